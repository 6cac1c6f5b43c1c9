"""Makes passages of texts: of a .txt, .md, .html or .pdf file, a folder of them, the reference text that Python
carries, or a corpus in a package (`mempipe.data.packaged`); and of the rows of a .csv, .tsv or .json file, which are
passages already.

A passage joins paragraphs until it has about `PASSAGE_WORDS` words, or as many as are asked for; a longer paragraph
is cut at the ends of sentences, whether or not lines end there. A heading (`#` in markdown, an underlined line
elsewhere) begins a new passage. The title of a passage is the name of the file, the heading with those above it, and
from the second part of a long section on its number: the titles are what questions are split by into training and test.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path

import pyarrow as pa

from mempipe.data.corpus import PASSAGE_COLUMNS, corpus_files, parse_passage, read_segments
from mempipe.data.input_files import CSV, JSON, JSONL, PARQUET, input_files, is_hidden, is_remote
from mempipe.data.packaged import PACKAGED
from mempipe.data.rows import BadRow, BadRows, read_rows
from mempipe.data.text_files import HEADING_WORDS, SUFFIXES, check_reader, read_text_file
from mempipe.settings import ConfigError
from mempipe.storage.parquet import parquet_writer
from mempipe.text import UNSPACED, sentences
from mempipe.types import Passage

_ROWS_AT_ONCE = 65_536
_TABLES, _PASSAGES = (*CSV, *JSON), (*JSONL, *PARQUET)
PYTHON_REFERENCE = "python-reference"
"""Names the language reference in `pydoc_data.topics`: about 700 kB of English on every machine that has Python."""
PASSAGE_WORDS = 100
PART_PASSAGES = 10
"""Passages of a section that share a title."""
_LETTERS_A_WORD, _LONGEST_WORD = 6, 30
_UNDERLINES = '*=-~^"'
"""The signs below a heading, by its level; "=" has the level of a single "#"."""
_UNDERLINE = re.compile(rf"^([{re.escape(_UNDERLINES)}])\1{{2,}}\s*$")
_CLAUSE_END = re.compile(r"[.!?;:…][\"”’')\]]*\s+|[。！？；]")
_WORD = re.compile(r"\S+\s*")
_UNSPACED = re.compile(f"[{UNSPACED}]")
_WIDE = "[\u3001-\u30ff\u3400-\u9fff\uf900-\ufaff\uff01-\uff60\U00020000-\U0003ffff]"
_WRAPPED = re.compile(rf"(?<={_WIDE})\s*\n\s*(?={_WIDE})")
"""The end of a line inside a paragraph of Chinese or Japanese, where no space belongs."""


def is_plain_text(source: str | Path) -> bool:
    """Returns whether passages must be made of `source`: of the Python reference or a corpus in a package, of a text
    file or a table, or of a folder that holds a text file somewhere and no file of a corpus.
    """
    path = Path(source)
    if _is_name(source) or path.suffix.lower() in (*SUFFIXES, *_TABLES):
        return True
    if not path.is_dir() or any(file.parent == path for file in _files_of(path, _PASSAGES)):
        return False
    return bool(next(_files_of(path, SUFFIXES), None))


def check_source(source: str | Path) -> None:
    """Raises ConfigError for a corpus that is not there or that no installed package reads. It opens nothing."""
    if not is_plain_text(source):
        try:
            corpus_files(source)
        except ConfigError as error:
            raise ConfigError(f"{error}; texts and tables end in {', '.join((*SUFFIXES, *_TABLES))}") from error
    elif not _is_name(source) and not (is_remote(source) and _is_table(source)):
        for file in _files(source):
            check_reader(file)


def describe_source(source: str | Path) -> str:
    """Describes the passages of a source, with their licence if mempipe knows it; files and folders by their name."""
    if packaged := PACKAGED.get(str(source)):
        return packaged.description
    if str(source) == PYTHON_REFERENCE:
        version = ".".join(map(str, sys.version_info[:3]))
        return f"the language reference that Python {version} carries, licence PSF-2.0"
    return Path(source).name


def skipped_files(source: str | Path) -> dict[str, int]:
    """Returns how many files of a folder of texts are of no kind that is read, by the ends of their names."""
    path = Path(source)
    if _is_name(source) or not path.is_dir():
        return {}
    read = {file.suffix.lower() for file in _files_of(path, SUFFIXES)}
    ends = Counter(file.suffix.lower() or file.name for file in _files_of(path, ("",)))
    return {end: number for end, number in ends.most_common() if end not in read}


def _is_name(source: str | Path) -> bool:
    return str(source) == PYTHON_REFERENCE or str(source) in PACKAGED


def read_plain_text(source: str | Path, *, words: int = PASSAGE_WORDS, bad: BadRows | None = None) -> Iterator[Passage]:
    """Yields the passages, of at most `words` words, in the order of file names and of the text; rows as they are. The
    bad rows of a table go to `bad` (None: the first one raises).

    Raises ConfigError for what does not exist, cannot be read, is binary, is not UTF-8 or has no text;
    PackageUnavailable for a corpus in a package that cannot be downloaded.
    """
    found = False
    for passage in _rows(source, bad or BadRows()) if _is_table(source) else _cut(source, words):
        found = True
        yield passage
    if not found:
        raise ConfigError(f"{source} holds no text")


def write_corpus(source: str | Path, file: Path, *, words: int = PASSAGE_WORDS, bad: BadRows | None = None) -> Path:
    """Writes the passages of `read_plain_text`, or those of a corpus as they are, as one file from which an index is
    built, and returns its path. It holds `_ROWS_AT_ONCE` of them in memory.

    Raises ConfigError as `read_plain_text` and `read_segments` do.
    """
    with parquet_writer(file, PASSAGE_COLUMNS) as writer:
        for batch in _cut_batches(source, words, bad) if is_plain_text(source) else _batches(source):
            writer.write_table(pa.Table.from_batches([batch]))
    return file


def _cut_batches(source: str | Path, words: int, bad: BadRows | None) -> Iterator[pa.RecordBatch]:
    passages = read_plain_text(source, words=words, bad=bad)
    while part := list(islice(passages, _ROWS_AT_ONCE)):
        columns = {name: [getattr(passage, name) for passage in part] for name in PASSAGE_COLUMNS.names}
        yield pa.record_batch(columns, schema=PASSAGE_COLUMNS)


def _batches(source: str | Path) -> Iterator[pa.RecordBatch]:
    return (batch for batch, _ in read_segments(corpus_files(source), size=_ROWS_AT_ONCE))


def _cut(source: str | Path, words: int) -> Iterator[Passage]:
    for name, text in _texts(source):
        for number, (title, passage) in enumerate(_passages(name, text, words)):
            yield Passage(id=f"{name}-{number}", title=title, text=passage)


def _is_table(source: str | Path) -> bool:
    return Path(source).suffix.lower() in _TABLES


def _rows(source: str | Path, bad: BadRows) -> Iterator[Passage]:
    for file in input_files(source, suffixes=_TABLES):
        for number, (place, row) in enumerate(read_rows(file, bad=bad), start=1):
            try:
                yield parse_passage(row, own_id=f"{file.name.rpartition('.')[0]}-{number}")
            except BadRow as fault:
                bad.add(place, str(fault), kind=fault.kind)


def _texts(source: str | Path) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of every file. No two names are the same."""
    if str(source) == PYTHON_REFERENCE:
        from pydoc_data.topics import topics

        yield from sorted(topics.items())
        return
    if packaged := PACKAGED.get(str(source)):
        yield from packaged.texts()
        return
    path, files = Path(source), _files(source)
    if not path.is_dir():
        yield path.stem, read_text_file(path)
        return
    whole = [str(file.relative_to(path)) for file in files]
    short = [str(file.relative_to(path).with_suffix("")) for file in files]
    seen = Counter([*whole, *short])  # if notes.md exists too, notes.txt has its whole name as title
    for file, name, brief in zip(files, whole, short, strict=True):
        yield brief if seen[brief] == 1 else name, read_text_file(file)


