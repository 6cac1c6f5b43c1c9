"""AdamW's moments in the machine's memory: the same numbers, bit for bit, with one rank and with two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_setup import make_learner, pack, run_two_ranks, samples, save_model
from torch import Tensor

from mempipe.engines import offload
from mempipe.engines.checkpoint import Position
from mempipe.engines.learner import Learner
from mempipe.engines.offload import MOMENTS, moments_on_device

STEPS = 3


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("models"))


def train(learner: Learner, *, rank: int = 0, num_ranks: int = 1, first: int = 0) -> list[float]:
    """Makes updates `first` to `STEPS`; returns their losses."""
    updates = [pack(samples(seed), num_ranks=num_ranks, max_tokens=40)[rank] for seed in range(first, STEPS)]
    return [metrics["loss"] for metrics in learner.step(updates)]


def trained(learner: Learner) -> dict[str, Tensor]:
    """Copies of this rank's shards of the weights and of AdamW's state."""
    return {name: getattr(t, "_local_tensor", t).clone() for name, t in learner._tensors().items()}


def moments(learner: Learner) -> list[Tensor]:
    return [state[name] for state in learner._optimizer.state.values() for name in MOMENTS]


def addresses(tensors: list[Tensor]) -> list[int]:
    return [getattr(tensor, "_local_tensor", tensor).data_ptr() for tensor in tensors]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys() and len(found) > 4
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def compare_on_ranks(rank: int, port: int, folder: Path, out: Path, num_ranks: int) -> None:
    """Trains with moments on the device and in the machine's memory, and resumes both ways from a checkpoint of the
    second. The learners share the ranks' process group."""
    place: dict[str, Any] = {"rank": rank, "world_size": num_ranks, "master_port": port, "updates_per_step": 1}
    plain = make_learner(folder, **place)
    losses, expected = train(plain, rank=rank, num_ranks=num_ranks), trained(plain)
    offloaded = make_learner(folder, offload_optimizer=True, **place)
    assert train(offloaded, rank=rank, num_ranks=num_ranks) == losses
    assert_same(trained(offloaded), expected)
    path = offloaded.save(out, Position(), keep=1)
    twice = trained_twice(folder, place, rank, num_ranks)
    for settings in ({"offload_optimizer": True}, {"offload_optimizer": False}):
        resumed = make_learner(folder, **settings, **place)
        resumed.load(path)
        assert_same(trained(resumed), expected)
        assert train(resumed, rank=rank, num_ranks=num_ranks) != losses
        assert_same(trained(resumed), twice)
    plain.close()


def trained_twice(folder: Path, place: dict[str, Any], rank: int, num_ranks: int) -> dict[str, Tensor]:
    learner = make_learner(folder, **place)
    for _ in range(2):
        train(learner, rank=rank, num_ranks=num_ranks)
    return trained(learner)


def test_moments_in_the_machines_memory_change_no_bit_of_an_update_or_a_checkpoint(qwen2, tmp_path):
    compare_on_ranks(0, 29500, qwen2, tmp_path, 1)


@pytest.mark.slow
def test_two_ranks_keep_their_shards_of_the_moments_in_the_machines_memory(qwen2, tmp_path):
    run_two_ranks(compare_on_ranks, qwen2, tmp_path, 2)


def test_an_update_works_on_copies_of_the_moments_and_keeps_the_buffers(qwen2, monkeypatch):
    learner = make_learner(qwen2, offload_optimizer=True)
    train(learner)
    monkeypatch.delattr(offload, "host_zeros")  # pinned memory is slow to make
    host = moments(learner)
    kept, values = addresses(host), [moment.clone() for moment in host]
    with moments_on_device(learner._optimizer):
        assert not set(addresses(moments(learner))) & set(kept)
        for moment in moments(learner):
            moment.add_(1)
        assert all(torch.equal(moment, value) for moment, value in zip(host, values, strict=True))
    assert addresses(moments(learner)) == kept
    assert all(torch.equal(moment, value + 1) for moment, value in zip(host, values, strict=True))


def test_an_update_that_fails_leaves_the_moments_as_they_were(qwen2):
    learner = make_learner(qwen2, offload_optimizer=True)
    train(learner)
    values = [moment.clone() for moment in moments(learner)]
    with pytest.raises(RuntimeError, match="no memory"), moments_on_device(learner._optimizer):
        moments(learner)[0].add_(1)
        raise RuntimeError("no memory")
    assert all(torch.equal(moment, value) for moment, value in zip(moments(learner), values, strict=True))
