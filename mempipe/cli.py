"""The `mempipe` command. Heavy libraries are imported by the command that needs them, so that `mempipe --help` answers at once."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mempipe.config import ConfigError, RunConfig, load_config

EXIT_CONFIG = 2
EXIT_RUN = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0, 1 (the run failed), 2 (the input cannot work), 130 (interrupted)."""
    arguments = _parser().parse_args(_resume_last(sys.argv[1:] if argv is None else argv))
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return arguments.command(arguments) or 0
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except BrokenPipeError:  # `mempipe config | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted; the same command with --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    except (RuntimeError, OSError) as error:
        if os.environ.get("MEMPIPE_DEBUG"):
            raise
        error = getattr(error, "cause", None) or error  # of what an actor raised, without its trace
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        print("(MEMPIPE_DEBUG=1 shows where)", file=sys.stderr)
        return EXIT_RUN


ENVIRONMENT = {
    # Before torch is imported: several processes share the cores, and an idle OpenMP thread must sleep, not spin.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "DO_NOT_TRACK": "1",
}


def _resume_last(argv: Sequence[str]) -> list[str]:
    """`--resume` and `--resume=auto` may stand anywhere; argparse would take what follows for their value and end the overrides there."""
    return sorted(argv, key=lambda argument: argument.partition("=")[0] == "--resume")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mempipe", description="Train, measure and serve LLM agents with a bounded memory.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function, summary: str, into=commands) -> argparse.ArgumentParser:
        command = into.add_parser(name, help=summary, description=summary)
        command.set_defaults(command=function)
        return command

    train = add("train", _train, "train an agent: CONFIG [key=value ...]")
    train.add_argument("config", help="a YAML file, e.g. jobs/configs/quickstart.yaml")
    train.add_argument("overrides", nargs="*", help="key=value with dotted keys, e.g. algorithm.group_size=16")
    train.add_argument("--resume", nargs="?", const="always", default="never", choices=["always", "auto", "never"])

    doctor = add("doctor", _doctor, "check that a config can work on this cluster, without starting anything")
    doctor.add_argument("config")
    doctor.add_argument("overrides", nargs="*")
    doctor.add_argument("--devices", type=int, help="GPUs to plan for (default: those of the config's cluster, or of this machine)")

    add("config", _config, "list every setting with its default and meaning")

    trace = add("trace", _trace, "read the trajectories of a run, turn by turn")
    trace.add_argument("run", help="a run's folder or a trajectories.parquet")
    trace.add_argument("--question", default="", help="only questions whose id or text contains this")
    trace.add_argument("--limit", type=int, default=3)

    index = commands.add_parser("index", help="build or search a passage index").add_subparsers(required=True, metavar="build|search")
    build = add("build", _index_build, "passages (wiki-18 jsonl, jsonl.gz, parquet) to an index folder", index)
    build.add_argument("corpus")
    build.add_argument("output")
    build.add_argument("--encoder", default="hashing", help="hashing, or the folder of a Hugging Face encoder")
    search = add("search", _index_search, "the best passages for a query", index)
    search.add_argument("index")
    search.add_argument("query")
    search.add_argument("--num-passages", type=int, default=5)
    search.add_argument("--partition", default="")
    search.add_argument("--json", action="store_true")

    data = commands.add_parser("data", help="make or check question files").add_subparsers(required=True, metavar="world|qa")
    world = add("world", _data_world, "print a synthetic world: passages and questions", data)
    world.add_argument("--seed", type=int, default=1)
    world.add_argument("--questions", type=int, default=6)
    qa = add("qa", _data_qa, "show what was understood of a question file", data)
    qa.add_argument("file", help="a file or folder, a URL, or OWNER/NAME:FILE on the Hugging Face hub")
    qa.add_argument("--max-bad-rows", type=int, default=0, help="rows that may be passed over (default: the first is an error)")
    qa.add_argument("--limit", type=int, default=5, help="questions shown")
    return parser


def _train(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.config, arguments.overrides)
    from pipelines.train import main as train

    train(config, resume=arguments.resume)


def _doctor(arguments: argparse.Namespace) -> int:
    from mempipe.doctor import check

    findings = check(load_config(arguments.config, arguments.overrides), num_devices=arguments.devices)
    for finding in findings:
        print(finding)
    return EXIT_CONFIG if any(finding.fatal for finding in findings) else 0


def _config(arguments: argparse.Namespace) -> None:
    for line in describe_settings(RunConfig):
        print(line)


def describe_settings(section: type, prefix: str = "") -> list[str]:
    """One line per setting: dotted key, default, meaning."""
    lines = []
    for name, field in section.model_fields.items():
        inner = next((t for t in (field.annotation, *getattr(field.annotation, "__args__", ())) if hasattr(t, "model_fields")), None)
        if inner is not None:
            lines += [
                "",
                f"# {prefix}{name}: {field.description or (inner.__doc__ or '').strip()}",
                *describe_settings(inner, f"{prefix}{name}."),
            ]
        else:
            lines.append(f"{prefix}{name} = {json.dumps(field.default)}" + (f"    # {field.description}" if field.description else ""))
    return lines


def _trace(arguments: argparse.Namespace) -> None:
    from mempipe.data.trajectories import read_trajectories
    from mempipe.evaluation.trace import trajectory_lines

    path = Path(arguments.run)
    path = path / "trajectories.parquet" if path.is_dir() else path
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give a run's folder or a trajectories.parquet")
    shown = 0
    for group in read_trajectories(path):
        if shown < arguments.limit and (arguments.question in group.id or arguments.question in group.question.text):
            for trajectory in group.trajectories:
                print("\n".join(trajectory_lines(group.question, trajectory)), end="\n\n")
            shown += 1
    if not shown:
        raise ConfigError(f"no trajectory in {path} matches --question {arguments.question!r}")


def _index_build(arguments: argparse.Namespace) -> None:
    from pipelines.build_index import main as build_index

    build_index(Path(arguments.corpus), Path(arguments.output), encoder=arguments.encoder)


def _index_search(arguments: argparse.Namespace) -> None:
    from pipelines.build_index import search

    passages = search(Path(arguments.index), arguments.query, num_passages=arguments.num_passages, partition=arguments.partition)
    if arguments.json:
        print(json.dumps(passages, ensure_ascii=False, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("score", "title", "text")
    for passage in passages:
        table.add_row(f"{passage['score']:.3f}", passage["title"], passage["text"][:300])
    Console().print(table)


def _data_world(arguments: argparse.Namespace) -> None:
    from mempipe.data.world import World

    world = World(arguments.seed)
    for passage in world.passages:
        print(f"{passage.title}: {passage.text}")
    for question in world.questions(arguments.questions, seed=arguments.seed):
        print(f"\n{question.text}  ->  {question.golden_answers[0]}   ({question.num_hops} hops)")


def _data_qa(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from mempipe.data.qa import describe_questions, read_question_file

    file = read_question_file(arguments.file, max_bad_rows=arguments.max_bad_rows)
    print("\n".join(describe_questions(file)))
    table = Table("id", "question", "golden answers")
    for question in file.questions[: max(arguments.limit, 0)]:
        table.add_row(*(Text(text[:300]) for text in (question.id, question.text, " | ".join(question.golden_answers))))
    if table.row_count:
        Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
