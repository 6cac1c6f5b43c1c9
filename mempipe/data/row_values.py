"""The values of a question file's row: how a path finds one, and the texts, answers and documents that it may hold.

A path leads into a row (`reward_model.ground_truth`, `prompt.-1.content`). A value that is missing, has another type or
could mean two things raises BadRow, which names its field.
"""

from __future__ import annotations

import ast
import datetime
import decimal
import itertools
import json
import math
import re
import reprlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mempipe.data.input_files import InputFile
from mempipe.data.rows import BadRow
from mempipe.data.ruler import expand_context, join_documents
from mempipe.text import BOX, join_sentences

_NESTED = ("target", "ground_truth", "text", "value", "answer", "aliases")
"""Keys of gold answers inside an object: verl and Search-R1, SQuAD, TriviaQA, ComplexWebQuestions."""
_TEXTS = ("text", "paragraph_text", "contents", "content", "passage", "sentences")
_NO_VALUE: tuple[Any, ...] = (None, "", [], {})
_SHOWN = 80  # characters of a wrong value
LISTS_OF_LISTS = {
    "objectives": ("{n} objectives with one golden answer each", "one objective with {n} golden answers"),
    "recall_targets": ("{n} entities with one surface form each", "one entity with {n} surface forms"),
}
"""Fields that are lists of lists of texts, and what a list of `n` texts in their place may mean."""
_FINAL = re.compile(r"\n#### *(\S[^\n]*)\s*$")
_DESCRIPTION = re.compile(r'\s*\(description\s+(?:"((?:[^"\\]|\\.)*)"|([^\s()"][^()"]*))\s*\)', re.DOTALL)
_DESCRIPTIONS = re.compile(rf"\(list(?:{_DESCRIPTION.pattern})*\s*\)", re.DOTALL)
_LISP_LIST = re.compile(r"\(list(\s*\)|\s+\()")
_LISTS = ("context", "supporting_facts", "evidences")
_BRACKETED = re.compile(r"\[.*\]|\{.*\}", re.DOTALL)
_BOXED = re.compile(re.escape(BOX) + r"\s*\{(.*\S.*)\}", re.DOTALL)
_PRINTED = re.compile(r"\[\s*'.*\]|array\(\[\s*['\"].*\)|\{\s*'.*\barray\(\[.*\}", re.DOTALL)
"""A list as Python and NumPy print it: ['a', 'b'], ['a' 'b'], array(['a'], dtype=object), or one of these in an
object."""


def find(row: object, paths: Sequence[str]) -> Any:
    """Returns the first value that one of the paths leads to; None where none does."""
    return next((value for path in paths if not is_empty(value := value_at(row, path))), None)


def value_at(value: object, path: str) -> Any:
    """Follows a path of names and of places in lists; None where it leads nowhere."""
    if isinstance(value, dict) and path in value:
        return value[path]
    for name in path.split("."):
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and re.fullmatch(r"-?\d{1,6}", name):
            value = value[int(name)] if -len(value) <= int(name) < len(value) else None
        else:
            return None
    return value


def has_value(row: dict[str, Any], path: str) -> bool:
    return not is_empty(value_at(row, path))


def is_empty(value: object) -> bool:
    return value in _NO_VALUE or value != value  # what pandas writes for no value is not a number


def has_no_item(value: object) -> bool:
    """Returns whether a value is columns without a row, as HotpotQA has them for a question without documents."""
    return isinstance(value, dict) and all(column == [] for column in value.values())


def lists_no_answer(value: object) -> bool:
    """Returns whether a value is a list of golden answers that names none: an empty one (also as the text of a cell),
    one of nameless objects, or WebQuestions' list of empty texts."""
    if isinstance(value, str):
        listed = _json_in(value.strip())
        nothing = listed == [] or as_object(listed).get("text") == []  # of SQuAD 2, in a table
        return nothing or (bool(_DESCRIPTIONS.fullmatch(value.strip())) and not _described(value))
    return isinstance(value, list) and all(map(_is_nameless, value))


