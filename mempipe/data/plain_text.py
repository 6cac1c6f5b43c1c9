"""Makes passages of plain text: of a .txt or .md file, a folder of them, or the reference text that Python carries.

A passage joins paragraphs until it has about `PASSAGE_WORDS` words. A heading (`#` in markdown, an underlined line
elsewhere) begins a new passage; the passage's title is the name of the file and this heading.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mempipe.data.corpus import PASSAGE_COLUMNS
from mempipe.files import whole_file
from mempipe.settings import ConfigError
from mempipe.text import replace_surrogates
from mempipe.types import Passage

SUFFIXES = (".txt", ".md")
PYTHON_REFERENCE = "python-reference"
"""Names the language reference in `pydoc_data.topics`: about 700 kB of English on every machine that has Python."""
PASSAGE_WORDS = 100
_UNDERLINE = re.compile(r"^([=\-*~^\"])\1{2,}\s*$")


def is_plain_text(source: str | Path) -> bool:
    """Tells whether `source` is the Python reference, a .txt or .md file, or a folder that holds one somewhere."""
    path = Path(source)
    if str(source) == PYTHON_REFERENCE or path.suffix in SUFFIXES:
        return True
    return path.is_dir() and any(file.suffix in SUFFIXES for file in path.rglob("*"))


def read_plain_text(source: str | Path) -> Iterator[Passage]:
    """Yields the passages in the order of file names and of the text.

    Raises ConfigError for what does not exist, is not UTF-8 or has no text.
    """
    found = False
    for name, text in _texts(source):
        for number, (title, words) in enumerate(_passages(name, text)):
            found = True
            yield Passage(id=f"{name}-{number}", title=title, text=words)
    if not found:
        raise ConfigError(f"{source} holds no text")


def write_corpus(source: str | Path, file: Path) -> Path:
    """Writes the passages of plain text as a corpus that an index is built from, and returns its path."""
    rows = [dataclasses.asdict(passage) for passage in read_plain_text(source)]
    columns = {name: [row[name] for row in rows] for name in PASSAGE_COLUMNS.names}
    with whole_file(file) as partial:
        pq.write_table(pa.table(columns, schema=PASSAGE_COLUMNS), partial)
    return file


def _texts(source: str | Path) -> Iterator[tuple[str, str]]:
    if str(source) == PYTHON_REFERENCE:
        from pydoc_data.topics import topics

        yield from sorted(topics.items())
        return
    path = Path(source)
    if not path.exists():
        raise ConfigError(
            f"{source} does not exist; expected a corpus (.jsonl, .parquet), a text file or a folder of .txt or "
            ".md files"
        )
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES) if path.is_dir() else [path]
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from error
        yield str(file.relative_to(path).with_suffix("") if path.is_dir() else file.stem), replace_surrogates(text)


def _passages(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Yields title and text of each passage."""
    title, parts = name, list[str]()
    for heading, paragraph in _paragraphs(text.splitlines()):
        full = sum(len(part.split()) for part in parts) + len(paragraph.split()) > PASSAGE_WORDS
        if parts and (heading or full):
            yield title, " ".join(parts)
            parts = []
        if heading:
            title = f"{name}: {heading}" if heading.lower() != name.lower() else name
        if paragraph:
            parts.append(paragraph)
    if parts:
        yield title, " ".join(parts)


def _paragraphs(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields (heading, "") or ("", paragraph) in the order of the text."""
    block: list[str] = []
    for line in [*lines, ""]:
        underlined = len(block) == 1 and _UNDERLINE.match(line)
        heading = re.match(r"#{1,6}\s+(.*)", line)
        if underlined:
            yield block[0].strip(), ""
            block = []
        elif heading or not line.strip():
            if block:
                yield "", " ".join(" ".join(block).split())
            block = []
            if heading:
                yield heading[1].strip(" #"), ""
        else:
            block.append(line)
