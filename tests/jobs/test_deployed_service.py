"""The agent service as `serve deploy` puts it on a cluster that asks for a token: new agent, weights and index while
clients ask."""

from __future__ import annotations

import shutil

import httpx
import pytest

from benchmarks.upgrade import faults, on_cluster, other_index, other_weights, upgraded
from mempipe.data.partitions import main_partition
from mempipe.data.qa import read_questions

pytestmark = pytest.mark.jobs


def test_upgrades_on_a_cluster_refuse_nobody_and_mix_nothing(world, tmp_path):
    shutil.copytree(world.model.path, world.folder / "huggingface")
    held_out = read_questions(world.data.validation)
    partition = main_partition(held_out)
    questions = [(question.text, partition) for question in held_out if question.partition == partition]
    index = other_index(world.retrieval.index, {partition}, to=tmp_path / "index")
    weights = other_weights(str(world.folder / "huggingface"), to=tmp_path / "weights")
    with on_cluster({"run": str(world.folder), "state": str(tmp_path)}) as (url, service):
        assert httpx.get(f"{url}/readyz", timeout=60).json()["status"] == "ok"
        unknown = httpx.post(f"{url}/nope", json={}, timeout=60)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_url")
        upgrades = [
            lambda: service.change(name="another"),
            lambda: service.weights(weights),
            lambda: service.change(settings={"retrieval": {"index": index}}),
        ]
        seen = upgraded(url, upgrades, questions, num_requests=60, num_clients=2)
        assert httpx.get(f"{url}/readyz", timeout=60).json()["status"] == "ok"
    assert faults(seen, num_upgrades=len(upgrades)) == []
    assert seen.statuses["200"] >= 60
    assert {versions.agent for versions in seen.replies} == {"another", world.folder.name}
    assert len({versions.weights for versions in seen.replies}) == 2
