"""Continuing a run: what may be changed, and what is refused with the values."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mempipe.config import RunConfig
from mempipe.loader import parse_config
from mempipe.runs import FREE_SETTINGS, Run, saved_state
from mempipe.settings import ConfigError


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """Where a run with default settings began."""
    Run(config(tmp_path))
    return tmp_path


def config(output: Path, **values: object) -> RunConfig:
    return parse_config({"output": str(output), **values})


@pytest.mark.parametrize(
    "values",
    [
        {"generation": {"num_replicas": 5, "gpu_memory_utilization": 0.5, "canary_tolerance": 0.2, "timeout_s": 9}},
        {"learner": {"num_ranks": 4, "timeout_s": 9, "max_tokens_per_micro_batch": 40000}},
        {"placement": "colocated", "max_restarts": 9, "reference": {"num_replicas": 2}},
        {"model": {"gradient_checkpointing": True}},
        {"data": {"num_epochs": 7}},
        {"retrieval": {"num_replicas": 3, "timeout_s": 9}},
        {"num_steps": 7, "checkpoint": {"every_steps": 1}, "stream": {"num_drivers": 3}},
    ],
    ids=str,
)
def test_a_run_goes_on_with_other_settings_of_its_machinery(begun, values):
    assert saved_state(config(begun, **values), resume="always") is not None


def test_what_changes_the_learning_is_refused_with_both_values(begun):
    changed = config(begun, optimizer={"lr": 0.5}, learner={"old_logprobs": "recompute", "num_ranks": 2})
    with pytest.raises(ConfigError) as error:
        saved_state(changed, resume="always")
    text = str(error.value)
    assert "learner.old_logprobs 'recompute' (was 'sampler'), optimizer.lr 0.5 (was 1e-06);" in text
    assert "num_ranks 2" not in text


def test_a_run_of_a_version_without_a_setting_goes_on_with_its_default(begun):
    file = config(begun).folder / "config.yaml"
    saved = yaml.safe_load(file.read_text())
    del saved["algorithm"]["dual_clip"]
    file.write_text(yaml.safe_dump(saved))
    assert saved_state(config(begun), resume="always") is not None
    with pytest.raises(ConfigError, match=r"algorithm\.dual_clip 5\.0 \(was 3\.0\);"):
        saved_state(config(begun, algorithm={"dual_clip": 5.0}), resume="always")


def test_every_free_setting_exists():
    values = RunConfig().model_dump()
    for name in FREE_SETTINGS:
        found = values
        for key in name.split("."):
            found = found[key]
