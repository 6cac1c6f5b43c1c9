"""Corpora as streams of passages: wiki-18 jsonl (plain or gzip) and parquet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mempipe.agents.protocol import replace_surrogates
from mempipe.config import ConfigError
from mempipe.data.rows import read_rows
from mempipe.types import Passage


def read_corpus(path: str | Path) -> Iterator[Passage]:
    """The passages of a `.jsonl`, `.jsonl.gz` or `.parquet` file, in order.

    A row has `id` and `contents` (the wiki-18 format: the title in quotes, a newline, the text), or `id`, `title` and `text`; either may
    have a `partition`. Lone surrogates become U+FFFD. Raises ConfigError, naming the line or row, for what cannot be read, lacks a field,
    has no text or repeats an id.
    """
    seen: set[str] = set()
    for place, row in read_rows(Path(path)):
        passage = _passage(row, place)
        if passage.id in seen:
            raise ConfigError(f"{place}: passage id {passage.id!r} occurs twice")
        seen.add(passage.id)
        yield passage


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text of wiki-18 contents; the title is "" when there is no line of its own. Quotes that belong to the title stay."""
    title, newline, text = contents.partition("\n")
    if not newline:
        return "", contents.strip()
    title = title.strip()
    if len(title) >= 2 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title, text.strip()


def _passage(row: dict[str, Any], place: str) -> Passage:
    identity = row.get("id")
    if type(identity) not in (str, int) or identity == "":
        raise ConfigError(f"{place}: id is {identity!r}; a passage needs a text or a whole number")
    if row.get("contents") is not None:
        title, text = split_contents(_text(row, "contents", place))
    else:
        title, text = _text(row, "title", place, default=""), _text(row, "text", place).strip()
    if not text:
        raise ConfigError(f"{place}: passage {identity!r} has no text")
    return Passage(id=str(identity), title=title, text=text, partition=_text(row, "partition", place, default=""))


def _text(row: dict[str, Any], name: str, place: str, *, default: str | None = None) -> str:
    value = row.get(name)
    value = default if value is None else value
    if not isinstance(value, str):
        found = "missing" if value is None else repr(value)[:80]
        raise ConfigError(f"{place}: {name} is {found}; a passage needs `contents`, or `title` and `text`, as text")
    return replace_surrogates(value)
