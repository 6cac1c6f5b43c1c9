"""Question files of every published format, read into one record: `Question`.

A row's fields tell its format (`_FORMATS`); a file is `.jsonl`, `.jsonl.gz`, `.json` (one list) or `.parquet`, local or
by URL.
"""

from __future__ import annotations

import json
import random
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from mempipe.data.rows import JSON, JSONL, PARQUET, BadRow, BadRows, InputFile, input_files, read_rows
from mempipe.data.ruler import expand_context
from mempipe.data.trajectories import arrow_schema
from mempipe.settings import ConfigError
from mempipe.storage.parquet import write_table
from mempipe.text import replace_surrogates
from mempipe.types import Question, from_row, to_row

_BATCH_ROWS = 64
_OWN_FIELDS = tuple(field.name for field in fields(Question))
_MAX_HOPS = 10_000
_SHOWN = 80  # characters of a wrong value
_READINGS = {
    "objectives": ("{n} objectives with one golden answer each", "one objective with {n} golden answers"),
    "recall_targets": ("{n} entities with one surface form each", "one entity with {n} surface forms"),
}
"""Fields that are lists of lists of texts, and what a list of `n` texts in their place may mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionFile:
    """Holds the questions of a file, how many of them came in each format, and the rows that were passed over."""

    questions: list[Question]
    formats: dict[str, int]
    bad: BadRows


def read_questions(path: str | Path, *, max_bad_rows: int = 0) -> list[Question]:
    """Returns all questions of a file in order, as `read_question_file` reads them."""
    return read_question_file(path, max_bad_rows=max_bad_rows).questions


def read_question_file(path: str | Path, *, max_bad_rows: int = 0) -> QuestionFile:
    """Reads the questions of a file or of a folder of files, in order. Lone surrogates in texts become U+FFFD.

    `path` may be an fsspec URL, or `OWNER/NAME:FILE` of a data set on the Hugging Face hub. Supporting facts give
    `num_hops` (the number of different titles) but no `evidence`: a title is no passage id, and data sets do not record
    what a middle fact contributes. When two questions of joined data sets have one id, the later one's id gets the name
    of its source.

    A text is never taken for a list, nor a list for a text: in mempipe's own format `objectives` and `recall_targets`
    are lists of lists, and a list of texts in their place is refused, since it may mean one of them or several.

    It passes over bad rows: those of no known format, with a missing or wrong value, without golden answers, or with a
    question that came before. Raises ConfigError with row and field for more than `max_bad_rows` of them, and for a
    file that cannot be read, has no question or lacks its texts.
    """
    bad, formats = BadRows(max_bad_rows), Counter[str]()
    return QuestionFile(questions=list(_read(path, bad=bad, formats=formats)), formats=formats, bad=bad)


def iter_questions(path: str | Path) -> Iterator[Question]:
    """Yields the questions of `read_questions` one by one, so that long contexts are never in memory together.

    Raises what `read_questions` raises when it reaches the row.
    """
    return _read(path, bad=BadRows(), formats=Counter())


class QuestionTable:
    """Holds questions as Arrow columns and makes each one when it is asked for.

    A text takes its bytes of UTF-8 here, and Ray gives the columns to other processes without a copy: a file of long
    documents may have gigabytes.
    """

    def __init__(self, questions: Iterable[Question]) -> None:
        self._batches: list[pa.RecordBatch] = []
        remaining = iter(questions)
        while rows := [to_row(question) for question in islice(remaining, _BATCH_ROWS)]:
            self._batches.append(pa.RecordBatch.from_pylist(rows, schema=arrow_schema(Question)))

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self._batches)

    def __getitem__(self, index: int) -> Question:
        batch = self._batches[index // _BATCH_ROWS]
        return from_row(Question, batch.slice(index % _BATCH_ROWS, 1).to_pylist()[0])


def _read(path: str | Path, *, bad: BadRows, formats: Counter[str]) -> Iterator[Question]:
    seen: dict[str, str] = {}  # the text of every id
    for file in input_files(path, suffixes=(*JSONL, *PARQUET, *JSON)):
        for number, (place, row) in enumerate(read_rows(file, bad=bad)):
            try:
                name, question = _question(row, file=file, number=number)
                question = _with_own_id(question, seen=seen, number=number)
            except BadRow as fault:
                bad.add(place, str(fault), kind=fault.kind)
            except ConfigError as error:
                raise ConfigError(f"{place}: {error}") from error
            else:
                seen[question.id] = question.text
                formats[name] += 1
                yield question
    if not seen:
        raise ConfigError(f"{path} holds no question")


def _with_own_id(question: Question, *, seen: Mapping[str, str], number: int) -> Question:
    """Returns the question under an id that no other question has.

    Data sets count from 0 each, so an id that another question has already gets its source's name, and, where sets were
    put into one file, its row's number. Raises BadRow for the same question under the same id.
    """
    prefix = question.source or "question"
    for own in (question.id, f"{prefix}-{question.id}", f"{prefix}-{question.id}-{number}"):
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

    The file appears whole or not at all.
    """
    table = pa.Table.from_pylist([to_row(question) for question in questions], schema=arrow_schema(Question))
    write_table(Path(path), table)


