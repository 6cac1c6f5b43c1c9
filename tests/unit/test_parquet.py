"""Parquet files carry a checksum that any other reader passes over."""

from __future__ import annotations

import random
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mempipe.settings import ConfigError
from mempipe.storage.parquet import check_parquet, parquet_writer, read_metadata, read_table, write_table

TABLE = pa.table({"id": [f"q{i}" for i in range(300)], "score": [i / 7 for i in range(300)]})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_table(tmp_path / "t.parquet", TABLE.replace_schema_metadata({"made_of": "this"}))
    return tmp_path / "t.parquet"


def test_a_file_with_a_checksum_is_read_by_everybody_as_one_without(file):
    assert read_table(file, advice="") == pq.read_table(file).replace_schema_metadata() == TABLE
    assert pl.read_parquet(file).to_arrow().to_pylist() == TABLE.to_pylist()
    assert read_metadata(file, advice="") == {b"made_of": b"this"}
    assert read_table(file, advice="", columns=["score", "none"]).column_names == ["score"]


def test_every_changed_byte_is_noticed(file):
    content, draw = file.read_bytes(), random.Random(0)
    for place in [*range(len(content) - 700, len(content)), *draw.sample(range(len(content)), 300)]:
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :])
        with pytest.raises(ConfigError, match=r"t.parquet .*; make it again"):
            read_table(file, advice="make it again")


def test_a_file_of_another_program_or_an_older_version_is_read_as_it_is(tmp_path):
    pq.write_table(TABLE, tmp_path / "other.parquet")
    check_parquet(tmp_path / "other.parquet", advice="")
    assert read_table(tmp_path / "other.parquet", advice="") == TABLE


def test_a_file_that_a_user_wrote_anew_is_no_damaged_one(file, tmp_path):
    pq.write_table(pq.read_table(file).slice(0, 5), tmp_path / "mine.parquet")
    assert len(read_table(tmp_path / "mine.parquet", advice="")) == 5


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), parquet_writer(tmp_path / "t.parquet", TABLE.schema) as writer:
        writer.write_table(TABLE)
        raise KeyError("the source ended")
    assert list(tmp_path.iterdir()) == []