def lowered(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the object with its names in lower case and without spaces around them, in addition to its own."""
    return {str(name).strip().casefold(): item for name, item in value.items()} | value


def opened(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of HotpotQA or 2WikiMultihopQA with its lists, JSON in a table; any other row as it is."""
    if not isinstance(row.get("supporting_facts"), str):
        return row
    lists = {name: _json_in(row[name]) for name in _LISTS if isinstance(row.get(name), str)}
    return row | {name: value for name, value in lists.items() if value is not None}


def as_object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def golden_answers(value: object, name: str) -> list[str]:
    """Returns the golden answers of a text, a number, a list of them, or an object that holds them (`_NESTED`). Objects
    of a list without a name in it are passed over.

    Raises BadRow for a missing value, a value that is not an answer, or one that may be one answer or several.
    """
    if isinstance(value, bool):
        yes = "yes" if value else "no"
        raise BadRow(
            "ambiguous", f"{name} is {value}, which may mean {yes!r} or {str(value).lower()!r}; write it as a text"
        )
    if isinstance(value, int | float | decimal.Decimal) and abs(value) != math.inf:
        return [_written(value) if isinstance(value, float) else str(value)]
    if isinstance(value, datetime.date | datetime.time):
        is_day = isinstance(value, datetime.datetime) and value.time() == datetime.time()  # pandas has no plain dates
        return [value.isoformat().partition("T")[0] if is_day else value.isoformat()]
    if isinstance(value, str) and value.strip():
        return _answers_in(value.strip(), name)
    if isinstance(value, dict):
        held = lowered(value)
        inner = [(f"{name}.{key}", held[key]) for key in _NESTED if not is_empty(held.get(key))]
        found = [answer for path, item in inner for answer in golden_answers(_without_blanks(item), path)]
    elif isinstance(value, list) and any(isinstance(item, list) for item in value):
        raise BadRow(
            "ambiguous",
            f"{name} is {shown(value)}, a list of lists, which may mean several golden answers or several objectives; "
            "write golden answers as one list, and objectives as `objectives` of mempipe's own format",
        )
    else:
        items = [*enumerate(value)] if isinstance(value, list) else []
        named = [(f"{name}[{i}]", item) for i, item in items if not _is_nameless(item)]
        found = [answer for path, item in named for answer in golden_answers(item, path)]
    if not found:
        kind = "missing_field" if value is None else "empty" if is_empty(value) else "wrong_type"
        raise BadRow(kind, f"{name} is {quoted(value)}; expected a golden answer: a text, a number or a list of them")
    return list(dict.fromkeys(found))


def _written(value: float) -> str:
    """Returns a number as a person wrote it: without the digits that 0.1 gets in a column of 32 bits."""
    text = f"{value:.15g}"
    if decimal.Decimal(text) == value or abs(value) > float(np.finfo(np.float32).max):
        return text
    single = np.float32(value)
    return str(single) if float(single) == value else text


def question_text(value: object, name: str) -> str:
    """Returns the question of a text, or of chat messages. Raises BadRow, also for several messages of the user."""
    if not isinstance(value, list):
        return checked_text(value, name)
    asked = [i for i, message in enumerate(value) if _is_users(message)]
    contents = [_message_text(value[i]) for i in asked]
    if len(contents) > 1:
        last = asked[-1] - len(value)
        text = "content" if "content" in value[last] else "value"
        raise BadRow(
            "ambiguous",
            f"{name} has {len(contents)} messages of the user; the question may be the first, "
            f"{shown(contents[0])!r}, or the last, {shown(contents[-1])!r}; set data.columns.question, e.g. to "
            f"{name}.{last}.{text}",
        )
    if not contents or not contents[0]:
        raise BadRow(
            "wrong_type", f"{name} is {shown(value)}; expected messages with role and content, one of them the user's"
        )
    return contents[0]


def context_of(value: object, *, file: InputFile, name: str = "context") -> str:
    """Returns a long text: a text as it is, documents (`documents_of`, or RULER's numbers) under numbered headers.
    Raises BadRow.
    """
    if isinstance(value, list) and any(isinstance(item, int | float) for item in value):
        return expand_context(value, folder=Path(file.url).parent)
    documents = documents_of(value)
    if documents:
        return join_documents(f"{title}\n{text}" if title else text for title, text in documents)
    if not isinstance(value, list | dict):
        return checked_text(value, name)
    raise BadRow(
        "empty" if is_empty(value) else "wrong_type",
        f"{name} is {shown(value)}; expected a text or documents with text: a list of texts, [[title, [sentence, …]], "
        f"…], [{{title, text}}, …], or equally many titles and sentences",
    )


def documents_of(value: object) -> list[tuple[str, str]]:
    """Returns the documents (title, text) of [[title, [sentence, …]], …], {title: […], sentences: [[…], …]},
    [{title, text}, …] or a list of texts, without those whose text is blank; none for anything else.
    """
    if isinstance(value, dict):
        titles, texts = value.get("title"), find(value, ("sentences", "content", "text"))
        both = isinstance(titles, list) and isinstance(texts, list) and len(titles) == len(texts)
        value = [[title, text] for title, text in zip(titles, texts, strict=True)] if both else None
    found = [_document(item) for item in value] if isinstance(value, list) else []
    documents = [document for document in found if document is not None]
    return [(title, text) for title, text in documents if text] if len(documents) == len(found) else []


def num_hops(row: dict[str, Any]) -> int:
    """Returns the steps of a question: those of `question_decomposition` (MuSiQue), or the different titles of
    `supporting_facts`; 0 when the data set names none.
    """
    steps = find(row, ("question_decomposition", "metadata.question_decomposition"))
    return len(steps) if isinstance(steps, list) else len(set(supporting_titles(row)))


def supporting_titles(row: dict[str, Any]) -> list[str]:
    """Returns the titles of `supporting_facts`, {title: […]}, [[title, sentence], …] or [{title, …}, …], in order."""
    facts = find(row, ("supporting_facts", "metadata.supporting_facts"))
    if isinstance(facts, dict):
        titles = facts.get("title")
    else:
        named = [find(fact, ("title", "0")) for fact in facts] if isinstance(facts, list) else []
        titles = [title for title in named if title is not None]
    return list(map(str, titles)) if isinstance(titles, list) else []


def checked_text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        kind = "missing_field" if value is None else "empty" if isinstance(value, str) else "wrong_type"
        raise BadRow(kind, f"{name} is {shown(value)!r}; expected a text")
    return value.strip()


def checked_answers(value: object, name: str) -> list[str]:
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(answer, str) and answer.strip() for answer in value)
    ):
        kind = "missing_field" if value is None else "empty" if value in ([], "") else "wrong_type"
        raise BadRow(kind, f"{name} is {shown(value)}; expected a list of at least one text")
    return list(value)