def _files(source: str | Path) -> list[Path]:
    """Returns the files of a source in order. Raises ConfigError when it is not there."""
    path = Path(source)
    if is_remote(source):
        raise ConfigError(f"{source} is a text at a URL, which is not read from there; copy it to this machine")
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist; expected a corpus (.jsonl, .parquet, .csv, .json), a text file or a folder of "
            f"text files ({', '.join(SUFFIXES)})",
            absent=str(path),
        )
    if not path.is_dir():
        return [path]
    if passages := next(_files_of(path, _PASSAGES), None):
        raise ConfigError(
            f"{path} holds text files, and {passages.parent} files of passages; name the folder that is meant, or move "
            "one of them elsewhere"
        )
    return sorted(_files_of(path, SUFFIXES))


def _files_of(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Yields the files in a folder and in those inside it, also where a link leads to one; each folder once."""
    seen = set[str]()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        for name in names:
            if name.lower().endswith(suffixes) and not is_hidden(name) and (file := Path(place) / name).is_file():
                yield file


def _passages(name: str, text: str, words: int) -> Iterator[tuple[str, str]]:
    """Yields title and text of each passage."""
    for section, paragraphs in _sections(name, _paragraphs(text.splitlines())):
        parts = (part for paragraph in paragraphs for part in _parts(paragraph + " ", _CUTS, words))
        for number, passage in enumerate(_joined(parts, words)):
            part = number // PART_PASSAGES + 1
            yield section if part == 1 else f"{section} ({part})", passage


def _sections(name: str, blocks: Iterable[tuple[int, str]]) -> Iterator[tuple[str, list[str]]]:
    """Yields the title and the paragraphs of every section. The title holds all headings that the section is under."""
    above, paragraphs = dict[int, str](), list[str]()
    for level, text in blocks:
        if not level:
            paragraphs.append(text)
            continue
        yield _title(name, above), paragraphs
        above = {other: heading for other, heading in above.items() if other < level} | {level: text}
        paragraphs = []
    yield _title(name, above), paragraphs


def _title(name: str, headings: Mapping[int, str]) -> str:
    return ": ".join([name, *(heading for heading in headings.values() if heading.lower() != name.lower())])


def _joined(parts: Iterable[str], words: int) -> Iterator[str]:
    """Joins parts, the space after each included, as long as they have no more than `words` words together."""
    passage = ""
    for part in parts:
        if passage and _num_words(passage + part) > words:
            yield passage.rstrip()
            passage = ""
        passage += part
    if passage:
        yield passage.rstrip()


def _parts(text: str, cuts: Sequence[Callable[[str, int], Iterable[int]]], words: int) -> Iterator[str]:
    """Yields the text where it fits a passage, else the pieces that the first of `cuts` gives, cut further in the same
    way. The parts joined are the text.
    """
    if not cuts or _num_words(text) <= words:
        yield text
        return
    for start, end in pairwise([*cuts[0](text, words), len(text)]):
        yield from _parts(text[start:end], cuts[1:], words)


_CUTS = (
    lambda text, words: [start for start, _ in sentences(text)],
    lambda text, words: [0, *(match.end() for match in _CLAUSE_END.finditer(text, 0, len(text.rstrip())))],
    lambda text, words: [match.start() for match in _WORD.finditer(text)],
    lambda text, words: range(0, len(text), max(len(text) * words // _num_words(text), 1)),
)
"""Places where a text may be cut, in order of preference: sentences, clauses, words, and letters of overlong words."""


def _num_words(text: str) -> int:
    """Counts words. A run of letters that no word would be counts as several, and so do two characters of a script
    without spaces as one.
    """
    others, num_unspaced = _UNSPACED.subn("", text)
    words = (1 if len(word) <= _LONGEST_WORD else -(-len(word) // _LETTERS_A_WORD) for word in others.split())
    return sum(words) + -(-num_unspaced // 2)


def _paragraphs(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yields headings with their level, and paragraphs with 0, in the order of the text."""
    block: list[str] = []
    for line in [*lines, ""]:
        underline = _UNDERLINE.match(line) if len(block) == 1 and _is_short(block[0]) else None
        marked = re.match(r"(#{1,6})\s+(.*)", line) if _is_short(line) else None
        if underline:
            yield _UNDERLINES.index(underline[1]) + 1, block[0].strip()
            block = []
        elif marked or not line.strip():
            if block:
                yield 0, " ".join(_WRAPPED.sub("", "\n".join(block)).split())
            block = []
            if marked and (heading := marked[2].strip(" #")):
                yield len(marked[1]) + 1, heading
        else:
            block.append(line)


def _is_short(line: str) -> bool:
    return len(line.split()) <= HEADING_WORDS
