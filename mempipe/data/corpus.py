"""Corpora as streams of passages: wiki-18 jsonl (plain or gzip) and parquet."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import polars as pl

from mempipe.config import ConfigError
from mempipe.types import Passage


def read_corpus(path: str | Path) -> Iterator[Passage]:
    """The passages of a `.jsonl`, `.jsonl.gz` or `.parquet` file, in order.

    A row has `id` and `contents`, where contents are the title in quotes, a newline, and the text (the wiki-18 format), or `id`, `title`
    and `text`, and optionally `partition`. Raises ConfigError, naming file and line, for what cannot be read, lacks a field, is empty or
    repeats an id.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"corpus {path} does not exist")
    seen: set[str] = set()
    for line, row in _rows(path):
        passage = _passage(row, where=f"{path}, line {line}")
        if passage.id in seen:
            raise ConfigError(f"{path}, line {line}: passage id {passage.id!r} occurs twice")
        seen.add(passage.id)
        yield passage


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        try:
            frame = pl.read_parquet(path)
        except (pl.exceptions.PolarsError, OSError) as error:
            raise ConfigError(f"corpus {path} is not a whole parquet file: {error}") from error
        yield from enumerate(frame.iter_rows(named=True), start=1)
        return
    with _open(path) as file:
        number = 0
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, json.loads(line)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}, line {number + 1}: not UTF-8 ({error.reason})") from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number}: not JSON ({error.msg})") from error
        except (EOFError, gzip.BadGzipFile) as error:
            raise ConfigError(f"{path}: truncated or not gzip, after line {number}") from error


def _open(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _passage(row: Any, *, where: str) -> Passage:
    if not isinstance(row, dict) or "id" not in row:
        raise ConfigError(f"{where}: a passage needs an id, got {str(row)[:80]!r}")
    if isinstance(row.get("contents"), str):
        title, newline, text = row["contents"].partition("\n")
        title, text = (title.strip().strip('"'), text) if newline else ("", title)
    else:
        title, text = row.get("title") or "", row.get("text")
    if not isinstance(text, str) or not isinstance(title, str) or not text.strip():
        raise ConfigError(f"{where}: passage {row['id']!r} has no text; expected `contents`, or `title` and `text`")
    return Passage(id=str(row["id"]), title=title, text=text.strip(), partition=str(row.get("partition") or ""))
