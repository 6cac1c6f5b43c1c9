"""Corpora as streams of passages, of any size: wiki-18 jsonl (plain or gzip) and parquet, local or by URL.

A row has `id` and `contents` (the wiki-18 format: the title in quotes, a newline, the text), or `id`, `title` and
`text`; either may have a `partition`. With a `title` next to it, `contents` is the text. Id, title and text may have
other usual names (`IDS`, `TITLES`, `TEXTS`), the last two in any case, and a row without an id is named after its file
and its place there.

`read_segments` reads many rows at once with Arrow. Where Arrow finds anything odd it reads the same rows one by one, so
that it can name the line of a row that it refuses. Both ways give the same passages.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute
import pyarrow.json as pj

from mempipe.data import rows
from mempipe.data.input_files import JSONL, PARQUET, InputFile, input_files
from mempipe.data.rows import BadRow, BadRows
from mempipe.settings import ConfigError
from mempipe.text import join_sentences, replace_surrogates
from mempipe.types import Passage

pc: Any = pyarrow.compute  # its functions are made at run time, which no type checker sees

CorpusFile = InputFile
PASSAGE_COLUMNS = pa.schema(
    [("id", pa.string()), ("title", pa.string()), ("text", pa.string()), ("partition", pa.string())]
)
IDS = ("id", "_id", "docid", "doc_id", "passage_id", "pid")
"""Fields that hold a passage's id; the first one that has a value counts."""
TEXTS = ("text", "content", "passage", "body", "paragraph_text", "page_content")
"""Fields that hold a passage's text where it has no `contents`: a text, or the list of its sentences. `text` precedes
the others; a row has one of them."""
TITLES = ("title", "wikipedia_title")
_SOURCE_TEXTS = ("contents", "title", "text", "partition")
_OTHER_NAMES = (*IDS[1:], *TEXTS[1:], *TITLES[1:])
_ANY_CASE = (TITLES, ("contents", *TEXTS))
"""Names that count in any case where a row has none of the same part as it is written here."""
_ENDINGS = tuple({name.rpartition("_")[2].encode() + b'"' for names in _ANY_CASE for name in names})
_NAMES = re.compile(rf'"({"|".join(itertools.chain(*_ANY_CASE))})"\s*:'.encode(), re.IGNORECASE)
_SUFFIX = re.compile("(?:" + "|".join(map(re.escape, (*JSONL, *PARQUET))) + ")$", re.IGNORECASE)
_ROWS_AT_ONCE = 8192  # of parquet
_LOOK_AHEAD = 1024  # rows
_MAX_BRACKETS = 100
"""The most brackets on a line that Arrow reads. Python's parser refuses JSON that is nested about ten times deeper,
Arrow's does not, and nesting needs brackets."""
_NO_JSON = (re.compile(rb"NaN\s*[,}\]]"), re.compile(rb"Inf(?:inity)?\s*[,}\]]"))
"""Numbers that Arrow reads and JSON does not have."""


@dataclass(frozen=True, slots=True)
class CorpusPosition:
    """Says where to continue reading: in `file`, after its first `row` lines or rows, good or bad.

    `counts` are the bad rows so far, by kind.
    """

    file: int = 0
    row: int = 0
    counts: dict[str, int] = field(default_factory=dict)


