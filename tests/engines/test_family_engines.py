"""Families of models with real engines: log-probs, weight sync and adapters (`benchmarks/families.py`)."""

from __future__ import annotations

import pytest

from benchmarks.families import FAMILIES, measure, save_family

DIFFERENT = "gemma3"
"""The one whose network differs most from Qwen2's: sliding windows and scaled embeddings. `make test-jobs` has all."""
TRAINED = [name for name, family in FAMILIES.items() if not family.refused]


@pytest.mark.parametrize(
    "name", [name if name == DIFFERENT else pytest.param(name, marks=pytest.mark.jobs) for name in TRAINED]
)
async def test_a_family_works_in_engine_and_learner(name, tmp_path):
    save_family(FAMILIES[name], tmp_path)
    row = await measure(name, tmp_path)
    assert row.is_expected and row.sync and row.adapter, row
