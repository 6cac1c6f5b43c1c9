"""What a person reads while a run works: a line every few seconds, also while nothing comes."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mempipe.loader import load_config
from mempipe.progress import Progress, waiting
from pipelines.train import phases
from pipelines.warm_start import _said_of_faults


def until(condition, *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Said:
    """What was printed so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self.text = capsys, ""

    def __contains__(self, pattern: str) -> bool:
        self.text += self._capsys.readouterr().out
        return re.search(pattern, self.text) is not None


def test_what_takes_long_to_begin_says_that_it_goes_on(capsys):
    said = Said(capsys)
    with waiting("starting engines", every_s=0.02):
        until(lambda: r"\] starting engines\n.*\] starting engines: \d+ s so far\n" in said)
    capsys.readouterr()  # a line that came between the last look and the end
    said.text = ""
    time.sleep(0.1)
    assert "starting" not in said, "it is over"


def test_progress_tells_of_itself_while_nothing_comes_and_how_long_it_goes_on(capsys):
    said = Said(capsys)
    with Progress("train", total=4, done=1, every_s=0.02) as progress:
        until(lambda: r"train: 1/4  \d+ s\n" in said)
        progress.advance(1, em=0.5)
        until(lambda: r"train: 2/4  \d+ s, about \d+ s left  em 0\.500\n" in said)
        progress.advance(2, em=0.75)
    assert r"train: 4/4  \d+ s  em 0\.750\n" in said


def test_of_two_only_the_one_within_the_other_tells_of_itself(capsys):
    said = Said(capsys)
    with Progress("train", total=2, every_s=0.02) as outer:
        with Progress("evaluate", total=2, every_s=0.02):
            until(lambda: r"evaluate: 0/2  \d+ s" in said)
            said.text = ""
            until(lambda: r"(evaluate: 0/2  \d+ s\n){3}" in said)
            assert "train" not in said
        until(lambda: r"train: 0/2  \d+ s" in said)
        outer.advance(2)


def test_the_time_left_is_that_of_what_is_still_to_do(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("mempipe.progress.time.monotonic", lambda: now[0])
    progress = Progress("train", total=40, done=10)
    now[0] += 60
    progress.advance(20)
    assert progress._time() == "60 s, about 30 s left"


def test_the_phases_of_a_run_stand_at_its_beginning():
    quickstart = load_config("jobs/configs/quickstart.yaml")
    assert phases(quickstart) == [
        "imitate 5,500 demonstrations",
        "384 held-out questions",
        "30 steps of 128 attempts at 16 questions",
        "384 held-out questions again",
        "a report",
    ]
    own = load_config("examples/own_reward/config.yaml", ["data.validation=''"])
    assert phases(own) == ["4 steps of 128 attempts at 16 questions", "a report"]
    assert phases(own.model_copy(update={"num_steps": 1}))[0] == "1 step of 128 attempts at 16 questions"


def test_where_the_loss_rises_is_said_before(monkeypatch):
    wanted: Any = load_config("jobs/configs/quickstart.yaml").warm_start
    monkeypatch.setattr("pipelines.warm_start._samples_of", lambda groups: list(groups))
    shown: Any = SimpleNamespace(clean=["c"] * 5, noisy=["n"] * 3)
    updates: Any = [["c", "c"], ["c", "c"], ["c", "n"], ["n", "n"]]
    said = _said_of_faults(shown, updates, wanted)
    assert said.startswith("the last 3 demonstrations are faulty on purpose") and "from update 3 of 4 on" in said
    assert _said_of_faults(shown, updates, wanted.model_copy(update={"order": "mixed"})) == ""
    shown.noisy = []
    assert _said_of_faults(shown, updates, wanted) == ""


def closed_pipe(code: str, *arguments: str) -> int:
    """Returns the exit code of a Python process whose standard output and error are a pipe that nobody reads."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        process.stdout.close()
        return process.wait(timeout=120)


def test_a_job_continues_when_the_reader_of_its_output_has_ended(tmp_path: Path):
    job = """
import pathlib, sys
from mempipe.progress import Progress, say
for _ in range(2):
    if "bar" in sys.argv:
        with Progress("train", total=2) as progress:
            progress.advance(2)
            progress.note("a line above it")
    else:
        say("saved")
pathlib.Path(sys.argv[1]).touch()
"""
    for number, how in enumerate(("say", "bar")):
        file = tmp_path / str(number)
        assert closed_pipe(job, str(file), how) == 0
        assert file.exists(), how


def test_an_interrupted_command_whose_output_nobody_reads_ends_with_its_exit_code():
    command = """
import sys
from mempipe import cli, doctor
def examine(*_, **__):
    raise KeyboardInterrupt
doctor.examine = examine
sys.exit(cli.main(["doctor", "quickstart"]))
"""
    assert closed_pipe(command) == 130