class SeenIds:
    """Remembers which ids came before, in 16 bytes an id.

    It keeps two 64-bit hashes of each in sorted runs, each run at least twice as long as the next.
    """

    def __init__(self) -> None:
        self._runs: list[npt.NDArray[np.uint64]] = []  # [2, n], ordered by the first hash

    def __len__(self) -> int:
        return sum(run.shape[1] for run in self._runs)

    def known(self, ids: pa.Array | Sequence[str]) -> npt.NDArray[np.bool_]:
        """Tells which of them were added before, [n]."""
        return self._known(_hashes(ids))

    def add(self, ids: pa.Array | Sequence[str]) -> npt.NDArray[np.bool_]:
        """Adds them all. Returns which ids were added before or occur earlier in `ids`, [n]."""
        hashes = _hashes(ids)
        order = np.lexsort(hashes[::-1])  # stable: of equal ids the first one stays first
        ordered = hashes[:, order]
        known = self._known(ordered)  # sorted, since that is several times faster than a search here and there
        known[1:] |= (ordered[:, 1:] == ordered[:, :-1]).all(axis=0)
        if not known.all():
            self._runs.append(ordered[:, ~known])
        repeated = np.empty_like(known)
        repeated[order] = known
        while len(self._runs) > 1 and self._runs[-2].shape[1] < 2 * self._runs[-1].shape[1]:
            self._runs[-2:] = [_merged(*self._runs[-2:])]
        return repeated

    def _known(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        known = np.zeros(hashes.shape[1], dtype=bool)
        for run in self._runs:
            places = np.searchsorted(run[0], hashes[0])
            same = np.flatnonzero(places < run.shape[1])
            while len(same := same[run[0, places[same]] == hashes[0, same]]):
                known[same] |= run[1, places[same]] == hashes[1, same]
                places[same] += 1  # others with the same first hash
                same = same[places[same] < run.shape[1]]
        return known


def corpus_files(sources: str | Path | Sequence[str | Path]) -> list[CorpusFile]:
    """Returns the files of a corpus.

    A source is a file that ends in `JSONL` or `PARQUET`, a folder of them or a list of any, local or by fsspec URL.

    Raises ConfigError for what does not exist, has another suffix, or is a folder without such files.
    """
    return input_files(sources, suffixes=(*JSONL, *PARQUET))


def read_segments(
    files: Sequence[CorpusFile],
    *,
    size: int,
    start: CorpusPosition = CorpusPosition(),
    seen: SeenIds | None = None,
    max_bad_rows: int = 0,
    max_line_bytes: int = 2**20,
) -> Iterator[tuple[pa.RecordBatch, CorpusPosition]]:
    """Yields batches [size] of PASSAGE_COLUMNS in the order of the files, each with the position of what follows. The
    last batch may be shorter.

    A batch's position is that of the next good row, so its counts include the bad rows between them. A reading that
    starts there, with the ids before it in `seen`, yields the batches that an undisturbed reading yields; at each yield
    `seen` holds the ids of the batches so far. Only `seen` grows with the corpus. Lone surrogates become U+FFFD.

    It passes over bad rows: those that are not a JSON object in UTF-8, are longer than `max_line_bytes`, lack id or
    text, have a wrong type, or repeat an id. Raises ConfigError with file and line for more than `max_bad_rows` of
    them, and for a truncated file.
    """
    if size < 1:
        raise ConfigError(f"a segment has {size} passages; it needs at least 1")
    seen = SeenIds() if seen is None else seen
    bad = BadRows(max_bad_rows, counts=start.counts)
    parts: list[pa.RecordBatch] = []
    missing = size
    for chunk in _chunks(files, start, max_line_bytes):
        chunk.report(bad, 0, np.array([], dtype=bool))
        done = 0
        while done < len(chunk.numbers):
            # A full segment waits for the next good row: known ids are bad rows, and nothing may enter `seen` before it
            # is handed out.
            ids = chunk.passages.column("id").slice(done, missing or _LOOK_AHEAD)
            repeated = seen.add(ids) if missing else seen.known(ids)
            taken = len(ids) if missing or repeated.all() else int(np.argmin(repeated))
            chunk.report(bad, done, repeated[:taken])
            part = chunk.passages.slice(done, taken).filter(pa.array(~repeated[:taken]))
            done += taken
            if not missing and taken < len(ids):
                yield _joined(parts), CorpusPosition(chunk.file, int(chunk.numbers[done]) - 1, dict(bad.counts))
                parts, missing = [], size
            elif part.num_rows:
                parts.append(part)
                missing -= part.num_rows
    if parts:
        yield _joined(parts), CorpusPosition(len(files), 0, dict(bad.counts))


def read_corpus(path: str | Path | Sequence[str | Path], *, max_bad_rows: int = 0) -> Iterator[Passage]:
    """Yields the passages of a corpus. Raises ConfigError as `corpus_files` and `read_segments` do."""
    for batch, _ in read_segments(corpus_files(path), size=_ROWS_AT_ONCE, max_bad_rows=max_bad_rows):
        for row in batch.to_pylist():
            yield Passage(**row)


def split_contents(contents: str) -> tuple[str, str]:
    """Returns title and text of wiki-18 contents. The title is "" when it does not have a separate line.

    FlashRAG writes the title's line without quotes, so it needs none. Quotes that belong to the title stay.
    """
    title, newline, text = contents.partition("\n")
    if not newline:
        return "", contents.strip()
    title = title.strip()
    if len(title) >= 2 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title, text.strip()


def join_contents(title: str, text: str) -> str:
    """Returns the wiki-18 contents that `split_contents` splits again.

    Newlines in the title become spaces, since the first one ends the title's line.
    """
    return f'"{title.replace(chr(10), " ")}"\n{text}'


class _Chunk:
    """Holds some rows of one file: the good ones as PASSAGE_COLUMNS with their numbers (from 1 on), and the faults.

    Its ids are not yet compared with those before.
    """

    def __init__(
        self,
        file: int,
        place: str,
        passages: pa.RecordBatch,
        numbers: npt.NDArray[np.int64],
        faults: list[tuple[int, BadRow]],
    ):
        self.file, self.passages, self.numbers = file, passages, numbers
        self._place, self._faults = place, faults

    def report(self, bad: BadRows, done: int, repeated: npt.NDArray[np.bool_]) -> None:
        """Counts the `repeated` ones of the passages from `done` on, and the faults before the next one, in the order
        of the file.
        """
        following = self.numbers[done + len(repeated) :][:1]
        before = [fault for fault in self._faults if not len(following) or fault[0] < following[0]]
        self._faults = self._faults[len(before) :]
        for number, fault in merge(before, self._duplicates(done, repeated), key=lambda fault: fault[0]):
            bad.add(f"{self._place} {number}", str(fault), kind=fault.kind)

    def _duplicates(self, done: int, repeated: npt.NDArray[np.bool_]) -> Iterator[tuple[int, BadRow]]:
        for i in np.flatnonzero(repeated) + done:
            identity = self.passages.column("id")[i].as_py()
            yield int(self.numbers[i]), BadRow("duplicate_id", f"passage id {identity!r} occurs twice")


def row_names(files: Sequence[CorpusFile]) -> list[str]:
    """Returns for each file the name by which its rows without an id are called: its own up to the first dot. Files
    that share it have their whole name without the suffix, and those that share even that have their place too.
    """
    short = [file.name.partition(".")[0] for file in files]
    whole = [_SUFFIX.sub("", file.name) for file in files]
    shared = Counter(short)
    names = [longer if shared[brief] > 1 else brief for brief, longer in zip(short, whole, strict=True)]
    counts = Counter(names)
    return [f"{name}.{place}" if counts[name] > 1 else name for place, name in enumerate(names, start=1)]


def _chunks(files: Sequence[CorpusFile], start: CorpusPosition, max_line_bytes: int) -> Iterator[_Chunk]:
    names = row_names(files)
    for index in range(start.file, len(files)):
        file, stem, first = files[index], names[index], start.row if index == start.file else 0
        if file.is_parquet:
            for number, batch in rows.parquet_batches(
                file, first=first, size=_ROWS_AT_ONCE, columns=["id", *_SOURCE_TEXTS, *_OTHER_NAMES]
            ):
                numbers = np.arange(number + 1, number + 1 + batch.num_rows)
                read = _read_columns(batch, numbers) or _read_rows(rows.rows_of_batch(batch), numbers, stem)
                place = f"{file.made_of}, passage" if file.made_of else f"{file.url}, row"
                yield _Chunk(index, place, *read)
        else:
            for number, lines in rows.line_blocks(file, first=first, max_line_bytes=max_line_bytes):
                yield _Chunk(index, f"{file.url}, line", *_read_lines(lines, number, max_line_bytes, stem))


_Read = tuple[pa.RecordBatch, npt.NDArray[np.int64], list[tuple[int, BadRow]]]
"""Passages, the number of each, and the numbered faults."""


def _read_lines(lines: Sequence[bytes | None], before: int, max_line_bytes: int, stem: str) -> _Read:
    numbers = np.arange(before + 1, before + 1 + len(lines))
    table = _parse_lines(lines)
    fast = None if table is None else _read_columns(table, numbers)
    return fast or _read_rows(rows.rows_of_lines(lines, max_line_bytes=max_line_bytes), numbers, stem)


def _parse_lines(lines: Sequence[bytes | None]) -> pa.RecordBatch | None:
    """Returns one row per line, of `id` and the source texts. Returns None unless every line is certainly one plain
    object that Python reads alike.
    """
    if None in lines:
        return None
    joined = b"\n".join(lines)  # pyrefly: ignore[bad-argument-type]
    boundaries = joined.count(b"}\n{") + joined.count(b"}\r\n{")
    if boundaries != len(lines) - 1 or not joined.startswith(b"{") or not joined.endswith((b"}", b"}\r")):
        return None
    for unexpected in ("error", "ignore"):
        if unexpected == "ignore" and not _reads_alike(lines, joined):
            return None
        for id_type in (pa.string(), pa.int64()):
            schema = pa.schema([("id", id_type), *((name, pa.string()) for name in (*_SOURCE_TEXTS, *_OTHER_NAMES))])
            try:
                table = pj.read_json(
                    pa.BufferReader(joined),
                    read_options=pj.ReadOptions(use_threads=False, block_size=len(joined) + 1),
                    parse_options=pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected),
                )
            except pa.ArrowInvalid:
                continue
            # Each line begins one object and ends one; as many objects as lines means that each line is one.
            batch = table.combine_chunks().to_batches()[0]
            return batch if batch.num_rows == len(lines) else None
    return None


