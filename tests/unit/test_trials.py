"""What runs inside a trial: commands one after another, their output in a file, and an end together with the trial."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mempipe.actors import trials
from mempipe.actors.trials import TrialCommands, run_commands

WORLD = ["data", "world", "--questions", "1"]


@pytest.fixture(autouse=True)
def without_a_cluster(monkeypatch) -> None:
    monkeypatch.setattr(trials, "_same_cluster", dict)


def trial(log: Path, *commands: list[str]) -> TrialCommands:
    return TrialCommands(name="t", commands=list(commands), log=str(log))


@pytest.mark.slow
def test_commands_run_one_after_another_and_leave_their_output(tmp_path):
    assert not run_commands(trial(tmp_path / "log", WORLD, ["config", "sweep"]))
    text = (tmp_path / "log").read_text()
    assert 0 < text.index("(1 hop") < text.index("# A sweep over memory budgets")


@pytest.mark.slow
def test_input_that_cannot_work_ends_a_trial_for_good(tmp_path):
    error = run_commands(trial(tmp_path / "log", ["config", "nothing"], WORLD))
    assert error.startswith("mempipe config ended with 2: error: 'nothing' is not a kind of config")
    assert "(1 hop" not in (tmp_path / "log").read_text()


def test_a_command_that_died_is_tried_again_by_tune(tmp_path, monkeypatch):
    kill = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    started = subprocess.Popen
    monkeypatch.setattr(trials.subprocess, "Popen", lambda _, **options: started(kill, **options))
    with pytest.raises(RuntimeError, match=r"mempipe data ended with -9: it wrote nothing"):
        run_commands(trial(tmp_path / "log", WORLD))


@pytest.mark.slow
def test_a_trial_in_series_has_its_own_log_and_what_fails_ends_the_process_for_the_next_one(tmp_path):
    (tmp_path / "damaged.yaml").write_text("runs: [")
    first, second = (
        TrialCommands(name="t", commands=[["evaluate", str(tmp_path / name)]], log=str(tmp_path / f"{name}.log"))
        for name in ("missing.yaml", "damaged.yaml")
    )
    series = trials._Series(first.log)
    assert series.run(first.commands[0][1], first.log) == 2 and series._process.returncode == 2
    assert "missing.yaml" in Path(first.log).read_text()
    series = trials._Series(second.log)
    os.kill(series._process.pid, signal.SIGKILL)
    assert series.run(second.commands[0][1], second.log) == -signal.SIGKILL


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
    while not has_ended(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
