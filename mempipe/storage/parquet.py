"""Parquet files whose damage is detected: each holds the sha256 of its bytes.

The checksum is between the data and the footer, where Parquet allows anything: any reader reads such a file. It is
repeated there, so that damage to the checksum is detected too. Files of older versions and of other programs have none
and are read as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mempipe.settings import ConfigError
from mempipe.storage.files import whole_file

_MARK = b"\nmempipe sha256\n"
_COPIES = 8
_NUM_CHECKSUM = _COPIES * (len(_MARK) + hashlib.sha256().digest_size)
_NUM_TAIL = 8  # bytes after the footer: its length, and "PAR1"
_BLOCK_BYTES = 2**20


@contextmanager
def parquet_writer(
    path: Path, schema: pa.Schema, *, durable: bool = True, **options: Any
) -> Iterator[pq.ParquetWriter]:
    """Yields a writer of the file, which appears atomically, with its checksum. `options` are pyarrow's."""
    with whole_file(path, durable=durable) as partial:
        with pq.ParquetWriter(partial, schema, **options) as writer:
            yield writer
        _add_checksum(partial)


def write_table(path: Path, table: pa.Table, *, durable: bool = True, **options: Any) -> None:
    """Writes the table as `parquet_writer` does."""
    with parquet_writer(path, table.schema, durable=durable, **options) as writer:
        writer.write_table(table)


def read_table(path: Path, *, advice: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Returns the table with those of `columns` (None: all) that the file has, without its metadata.

    Raises ConfigError, which ends in `advice` (what the user does), for a file that is missing or damaged.
    """
    check_parquet(path, advice=advice)
    try:
        with pq.ParquetFile(path) as file:
            known = set(file.schema_arrow.names)
            table = file.read(columns=None if columns is None else [name for name in columns if name in known])
            table.validate(full=True)  # texts that are not UTF-8, places in lists that do not ascend
            return table.replace_schema_metadata()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, error, advice) from error


def read_row_groups(
    path: Path, *, advice: str, columns: Sequence[str] | None = None, without: Sequence[str] = ()
) -> Iterator[pa.Table]:
    """Yields the table that `read_table` returns in parts, one row group after the other, so that a large file is never
    in memory at once. Fields that `without` names are not read, however deep in lists and structs they are."""
    check_parquet(path, advice=advice)
    try:
        with pq.ParquetFile(path) as file:
            leaves = [file.schema.column(i).path for i in range(len(file.schema))]
            places = [leaf.split(".") for leaf in leaves]
            read = [
                leaf
                for leaf, place in zip(leaves, places, strict=True)
                if (columns is None or place[0] in columns) and not set(place).intersection(without)
            ]
            for number in range(file.num_row_groups):
                table = file.read_row_group(number, columns=read)
                table.validate(full=True)
                yield table.replace_schema_metadata()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, error, advice) from error


def read_metadata(path: Path, *, advice: str) -> dict[bytes, bytes]:
    """Returns the metadata that the schema was written with. Raises ConfigError as `read_table` does."""
    check_parquet(path, advice=advice)
    try:
        return pq.read_schema(path).metadata or {}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, error, advice) from error


def check_parquet(path: Path, *, advice: str) -> None:
    """Compares the file with its checksum, if it has one; reads every byte then. Raises ConfigError, which ends in
    `advice`, for a file that is missing or was changed.
    """
    try:
        with path.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(max(size - _NUM_TAIL, 0))
            tail = opened.read(_NUM_TAIL)
            footer = size - _NUM_TAIL - int.from_bytes(tail[:4], "little")
            if tail[4:] != b"PAR1" or footer < 0:
                return  # truncated or no parquet, which a reader of it will say
            place = max(footer - _NUM_CHECKSUM, 0)
            opened.seek(place)
            found = opened.read(footer - place)
        if _MARK in found and found != _checksum(path, [(0, place), (footer, size)]):
            raise ConfigError(f"{path} was changed since it was written; {advice}")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {advice}") from error


def _add_checksum(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as opened:
        opened.seek(size - _NUM_TAIL)
        place = size - _NUM_TAIL - int.from_bytes(opened.read(4), "little")
        opened.seek(place)
        footer = opened.read()
        checksum = _checksum(path, [(0, size)])
        opened.seek(place)
        opened.write(checksum + footer)


def _checksum(path: Path, parts: Sequence[tuple[int, int]]) -> bytes:
    """Returns the stored form of the checksum over the ranges (first, last not included), one after the other."""
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        for first, last in parts:
            opened.seek(first)
            while first < last and (block := opened.read(min(_BLOCK_BYTES, last - first))):
                digest.update(block)
                first += len(block)
    return _COPIES * (_MARK + digest.digest())


def _damaged(path: Path, error: Exception, advice: str) -> ConfigError:
    return ConfigError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}; {advice}")
