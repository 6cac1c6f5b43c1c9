"""The parts that all commands share: how a command is added, its options for a resume, and the exit codes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

EXIT_RUN = 1
"""The run failed."""
EXIT_CONFIG = 2
"""The input cannot work."""


def add_command(
    commands: Any, name: str, function: Callable[..., int | None], summary: str, *, continues: bool = False
) -> argparse.ArgumentParser:
    """Returns a new command, which calls the function with the parsed arguments.

    `continues`: the same command, given again, continues the work that an interruption left.
    """
    command = commands.add_parser(name, help=summary, description=summary)
    command.set_defaults(command=function, continues=continues, usage=command.format_usage)
    return command


def add_resume(command: argparse.ArgumentParser) -> None:
    """Adds --resume and --resume-if-exists."""
    choice = command.add_mutually_exclusive_group()
    choice.set_defaults(resume="never")
    choice.add_argument(
        "--resume", action="store_const", const="always", help="resume the existing run; fails if there is none"
    )
    choice.add_argument(
        "--resume-if-exists",
        action="store_const",
        const="auto",
        dest="resume",
        help="resume the run if it exists; otherwise start a new one",
    )
