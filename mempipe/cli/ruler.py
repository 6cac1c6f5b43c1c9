"""The command that creates RULER-HQA, which has the most options."""

from __future__ import annotations

import argparse
from typing import Any

from mempipe.cli.commands import add_command
from mempipe.settings import ConfigError


def add_ruler(data: Any) -> None:
    """Adds the command that creates RULER-HQA, which has the most options."""
    ruler = add_command(
        data, "ruler", _data_ruler, "create HotpotQA questions in contexts of many documents (RULER-HQA)"
    )
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


def _data_ruler(arguments: argparse.Namespace) -> None:
    from mempipe.data.qa import read_questions
    from mempipe.data.ruler import read_sources, write_ruler

    splits = (
        _numbers(arguments.split, "--split", "train=8192,test=128")
        if arguments.split
        else {"test": arguments.num_questions}
    )
    num_docs = [int(text) if text.isdecimal() else 0 for text in arguments.num_docs.split(",")]
    if not all(num_docs) or min(splits.values()) < 1:
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
    if not all(name.isidentifier() and number.isdecimal() for name, _, number in pairs) or len(
        {name for name, *_ in pairs}
    ) < len(pairs):
        raise ConfigError(f"{option} is {text!r}; expected names with numbers, e.g. {example}")
    return {name: int(number) for name, _, number in pairs}
