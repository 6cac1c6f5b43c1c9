"""Reads rows of jsonl, json, csv, tsv and parquet files (`mempipe.data.input_files`), with the place of every row.

A row that a reader cannot use raises `BadRow`; the reader adds it to `BadRows`, which limits the number of skipped
rows. A fault of a whole file (missing, truncated, of another kind) is a ConfigError whatever the limit. A fault of the
disk or the network stays an OSError.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from mempipe.data.input_files import CSV, JSON, InputFile, is_url
from mempipe.settings import ConfigError
from mempipe.storage.parquet import check_parquet

BLOCK_BYTES = 8 * 2**20
"""Bytes read at once from a file of lines; the memory that a reader needs follows from them."""
MAX_LINE_BYTES = 256 * 2**20
"""The most bytes of a row; 6,400 documents of context are 4 MB."""
TOO_DEEP = "lists or objects are nested too deeply"
"""Fault of a row that Python's parser, or a reader of its values, does not reach the bottom of."""
_BOM = b"\xef\xbb\xbf"
_NUM_EXAMPLES = 5
_ROWS_AT_ONCE = 256
_SEPARATORS = ",\t;"
_NO_CELL = frozenset({"", "None", "nan", "NaN", "NaT", "<NA>"})
"""A cell without a value: an empty one, and what pandas writes where all columns were made texts."""
_CONSTANTS = (b"NaN", b"Infinity")
_OF_A_ROW = frozenset({"question", "messages", "conversations", "conversation"})
"""Names in an object of a .json file that say that it is a row itself, whatever lists of objects it has."""


class BadRow(ValueError):
    """A row that a reader cannot use.

    `kind` is a short name to count by; the message names the field and the fault.
    """

    def __init__(self, kind: str, problem: str) -> None:
        super().__init__(problem)
        self.kind = kind


class BadRows:
    """Counts bad rows by kind and keeps the first of them; more than `limit` (`max_bad_rows`) raise ConfigError.

    `counts` are those of an earlier reading that is continued.
    """

    def __init__(self, limit: int = 0, *, counts: Mapping[str, int] | None = None) -> None:
        if limit < 0:
            raise ConfigError(f"max_bad_rows is {limit}; it is a number of rows, 0 or more")
        self.limit = limit
        self.counts: dict[str, int] = dict(counts or {})
        self.examples: list[str] = []

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def add(self, place: str, problem: str, *, kind: str) -> None:
        """Counts one. Raises ConfigError when there are too many: with the first of them, or with this one alone where
        none is allowed.
        """
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if len(self.examples) < _NUM_EXAMPLES:
            self.examples.append(f"{place}: {problem}")
        if self.total <= self.limit:
            return
        if not self.limit:
            raise ConfigError(f"{place}: {problem}")
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        raise ConfigError(
            "\n  ".join([f"{self.total} bad rows ({kinds}), more than max_bad_rows {self.limit}:", *self.examples])
        )


