"""A run that is told to stop, and one that loses a learner rank: the real command, its processes killed."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from miniature import FEW_PROCESSES, Marked, start_train, train_command

from mempipe.engines.checkpoint import latest, read_state
from mempipe.tracking.tracker import read_metrics

WITHIN_S = 400.0
NUM_STEPS = 6
OVERRIDES = [*FEW_PROCESSES, f"num_steps={NUM_STEPS}", "checkpoint.every_steps=100", "tracking.enabled=false"]


@dataclass(frozen=True, kw_only=True)
class Repaired:
    """What a run left behind that was stopped after some steps, resumed, and robbed of its learner."""

    folder: Path
    steps_at_stop: int
    checkpoint_at_stop: int
    code_of_stop: int
    said_at_stop: str
    code: int
    said: str
    errors: str


@pytest.fixture(scope="module")
def repaired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repaired]:
    output = tmp_path_factory.mktemp("repair")
    folder, marked = output / "quickstart", Marked()
    command = train_command(output, OVERRIDES)
    try:
        stopped = start_train(command, output, marked=marked)
        _wait_for_step(folder, stopped, 2)
        stopped.send_signal(signal.SIGTERM)
        said_at_stop, _ = stopped.communicate(timeout=WITHIN_S)
        newest = latest(folder / "checkpoints")
        resumed = start_train([*command, "--resume"], output, marked=marked)
        steps_at_stop = _steps(folder)
        _wait_for_step(folder, resumed, steps_at_stop + 1)
        (rank,) = [process for process in marked.processes() if "LearnerActor" in " ".join(process.cmdline())]
        rank.kill()
        said, errors = resumed.communicate(timeout=WITHIN_S)
        yield Repaired(
            folder=folder,
            steps_at_stop=steps_at_stop,
            checkpoint_at_stop=read_state(newest).position.step if newest else 0,
            code_of_stop=stopped.returncode,
            said_at_stop=said_at_stop,
            code=resumed.returncode,
            said=said,
            errors=errors,
        )
    finally:
        marked.end()


def _steps(folder: Path) -> int:
    file = folder / "state.json"
    return json.loads(file.read_text()).get("num_steps", 0) if file.exists() else 0


def _wait_for_step(folder: Path, process: subprocess.Popen[str], step: int) -> None:
    deadline = time.monotonic() + WITHIN_S
    while _steps(folder) < step:
        assert process.poll() is None, f"the run ended early: {process.communicate()}"
        assert time.monotonic() < deadline, f"no step {step} within {WITHIN_S} s"
        time.sleep(0.02)


def test_a_run_that_is_told_to_stop_saves_what_it_has_learnt(repaired):
    assert repaired.code_of_stop != 0
    assert repaired.checkpoint_at_stop >= repaired.steps_at_stop >= 2
    assert f"saved step {repaired.checkpoint_at_stop} before the run ended" in repaired.said_at_stop


def test_a_run_that_loses_its_learner_goes_on_by_itself(repaired):
    assert repaired.code == 0, repaired.errors
    assert repaired.said.count("restart 1 of max_restarts 3") == 1
    newest = latest(repaired.folder / "checkpoints")
    assert newest is not None and read_state(newest).position.step == NUM_STEPS


def test_every_step_is_on_record_and_no_group_was_trained_twice(repaired):
    rows = {row["step"] for row in read_metrics(repaired.folder / "metrics.jsonl") if "reward" in row}
    missing = {*range(1, NUM_STEPS + 1)} - rows
    assert missing <= {repaired.checkpoint_at_stop}  # it may have been stopped before that step was logged
    newest = latest(repaired.folder / "checkpoints")
    assert newest is not None
    groups = [group for step in read_state(newest).position.trained for group in step]
    assert len(groups) == len(set(groups)) == 4 * NUM_STEPS
