"""The arithmetic of memory, against figures worked out by hand and against torch's own count of a small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from mempipe.engines.config import ModelConfig
from mempipe.loader import load_config
from mempipe.planning.capacity import (
    CONTEXT,
    GIB,
    KNOWN,
    engine_memory,
    learner_memory,
    object_store_bytes,
    reference_memory,
)

CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"
SEVEN = KNOWN["Qwen/Qwen2.5-7B-Instruct"]


@pytest.mark.parametrize(
    ("name", "ranks", "gigabytes"),
    [("7b", 8, 36), ("7b", 4, 51), ("7b", 2, 82), ("3b", 4, 24), ("3b", 1, 61)],
)
def test_a_learner_rank_of_the_published_runs(name, ranks, gigabytes):
    """Sums by hand: masters, gradients and moments, root, gathered layer, saved states, recomputed layer, context."""
    config = load_config(CONFIGS / f"memsearcher_qwen2.5-{name}.yaml")
    found = learner_memory(config, KNOWN[config.model.path], num_ranks=ranks).peak / 1e9
    assert found == pytest.approx(gigabytes, rel=0.05)


def test_an_adapter_needs_masters_but_no_gradients_or_moments_of_the_base():
    config = load_config(CONFIGS / "memsearcher_qwen2.5-7b.yaml", ["model.lora_rank=32"])
    held = learner_memory(config, SEVEN, num_ranks=4).held - CONTEXT
    adapter = 32 * 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert held == (4 * SEVEN.num_parameters + 12 * adapter) // 4


def test_kv_cache_and_weights_are_divided_by_tensor_parallelism():
    config = load_config(CONFIGS / "memsearcher_qwen2.5-7b.yaml")
    one, two = (engine_memory(config, SEVEN, tensor_parallel=n) for n in (1, 2))
    assert one.working == 2 * two.working == 16 * 8192 * 2 * 28 * 4 * 128 * 2
    assert one.held - two.held == SEVEN.num_parameters
    assert reference_memory(config, SEVEN).held == SEVEN.num_parameters * 2 + CONTEXT


@pytest.mark.parametrize(
    ("path", "memory", "shared", "expected"),
    [
        ("", 24, 12, 0.5),
        ("Qwen/Qwen2.5-3B-Instruct", 2000, 1000, 0.5 + 4 * 3085 * 2e6 / GIB),
        ("Qwen/Qwen2.5-3B-Instruct", 24, 12, 7.2),  # what Ray would take: 30 % of the memory
        ("Qwen/Qwen2.5-3B-Instruct", 24, 1, 0.9),  # what /dev/shm has
        ("Qwen/Qwen2.5-3B-Instruct", 24, 0, 0.5),
    ],
)
def test_the_object_store_has_room_for_the_weights_on_their_way(path, memory, shared, expected):
    found = object_store_bytes(ModelConfig(path=path), memory=memory * GIB, shared_memory=shared * GIB)
    assert found / GIB == pytest.approx(expected, rel=0.01)
