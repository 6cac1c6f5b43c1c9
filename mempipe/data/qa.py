"""Question files of several formats, read into one record: `Question`.

Read: FlashRAG jsonl, mempipe's own parquet, and the parquet files that MemSearcher and Search-R1 train from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from mempipe.config import ConfigError
from mempipe.data.trajectories import arrow_schema
from mempipe.types import Question, from_row, to_row


def read_questions(path: str | Path) -> list[Question]:
    """All questions of a file, in order. Raises ConfigError, naming file and row, for what cannot be understood or repeats an id."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"question file {path} does not exist")
    questions: dict[str, Question] = {}
    for number, row in _rows(path):
        where = f"{path}, row {number}"
        question = _question(row, where=where, number=number)
        if question.id in questions:
            raise ConfigError(f"{where}: question id {question.id!r} occurs twice")
        questions[question.id] = question
    if not questions:
        raise ConfigError(f"question file {path} holds no question")
    return list(questions.values())


def write_questions(path: str | Path, questions: Sequence[Question]) -> None:
    """Writes mempipe's own parquet; the file appears whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        pq.write_table(pa.Table.from_pylist([to_row(question) for question in questions], schema=arrow_schema(Question)), partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        try:
            yield from enumerate(pl.read_parquet(path).iter_rows(named=True), start=1)
        except (pl.exceptions.PolarsError, OSError) as error:
            raise ConfigError(f"question file {path} is not a whole parquet file: {error}") from error
        return
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, json.loads(line)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}, row {number + 1}: not UTF-8 ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, row {number}: not JSON ({error.msg})") from error


def _question(row: Any, *, where: str, number: int) -> Question:
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object, got {str(row)[:80]!r}")
    if row.keys() >= {"text", "golden_answers", "partition"}:
        return from_row(Question, row)
    if "reward_model" in row:  # MemSearcher (ground_truth: list) and Search-R1 (ground_truth: {target: list}) parquet
        truth = (row["reward_model"] or {}).get("ground_truth")
        answers = truth.get("target") if isinstance(truth, dict) else truth
        identity = (row.get("extra_info") or {}).get("index")
        fallback = f"{row.get('data_source', 'row')}-{number if identity is None else identity}"
        return _checked(row.get("id") or fallback, row.get("question"), answers, source=row.get("data_source") or "", where=where)
    return _checked(row.get("id") or f"row-{number}", row.get("question"), row.get("golden_answers"), source="", where=where)


def _checked(identity: Any, text: Any, answers: Any, *, source: str, where: str) -> Question:
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where}: `question` is {str(text)[:80]!r}, expected a text")
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
        raise ConfigError(f"{where}: the golden answers are {str(answers)[:80]!r}, expected a list of at least one text")
    return Question(id=str(identity), text=text.strip(), golden_answers=answers, source=source)
