"""Question files of several formats, read into one record: `Question`.

Read: FlashRAG jsonl, mempipe's own parquet, and the parquet files that MemSearcher and Search-R1 train from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mempipe.agents.protocol import replace_surrogates
from mempipe.config import ConfigError
from mempipe.data.rows import read_rows
from mempipe.data.trajectories import arrow_schema
from mempipe.types import Question, from_row, to_row


def read_questions(path: str | Path) -> list[Question]:
    """All questions of a `.jsonl`, `.jsonl.gz` or `.parquet` file, in order. Lone surrogates in texts become U+FFFD.

    FlashRAG's supporting facts give `num_hops` (the different titles) but no `evidence`: a title is no passage id, and what a middle fact
    contributes is not recorded. Raises ConfigError, naming line or row and field, for an unknown format, a missing or wrong value, a
    question without golden answers, a repeated id and a file without questions.
    """
    path = Path(path)
    questions: dict[str, Question] = {}
    for number, (place, row) in enumerate(read_rows(path)):
        question = _question(row, place=place, path=path, number=number)
        if question.id in questions:
            raise ConfigError(f"{place}: question id {question.id!r} occurs twice")
        questions[question.id] = question
    if not questions:
        raise ConfigError(f"{path} holds no question")
    return list(questions.values())


def write_questions(path: str | Path, questions: Iterable[Question]) -> None:
    """Writes mempipe's own parquet: one column per field. The file appears whole or not at all; an existing one is replaced."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        pq.write_table(pa.Table.from_pylist([to_row(question) for question in questions], schema=arrow_schema(Question)), partial)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def long_questions(questions: Iterable[Question], *, count_tokens: Callable[[str], int], limit: int) -> list[tuple[Question, int]]:
    """The questions of more than `limit` tokens, each with its number of tokens."""
    counted = ((question, count_tokens(question.text)) for question in questions)
    return [(question, num_tokens) for question, num_tokens in counted if num_tokens > limit]


def check_lengths(questions: Iterable[Question], *, count_tokens: Callable[[str], int], limit: int) -> None:
    """Raises ConfigError, naming the longest, when questions are longer than `limit` tokens (`budget.question_tokens`)."""
    found = sorted(long_questions(questions, count_tokens=count_tokens, limit=limit), key=lambda pair: -pair[1])
    if found:
        shown = ", ".join(f"{question.id} ({num_tokens})" for question, num_tokens in found[:3])
        raise ConfigError(
            f"budget.question_tokens is {limit}, but {len(found)} of the questions have more tokens, the longest being {shown}; "
            "raise it or leave them out"
        )


def _question(row: dict[str, Any], *, place: str, path: Path, number: int) -> Question:
    if row.keys() >= {"id", "text", "golden_answers"}:
        return _own(row, place)
    if row.keys() >= {"question", "reward_model"}:
        return _reward_model_row(row, place, number)
    if row.keys() >= {"id", "question", "golden_answers"}:
        return Question(
            id=_text(row["id"], "id", place),
            text=_text(row["question"], "question", place),
            golden_answers=_answers(row["golden_answers"], "golden_answers", place),
            source=path.parent.name if path.name.split(".")[0] in ("train", "dev", "test") else path.name.split(".")[0],
            num_hops=_num_hops(row),
        )
    raise ConfigError(
        f"{place}: fields {sorted(row)} are of no known format; expected id, question and golden_answers (FlashRAG), id, text and "
        "golden_answers (mempipe), or question and reward_model (MemSearcher, Search-R1)"
    )


def _own(row: dict[str, Any], place: str) -> Question:
    checked = {
        "id": _text(row["id"], "id", place),
        "text": _text(row["text"], "text", place),
        "golden_answers": _answers(row["golden_answers"], "golden_answers", place),
    }
    try:
        return from_row(Question, row | checked)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{place}: not a row that write_questions wrote: {type(error).__name__} {error}") from error


def _reward_model_row(row: dict[str, Any], place: str, number: int) -> Question:
    """MemSearcher has ground_truth: list, Search-R1 ground_truth: {target: list}."""
    truth = (row["reward_model"] or {}).get("ground_truth")
    extra = row.get("extra_info") or {}
    source = _text(row.get("data_source"), "data_source", place)
    key: Any = number  # MemSearcher names one data source for all, so its own index need not be unique
    field = "reward_model.ground_truth"
    if isinstance(truth, dict):
        key, truth, field = extra.get("index", number), truth.get("target"), f"{field}.target"
    return Question(
        id=f"{source}-{extra.get('split') or 'row'}-{key}",
        text=_text(row["question"], "question", place),
        golden_answers=_answers(truth, field, place),
        source=source,
    )


def _num_hops(row: dict[str, Any]) -> int:
    """The number of different supporting titles, 0 when the data set names none."""
    metadata = row.get("metadata")
    facts = metadata.get("supporting_facts") if isinstance(metadata, dict) else None
    titles = facts.get("title") if isinstance(facts, dict) else None
    return len(set(map(str, titles))) if isinstance(titles, list) else 0


def _text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{place}: {name} is {str(value)[:80]!r}; expected a text")
    return replace_surrogates(value.strip())


def _answers(value: Any, name: str, place: str) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(answer, str) and answer.strip() for answer in value):
        raise ConfigError(f"{place}: {name} is {str(value)[:80]}; expected a list of at least one text")
    return [replace_surrogates(answer) for answer in value]