def _reads_alike(lines: Sequence[bytes | None], joined: bytes) -> bool:
    """Returns whether the fields that Arrow passes over are certainly what JSON allows, and no `Title` is among them;
    Arrow itself does not look, not even for text that is not UTF-8.
    """
    try:
        joined.decode()
    except UnicodeDecodeError:
        return False
    if any(pattern.search(joined) for pattern in _NO_JSON):
        return False
    lowered = joined.lower()  # counts are many times faster than the pattern
    if any(joined.count(ending) != lowered.count(ending) for ending in _ENDINGS) and not all(
        found[1].islower() for found in _NAMES.finditer(joined)
    ):
        return False
    few = joined.count(b"[") + joined.count(b"{") <= len(lines) + _MAX_BRACKETS
    return few or all(line.count(b"[") + line.count(b"{") <= _MAX_BRACKETS for line in lines if line)


def _read_columns(batch: pa.RecordBatch, numbers: npt.NDArray[np.int64]) -> _Read | None:
    """Does what `parse_passage` does for whole columns. Returns None unless all columns have the right type, every row
    an `id`, and none another name for its parts.
    """
    columns = {name: batch.column(name) for name in batch.schema.names}
    others = columns.keys() - {"id", *_SOURCE_TEXTS}
    if any(columns.pop(name).null_count < batch.num_rows for name in others):
        return None
    identities = columns.pop("id", None)
    if (
        identities is None
        or identities.null_count
        or not (_is_text(identities) or pa.types.is_integer(identities.type))
        or not all(map(_is_text, columns.values()))
    ):
        return None
    try:
        batch.validate(full=True)  # UTF-8, above all
    except pa.ArrowInvalid:
        return None
    contents, empty = columns.get("contents"), pa.nulls(batch.num_rows, pa.string())
    if contents is not None and not contents.null_count:
        titles, texts = _split_contents(contents.cast(pa.string()))
        given = columns.get("title", empty).cast(pa.string()).fill_null("")
        wanted = pc.utf8_trim_whitespace(given)
        texts = pc.if_else(
            pc.or_(pc.equal(wanted, ""), pc.equal(wanted, titles)), texts, pc.utf8_trim_whitespace(contents)
        )
        titles = pc.if_else(pc.equal(wanted, ""), titles, given)
    elif contents is None or contents.null_count == batch.num_rows:
        titles = columns.get("title", empty).cast(pa.string()).fill_null("")
        texts = pc.utf8_trim_whitespace(columns.get("text", empty).cast(pa.string()))
    else:
        return None
    partitions = columns.get("partition", empty).cast(pa.string()).fill_null("")
    ids = identities.cast(pa.string())
    good = pc.and_(_is_filled(ids), _is_filled(texts))
    passages = pa.record_batch([ids, titles, texts, partitions], schema=PASSAGE_COLUMNS)
    if pc.all(good).as_py():
        return passages, numbers, []
    kept = np.asarray(good)
    _, none, faults = _read_rows(rows.rows_of_batch(batch.filter(pc.invert(good))), numbers[~kept], "")
    assert not len(none), "a row is bad by column and good by itself"
    return passages.filter(good), numbers[kept], faults


