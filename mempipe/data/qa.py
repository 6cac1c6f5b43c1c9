"""Question files, read into one record: `Question`.

A file is `.jsonl` or `.ndjson` (also gzipped), `.json`, `.csv`, `.tsv` or `.parquet` (`mempipe.data.rows`), local or by
URL; its rows may have any usual shape (`mempipe.data.shapes`).
"""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from mempipe.data.config import Columns
from mempipe.data.input_files import CSV, ROWS, InputFile, input_files
from mempipe.data.objectives import MAX_OBJECTIVES, join_objectives
from mempipe.data.row_values import opened
from mempipe.data.rows import TOO_DEEP, BadRow, BadRows, read_rows
from mempipe.data.shapes import LeftOut, Reading, content_id, readings
from mempipe.data.trajectories import arrow_schema
from mempipe.settings import ConfigError
from mempipe.storage.parquet import write_table
from mempipe.types import Question, from_row, to_row

BY_NAME = Columns()
"""Every field is found by its name."""
_BATCH_ROWS, _BATCH_CHARS = 64, 2**28
"""The most of a batch of columns, since a column of texts holds less than 2 GiB."""
_SPLIT = re.compile(r"^(?:train|test|dev|val)|(?<=[_. -])(?:train|test|dev|val(?:id(?:ation)?)?)(?=[_. -])")
"""A split in the name of a file, in lower case: it begins so, or has it as a word, as nq_train.jsonl does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionFile:
    """Holds the questions of a file, the number of questions by shape, the reading of the first row, the number of
    skipped rows by reason, and the bad rows that were passed over.
    """

    questions: list[Question]
    formats: dict[str, int]
    first: Reading
    left_out: dict[str, int]
    bad: BadRows


def read_questions(path: str | Path, *, columns: Columns = BY_NAME, max_bad_rows: int = 0) -> list[Question]:
    """Returns all questions of a file in order, as `read_question_file` reads them."""
    return read_question_file(path, columns=columns, max_bad_rows=max_bad_rows).questions


def read_question_file(path: str | Path, *, columns: Columns = BY_NAME, max_bad_rows: int = 0) -> QuestionFile:
    """Reads the questions of a file or of a folder of files, in order. Lone surrogates in texts become U+FFFD.

    `path` may be an fsspec URL, or `OWNER/NAME:FILE` of a data set on the Hugging Face hub. `columns` names fields of
    the rows that their names do not tell. Supporting facts give `num_hops` but no `evidence`: a title is not a passage
    id (`mempipe.evaluation.evidence` finds the passages). A row without an id gets one that its content decides. When
    two questions of joined data sets have one id, the later one's id gets the name of its source.

    It skips rows that have no answer by design of their data set, rows whose list of answers is empty, and rows without
    an id that repeat an earlier one. It passes over bad rows: those of no known shape, with a missing or wrong value,
    without golden answers, that can be read in two ways, or with an id and a question that came before. Raises
    ConfigError with row and field for more than `max_bad_rows` of them, and for a file that cannot be read, has no
    question or lacks its texts.
    """
    bad, left_out = BadRows(max_bad_rows), Counter[str]()
    found = [reading for _, reading in _read(path, columns=columns, bad=bad, left_out=left_out)]
    return QuestionFile(
        questions=[reading.question for reading in found],
        formats=dict(Counter(reading.shape for reading in found)),
        first=found[0],
        left_out=dict(left_out),
        bad=bad,
    )


def iter_questions(
    path: str | Path, *, columns: Columns = BY_NAME, left_out: Counter[str] | None = None
) -> Iterator[Question]:
    """Yields the questions of `read_questions` one by one, so that long contexts are never in memory together. Counts
    the skipped rows by reason in `left_out`.

    Raises what `read_questions` raises when it reaches the row.
    """
    left_out = Counter() if left_out is None else left_out
    return (reading.question for _, reading in _read(path, columns=columns, bad=BadRows(), left_out=left_out))


def iter_rows(path: str | Path, *, columns: Columns = BY_NAME) -> Iterator[tuple[dict[str, Any], Reading]]:
    """Yields the questions of `iter_questions`, each with its row and the reading of that row."""
    return _read(path, columns=columns, bad=BadRows(), left_out=Counter())


def skipped_text(left_out: Mapping[str, int]) -> str:
    """Returns "; N rows are skipped: ..." with the reasons, to follow the number of questions; "" where none is."""
    number = sum(left_out.values())
    return f"; {number:,} row{'s are' if number > 1 else ' is'} skipped: {_counts(left_out)}" if number else ""


def understood(path: str | Path, *, columns: Columns = BY_NAME) -> str:
    """Returns one line that says how the first question of a file is read. Raises ConfigError and OSError."""
    _, first = next(iter_rows(path, columns=columns))
    return f"{first.shape}: {first.describe()}"


class QuestionTable:
    """Holds questions as Arrow columns and makes each one when it is asked for.

    A text takes its bytes of UTF-8 here, and Ray gives the columns to other processes without a copy: a file of long
    documents may have gigabytes.
    """

    def __init__(self, questions: Iterable[Question]) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._ends: list[int] = []
        rows, num_chars = [], 0
        for question in questions:
            if len(rows) == _BATCH_ROWS or (rows and num_chars + len(question.context) > _BATCH_CHARS):
                self._add(rows)
                rows, num_chars = [], 0
            rows.append(to_row(question))
            num_chars += len(question.context)
        if rows:
            self._add(rows)

    def _add(self, rows: list[dict[str, Any]]) -> None:
        self._batches.append(pa.RecordBatch.from_pylist(rows, schema=arrow_schema(Question)))
        self._ends.append(len(self) + len(rows))

    def sources(self) -> dict[str, int]:
        """Returns the data sets that the questions name, with their numbers of questions."""
        counts = Counter(source for batch in self._batches for source in batch.column("source").to_pylist())
        return {source: number for source, number in sorted(counts.items()) if source}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Question:
        if not 0 <= index < len(self):
            raise IndexError(f"question {index} of {len(self)}")
        batch = self._batches[number := bisect_right(self._ends, index)]
        return from_row(Question, batch.slice(index - self._ends[number] + batch.num_rows, 1).to_pylist()[0])


def _read(
    path: str | Path, *, columns: Columns, bad: BadRows, left_out: Counter[str]
) -> Iterator[tuple[dict[str, Any], Reading]]:
    seen: dict[str, str] = {}  # the text of every id
    for file in _files(path):
        for number, (place, found) in enumerate(read_rows(file, bad=bad)):
            row = opened(found)
            asked = readings(row, file=file, number=number, columns=columns)
            while True:  # a row may hold several questions, some of them bad
                try:
                    reading = next(asked)
                    question = _with_own_id(reading.question, seen=seen, file=file.name, number=number)
                except StopIteration:
                    break
                except LeftOut as reason:
                    left_out[str(reason)] += 1
                except BadRow as fault:
                    bad.add(place, str(fault), kind=fault.kind)
                except RecursionError:
                    bad.add(place, TOO_DEEP, kind="too_deep")
                except ConfigError as error:
                    raise ConfigError(f"{place}: {error}") from error
                else:
                    seen[question.id] = question.text
                    yield row, replace(reading, question=question)
    if not seen:
        header = "; the first line of a csv file names its columns" if not left_out and str(path).endswith(CSV) else ""
        raise ConfigError(f"{path} holds no question{skipped_text(left_out)}{header}")


def _files(path: str | Path) -> list[InputFile]:
    """Returns the files of a question set. Raises ConfigError for a folder of several splits of one set, because a
    question set is one of them. The test questions of one set and the dev questions of another may be together.
    """
    files = input_files(path, suffixes=ROWS)
    splits: defaultdict[str, dict[str, str]] = defaultdict(dict)  # by the part of the name before the split
    for file in files:
        if split := _SPLIT.search(file.name.lower()):
            splits[file.name.lower()[: split.start()]][split[0][:3]] = file.name
    if several := next((names for names in splits.values() if len(names) > 1), None):
        raise ConfigError(f"{path} holds several splits ({', '.join(sorted(several.values()))}); name one of the files")
    return files


def _with_own_id(question: Question, *, seen: Mapping[str, str], file: str, number: int) -> Question:
    """Returns the question under an id that no other question has.

    Data sets count from 0 each, so an id that another question has already gets its source's name; where sets were put
    into one file, its row's number; and where a set has many files, the name of its file. Raises BadRow for the same
    question under the same id, and LeftOut where its content made the id.
    """
    if question.id in seen and question.id == content_id(question):
        raise LeftOut("repeated")
    prefix = question.source or "question"
    named = f"{prefix}-{question.id}"
    for own in (question.id, named, f"{named}-{number}", f"{named}-{file}-{number}"):
        if own not in seen:
            return replace(question, id=own)
        if seen[own] == question.text:
            break
    raise BadRow("duplicate_id", f"question id {question.id!r} occurs twice")


def draw_questions(questions: Sequence[Question], count: int, *, seed: int) -> list[Question]:
    """Returns `count` of the questions (0: all) in their order, drawn by the seed in equal shares of their sources.

    A source with fewer questions than its share gives all, and the others make up for it.
    """
    if not count or count >= len(questions):
        return list(questions)
    places: dict[str, list[int]] = {}
    for i, question in enumerate(questions):
        places.setdefault(question.source, []).append(i)
    drawn: list[int] = []
    smallest_first = sorted(places.items(), key=lambda item: (len(item[1]), item[0]))
    for num_done, (source, of_source) in enumerate(smallest_first):
        share = -((len(drawn) - count) // (len(places) - num_done))  # rounded up
        drawn += random.Random(f"{seed} {source}").sample(of_source, min(share, len(of_source)))
    return [questions[i] for i in sorted(drawn)]


def write_questions(path: str | Path, questions: Iterable[Question]) -> None:
    """Writes mempipe's own parquet, one column per field, and replaces an existing file.

    The file appears atomically.
    """
    table = pa.Table.from_pylist([to_row(question) for question in questions], schema=arrow_schema(Question))
    write_table(Path(path), table)


def describe_questions(file: QuestionFile) -> list[str]:
    """Returns lines that describe a question file to people: formats, sources, optional parts of the questions, lengths
    in characters, bad rows.
    """
    questions = file.questions
    sources = Counter(question.source or "(none)" for question in questions)
    with_what = {
        "evidence": sum(bool(question.evidence) for question in questions),
        "hops": sum(question.num_hops > 0 for question in questions),
        "objectives": sum(bool(question.objectives) for question in questions),
        "context": sum(bool(question.context) for question in questions),
    }
    lengths = {
        "question": [len(q.text) for q in questions],
        "first golden answer": [len(q.golden_answers[0]) for q in questions],
    }
    if with_what["context"]:
        lengths["context"] = [len(question.context) for question in questions if question.context]
    lines = [
        f"{len(questions)} questions",
        f"format: {_counts(file.formats)}",
        f"sources: {_counts(sources)}",
        f"the first row: {file.first.describe()}",
        "with " + ", ".join(f"{name} {count / len(questions):.0%}" for name, count in with_what.items()),
    ]
    for name, values in lengths.items():
        values.sort()
        lines.append(
            f"characters of a {name}: {values[0]} to {values[-1]}, half of them at most "
            f"{values[(len(values) - 1) // 2]}"
        )
    if file.left_out:
        lines.append(f"skipped:  {_counts(file.left_out)}")
    if file.bad.counts:
        lines += [
            f"bad rows: {_counts(file.bad.counts)}; the first:",
            *(f"  {example}" for example in file.bad.examples),
        ]
    return lines


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def write_joined(source: str, output: str, *, objectives: int, seed: int | None = None) -> tuple[int, int]:
    """Writes the questions of a file, joined by `join_objectives`, and returns how many there are, and how many of the
    file's questions were too few for one more.

    Raises ConfigError, before anything is written, for fewer than two objectives, for an output that is not a new
    .parquet file, for questions that have several objectives already, and for too few questions.
    """
    if not 2 <= objectives <= MAX_OBJECTIVES:
        raise ConfigError(f"--n is {objectives}; expected 2 to {MAX_OBJECTIVES} questions to join into one")
    if not output.endswith(".parquet") or Path(output).exists():
        problem = "exists" if Path(output).exists() else "is not a .parquet file"
        raise ConfigError(f"{output} {problem}; name a new .parquet file")
    questions = list(iter_questions(source))
    if joined := next((question.id for question in questions if len(question.objectives) > 1), ""):
        raise ConfigError(f"{source}: question {joined} has several objectives already; give a file of single ones")
    if len(questions) < objectives:
        raise ConfigError(f"{source} has {len(questions)} questions; {objectives} are needed to join them into one")
    together = list(join_objectives(questions, objectives=objectives, seed=seed, file=source))
    write_questions(output, together)
    return len(together), len(questions) - objectives * len(together)
