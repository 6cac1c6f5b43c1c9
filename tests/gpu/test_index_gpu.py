"""Shards of an index on GPUs find what CPUs find."""

from __future__ import annotations

import numpy as np
import pytest

from mempipe.retrieval import gpu_vectors, vectors
from mempipe.retrieval.build import build_index
from mempipe.retrieval.retriever import Query, Retriever
from mempipe.types import Passage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpu_vectors.num_visible_gpus(), reason="needs a CUDA device and the faiss-gpu package"),
]


def test_gpus_find_what_cpus_find(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    words = [f"word{i}" for i in range(2000)]
    passages = [
        Passage(id=str(i), title=f"title {i}", text=" ".join(rng.choice(words, 40)), score=0.0) for i in range(5000)
    ]
    build_index(passages, tmp_path / "index", faiss={"shard_passages": 2000})
    queries = [Query(text=" ".join(rng.choice(words, 6)), num_passages=5) for _ in range(100)]
    found = Retriever(tmp_path / "index").search(queries)
    monkeypatch.setattr(vectors, "num_visible_gpus", lambda: 0)
    assert found == Retriever(tmp_path / "index").search(queries)
