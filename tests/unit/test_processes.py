"""Waiting for a command: as long as it gets on, and no longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tools import processes
from tools.processes import ROOT, Marked, Running, run

GROWS = """
import time
for i in range(16):
    time.sleep(0.5)
    print(i, flush=True) if i % 2 else open("file", "a").write(str(i))
"""

CHURNS = """
import os, shutil, time
end = time.monotonic() + 1
while time.monotonic() < end:
    os.makedirs("a/b/c/d")
    shutil.rmtree("a")
"""


SAVES = """
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    print("begun", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    pathlib.Path("saved").touch()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LOOK_EVERY_S", 0.1)


@pytest.mark.slow
def test_a_command_that_gets_on_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "QUIET_S", 6.0)  # less than it takes, more than a busy machine needs to start it
    done = run([sys.executable, "-c", GROWS], marked=Marked(), cwd=tmp_path)
    assert (done.returncode, done.stdout.split()) == (0, [str(i) for i in range(1, 16, 2)])
    assert (tmp_path / "file").read_text() == "02468101214"


@pytest.mark.slow
def test_folders_may_vanish_while_a_command_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LOOK_EVERY_S", 0.0)
    assert run([sys.executable, "-c", CHURNS], marked=Marked(), cwd=tmp_path).returncode == 0


@pytest.mark.slow
def test_a_command_that_is_given_up_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "QUIET_S", 0.5)
    marked = Marked()
    with pytest.raises(AssertionError, match="written nothing"):
        run([sys.executable, "-c", "import time; time.sleep(600)"], marked=marked, cwd=tmp_path)
    assert marked.survivors() == []


@pytest.mark.slow
def test_a_command_that_hangs_fails_with_the_end_of_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marked = Marked()
    hangs = Running(
        [sys.executable, "-c", "import time; print('so far', flush=True); time.sleep(600)"], marked=marked, cwd=tmp_path
    )
    try:
        hangs.wait_until(lambda: "so far" in hangs.stdout)
        monkeypatch.setattr(processes, "QUIET_S", 3.0)
        with pytest.raises(AssertionError, match="written nothing for 3 s\nso far"):
            hangs.wait_until(lambda: False)
        assert len(marked.processes()) == 1
    finally:
        marked.end()
    assert marked.survivors() == []


def test_a_tree_is_killed_with_a_child_that_has_lost_its_environment(tmp_path: Path) -> None:
    marked = Marked()
    shell = Running(["sh", "-c", "env -i sleep 600 & echo $!; wait"], marked=marked, cwd=tmp_path)
    shell.wait_until(lambda: shell.stdout)
    child = psutil.Process(int(shell.stdout))
    shell.wait_until(lambda: child.name() == "sleep")
    assert child not in marked.processes()
    shell.kill_tree()
    assert child.wait(timeout=60) is None and marked.survivors() == []
    shell.kill_tree()


def test_a_command_that_ends_before_its_time_fails_with_what_it_said(tmp_path: Path) -> None:
    ends = Running([sys.executable, "-c", "import sys; sys.exit('no room')"], marked=Marked(), cwd=tmp_path)
    with pytest.raises(AssertionError, match="ended early with 1\nno room"):
        ends.wait_until(lambda: False)
    assert (ends.wait().returncode, ends.stderr) == (1, "no room\n")


@pytest.mark.parametrize(("number", "to_all", "exit_code"), [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)])
def test_an_end_from_outside_waits_until_the_command_in_the_foreground_has_saved(
    number: int, to_all: bool, exit_code: int, tmp_path: Path
) -> None:
    """A terminal tells all its processes, and `timeout`, a scheduler or a user the first one alone."""
    code = f"import sys; from tools.processes import foreground; foreground([sys.executable, '-c', {SAVES!r}])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        (os.killpg if to_all else os.kill)(process.pid, number)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (exit_code, b"") and (tmp_path / "saved").exists()