def describe_questions(file: QuestionFile) -> list[str]:
    """Returns lines that describe a question file to people: formats, sources, what the questions come with, lengths
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
        "with " + ", ".join(f"{name} {count / len(questions):.0%}" for name, count in with_what.items()),
    ]
    for name, values in lengths.items():
        values.sort()
        lines.append(
            f"characters of a {name}: {values[0]} to {values[-1]}, half of them at most "
            f"{values[(len(values) - 1) // 2]}"
        )
    if file.bad.counts:
        lines += [
            f"bad rows: {_counts(file.bad.counts)}; the first:",
            *(f"  {example}" for example in file.bad.examples),
        ]
    return lines


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _question(row: dict[str, Any], *, file: InputFile, number: int) -> tuple[str, Question]:
    for known in _FORMATS:
        if row.keys() >= known.fields and known.applies(row):
            return known.name, _readable(known.read(row, file, number))
    expected = "; ".join(f"{', '.join(sorted(known.fields))} ({known.name})" for known in _FORMATS)
    raise BadRow("unknown_format", f"fields {sorted(row)} are of no known format; expected {expected}")


def _mempipe(row: dict[str, Any], file: InputFile, number: int) -> Question:
    given = {name: row[name] for name in _OWN_FIELDS if row.get(name) is not None}
    checked = {
        "id": _text(row["id"], "id"),
        "text": _text(row["text"], "text"),
        "golden_answers": _answers(row["golden_answers"], "golden_answers"),
        "evidence": _evidence(given.get("evidence", [])),
        **{name: _lists(given[name], name) for name in _READINGS if name in given},
    }
    try:
        question = from_row(Question, given | checked)
    except KeyError as error:
        raise BadRow("missing_field", f"{error.args[0]} is missing") from error
    except TypeError as error:
        raise BadRow("wrong_type", str(error)) from error
    if not 0 <= question.num_hops <= _MAX_HOPS:
        raise BadRow("wrong_value", f"num_hops is {question.num_hops}; expected 0 to {_MAX_HOPS}")
    return question


def _flashrag(row: dict[str, Any], file: InputFile, number: int) -> Question:
    stem = file.name.partition(".")[0]
    return Question(
        id=_text(row["id"], "id"),
        text=_text(row["question"], "question"),
        golden_answers=_answers(row["golden_answers"], "golden_answers"),
        source=file.folder if stem in ("train", "dev", "test") else stem,
        num_hops=_num_titles(_struct(row, "metadata").get("supporting_facts")),
    )


def _hotpotqa(row: dict[str, Any], file: InputFile, number: int) -> Question:
    return Question(
        id=_text(row["_id"], "_id"),
        text=_text(row["question"], "question"),
        golden_answers=[_text(row["answer"], "answer")],
        source="hotpotqa",
        num_hops=_num_titles(row.get("supporting_facts")),
    )


def _ruler(row: dict[str, Any], file: InputFile, number: int) -> Question:
    source = file.name.partition(".")[0]
    return Question(
        id=f"{source}-{_index(row, number)}",
        text=_text(row["input"], "input"),
        golden_answers=_answers(row["answers"], "answers"),
        source=source,
        context=_context(row["context"], file),
    )


def _memagent(row: dict[str, Any], file: InputFile, number: int) -> Question:
    extra = _struct(row, "extra_info")
    source = _text(row.get("data_source"), "data_source")
    return Question(
        id=f"{source}-{_index(extra, number)}",
        text=_text(extra.get("question") or _prompt(row), "extra_info.question"),
        golden_answers=_answers(_ground_truth(row), "reward_model.ground_truth"),
        source=source,
        context=_context(row["context"], file),
    )


def _memsearcher(row: dict[str, Any], file: InputFile, number: int) -> Question:
    source = _text(row.get("data_source"), "data_source")
    return Question(
        # One data source is named for all, so the row's own index need not be unique.
        id=f"{source}-{_split(row)}-{number}",
        text=_text(row["question"], "question"),
        golden_answers=_answers(_ground_truth(row), "reward_model.ground_truth"),
        source=source,
    )


def _search_r1(row: dict[str, Any], file: InputFile, number: int) -> Question:
    source = _text(row.get("data_source"), "data_source")
    return Question(
        id=f"{source}-{_split(row)}-{_index(_struct(row, 'extra_info'), number)}",
        text=_text(row["question"], "question"),
        golden_answers=_answers(_ground_truth(row).get("target"), "reward_model.ground_truth.target"),
        source=source,
    )


def _mem1(row: dict[str, Any], file: InputFile, number: int) -> Question:
    source, indices = _text(row.get("data_source"), "data_source"), _struct(row, "extra_info").get("indices")
    targets = _ground_truth(row)["target"]
    objectives = [_answers(target, f"reward_model.ground_truth.target[{i}]") for i, target in enumerate(targets)]
    return Question(
        id=f"{source}-{_split(row)}-{'+'.join(map(str, indices)) if isinstance(indices, list) and indices else number}",
        text=_text(row["question"], "question") if row.get("question") else _asked_in(_prompt(row), len(objectives)),
        golden_answers=["; ".join(answers[0] for answers in objectives)],
        source=source,
        objectives=objectives,
    )


def _has_targets(row: dict[str, Any]) -> bool:
    return isinstance(_ground_truth(row), dict)


def _has_objectives(row: dict[str, Any]) -> bool:
    targets = _ground_truth(row).get("target") if _has_targets(row) else None
    return isinstance(targets, list) and any(isinstance(target, list) for target in targets)


@dataclass(frozen=True, slots=True)
class _Format:
    name: str
    fields: set[str]
    read: Callable[[dict[str, Any], InputFile, int], Question]
    applies: Callable[[dict[str, Any]], bool] = lambda row: True


_FORMATS = (  # the first that a row fits
    _Format("mempipe", {"id", "text", "golden_answers"}, _mempipe),
    _Format("MemAgent", {"prompt", "context", "reward_model"}, _memagent),
    _Format("MEM1", {"prompt", "reward_model"}, _mem1, _has_objectives),
    _Format("Search-R1", {"question", "reward_model"}, _search_r1, _has_targets),
    _Format("MemSearcher", {"question", "reward_model"}, _memsearcher),
    _Format("FlashRAG", {"id", "question", "golden_answers"}, _flashrag),
    _Format("RULER", {"context", "input", "answers"}, _ruler),
    _Format("HotpotQA", {"_id", "question", "answer"}, _hotpotqa),
)

_QUESTION_MARK = re.compile(r"questions?[^\S\n]*:", re.IGNORECASE)


def _asked_in(prompt: str, num_objectives: int) -> str:
    """Returns what follows "Question:" in a MEM1 prompt, up to the end of the line.

    It holds as many questions as objectives, joined by "; ". Raises BadRow when no line does.
    """
    for asked in reversed(_QUESTION_MARK.split(prompt)[1:]):
        line = asked.strip().partition("\n")[0].strip()
        if line and line.count("; ") >= num_objectives - 1:
            return line
    raise BadRow(
        "missing_field",
        f"prompt {prompt[-80:]!r} has no line 'Question: …' with {num_objectives} questions joined by '; '",
    )


def _prompt(row: dict[str, Any]) -> str:
    """Returns the last user message. Raises BadRow when there is none."""
    prompt = row["prompt"]
    messages = prompt if isinstance(prompt, list) else []
    contents = [
        message.get("content") for message in messages if isinstance(message, dict) and message.get("role") == "user"
    ]
    if not contents or not isinstance(contents[-1], str):
        raise BadRow(
            "wrong_type",
            f"prompt is {_shown(prompt)}; expected messages with role and content, one of them the user's",
        )
    return contents[-1]


def _context(value: Any, file: InputFile) -> str:
    return expand_context(value, folder=Path(file.url).parent) if isinstance(value, list) else _text(value, "context")


def _ground_truth(row: dict[str, Any]) -> Any:
    return _struct(row, "reward_model").get("ground_truth")


def _struct(row: dict[str, Any], name: str) -> dict[str, Any]:
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def _split(row: dict[str, Any]) -> str:
    return _struct(row, "extra_info").get("split") or "row"


def _index(row: dict[str, Any], number: int) -> Any:
    index = row.get("index")
    return number if index is None else index


def _num_titles(facts: Any) -> int:
    """Returns the number of different supporting titles, 0 when the data set names none.

    `facts` are {title: [...]} or [[title, sentence], ...].
    """
    if isinstance(facts, dict):
        titles = facts.get("title")
    else:
        titles = [fact[0] for fact in facts if isinstance(fact, list) and fact] if isinstance(facts, list) else None
    return len(set(map(str, titles))) if isinstance(titles, list) else 0


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        kind = "missing_field" if value is None else "empty" if isinstance(value, str) else "wrong_type"
        raise BadRow(kind, f"{name} is {_shown(value)!r}; expected a text")
    return value.strip()


def _answers(value: Any, name: str) -> list[str]:
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(answer, str) and answer.strip() for answer in value)
    ):
        kind = "missing_field" if value is None else "empty" if value in ([], "") else "wrong_type"
        raise BadRow(kind, f"{name} is {_shown(value)}; expected a list of at least one text")
    return list(value)


def _lists(value: Any, name: str) -> list[list[str]]:
    """Returns a list of lists of texts, none of them empty. Raises BadRow: of a list of texts it says both readings."""
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"{name} is {_shown(value)}; expected a list of lists of texts")
    if value and all(isinstance(item, str) for item in value):
        each, whole = (reading.format(n=len(value)) for reading in _READINGS[name])
        readings = f"{_json([[item] for item in value])} for {each}, or {_json([value])} for {whole}"
        right = readings if len(value) > 1 else _json([value])
        raise BadRow("wrong_type", f"{name} is {_json(value)}; expected a list of lists: {right}")
    return [_answers(item, f"{name}[{i}]") for i, item in enumerate(value)]


def _evidence(value: Any) -> Any:
    """Returns evidence whose ids and values may be whole numbers, as a passage's id may be."""
    if not isinstance(value, list):
        return value
    return [
        {name: str(item) if type(item) is int else item for name, item in fact.items()}
        if isinstance(fact, dict)
        else fact
        for fact in value
    ]


def _readable(question: Question) -> Question:
    """Returns the question with U+FFFD for the lone surrogates of its texts, of which the name of a file may be one."""

    def readable(value: Any) -> Any:
        if isinstance(value, str):
            return replace_surrogates(value)
        if isinstance(value, dict):
            return {name: readable(item) for name, item in value.items()}
        return [readable(item) for item in value] if isinstance(value, list) else value

    return from_row(Question, readable(to_row(question)))


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _shown(value: Any) -> str:
    return reprlib.repr(value)[:_SHOWN] if isinstance(value, list | dict) else str(value)[:_SHOWN]