def checked_lists(value: object, name: str) -> list[list[str]]:
    """Returns a list of lists of texts, none of them empty. Raises BadRow: of a list of texts it says both readings."""
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"{name} is {shown(value)}; expected a list of lists of texts")
    if value and all(isinstance(item, str) for item in value):
        each, whole = (reading.format(n=len(value)) for reading in LISTS_OF_LISTS[name])
        readings = f"{_json([[item] for item in value])} for {each}, or {_json([value])} for {whole}"
        right = readings if len(value) > 1 else _json([value])
        raise BadRow("wrong_type", f"{name} is {_json(value)}; expected a list of lists: {right}")
    return [checked_answers(item, f"{name}[{i}]") for i, item in enumerate(value)]


def shown(value: object) -> str:
    return reprlib.repr(value)[:_SHOWN] if isinstance(value, list | dict) else str(value)[:_SHOWN]


def quoted(value: object) -> str:
    return repr(value[:_SHOWN]) if isinstance(value, str) else shown(value)


def _is_users(message: object) -> bool:
    """Returns whether a message is one of the user's: of OpenAI's role user, or from ShareGPT's human."""
    return as_object(message).get("role") == "user" or as_object(message).get("from") in ("human", "user")


def _message_text(message: object) -> str:
    """Returns the text of a message, whose content may be a list of parts; "" for one that is not text alone."""
    content = find(message, ("content", "value")) if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    words = [text for text in texts if isinstance(text, str)]
    return "\n".join(words).strip() if len(words) == len(texts) else ""


