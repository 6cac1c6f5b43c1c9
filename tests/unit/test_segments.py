"""How many encoders of an index a cluster gets, and that each of them fits on a node."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from mempipe.retrieval.config import IndexConfig
from mempipe.streams.pools import SOURCE_CPUS
from mempipe.streams.segments import _encoders


@pytest.mark.parametrize(
    ("nodes", "num_encoders", "size", "cpus"),
    [
        ([{"CPU": 2.0}], 0, 1, 2),
        ([{"CPU": 8.0}, {"CPU": 5.0}], 0, 6, 2),
        ([{"CPU": 1.0}, {"CPU": 1.0}], 0, 2, 1),
        ([{}, {"CPU": 1.0}], 0, 1, 1),
        ([{"CPU": 8.0}], 3, 3, 2),
    ],
)
def test_encoders_fit_on_the_nodes(monkeypatch, tmp_path, nodes: list[dict[str, float]], num_encoders, size, cpus):
    alive: list[dict[str, Any]] = [{"Alive": True, "Resources": each} for each in nodes]
    monkeypatch.setattr(ray, "nodes", lambda: [*alive, {"Alive": False, "Resources": {"CPU": 64.0}}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {})
    config = IndexConfig(corpus=["c.jsonl"], output="i", encoder={"kind": "hashing"}, num_encoders=num_encoders)
    pool = _encoders(config, tmp_path)
    assert (pool.size, pool.options) == (size, {"num_cpus": cpus - SOURCE_CPUS})


def test_each_gpu_has_an_encoder(monkeypatch, tmp_path):
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0}}] * 2)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 8.0})
    pool = _encoders(IndexConfig(corpus=["c.jsonl"], output="i", encoder={"kind": "hashing"}), tmp_path)
    assert (pool.size, pool.options) == (8, {"num_gpus": 1, "num_cpus": 1})
