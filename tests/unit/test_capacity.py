"""Sizes that follow from a model's shape, against figures worked out by hand."""

from __future__ import annotations

import pytest

from mempipe.engines.config import ModelConfig
from mempipe.planning.capacity import GIB, object_store_bytes


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
