"""The commands that ask and serve an agent."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mempipe.cli.commands import EXIT_RUN, add_command
from mempipe.settings import ConfigError

if TYPE_CHECKING:
    from mempipe.answers.api import TurnReply
    from mempipe.api.agent import AskOptions

_SERVED_INDEX = "settings.retrieval.index="


def add_commands(commands: Any) -> None:
    """Adds the commands of the agent service."""
    served = add_command(commands, "serve", _serve, "answer questions over HTTP on this machine until Ctrl-C")
    served.add_argument("source", metavar="RUN_OR_CHECKPOINT", help="a run's folder or YAML file, or a model")
    served.add_argument(
        "overrides", nargs="*", default=[], help="key=value (`mempipe config agent-service` prints all)"
    )
    served.add_argument("--index", default="", help="the index to search, in place of the run's own")
    served.add_argument(
        "--host", default="127.0.0.1", help="0.0.0.0 to be reached from other machines, with API keys only"
    )
    served.add_argument("--port", type=int, default=8000)

    ask = add_command(
        commands, "ask", _ask, "answer one question on this machine: RUN_OR_MODEL QUESTION [key=value ...]"
    )
    ask.add_argument("source", metavar="RUN_OR_MODEL", help="a run's folder or YAML file, or a model with --index")
    ask.add_argument("question")
    ask.add_argument("overrides", nargs="*", default=[], help="settings of the run, key=value, e.g. budget.max_turns=4")
    ask.add_argument("--index", default="", help="the index to search, in place of the run's own")
    ask.add_argument("--partition", help="the part of the corpus that is searched; '' for all of it")
    ask.add_argument("--trace", action="store_true", help="print each turn when it is finished")

    mcp = add_command(
        commands, "mcp", _mcp, "offer the agent as tools to an MCP client, over standard input and output"
    )
    mcp.add_argument(
        "source",
        metavar="RUN_OR_URL",
        help="a run or model as for `mempipe serve`, or the address of a running service (key: MEMPIPE_API_KEY)",
    )
    mcp.add_argument("overrides", nargs="*", default=[], help="key=value, as for `mempipe serve`")
    mcp.set_defaults(index="")

    key = add_command(
        commands, "key", _key, "create an API key for `mempipe serve`; prints the line to append to the key file"
    )
    key.add_argument("name", help="name of the key's owner")


def _serve(arguments: argparse.Namespace) -> None:
    settings = _service_settings(arguments)
    from mempipe.serve.agent import serve_agent
    from mempipe.serve.local import exit_now

    serve_agent(settings, host=arguments.host, port=arguments.port)
    exit_now()


def _service_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns settings of AgentServiceConfig. Raises ConfigError for a run that does not exist."""
    from mempipe.loader import parse_overrides

    if not (Path(arguments.source).exists() or arguments.index or arguments.overrides):
        raise ConfigError(
            f"{arguments.source} does not exist; give a run's folder or its config, or a model with --index"
        )
    _check_served(arguments)
    is_run = arguments.source.endswith((".yaml", ".yml")) or (Path(arguments.source) / "state.json").exists()
    settings: dict[str, Any] = {"run" if is_run else "checkpoint": arguments.source}
    settings |= parse_overrides(arguments.overrides)
    if arguments.index:
        of_run = settings.setdefault("settings", {})
        of_run["retrieval"] = {"url": "", **of_run.get("retrieval", {}), "index": arguments.index}
    return settings


def _check_served(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for what can be known before Ray and transformers are imported."""
    from mempipe.config import RunConfig
    from mempipe.serve.config import AgentServiceConfig

    for word in arguments.overrides:
        section = word.partition("=")[0].partition(".")[0]
        if section in RunConfig.model_fields and section not in AgentServiceConfig.model_fields:
            raise ConfigError(f"{word}: {section} is of the run, not of the service; write settings.{word}")
    index = [arguments.index, *(w.partition("=")[2] for w in arguments.overrides if w.startswith(_SERVED_INDEX))]
    for folder in filter(None, index):
        if not Path(folder).is_dir():
            raise ConfigError(f"retrieval.index is {folder!r}, which is not a folder; `mempipe index build` makes one")


def _mcp(arguments: argparse.Namespace) -> None:
    is_there = arguments.source.startswith(("http://", "https://"))
    settings = {} if is_there else _service_settings(arguments)
    from mempipe.serve.mcp.stdio import own_stdout, pass_on

    with own_stdout() as stdout:
        if is_there:
            pass_on(arguments.source, stdout)
            return
        from mempipe.serve.agent import served_agent
        from mempipe.serve.local import exit_now, free_port

        with served_agent(settings, host="127.0.0.1", port=free_port(), finishes=False) as (url, _):
            print(f"serving {arguments.source} at {url} until the MCP client ends", file=sys.stderr)
            pass_on(url, stdout)
            # Two seconds after the end of standard input, clients send SIGTERM, which would interrupt the end.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exit_now()  # two seconds later they send SIGKILL


def _ask(arguments: argparse.Namespace) -> int:
    from mempipe.api.agent import load
    from mempipe.api.reply import turn_lines
    from mempipe.loader import parse_overrides
    from mempipe.types import EndReason

    if not arguments.question.strip():
        raise ConfigError('QUESTION is empty; write it in quotation marks: mempipe ask RUN "Who ...?"')

    def show(turn: TurnReply) -> None:
        print("\n".join(turn_lines(turn)), flush=True)

    settings = parse_overrides(arguments.overrides)
    for name in ("index", "source"):
        if name in settings:
            raise ConfigError(f"{name} is not a setting of a run")
    print(f"{arguments.source}: loading", file=sys.stderr)
    with load(arguments.source, index=arguments.index, **settings) as agent:
        options: AskOptions = {} if arguments.partition is None else {"partition": arguments.partition}
        if arguments.trace:
            options["on_turn"] = show
        reply = agent.ask(arguments.question, **options)
    if reply.answer is None:
        print(f"no answer: {EndReason(reply.end_reason).sentence}", file=sys.stderr)
        return EXIT_RUN
    print(reply.answer)
    return 0


def _key(arguments: argparse.Namespace) -> None:
    from mempipe.serve.http.keys import new_key

    key, record = new_key(arguments.name)
    print(f"the key, shown this once: {key}", file=sys.stderr)
    print(record.line())