def _read_rows(found: Iterable[dict[str, Any] | BadRow | None], numbers: npt.NDArray[np.int64], stem: str) -> _Read:
    passages: list[Passage] = []
    good: list[int] = []
    faults: list[tuple[int, BadRow]] = []
    for number, row in zip(numbers.tolist(), found, strict=True):
        if isinstance(row, BadRow):
            faults.append((number, row))
        elif row is not None:
            try:
                passages.append(parse_passage(row, own_id=f"{stem}-{number}"))
                good.append(number)
            except BadRow as fault:
                faults.append((number, fault))
    columns = [
        pa.array([getattr(passage, name) for passage in passages], pa.string()) for name in PASSAGE_COLUMNS.names
    ]
    return pa.record_batch(columns, schema=PASSAGE_COLUMNS), np.array(good, dtype=np.int64), faults


def parse_passage(row: dict[str, Any], *, own_id: str | None = None, may_be_empty: bool = False) -> Passage:
    """Returns the passage that a row describes; `own_id` is the id of a row that has none. Raises BadRow, also for a
    text without a word unless it `may_be_empty`."""
    identity = next((row[name] for name in IDS if row.get(name) is not None), own_id)
    if type(identity) not in (str, int) or identity == "":
        kind = "missing_field" if identity is None or identity == "" else "wrong_type"
        raise BadRow(kind, f"id is {repr(identity)[:80]}; a passage needs a text or a whole number")
    row = _in_lower_case(row)
    titled = next((name for name in TITLES if row.get(name) is not None), "title")
    if row.get("contents") is None:
        title, text = _text(row, titled, default=""), _text(row, _text_field(row), may_be_list=True).strip()
    else:
        contents = _text(row, "contents")
        title, text = split_contents(contents)
        given = _text(row, titled) if isinstance(row.get(titled), str) else ""
        if given.strip():
            title, text = given, text if title == given.strip() else contents.strip()
    if not text and not may_be_empty:
        raise BadRow("empty", f"passage {identity!r} has no text")
    return Passage(
        id=replace_surrogates(str(identity)), title=title, text=text, partition=_text(row, "partition", default="")
    )


