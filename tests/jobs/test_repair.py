"""A run that is told to stop, and one that loses a learner rank: the real command, its processes ended or killed.

It trains MEM1.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from miniature import FEW_PROCESSES, QUICKSTART, train_command
from trained import GRAMMAR, check_trained

from mempipe.engines.checkpoint import latest, read_state
from mempipe.tracking.tracker import read_metrics
from tools.processes import Marked, Running, command_line

NUM_STEPS = 6
OVERRIDES = [
    *FEW_PROCESSES,
    *GRAMMAR,
    "name=run",
    f"num_steps={NUM_STEPS}",
    "checkpoint.every_steps=100",
    "tracking.enabled=false",
]


@dataclass(frozen=True, kw_only=True)
class Repaired:
    """What a run left behind that was stopped after some steps, resumed, and robbed of its learner."""

    folder: Path
    steps_at_stop: int
    checkpoint_at_stop: int
    stopped: subprocess.CompletedProcess[str]
    ended: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def repaired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repaired]:
    output = tmp_path_factory.mktemp("repair")
    folder, marked = output / "run", Marked()
    command = train_command(output, OVERRIDES, config=QUICKSTART.with_name("quickstart_mem1.yaml"))
    try:
        driver = Running(command, marked=marked, cwd=output)
        driver.wait_until(lambda: _steps(folder) >= 2, every_s=0.02)
        driver.process.terminate()
        stopped = driver.wait()
        newest, steps_at_stop = latest(folder / "checkpoints"), _steps(folder)
        checkpoint_at_stop = read_state(newest).position.step if newest else 0  # later ones take its place
        resumed = Running([*command, "--resume"], marked=marked, cwd=output)
        resumed.wait_until(lambda: _steps(folder) > steps_at_stop, every_s=0.02)
        (rank,) = [process for process in marked.processes() if "LearnerActor" in command_line(process)]
        rank.kill()
        ended = resumed.wait()
        yield Repaired(
            folder=folder,
            steps_at_stop=steps_at_stop,
            checkpoint_at_stop=checkpoint_at_stop,
            stopped=stopped,
            ended=ended,
        )
    finally:
        marked.end()


def _steps(folder: Path) -> int:
    file = folder / "state.json"
    return json.loads(file.read_text()).get("num_steps", 0) if file.exists() else 0


def test_a_run_that_is_told_to_stop_saves_what_it_has_learnt(repaired):
    assert repaired.stopped.returncode == 143
    assert repaired.checkpoint_at_stop >= repaired.steps_at_stop >= 2
    assert f"saved step {repaired.checkpoint_at_stop} before the run ended" in repaired.stopped.stdout
    assert "SIGTERM received" not in repaired.stopped.stdout + (repaired.stopped.stderr or "")


def test_a_run_that_loses_its_learner_goes_on_by_itself(repaired):
    assert repaired.ended.returncode == 0, repaired.ended.stderr
    assert repaired.ended.stdout.count("restart 1 of max_restarts 3") == 1
    newest = latest(repaired.folder / "checkpoints")
    assert newest is not None and read_state(newest).position.step == NUM_STEPS


def test_every_step_is_on_record_and_no_group_was_trained_twice(repaired):
    rows = [row["step"] for row in read_metrics(repaired.folder / "metrics.jsonl") if "reward" in row]
    assert rows == [*range(1, NUM_STEPS + 1)]
    newest = latest(repaired.folder / "checkpoints")
    assert newest is not None
    groups = [group for step in read_state(newest).position.trained for group in step]
    assert len(groups) == len(set(groups)) == 4 * NUM_STEPS


def test_mem1_learns_its_grammar_from_the_script_and_is_trained_on_all_the_same(repaired):
    check_trained(repaired.folder, "mem1", num_steps=NUM_STEPS, stopped_in=repaired.checkpoint_at_stop)
