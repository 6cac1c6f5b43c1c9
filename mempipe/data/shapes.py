"""The shapes that rows of question files have, in one table, and how a row of any of them becomes a `Question`.

A shape says in which fields a row holds the question, its golden answers and the rest. A field is a path into the row
(`reward_model.ground_truth`, `prompt.-1.content`); names match whatever their case. Rows of published sets are known by
their fields (`SHAPES`). Any other row is read by the names of its fields (`QUESTION`, `ANSWERS`), or by those that
`Columns` names. What a row holds twice in different words is refused with both readings, never guessed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn, cast

from mempipe.data.config import Columns
from mempipe.data.input_files import InputFile
from mempipe.data.row_values import (
    LISTS_OF_LISTS,
    as_object,
    checked_answers,
    checked_lists,
    checked_text,
    context_of,
    find,
    golden_answers,
    has_no_item,
    has_value,
    is_empty,
    lists_no_answer,
    lowered,
    num_hops,
    question_text,
    quoted,
    shown,
    value_at,
)
from mempipe.data.rows import BadRow, header_hint
from mempipe.text import replace_surrogates
from mempipe.types import Question, from_row, to_row

QUESTION = ("question", "problem", "query", "utterance", "extra_info.question")
"""Fields that hold a question and nothing else."""
PROMPTS = ("prompt", "input", "messages", "conversations", "responses_create_params.input")
"""Fields that hold a question, perhaps with instructions around it: a text, or chat messages with one of the user's."""
ANSWERS = (
    "golden_answers",
    "golden_answer",
    "gold_answers",
    "gold_answer",
    "answers",
    "answer",
    "target",
    "label",
    "ground_truth",
    "expected_answer",
    "final_answer",
    "final answer",
    "possible_answers",
    "targetvalue",
    "reward_model.ground_truth",
)
MAY_BE_EMPTY = ("answers", "answer", "targetvalue")
"""Fields of published sets that list the answers of a question, and have an empty list where the set knows none."""
WORKED = ("solution",)
"""Fields whose text may be more than the answer; they count only where no field of `ANSWERS` has a value."""
ALIASES = ("answer_aliases", "aliases")
"""Further gold answers, in addition to those of another field."""
IDS = ("id", "_id", "question_id", "questionid", "qid", "task_id", "uuid")
CONTEXT = "context"
_OWN_FIELDS = tuple(field.name for field in fields(Question))
_MAX_HOPS = 10_000
_RULER_DOCUMENTS = "The following are given documents."
_RULER_TASK = "Answer the question based on the given documents."
_RULER_NEEDLE = re.compile(
    r"quiz you about the \w+ afterwards\.\s*\n(?P<context>.+)\n"
    r"(?P<question>What is the special magic \w+ for .+? mentioned in the provided text\?)",
    re.DOTALL,
)
"""The prompt of a needle in a haystack with one answer; "What are all ..." asks for several."""
_LETTERED = re.compile(r"(?:(?:choice|option|opt)[_ ]?)?[a-e]")
"""The columns of choices that have one column each: LongBench v2 has choice_A, MMLU has A."""
_SPLITS = {"train", "dev", "test", "validation", "val", "valid"}
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_QUESTION_MARK = re.compile(r"questions?[^\S\n]*:", re.IGNORECASE)