def read_rows(file: InputFile, *, bad: BadRows | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the place and the content of every row in order; a place is "FILE, line 3", "FILE, row 3" or "FILE, item
    3", counted from 1. It passes over blank lines.

    It streams lines and tables, and holds a `.json` file in memory: a list of objects, an object with one such list
    ({"data": [...]}), columns ({"question": [...], ...}), or lines of objects. Lines that are not a JSON object in
    UTF-8 go to `bad` (None: the first one raises). Raises ConfigError with the place for a file that is truncated or of
    another kind.
    """
    bad = bad or BadRows()
    read = next((read for suffixes, read in _READERS.items() if file.ends_in(*suffixes)), _table_or_lines)
    for place, row in read(file):
        if isinstance(row, BadRow):
            bad.add(place, str(row), kind=row.kind)
        else:
            yield place, row


def header_hint(row: dict[str, Any]) -> str:
    """Returns what to add to a refusal of a row whose names look like the values of a table without a header."""
    looks_like_text = any(len(str(name).split()) > 3 or str(name).strip().endswith(("?", "]")) for name in row)
    return " (if these are values: the first line of a csv file should name its columns)" if looks_like_text else ""


def line_blocks(file: InputFile, *, first: int = 0, max_line_bytes: int) -> Iterator[tuple[int, list[bytes | None]]]:
    """Yields the lines after the first `first`, many at a time: (number of lines before, lines without their "\\n").

    Lines are bytes, since only "\\n" ends a line of jsonl. A line of more than `max_line_bytes` is None and is never
    held whole. The first lines are counted, not parsed. Raises ConfigError with the last whole line for a file that is
    truncated or no gzip.
    """
    number = 0
    try:
        with file.open() as stored, _Blocks(stored, is_gzip=file.ends_in(".gz")) as blocks:
            number = blocks.skip_lines(first)
            rest, overlong = b"", False
            while block := blocks.read():
                block = block.removeprefix(_BOM) if not number and not rest else block
                lines: list[bytes | None] = [*(rest + block).split(b"\n")]
                rest = lines.pop() or b""
                lines = [line if line is None or len(line) <= max_line_bytes else None for line in lines]
                if overlong and lines:
                    lines[0], overlong = None, False
                if overlong or len(rest) > max_line_bytes:
                    rest, overlong = b"", True
                if lines:
                    yield number, lines
                    number += len(lines)
            if rest or overlong:
                yield number, [None if overlong else rest]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{file.url} is truncated or not gzip, after line {number}: {error}") from error


def parquet_batches(
    file: InputFile, *, first: int = 0, size: int, columns: Iterable[str] | None = None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yields the rows after the first `first`, up to `size` at a time: (number of rows before, rows). Rows have
    those of `columns` that the file has, in any case.

    It does not read row groups before `first`. Raises ConfigError with the last row that could be read for a file that
    is truncated or no parquet.
    """
    number = 0
    if not is_url(file.url):
        check_parquet(Path(file.url), advice="copy it again from where it came, or make it again")
    try:
        with file.open() as stored, pq.ParquetFile(stored) as parquet:
            wanted, names = None if columns is None else set(columns), parquet.schema_arrow.names
            found = None if wanted is None else [name for name in names if name.lower() in wanted]
            groups = list(range(parquet.num_row_groups))
            while groups and number + (rows := parquet.metadata.row_group(groups[0]).num_rows) <= first:
                number += rows
                groups.pop(0)
            for batch in parquet.iter_batches(batch_size=size, row_groups=groups, columns=found):
                before = max(first - number, 0)
                if before < batch.num_rows:
                    yield number + before, batch.slice(before)
                number += batch.num_rows
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's, not Arrow's
            raise
        raise ConfigError(
            f"{file.url} is truncated or not parquet, after row {number}: {' '.join(str(error).split())}"
        ) from error


def parse_object(line: bytes) -> dict[str, Any]:
    """Returns the JSON object of a line.

    Raises BadRow for anything else, also for text that is not UTF-8, and with its field for NaN and Infinity.
    """
    if line.strip() in (b"[", b"{", b"[{"):
        raise BadRow("not_json", "not JSON: a value of several lines; a list of objects belongs in a .json file")
    try:
        row = json.loads(line.decode(), parse_constant=_Constant)
    except UnicodeDecodeError as error:
        raise BadRow("not_utf8", f"not UTF-8, byte {error.start} is {line[error.start]:#04x}") from error
    except RecursionError as error:
        raise BadRow("not_json", f"not JSON: {TOO_DEEP}") from error
    except ValueError as error:
        raise BadRow("not_json", f"not JSON: {_said(error)}") from error
    if not isinstance(row, dict):
        raise BadRow("not_object", f"expected an object, got {line.decode()[:80].strip()!r}")
    if any(name in line for name in _CONSTANTS):
        check_numbers(row, kind=_Constant)
    return row


def check_numbers(row: dict[str, Any], *, kind: type[float] = float) -> None:
    """Raises BadRow, which names the field, for a number of a row that is NaN or infinite. `kind` is the type of the
    numbers that are looked at.
    """
    if found := next(_no_numbers(row, "", kind), None):
        path, value = found
        name = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        raise BadRow(
            "not_a_number", f"{path} is {name}, which is not a finite number; write null where there is no value"
        )


def _no_numbers(value: object, path: str, kind: type[float]) -> Iterator[tuple[str, float]]:
    """Yields the path and the value of every number inside `value` that is NaN or infinite."""
    if isinstance(value, kind) and not math.isfinite(value):
        yield path, value
    elif isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _no_numbers(item, f"{path}.{name}" if path else str(name), kind)


class _Constant(float):
    """A number that Python's reader of JSON takes and JSON does not have: NaN or an infinite one. 1e999 is none of
    them, though Python makes it infinite."""


def rows_of_lines(lines: Iterable[bytes | None], *, max_line_bytes: int) -> Iterator[dict[str, Any] | BadRow | None]:
    """Yields for each line its object, a description of its fault, or None for a blank line."""
    for line in lines:
        if line is None:
            yield BadRow("too_long", f"longer than {max_line_bytes} bytes")
        elif not line.strip():
            yield None
        else:
            try:
                yield parse_object(line)
            except BadRow as problem:
                yield problem


def rows_of_batch(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | BadRow]:
    """Yields the rows as Python objects. Parquet does not promise that a text is UTF-8, and it has dates after the year
    9999, which Python lacks: such a value is given as a text.
    """
    try:
        yield from batch.to_pylist()
    except (UnicodeDecodeError, OverflowError):
        for i in range(batch.num_rows):
            try:
                yield {name: _value(column[i]) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
            except UnicodeDecodeError as error:
                yield BadRow("not_utf8", f"not UTF-8: byte {error.start} of a text is {error.object[error.start]:#04x}")
            except (OverflowError, pa.ArrowException):
                yield BadRow("wrong_value", "a date or a time, deep in a column, is none that Python has")


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except OverflowError:
        return scalar.cast(pa.string()).as_py()


class _Blocks:
    """Reads about BLOCK_BYTES at a time; of a gzip file that breaks off, everything before the break first."""

    def __init__(self, stored: BinaryIO, *, is_gzip: bool) -> None:
        self._stored = stored
        self._stream: Any = gzip.GzipFile(fileobj=stored) if is_gzip else stored
        self._is_gzip = is_gzip
        self._ahead = b""
        self._error: Exception | None = None

    def __enter__(self) -> _Blocks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def read(self) -> bytes:
        if self._ahead:
            block, self._ahead = self._ahead, b""
            return block
        if not self._is_gzip:
            return self._stream.read(BLOCK_BYTES)
        parts: list[bytes] = []
        size = 0
        while size < BLOCK_BYTES and self._error is None:
            try:
                part = self._stream.read1(BLOCK_BYTES)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                self._error = error
            else:
                if not part:
                    if not self._stored.tell():
                        raise EOFError("it is empty")  # which no gzip file is
                    break
                parts.append(part)
                size += len(part)
        if self._error is not None and not parts:
            raise self._error
        return b"".join(parts)

    def skip_lines(self, count: int) -> int:
        """Passes over `count` lines, or as many as there are; returns their number."""
        number = 0
        while number < count and (block := self.read()):
            if number + block.count(b"\n") >= count:
                self._ahead = block.split(b"\n", count - number)[-1]
                return count
            number += block.count(b"\n")
        return number


def _table_or_lines(file: InputFile) -> Iterator[tuple[str, dict[str, Any] | BadRow]]:
    if file.is_parquet:
        for number, batch in parquet_batches(file, size=_ROWS_AT_ONCE):
            for i, row in enumerate(rows_of_batch(batch), start=number + 1):
                yield f"{file.url}, row {i}", row if isinstance(row, BadRow) else _checked(row, float)
        return
    for number, lines in line_blocks(file, max_line_bytes=MAX_LINE_BYTES):
        for i, row in enumerate(rows_of_lines(lines, max_line_bytes=MAX_LINE_BYTES), start=number + 1):
            if row is not None:
                yield f"{file.url}, line {i}", row


def _json_items(file: InputFile) -> Iterator[tuple[str, dict[str, Any] | BadRow]]:
    with file.open() as stored:
        content = stored.read().removeprefix(_BOM)
    try:
        items = json.loads(content.decode(), parse_constant=_Constant)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise ConfigError(f"{file.url} is truncated or not JSON: {error}") from error
        yield from _table_or_lines(file)  # one object a line, as several tools write it
        return
    except RecursionError as error:
        raise ConfigError(f"{file.url} is not JSON: lists or objects are nested too deeply") from error
    except ValueError as error:
        raise ConfigError(f"{file.url} is truncated or not JSON: {_said(error)}") from error
    for i, item in enumerate(_items_of(items, file), start=1):
        wrong = BadRow("not_object", f"expected an object, got {str(item)[:80]!r}")
        yield f"{file.url}, item {i}", _checked(item, _Constant) if isinstance(item, dict) else wrong


def _checked(row: dict[str, Any], kind: type[float]) -> dict[str, Any] | BadRow:
    """Returns the row, or the fault that `check_numbers` finds."""
    try:
        check_numbers(row, kind=kind)
    except BadRow as fault:
        return fault
    return row


def _items_of(value: Any, file: InputFile) -> list[Any]:
    """Returns the items of a list, of columns, of objects by their ids, of the one list of objects in an object, of a
    page of Hugging Face's dataset viewer, or the object itself where it is a row. Raises ConfigError.
    """
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise ConfigError(f"{file.url} holds {type(value).__name__}, expected a list of objects")
    if rows := _rows_of_viewer(value):
        if cut := next((row["truncated_cells"] for row in rows if row.get("truncated_cells")), None):
            raise ConfigError(
                f"{file.url} holds rows whose {', '.join(map(str, cut))} the dataset viewer has cut; take its files"
            )
        return [row["row"] for row in rows]
    if columns := _columns_of(value):
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if value and all(isinstance(item, dict) and item for item in value.values()):
        return [{"id": name, **item} for name, item in value.items()]
    if any(str(name).strip().casefold() in _OF_A_ROW for name in value):
        return [value]
    lists = [name for name, items in value.items() if isinstance(items, list) and items and isinstance(items[0], dict)]
    if len(lists) > 1:
        listed = " and ".join(f"{name} ({len(value[name])} objects)" for name in lists)
        raise ConfigError(f"{file.url} holds several lists of objects: {listed}; keep the one that is meant")
    return value[lists[0]] if lists else [value]


def _rows_of_viewer(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of an answer of the dataset viewer, {"features": …, "rows": [{"row": {…}, …}, …]}; none for
    another object."""
    rows = value.get("rows")
    are_rows = "features" in value and isinstance(rows, list)
    return rows if are_rows and all(isinstance(row, dict) and isinstance(row.get("row"), dict) for row in rows) else []


def _columns_of(value: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns the columns of an object of equally long lists, or of the objects by row number that pandas writes; none
    for another object.
    """
    columns = {
        name: list(column.values()) if isinstance(column, dict) and all(map(str.isdigit, column)) else column
        for name, column in value.items()
    }
    lengths = {len(column) if isinstance(column, list) else 0 for column in columns.values()}
    are_columns = len(columns) > 1 and len(lengths) == 1 and lengths != {0}
    return columns if are_columns else {}


def _table_rows(file: InputFile) -> Iterator[tuple[str, dict[str, Any] | BadRow]]:
    """Yields the rows below the header of a csv or tsv file. A cell of `_NO_CELL` does not count as a value, a row of
    empty cells not as a row, and a column without a name not as a column. The separator is the one of comma, tab and
    semicolon that makes the most columns of the header; in a tsv file it is a tab if the header has one.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    lines = table = None
    try:
        with file.open() as stored, io.TextIOWrapper(stored, encoding="utf-8-sig", newline="") as text:
            header = text.readline()
            separator = "\t" if file.ends_in(".tsv") and "\t" in header else max(_SEPARATORS, key=header.count)
            lines = itertools.chain([header], text)
            table = csv.reader(lines, delimiter=separator, strict=True)
            names = [name.strip() for name in next(table, [])]
            named = list(filter(None, names))
            if len(named) != len(set(named)):
                raise ConfigError(f"{file.url} has two columns of one name: {', '.join(named)[:200]}")
            for number, cells in enumerate(table, start=1):
                if not any(cells):
                    continue
                place = f"{file.url}, row {number}"
                if len(cells) == len(names):
                    named_cells = ((name, cell) for name, cell in zip(names, cells, strict=True) if name)
                    yield place, {name: None if cell in _NO_CELL else cell for name, cell in named_cells}
                else:
                    yield place, BadRow("wrong_cells", f"{len(cells)} cells, but the header has {len(names)}")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file.url} is not UTF-8 (byte {error.object[error.start]:#04x}); save it as UTF-8"
        ) from error
    except csv.Error as error:
        raise ConfigError(f"{file.url}, line {table.line_num if table else 1}: not a table: {error}") from error


def _said(error: ValueError) -> str:
    """Returns what a reader of JSON said, without its advice to a programmer."""
    return str(error).partition("; use sys.")[0]


_READERS = {JSON: _json_items, CSV: _table_rows}
"""How a file is read that has neither lines of JSON nor Parquet."""
