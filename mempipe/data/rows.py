"""Rows of jsonl, jsonl.gz and parquet files, each with its place in the file, for readers whose errors say where."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from mempipe.config import ConfigError

_ROWS_AT_ONCE = 4096


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) in order; a place is "FILE, line 3" or "FILE, row 3", counted from 1. Blank lines are passed over.

    Files are streamed, so that their size does not matter. Raises ConfigError, naming the place, for a file that is missing, truncated or
    of another kind, and for a line that is not a JSON object in UTF-8.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist" if not path.exists() else f"{path} is not a file")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix == ".jsonl" or path.suffixes[-2:] == [".jsonl", ".gz"]:
        for number, line in enumerate(_lines(path), start=1):
            if line.strip():
                place = f"{path}, line {number}"
                yield place, _parse(line, place)
    else:
        raise ConfigError(f"{path} ends in neither .jsonl, .jsonl.gz nor .parquet")


def _lines(path: Path) -> Iterator[bytes]:
    number = 0
    try:
        # Bytes: a text file decodes ahead of the line it returns, and only "\n" ends a line of jsonl.
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                number += 1
                yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{path} is truncated or not gzip, after line {number}: {error}") from error


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8, byte {error.start} is {line[error.start]:#04x}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: expected an object, got {line.decode()[:80].strip()!r}")
    return row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is truncated or not parquet, after row {number}: {' '.join(str(error).split())}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
