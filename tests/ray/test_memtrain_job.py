"""Masked documents by the whole job on a local cluster: the same ones by one worker and by two."""

from pathlib import Path

import polars as pl
import pytest

from mempipe.data.world import World
from mempipe.engines.tiny import build_tokenizer
from mempipe.loader import parse_section
from mempipe.masking.documents import MemtrainConfig
from mempipe.masking.entities import can_be_read
from mempipe.retrieval.build import build_index
from pipelines import build_memtrain


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("memtrain")
    build_index([passage for seed in range(4) for passage in World(seed).passages], folder / "index")
    build_tokenizer(folder / "model")
    values = {"index": str(folder / "index"), "tokenizer": str(folder / "model"), "entities": "rules", "mask": "____"}
    values |= {"num_documents": 16, "num_held_out": 4, "num_related": 4, "num_random": 8, "documents_per_part": 4}
    return values | {"chunk_tokens": 64, "min_tokens": 100, "max_tokens": 1000, "max_passage_share": 0.5}


def test_the_number_of_workers_changes_nothing(settings, tmp_path):
    folders: list[Path] = []
    for workers in (1, 2):
        values = settings | {"output": str(tmp_path), "name": f"by{workers}", "num_workers": workers}
        folders.append(build_memtrain.main(parse_section(values, MemtrainConfig)))
    one, two = (pl.read_parquet(folder / "documents.parquet") for folder in folders)
    assert len(one) == 16 and one.equals(two)
    for row in one.iter_rows(named=True):
        assert not can_be_read(row["context"], row["golden_answers"][0], row["kind"])
