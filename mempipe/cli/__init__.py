"""The `mempipe` command.

Every command checks its input first (`mempipe.checks`) and imports heavy libraries afterwards, so that `--help` and a
refusal come at once.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from mempipe.cli import data, index, measure, run, serve, submit
from mempipe.cli.commands import EXIT_CONFIG, EXIT_RUN
from mempipe.environment import prepare_process, speak_utf8
from mempipe.installation import check_pipelines
from mempipe.progress import unread_is_discarded
from mempipe.settings import ConfigError, OldName
from mempipe.stop import signals_interrupt

_FORMAT = warnings.formatwarning


def program(*words: str) -> int:
    """Runs the command that this process was started with, after `words`. Returns as `main`."""
    speak_utf8()
    return main([*words, *sys.argv[1:]])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0, 1 (the run failed), 2 (the input cannot work), 130 (Ctrl-C),
    143 (SIGTERM), 129 (SIGHUP)."""
    if argv is None:
        return program()
    arguments = _parsed(argv)
    prepare_process()
    warnings.formatwarning = _formatted
    try:
        _check_working_folder()
        check_pipelines()
        with signals_interrupt():
            return arguments.command(arguments) or 0
    except ConfigError as error:
        print(f"error: {_option_meant(error, arguments) or error}", file=sys.stderr)
        return EXIT_CONFIG
    except BrokenPipeError:  # the reader of a pipe has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as interrupted:
        # Not --resume, which is refused where nothing was begun yet.
        flag = " with --resume-if-exists" if hasattr(arguments, "resume") else ""
        hint = f"; the same command{flag} resumes where this one stopped" if arguments.continues else ""
        with unread_is_discarded():
            print(f"interrupted{hint}", file=sys.stderr)
        return getattr(interrupted, "exit_code", 130)
    except Exception as error:  # the outermost handler: a mistake in the code is raised with its trace
        if os.environ.get("MEMPIPE_DEBUG") or not _is_fault(error):
            raise
        error = getattr(error, "cause", None) or error  # of what an actor raised, without its trace
        if getattr(error, "was_said", False):  # the cluster is gone, and threads that wait for it would never end
            sys.stdout.flush()
            os._exit(EXIT_RUN)
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        print("(MEMPIPE_DEBUG=1 shows where)", file=sys.stderr)
        return EXIT_RUN


def _option_meant(error: ConfigError, arguments: argparse.Namespace) -> str:
    """Returns a sentence about an option that was written as a setting, as port=8000; "" for another error."""
    name, found, _ = str(error).partition(" is not a setting")
    is_option = re.search(rf"--{re.escape(name)}\b", arguments.usage()) if found and name else None
    return f"{name} is an option of this command, not a setting: --{name}" if is_option else ""


def _formatted(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> str:
    """Returns a warning as it is printed: one about the user's own config without a place in the code."""
    return f"warning: {message}\n" if issubclass(category, OldName) else _FORMAT(message, category, *place, **line)


def _check_working_folder() -> None:
    """Raises ConfigError if the working folder has been removed, since every relative path would be a bare "No such
    file", or has a name that is not UTF-8, which no YAML or JSON file of a run could hold."""
    try:
        os.getcwd().encode()
    except FileNotFoundError as error:
        raise ConfigError("the working folder of this command was removed; change to another folder") from error
    except UnicodeEncodeError as error:
        raise ConfigError(f"the name of the working folder is not UTF-8: {os.fsencode(os.getcwd())!r}") from error


def _is_fault(error: Exception) -> bool:
    """Tells a fault of the infrastructure, which a sentence describes, from a mistake in the code, whose trace is
    needed."""
    return isinstance(error, RuntimeError | OSError) or any(
        kind.__module__ == "ray.exceptions" for kind in type(error).__mro__
    )


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Parses a command whose options may come between its overrides (argparse alone requires the overrides in one
    block)."""
    parser = _parser()
    if not argv:
        parser.print_help()
        parser.exit()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-") or not hasattr(arguments, "overrides")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


class _Version(argparse.Action):
    """Looks the version up when it is asked for: the metadata of packages takes a tenth of a second to load."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"mempipe {version('mempipe')}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mempipe", description="Train, measure and serve LLM agents with a bounded memory."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for room in (run, submit, measure, serve, index, data):
        room.add_commands(commands)
    return parser