def _answers_in(text: str, name: str) -> list[str]:
    """Returns the golden answers of a text: itself, those of a JSON list or object (a cell of a table holds several so,
    perhaps with blanks between them) or of a list of WebQuestions, what follows GSM8K's ####, or what a box holds that
    is all of it.
    """
    listed = _json_in(text)
    if _holds_answers(listed, name):
        return golden_answers(_without_blanks(listed), name)
    if listed is None and (_PRINTED.fullmatch(text) or _holds_answers(_printed_in(text), name)):
        raise BadRow(
            "ambiguous",
            f"{name} is {shown(text)}, which may be one golden answer or a list that Python printed; write a list as "
            'JSON: ["a", "b"]',
        )
    if _DESCRIPTIONS.fullmatch(text):
        return _described(text)
    if _LISP_LIST.match(text):
        raise BadRow(
            "wrong_type",
            f"{name} is {shown(text)}, a list as WebQuestions writes it, with an entry that cannot be read; expected "
            '(list (description "a text") ...)',
        )
    if final := _FINAL.search(text):
        return [final[1].strip()]
    if whole := _BOXED.fullmatch(text):
        text = whole[1].strip() if _is_balanced(whole[1]) else text
    if BOX in text:
        raise BadRow(
            "ambiguous",
            f"{name} is {shown(text)}, a worked solution; the golden answer may be all of it or what its {BOX} holds: "
            "write the answer into a separate field and set data.columns.answer to it",
        )
    return [text]


def _json_in(text: str) -> Any:
    """Returns the list or the object that a text is in JSON; None for any other text."""
    if not _BRACKETED.fullmatch(text):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _printed_in(text: str) -> Any:
    """Returns the list or the object that a text is as Python prints it; None for any other text."""
    if not _BRACKETED.fullmatch(text):
        return None
    try:
        with warnings.catch_warnings():  # of a backslash
            warnings.simplefilter("ignore")
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _holds_answers(value: object, name: str) -> bool:
    """Returns whether a list or an object that is written in a text holds golden answers. In a field of one answer,
    numbers alone may be an interval or a point, [0, 1], and an object without a name of an answer is one text."""
    if isinstance(value, dict):
        return any(key in lowered(value) for key in _NESTED)
    return isinstance(value, list) and (name.casefold().endswith(("answers", "aliases")) or not _are_numbers(value))


def _are_numbers(value: object) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_are_numbers, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_balanced(text: str) -> bool:
    """Returns whether no brace closes before it opens, so that braces around the text belong together."""
    depths = [*itertools.accumulate((char == "{") - (char == "}") for char in text)]
    return not depths or (min(depths) >= 0 and depths[-1] == 0)


def _described(text: str) -> list[str]:
    """Returns the texts of a list of WebQuestions, whose quotation marks and backslashes are escaped by a backslash."""
    found = [re.sub(r"\\(.)", r"\1", quoted or plain, flags=re.DOTALL) for quoted, plain in _DESCRIPTION.findall(text)]
    return [answer.strip() for answer in found if answer.strip()]


def _is_nameless(value: object) -> bool:
    """Returns whether a value is an answer of ComplexWebQuestions for which the data set knows no name, or an entry of
    KILT that only names the source of an answer."""
    held = lowered(as_object(value))
    names = [held[key] for key in _NESTED if key in held]
    return all(map(is_empty, names)) if names else "provenance" in held


def _without_blanks(value: object) -> Any:
    """Returns a list without its blank texts, which published lists of aliases have."""
    return [item for item in value if not _is_blank(item)] if isinstance(value, list) else value


def _is_blank(value: object) -> bool:
    return is_empty(value.strip() if isinstance(value, str) else value)


def _document(value: object) -> tuple[str, str] | None:
    """Returns title and text of a document; None for a value that is none."""
    if value is None or isinstance(value, str):
        return "", (value or "").strip()
    if isinstance(value, list) and len(value) == 2:
        title, text = value
    elif isinstance(value, dict) and any(name in value for name in _TEXTS):
        title, text = value.get("title") or "", find(value, _TEXTS) or ""
    else:
        return None
    if isinstance(text, list) and all(isinstance(sentence, str) for sentence in text):
        text = join_sentences(text)
    return (title, text.strip()) if isinstance(title, str) and isinstance(text, str) else None


def _json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