def _in_lower_case(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row with `Title` as title and `Text` as text, where no other field is its title or its text."""
    named = {str(name).lower(): value for name, value in row.items() if value is not None}
    missing = [names for names in _ANY_CASE if all(row.get(name) is None for name in names)]
    return row | {name: named[name] for names in missing for name in names if name in named}


def _text_field(row: dict[str, Any]) -> str:
    """Returns the field that holds the text. Raises BadRow where two of the other names hold different ones."""
    given = [name for name in TEXTS if row.get(name) is not None]
    if len(given) > 1 and given[0] != "text" and row[given[0]] != row[given[1]]:
        raise BadRow(
            "ambiguous", f"{given[0]} and {given[1]} hold different texts; rename the one that is meant to text"
        )
    return given[0] if given else "text"


def _text(row: dict[str, Any], name: str, *, default: str | None = None, may_be_list: bool = False) -> str:
    value = row.get(name)
    value = default if value is None else value
    if may_be_list and isinstance(value, list):
        value = _of_sentences(value)
    if not isinstance(value, str):
        found = "missing" if value is None else repr(value)[:80]
        kind = "missing_field" if value is None else "wrong_type"
        needs = f"a passage needs `contents`, or `title` and `text` (or {', '.join(TEXTS[1:])})"
        raise BadRow(kind, f"{name} is {found}; {needs}{rows.header_hint(row)}")
    return replace_surrogates(value)


def _of_sentences(value: list[Any]) -> Any:
    """Returns the text of a list of sentences or of a list of such paragraphs; any other list as it is."""
    if all(isinstance(part, str) for part in value):
        return join_sentences(value)
    if all(isinstance(part, list) and all(isinstance(sentence, str) for sentence in part) for part in value):
        return "\n".join(join_sentences(paragraph) for paragraph in value)
    return value


def _split_contents(contents: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Does what `split_contents` does, for a whole column."""
    lines = pc.split_pattern(contents, "\n", max_splits=1)
    first, last = lines.offsets[:-1], pc.subtract(lines.offsets[1:], 1)
    has_title = pc.not_equal(first, last)
    titles = pc.utf8_trim_whitespace(lines.values.take(first))
    quoted = pc.and_(
        pc.and_(pc.starts_with(titles, '"'), pc.ends_with(titles, '"')), pc.greater_equal(pc.binary_length(titles), 2)
    )
    titles = pc.if_else(quoted, pc.utf8_slice_codeunits(titles, 1, -1), titles)
    return pc.if_else(has_title, titles, ""), pc.utf8_trim_whitespace(lines.values.take(last))


def _is_text(column: pa.Array) -> bool:
    return (
        pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type)
    )


def _is_filled(texts: pa.Array) -> pa.Array:
    return pc.greater(pc.binary_length(texts), 0).fill_null(False)


def _joined(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    try:
        return pa.concat_batches(parts)
    except pa.ArrowInvalid as error:
        num_rows = sum(part.num_rows for part in parts)
        raise ConfigError(
            f"a segment of {num_rows} passages holds more than 2 GiB of text; make segments smaller"
        ) from error


def _hashes(ids: pa.Array | Sequence[str]) -> npt.NDArray[np.uint64]:
    """Returns two hashes of every id, [2, n]."""
    texts = pl.Series(ids, dtype=pl.String) if not isinstance(ids, pa.Array) else pl.Series(pl.from_arrow(ids))
    return np.stack([texts.hash(seed=seed).to_numpy() for seed in (1, 2)])


def _merged(left: npt.NDArray[np.uint64], right: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Merges two sorted runs."""
    merged = np.empty((2, left.shape[1] + right.shape[1]), dtype=np.uint64)
    from_right = np.zeros(merged.shape[1], dtype=bool)
    from_right[np.searchsorted(left[0], right[0], side="right") + np.arange(right.shape[1])] = True
    merged[:, from_right] = right
    merged[:, ~from_right] = left
    return merged