class LeftOut(Exception):
    """A row that is not a question to ask, by design of its data set; the message says which kind it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The reading of a row: its question, the name of its shape, and the field of each part ("" for none)."""

    question: Question
    shape: str
    fields: dict[str, str]

    def describe(self) -> str:
        """Returns one line for people."""
        question = self.question
        parts = [
            f"question {shown(question.text)!r}",
            f"golden answers {shown(' | '.join(question.golden_answers))!r}",
        ]
        parts = [
            f"{part}{_from(self.fields.get(name))}" for part, name in zip(parts, ("question", "answer"), strict=True)
        ]
        if question.context:
            parts.append(f"a context of {len(question.context):,} characters{_from(self.fields.get('context'))}")
        return ", ".join([*parts, f"id {question.id!r}{_from(self.fields.get('id'))}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """Says which fields a row of this shape has (`marks`), and in which of them the parts of its question are.

    Of `question`, `answers` and `id` the first field with a value counts. An `id` with braces is put together from
    {file}, {source}, {split}, {index} and {number}. `source` is a field or, behind an equals sign, a name; "" takes the
    name of the file or of its folder. A row of a set that `is_read` needs its `context`. `read` replaces all
    other fields for a shape that they cannot describe; `question` and `answers` then only say which fields are compared
    with others of the row.
    """

    name: str
    marks: tuple[str, ...]
    question: tuple[str, ...] = ("question",)
    answers: tuple[str, ...] = ("answer",)
    aliases: tuple[str, ...] = ()
    id: tuple[str, ...] = IDS
    index: str = "extra_info.index"
    source: str = ""
    context: str = ""
    is_read: bool = False
    applies: Callable[[dict[str, Any]], bool] = lambda row: True
    read: Callable[[dict[str, Any], int], Question] | None = None


def readings(row: dict[str, Any], *, file: InputFile, number: int, columns: Columns) -> Iterator[Reading]:
    """Returns the questions of the row: one question, or all questions about a text in it (SQuAD, LoCoMo). A fault of
    one of them does not end the iterator: the next call gives the next question.

    `number` is the row's place in its file, from 0 on. The iterator raises BadRow for a row that is of no known shape,
    lacks a part or can be read in two ways, and LeftOut for one that has no answer by design of its data set, or whose
    list of answers is empty.
    """
    name, parts = _unfolded(lowered(row))
    # A map gives its next item after an error; a generator has ended then.
    return map(lambda part: _reading(part, name=name, file=file, number=number, columns=columns), parts)


def _reading(part: dict[str, Any], *, name: str, file: InputFile, number: int, columns: Columns) -> Reading:
    if any(find(part, (field,)) == value for field, value in _UNANSWERABLE) or "adversarial_answer" in part:
        raise LeftOut("without an answer, as their data set says")
    shape = None if columns.named else next((shape for shape in SHAPES if _fits(shape, part)), None)
    if shape is None and not columns.answer and _lists_no_answer(part):
        raise LeftOut("whose list of answers is empty")
    if shape is not None:
        _refuse_others(shape, part)
    return _read(shape or _by_names(part, columns, name=name), part, file=file, number=number)


def _lists_no_answer(row: dict[str, Any]) -> bool:
    """Returns whether the row's list of answers names none, as in some rows of ComplexWebQuestions, and no other field
    holds an answer. A null or a blank text in the place of an answer may be a mistake, so such a row is bad."""
    given = [path for path in (*ANSWERS, *WORKED) if has_value(row, path)]
    return any(lists_no_answer(row.get(name)) for name in MAY_BE_EMPTY) and all(
        path in MAY_BE_EMPTY and lists_no_answer(row[path]) for path in given
    )


def content_id(question: Question) -> str:
    """Returns an id that the content of a question decides."""
    content = json.dumps([question.text, question.golden_answers, question.context])
    return f"q-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def _first(row: dict[str, Any], paths: Sequence[str]) -> str:
    """Returns the first path with a value, else the first path."""
    return next((path for path in paths if has_value(row, path)), paths[0])


def _fits(shape: RowShape, row: dict[str, Any]) -> bool:
    """Returns whether the row has the marks of the shape. A field without a value is a mark too: a missing field is
    then refused by its name."""
    return all(mark in row or has_value(row, mark) for mark in shape.marks) and shape.applies(row)


def _unfolded(row: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Returns the questions that a row holds, each as a row, and the name of its data set: those about the paragraphs
    of a SQuAD article, about a conversation of LoCoMo, about the sessions of LongMemEval; else the row itself.
    """
    paragraphs, asked = row.get("paragraphs"), row.get("qa")
    if isinstance(paragraphs, list) and paragraphs and all(_has_items(paragraph, "qas") for paragraph in paragraphs):
        items = [(paragraph, item) for paragraph in paragraphs for item in paragraph["qas"]]
        return "SQuAD", [{**lowered(as_object(item)), CONTEXT: paragraph.get(CONTEXT)} for paragraph, item in items]
    if isinstance(row.get("conversation"), dict) and isinstance(asked, list):
        shared = {CONTEXT: _conversation(row["conversation"]), "data_source": "locomo"}
        name = row.get("sample_id") or "conversation"
        return "LoCoMo", [{"id": f"{name}-{i}"} | as_object(item) | shared for i, item in enumerate(asked)]
    if isinstance(row.get("haystack_sessions"), list):
        date = row.get("question_date")
        question = f"Today is {date}. {row.get('question')}" if date and row.get("question") else row.get("question")
        return "LongMemEval", [{**row, "question": question, CONTEXT: _sessions(row), "data_source": "longmemeval"}]
    return "", [row]


def _has_items(value: Any, name: str) -> bool:
    return isinstance(value, dict) and isinstance(value.get(name), list)


def _conversation(talk: dict[str, Any]) -> str:
    """Returns the sessions of a LoCoMo conversation: `session_1`, `session_1_date_time` and so on."""
    numbers = sorted(int(found[1]) for key in talk if (found := re.fullmatch(r"session_(\d{1,6})", str(key))))
    return "\n\n".join(
        _session(talk.get(f"session_{n}_date_time"), talk[f"session_{n}"], who="speaker", said="text") for n in numbers
    )


def _sessions(row: dict[str, Any]) -> str:
    sessions, dates = row["haystack_sessions"], row.get("haystack_dates")
    dates = dates if isinstance(dates, list) and len(dates) == len(sessions) else [None] * len(sessions)
    pairs = zip(dates, sessions, strict=True)
    return "\n\n".join(_session(date, session, who="role", said="content") for date, session in pairs)


def _session(date: Any, turns: Any, *, who: str, said: str) -> str:
    """Returns one session as text. A picture of LoCoMo is its caption."""
    lines = [f"Session of {date}:"] if date else ["Session:"]
    for turn in map(as_object, turns if isinstance(turns, list) else []):
        caption = f" [picture: {turn['blip_caption']}]" if turn.get("blip_caption") else ""
        lines.append(f"{turn.get(who) or 'unknown'}: {turn.get(said) or ''}{caption}")
    return "\n".join(lines)


def _read(shape: RowShape, row: dict[str, Any], *, file: InputFile, number: int) -> Reading:
    if shape.read is not None:
        made, fields = shape.read(row, number), {}
    else:
        fields = {
            "question": _first(row, shape.question),
            "answer": _first(row, shape.answers),
            "context": shape.context,
        }
        text = question_text(value_at(row, fields["question"]), fields["question"])
        golden = golden_answers(value_at(row, fields["answer"]), fields["answer"])
        golden += [
            answer
            for name in shape.aliases
            if has_value(row, name)
            for answer in golden_answers(value_at(row, name), name)
        ]
        source = _source(shape.source, row, file)
        given = value_at(row, shape.context) if shape.context else None
        has_context = shape.is_read or not (is_empty(given) or has_no_item(given))
        own_id, fields["id"] = _identity(shape, row, file=file, source=source, number=number)
        made = Question(
            id=own_id,
            text=text,
            golden_answers=list(dict.fromkeys(golden)),
            source=source,
            num_hops=num_hops(row),
            context=context_of(given, file=file, name=shape.context) if has_context else "",
        )
    made = _readable(made)
    if not made.id:
        made, fields["id"] = replace(made, id=content_id(made)), "its content"
    return Reading(question=made, shape=shape.name, fields=fields)


def _source(source: str, row: dict[str, Any], file: InputFile) -> str:
    if source:
        return source[1:] if source.startswith("=") else checked_text(value_at(row, source), source)
    return file.folder if _SHARD.sub("", _stem(file)) in _SPLITS else _stem(file)


def _stem(file: InputFile) -> str:
    return file.name.partition(".")[0]


def _identity(shape: RowShape, row: dict[str, Any], *, file: InputFile, source: str, number: int) -> tuple[str, str]:
    """Returns the row's own id ("" for none) and the field that it is from."""
    field = _first(row, shape.id)
    if "{" in field:
        split, index = value_at(row, "extra_info.split") or "row", value_at(row, shape.index)
        index = "+".join(map(str, index)) if isinstance(index, list) and index else index
        parts = {"source": source, "split": split, "index": number if index is None else index, "number": number}
        return field.format(file=_stem(file), **parts), ""
    value = value_at(row, field)
    if is_empty(value):
        return "", ""
    if type(value) not in (str, int) or not str(value).strip():
        raise BadRow("wrong_type", f"{field} is {shown(value)!r}; expected a text or a whole number")
    return str(value).strip(), field


def _by_names(row: dict[str, Any], columns: Columns, *, name: str) -> RowShape:
    """Returns the shape of a row of no published set, by the names of its fields. Raises BadRow."""
    for setting, path in columns.named.items():
        if not has_value(row, path):
            raise BadRow(
                "missing_field", f"data.columns.{setting} is {path!r}, where the row has no value; it has {_names(row)}"
            )
    question = columns.question or _question_field(row)
    answers = columns.answer or _answer_field(row)
    return RowShape(
        name=name or f"{question} + {answers}",
        marks=(),
        question=(question,),
        answers=(answers,),
        aliases=() if columns.answer else tuple(path for path in ALIASES if has_value(row, path)),
        id=(columns.id,) if columns.id else IDS,
        source="data_source" if isinstance(value_at(row, "data_source"), str) and has_value(row, "data_source") else "",
        context=columns.context or CONTEXT,
    )


def _question_field(row: dict[str, Any]) -> str:
    """Returns the field that holds the question: one of `QUESTION`, else of `PROMPTS`. Raises BadRow where two of them
    ask different things; a prompt around the question of another field asks the same.
    """
    texts = {path: question_text(value_at(row, path), path) for path in QUESTION if has_value(row, path)}
    for path in PROMPTS:
        if has_value(row, path):
            try:
                texts[path] = question_text(value_at(row, path), path)
            except BadRow:
                if not texts:
                    raise
    if not texts:
        _refuse_without("question", row, (*QUESTION, *PROMPTS))
    asked = min(texts, key=lambda path: len(texts[path]))
    for path, text in texts.items():
        if texts[asked].casefold() not in text.casefold():
            _refuse_two("question", asked, texts[asked], path, text)
    return asked


def _answer_field(row: dict[str, Any]) -> str:
    """Returns the field that holds the golden answers. Raises BadRow where two fields hold different ones."""
    given = {path: golden_answers(value_at(row, path), path) for path in ANSWERS if has_value(row, path)}
    given = given or {path: golden_answers(value_at(row, path), path) for path in WORKED if has_value(row, path)}
    if not given:
        _refuse_without("answer", row, (*ANSWERS, *WORKED))
    _refuse_choice(row, *next(iter(given.items())))
    widest = max(given, key=lambda path: len(given[path]))
    known = {answer.casefold() for answer in given[widest]}
    for path, answers in given.items():
        if not known.issuperset(answer.casefold() for answer in answers):
            _refuse_two("answer", widest, given[widest][0], path, answers[0])
    return widest


def _refuse_others(shape: RowShape, row: dict[str, Any]) -> None:
    """Raises BadRow where another field asks something else than the question's field of a shape, or holds other
    golden answers than its answers' field. Fields that hold no question or answer by themselves do not count.
    """
    texts = _read_fields(row, [*_filled(row, shape.question), *QUESTION], question_text)
    for asked in _filled(row, shape.question):
        own = texts.get(asked, "").casefold()
        for path, text in texts.items():
            if own not in text.casefold() and text.casefold() not in own:
                _refuse_two("question", asked, texts[asked], path, text)
    given = _read_fields(row, [*_filled(row, shape.answers), *shape.aliases, *ANSWERS], golden_answers)
    for held in _filled(row, shape.answers):
        own = _folded(given.get(held, []))
        known = own.union(*(_folded(given.get(path, [])) for path in shape.aliases))
        for path, answers in given.items():
            others = _folded(answers)
            if path not in shape.aliases and not others <= known and not own <= others:
                _refuse_two("answer", held, given[held][0], path, answers[0])


def _folded(answers: Iterable[str]) -> set[str]:
    return {answer.casefold() for answer in answers}


def _filled(row: dict[str, Any], paths: Sequence[str]) -> list[str]:
    """Returns the first of the paths that has a value, as a list of it."""
    return [path for path in paths if has_value(row, path)][:1]


def _read_fields(row: dict[str, Any], paths: Iterable[str], read: Callable[[Any, str], Any]) -> dict[str, Any]:
    """Returns the values of the fields that `read` reads."""
    found = {}
    for path in paths:
        if has_value(row, path):
            with contextlib.suppress(BadRow):
                found[path] = read(value_at(row, path), path)
    return found


def _refuse_choice(row: dict[str, Any], path: str, answers: list[str]) -> None:
    """Raises BadRow for an answer that may be one of the row's choices by its place or letter."""
    lettered = {name: value for name, value in row.items() if _LETTERED.fullmatch(name) and not is_empty(value)}
    choices = find(row, ("choices.text", "choices", "options")) or (lettered if len(lettered) > 1 else None)
    if isinstance(choices, list | dict) and re.fullmatch(r"\d|[A-Za-z]", answers[0]) and answers[0] not in choices:
        raise BadRow(
            "ambiguous",
            f"{path} is {answers[0]!r}, which may be the golden answer or the place of one of the choices "
            f"{shown(choices)}; write the answer as a text into a field and set data.columns.answer to it",
        )


def _refuse_without(setting: str, row: dict[str, Any], paths: Sequence[str]) -> NoReturn:
    if empty := next((path for path in paths if path in row), None):
        held = "has no value" if row[empty] is None else f"is {quoted(row[empty])}"
        raise BadRow("missing_field", f"{empty} {held}; the row needs {_PARTS[setting]}, or set data.columns.{setting}")
    raise BadRow(
        "unknown_format",
        f"fields {_names(row)} are of no known format: none of them holds {_PARTS[setting]}; "
        f"set data.columns.{setting} to the one that does{header_hint(row)}",
    )


def _refuse_two(setting: str, first: str, one: str, second: str, other: str) -> NoReturn:
    raise BadRow(
        "ambiguous",
        f"{first} and {second} hold different {setting}s, {shown(one)!r} and {shown(other)!r}; "
        f"set data.columns.{setting} to {first} or to {second}",
    )


def _mempipe(row: dict[str, Any], number: int) -> Question:
    given = {name: row[name] for name in _OWN_FIELDS if row.get(name) is not None}
    checked = {
        "id": checked_text(row["id"], "id") if row.get("id") is not None else "",
        "text": checked_text(row["text"], "text"),
        "golden_answers": checked_answers(row["golden_answers"], "golden_answers"),
        "evidence": _evidence(given.get("evidence", [])),
        **{name: checked_lists(given[name], name) for name in LISTS_OF_LISTS if name in given},
    }
    try:
        question = from_row(Question, given | checked)
    except KeyError as error:
        raise BadRow("missing_field", f"{error.args[0]} is missing") from error
    except TypeError as error:
        raise BadRow("wrong_type", str(error)) from error
    if not 0 <= question.num_hops <= _MAX_HOPS:
        raise BadRow("wrong_value", f"num_hops is {question.num_hops}; expected 0 to {_MAX_HOPS}")
    last = max(len(question.objectives) - 1, 0)
    for place, fact in enumerate(question.evidence):
        if not 0 <= fact.objective <= last:
            raise BadRow("wrong_value", f"evidence[{place}].objective is {fact.objective}; expected 0 to {last}")
    return question


def _mem1(row: dict[str, Any], number: int) -> Question:
    source, indices = checked_text(row.get("data_source"), "data_source"), value_at(row, "extra_info.indices")
    targets = row["reward_model"]["ground_truth"]["target"]
    objectives = [checked_answers(target, f"reward_model.ground_truth.target[{i}]") for i, target in enumerate(targets)]
    place = "+".join(map(str, indices)) if isinstance(indices, list) and indices else number
    asked = row.get("question")
    return Question(
        id=f"{source}-{value_at(row, 'extra_info.split') or 'row'}-{place}",
        text=checked_text(asked, "question")
        if asked
        else _asked_in(question_text(row["prompt"], "prompt"), len(objectives)),
        golden_answers=["; ".join(answers[0] for answers in objectives)],
        source=source,
        objectives=objectives,
    )


def _ruler_parts(row: dict[str, Any]) -> tuple[str, str, str] | None:
    """Takes the prompt of RULER's own files apart: the task's name, the text to read, and the question. Returns None
    for its tasks that want all of several answers."""
    prompt = row["input"]
    if not isinstance(prompt, str):
        return None
    if needle := _RULER_NEEDLE.search(prompt):
        return "ruler_niah", needle["context"], needle["question"]
    if _RULER_DOCUMENTS not in prompt or _RULER_TASK not in prompt:
        return None
    # The task, the documents, the task again, and the question.
    context, _, asked = prompt.partition(_RULER_DOCUMENTS)[2].rpartition(_RULER_TASK)
    return "ruler_qa", context, asked.rpartition("Question:")[2].strip().removesuffix("Answer:")


def _ruler(row: dict[str, Any], number: int) -> Question:
    source, context, asked = cast("tuple[str, str, str]", _ruler_parts(row))
    return Question(
        id="",  # an index is that of its file, and files of several lengths have the same ones
        text=checked_text(asked.strip(), "the question of input"),
        golden_answers=golden_answers(row["outputs"], "outputs"),
        source=source,
        context=checked_text(context.strip(), "the text of input"),
    )


def _other_ruler(row: dict[str, Any], number: int) -> Question:
    """Refuses other tasks, whose answers all have to be given: golden answers are alternatives, so one would do."""
    raise BadRow(
        "wrong_value",
        "input is none of the tasks of RULER that are read (qa_*, niah_single_*, niah_multikey_*); the others want "
        "several answers at once",
    )


def _has_objectives(row: dict[str, Any]) -> bool:
    targets = value_at(row, "reward_model.ground_truth.target")
    return isinstance(targets, list) and any(isinstance(target, list) for target in targets)


def _is_beside_its_text(row: dict[str, Any]) -> bool:
    """Returns whether `input` is a text to read. An input that holds the question is a prompt around it."""
    text, asked = row.get("input"), row.get("question")
    return isinstance(text, str) and isinstance(asked, str) and asked.strip().casefold() not in text.casefold()


def _has_sources(row: dict[str, Any]) -> bool:
    output = row.get("output")
    return isinstance(output, list) and any("provenance" in as_object(item) for item in output)


def _asked_in(prompt: str, num_objectives: int) -> str:
    """Returns the text after "Question:" in a MEM1 prompt, up to the end of the line.

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


def _evidence(value: Any) -> Any:
    """Returns evidence whose ids and values may be whole numbers, as a passage's id may be. A row of an older version
    has no objectives of its facts, or null in a table with newer rows.
    """
    if not isinstance(value, list):
        return value
    return [
        {
            name: str(item) if type(item) is int and name != "objective" else item
            for name, item in fact.items()
            if (name, item) != ("objective", None)
        }
        if isinstance(fact, dict)
        else fact
        for fact in value
    ]


def _readable(question: Question) -> Question:
    """Returns the question with U+FFFD for the lone surrogates of its texts (the name of a file may have some)."""

    def readable(value: Any) -> Any:
        if isinstance(value, str):
            return replace_surrogates(value)
        if isinstance(value, dict):
            return {name: readable(item) for name, item in value.items()}
        return [readable(item) for item in value] if isinstance(value, list) else value

    return from_row(Question, readable(to_row(question)))


def _names(row: dict[str, Any]) -> str:
    """Returns the names of a row as its file has them, without those that `lowered` adds."""
    own = {str(name).strip().casefold(): str(name) for name in row}
    return reprlib.repr(sorted(own.values()))


def _from(field: str | None) -> str:
    return "" if not field else f" from {field}" if " " in field else f" from `{field}`"


_PARTS = {
    "question": f"a question ({', '.join((*QUESTION, *PROMPTS))})",
    "answer": f"a golden answer ({', '.join((*ANSWERS, *WORKED))})",
}
_UNANSWERABLE = (
    ("is_impossible", True),
    ("answerable", False),
    ("answers", {"text": [], "answer_start": []}),
    ("answer.value", "<unk>"),
)
"""Fields of SQuAD 2 and MuSiQue that mark a question whose text does not answer it, and that of TriviaQA's test set,
whose answers are not published."""

SHAPES = (  # the first that a row fits
    RowShape(
        name="mempipe", marks=("text", "golden_answers"), question=("text",), answers=("golden_answers",), read=_mempipe
    ),
    RowShape(
        name="MemAgent",
        marks=("prompt", "context", "reward_model"),
        question=("extra_info.question", "prompt"),
        answers=("reward_model.ground_truth",),
        id=("{source}-{index}",),
        source="data_source",
        context="context",
        is_read=True,
    ),
    RowShape(
        name="MEM1",
        marks=("prompt", "reward_model"),
        question=(),
        answers=(),  # of one objective each
        applies=_has_objectives,
        read=_mem1,
    ),
    RowShape(
        name="Search-R1",
        marks=("question", "reward_model.ground_truth.target"),
        answers=("reward_model.ground_truth.target",),
        id=("{source}-{split}-{index}",),
        source="data_source",
    ),
    RowShape(
        name="MemSearcher",  # whose index does not belong to one row, since one data source is named for all
        marks=("question", "reward_model"),
        answers=("reward_model.ground_truth",),
        id=("{source}-{split}-{number}",),
        source="data_source",
    ),
    RowShape(
        name="FlashRAG",
        marks=("question", "golden_answers"),
        answers=("golden_answers",),
        applies=lambda row: has_value(row, "golden_answers"),
    ),
    RowShape(
        name="RULER",
        marks=("context", "input", "answers"),
        question=("input",),
        answers=("answers",),
        id=("{file}-{index}",),
        index="index",
        context="context",
        is_read=True,
    ),
    RowShape(
        name="RULER's own",
        marks=("input", "outputs"),
        question=(),
        answers=(),
        applies=lambda row: _ruler_parts(row) is not None,
        read=_ruler,
    ),
    RowShape(
        name="RULER's other tasks",
        marks=("index", "input", "outputs", "length"),
        question=(),
        answers=(),
        read=_other_ruler,
    ),
    RowShape(
        name="BABILong",
        marks=("input", "question", "target"),
        answers=("target",),
        context="input",
        is_read=True,
        applies=_is_beside_its_text,
    ),
    RowShape(
        name="NarrativeQA",
        marks=("document.text", "question.text", "answers"),
        question=("question.text",),
        answers=("answers",),
        source="=narrativeqa",
        context="document.text",
        is_read=True,
    ),
    RowShape(name="KILT", marks=("input", "output"), question=("input",), answers=("output",), applies=_has_sources),
    RowShape(
        name="MuSiQue",
        marks=("question", "answer", "paragraphs"),
        aliases=("answer_aliases",),
        source="=musique",
        context="paragraphs",
    ),
    RowShape(
        name="2WikiMultihopQA",
        marks=("question", "answer", "supporting_facts", "evidences", "context"),
        source="=2wikimultihopqa",
        context="context",
    ),
    RowShape(
        name="HotpotQA",
        marks=("question", "answer", "supporting_facts", "context"),
        source="=hotpotqa",
        context="context",
    ),
)
"""Published sets whose rows hold more than their names tell. All others are read by the names of their fields."""
