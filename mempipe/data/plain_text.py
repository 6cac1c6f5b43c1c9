"""Makes passages of plain text: of a .txt or .md file, a folder of them, or the reference text that Python carries.

A passage joins paragraphs until it has about `PASSAGE_WORDS` words; a longer paragraph is cut at the ends of sentences,
whether or not lines end there. A heading (`#` in markdown, an underlined line elsewhere) begins a new passage. The
title of a passage is the name of the file, the heading, and from the second part of a long section on its number: the
titles are what questions are split by into training and test.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow as pa

from mempipe.data.corpus import PASSAGE_COLUMNS
from mempipe.data.rows import JSONL, PARQUET
from mempipe.settings import ConfigError
from mempipe.storage.parquet import write_table
from mempipe.text import replace_surrogates, sentences
from mempipe.types import Passage

SUFFIXES = (".txt", ".md")
PYTHON_REFERENCE = "python-reference"
"""Names the language reference in `pydoc_data.topics`: about 700 kB of English on every machine that has Python."""
PASSAGE_WORDS = 100
PART_PASSAGES = 10
"""Passages of a section that share a title."""
HEADING_WORDS = 20
"""A longer line is not a heading, whatever precedes or underlines it."""
_LETTERS_A_WORD, _LONGEST_WORD = 6, 30
_UNDERLINE = re.compile(r"^([=\-*~^\"])\1{2,}\s*$")
_CLAUSE_END = re.compile(r"[.!?;:…][\"”’')\]]*\s+|[。！？；]")
_WORD = re.compile(r"\S+\s*")


def is_plain_text(source: str | Path) -> bool:
    """Returns whether `source` is the Python reference, a .txt or .md file, or a folder that holds one somewhere and no
    file of a corpus.
    """
    path = Path(source)
    if str(source) == PYTHON_REFERENCE or path.suffix.lower() in SUFFIXES:
        return True
    if not path.is_dir() or any(file.name.endswith((*JSONL, *PARQUET)) for file in path.iterdir()):
        return False
    return bool(next(_files_of(path), None))


def read_plain_text(source: str | Path) -> Iterator[Passage]:
    """Yields the passages in the order of file names and of the text.

    Raises ConfigError for what does not exist, cannot be read, is binary, is not UTF-8 or has no text.
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
    write_table(file, pa.table(columns, schema=PASSAGE_COLUMNS))
    return file


def _texts(source: str | Path) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of every file. No two names are the same."""
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
    if not path.is_dir():
        yield path.stem, _read(path)
        return
    files = sorted(_files_of(path))
    whole = [str(file.relative_to(path)) for file in files]
    short = [str(file.relative_to(path).with_suffix("")) for file in files]
    seen = Counter([*whole, *short])  # if notes.md exists too, notes.txt has its whole name as title
    for file, name, brief in zip(files, whole, short, strict=True):
        yield brief if seen[brief] == 1 else name, _read(file)


def _files_of(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())


def _read(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}; save it as UTF-8 text"
        ) from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if "\0" in text:
        raise ConfigError(f"{file} is binary: character {text.index(chr(0))} is NUL; expected words in UTF-8")
    return replace_surrogates(text)


def _passages(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Yields title and text of each passage."""
    for section, paragraphs in _sections(name, _paragraphs(text.splitlines())):
        parts = (part for paragraph in paragraphs for part in _parts(paragraph + " ", _CUTS))
        for number, passage in enumerate(_joined(parts)):
            part = number // PART_PASSAGES + 1
            yield section if part == 1 else f"{section} ({part})", passage


def _sections(name: str, blocks: Iterable[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Yields the title and the paragraphs of every section."""
    title, paragraphs = name, list[str]()
    for heading, paragraph in blocks:
        if heading:
            yield title, paragraphs
            title, paragraphs = f"{name}: {heading}" if heading.lower() != name.lower() else name, []
        if paragraph:
            paragraphs.append(paragraph)
    yield title, paragraphs


def _joined(parts: Iterable[str]) -> Iterator[str]:
    """Joins parts, the space after each included, as long as they have no more than PASSAGE_WORDS together."""
    passage = ""
    for part in parts:
        if passage and _num_words(passage + part) > PASSAGE_WORDS:
            yield passage.rstrip()
            passage = ""
        passage += part
    if passage:
        yield passage.rstrip()


def _parts(text: str, cuts: Sequence[Callable[[str], Iterable[int]]]) -> Iterator[str]:
    """Yields the text where it fits a passage, else the pieces that the first of `cuts` gives, cut further in the same
    way. The parts joined are the text.
    """
    if not cuts or _num_words(text) <= PASSAGE_WORDS:
        yield text
        return
    for start, end in pairwise([*cuts[0](text), len(text)]):
        yield from _parts(text[start:end], cuts[1:])


_CUTS = (
    lambda text: [start for start, _ in sentences(text)],
    lambda text: [0, *(match.end() for match in _CLAUSE_END.finditer(text, 0, len(text.rstrip())))],
    lambda text: [match.start() for match in _WORD.finditer(text)],
    lambda text: range(0, len(text), PASSAGE_WORDS * _LETTERS_A_WORD),
)
"""Where a text may be cut: sentences, clauses, words, and runs of letters that no word would be."""


def _num_words(text: str) -> int:
    """Counts words. A run of letters that no word would be (a script without spaces) counts as several."""
    return sum(1 if len(word) <= _LONGEST_WORD else -(-len(word) // _LETTERS_A_WORD) for word in text.split())


def _paragraphs(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields (heading, "") or ("", paragraph) in the order of the text."""
    block: list[str] = []
    for line in [*lines, ""]:
        underlined = len(block) == 1 and _UNDERLINE.match(line) and _is_short(block[0])
        marked = re.match(r"#{1,6}\s+(.*)", line) if _is_short(line) else None
        if underlined:
            yield block[0].strip(), ""
            block = []
        elif marked or not line.strip():
            if block:
                yield "", " ".join(" ".join(block).split())
            block = []
            if marked:
                yield marked[1].strip(" #"), ""
        else:
            block.append(line)


def _is_short(line: str) -> bool:
    return len(line.split()) <= HEADING_WORDS
