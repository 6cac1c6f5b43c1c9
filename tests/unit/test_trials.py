"""What runs inside a trial: commands one after another, their output in a file, and an end together with the trial."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from mempipe.actors import trials
from mempipe.actors.trials import TrialCommands

WORLD = ["data", "world", "--questions", "1"]


@pytest.fixture
def reports(monkeypatch) -> list[dict[str, Any]]:
    """Collects what the trial tells Tune, of which nothing is started."""
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(trials.tune, "report", told.append)
    monkeypatch.setattr(trials, "_same_cluster", dict)
    return told


def trial(log: Path, *commands: list[str]) -> dict[str, Any]:
    return {"trial": asdict(TrialCommands(name="t", commands=list(commands), log=str(log)))}


@pytest.mark.slow
def test_commands_run_one_after_another_and_leave_their_output(tmp_path, reports):
    trials._run(trial(tmp_path / "log", WORLD, ["config", "sweep"]))
    text = (tmp_path / "log").read_text()
    assert 0 < text.index("(1 hop") < text.index("# A sweep over memory budgets") and reports == [{"error": ""}]


@pytest.mark.slow
def test_input_that_cannot_work_ends_a_trial_for_good(tmp_path, reports):
    trials._run(trial(tmp_path / "log", ["config", "nothing"], WORLD))
    (told,) = reports
    assert told["error"].startswith("mempipe config ended with 2: error: 'nothing' is not a kind of config")
    assert "(1 hop" not in (tmp_path / "log").read_text()


def test_a_command_that_died_is_tried_again_by_tune(tmp_path, reports, monkeypatch):
    kill = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    started = subprocess.Popen
    monkeypatch.setattr(trials.subprocess, "Popen", lambda _, **options: started(kill, **options))
    with pytest.raises(RuntimeError, match=r"mempipe data ended with -9: it wrote nothing"):
        trials._run(trial(tmp_path / "log", WORLD))
    assert not reports


@pytest.mark.slow
def test_a_command_ends_with_the_process_that_started_it(tmp_path):
    code = (
        "import subprocess, sys, time; from mempipe.actors.trials import _end_with_parent\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(300)']\n"
        "child = subprocess.Popen(sleep, preexec_fn=_end_with_parent)\n"
        "print(child.pid, flush=True); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
