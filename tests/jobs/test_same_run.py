"""Same seed, same run: a run that was killed and resumed ends with the bits of one that nothing disturbed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from miniature import FEW_PROCESSES, train_command

from mempipe.beacons import VARIABLE
from mempipe.data.trajectories import read_trajectories
from mempipe.engines.checkpoint import latest, read_state
from mempipe.tracking.tracker import read_metrics
from mempipe.types import Group
from tools.processes import Marked, Running

pytestmark = pytest.mark.jobs
"""`make test` has the same of a learner alone (test_checkpoint.py) and of an engine alone (test_determinism.py)."""
NUM_STEPS = 3
KILLED_IN = 1  # the second step
ORDERED = [
    *FEW_PROCESSES,
    "ordered=true",
    "algorithm.max_off_policy_steps=0",
    f"num_steps={NUM_STEPS}",
    "world.num_train_questions=24",
    "warm_start.tokens_per_step=1024",
    "reward.overlong_tokens=96",  # longer attempts earn less, so that every step has something to learn
    "reward.overlong_buffer=96",
    "optimizer.warmup_steps=0",
    "checkpoint.every_steps=1",
    f"checkpoint.keep={NUM_STEPS}",
    "max_restarts=0",
    "tracking.enabled=false",
]
CLOCK = re.compile(r"^time$|seconds|per_second|teraflops|memory_gib|^memory/|^engine/")
"""Finds the names of metrics that tell how long something took, or how busy the machine was."""


@dataclass(frozen=True)
class Runs:
    """The folders of both runs, and the step of the checkpoint that was the newest at the kill."""

    undisturbed: Path
    resumed: Path
    killed_at: int

    @property
    def both(self) -> tuple[Path, Path]:
        return self.undisturbed, self.resumed


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The second run goes on from a copy of the first one's folder, made while that stands still before the updates
    of a step whose groups are all there: what lies on the disk then is what a kill at that moment leaves.
    """
    first, second, beacons = (tmp_path_factory.mktemp(name) for name in ("undisturbed", "resumed", "beacons"))
    hold = beacons / "hold-learn"
    hold.write_text(json.dumps({"step": KILLED_IN}))
    marked, unheld = Marked({VARIABLE: str(beacons)}), Marked()
    try:
        running = Running(train_command(first, ORDERED), marked=marked, cwd=first)
        running.wait_until(lambda: _has_reached(beacons, "learn", step=KILLED_IN) and _newest(first / "quickstart"))
        shutil.copytree(first / "quickstart", second / "quickstart")
        killed_at = _newest(second / "quickstart")
        hold.unlink()
        _succeeds(running)
        _succeeds(Running([*train_command(second, ORDERED), "--resume"], marked=unheld, cwd=second))
        yield Runs(first / "quickstart", second / "quickstart", killed_at)
    finally:
        marked.end()
        unheld.end()


def _has_reached(beacons: Path, name: str, **details: Any) -> bool:
    record = beacons / "beacons.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    return any((row := json.loads(line))["name"] == name and row["details"] == details for line in lines)


def _newest(folder: Path) -> int:
    """Steps that the newest checkpoint holds; 0 without one."""
    newest = latest(folder / "checkpoints")
    return 0 if newest is None else read_state(newest).position.step


def _succeeds(running: Running) -> None:
    ended = running.wait()
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]


def test_the_resumed_run_trained_the_steps_after_its_checkpoint_again(runs):
    assert runs.killed_at == KILLED_IN < _newest(runs.resumed) == _newest(runs.undisturbed) == NUM_STEPS


def test_both_runs_sampled_the_same_tokens_with_the_same_logprobs(runs):
    """Of the answers after training, which also show the weights; the passages' scores are equal as well."""
    played = [read_trajectories(run / "evaluation" / "after.parquet") for run in runs.both]
    undisturbed, resumed = ([_without_clock(group) for group in groups] for groups in played)
    assert resumed == undisturbed
    assert max(len(trajectory.contexts) for group in undisturbed for trajectory in group.trajectories) > 1


def test_both_runs_have_the_same_losses_and_rewards(runs):
    undisturbed, resumed = (_numbers(run) for run in runs.both)
    assert [row["step"] for row in undisturbed] == [*range(1, NUM_STEPS + 1)]
    assert all(row["learner/grad_norm"] > 1e-3 for row in undisturbed), "a step that changes nothing shows nothing"
    assert {"reward", "learner/loss", "canary_mean_difference"} <= undisturbed[0].keys()
    assert resumed == undisturbed


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_both_runs_have_the_same_weights_and_optimizer_state_after_every_step(runs):
    *_, second, third = (path.name for path in sorted((runs.undisturbed / "checkpoints").iterdir()))
    for step in (second, third):
        undisturbed, resumed = (_tensors(run / "checkpoints" / step) for run in runs.both)
        assert undisturbed.keys() == resumed.keys() and any("exp_avg_sq" in name for name in undisturbed)
        assert [name for name in undisturbed if not torch.equal(undisturbed[name], resumed[name])] == []
    assert len({_sha256(run / "huggingface" / "model.safetensors") for run in runs.both}) == 1


def _without_clock(group: Group) -> Group:
    """The group without how long it took."""
    trajectories = [
        dataclasses.replace(
            trajectory,
            contexts=[dataclasses.replace(c, generate_seconds=0.0, search_seconds=0.0) for c in trajectory.contexts],
        )
        for trajectory in group.trajectories
    ]
    return dataclasses.replace(group, trajectories=trajectories, seconds=0.0)


def _numbers(run: Path) -> list[dict[str, float]]:
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "reward" in row]
    return [{name: value for name, value in row.items() if not CLOCK.search(name)} for row in rows]


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights, optimizer state and random states of a checkpoint."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, dcp.metadata.TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return tensors


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
