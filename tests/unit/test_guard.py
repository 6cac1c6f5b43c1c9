"""A test run leaves no process behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tools.guard import GUARDED, ROOT, descendants
from tools.processes import GONE_WITHIN_S

RUN = """
import os, signal, subprocess, sys, time
from tools.guard import GUARDED, leave_nothing_behind

CHILD = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True).wait()"
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background commands without it
leave_nothing_behind()
subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)  # which gets no signal of its parent
print(os.environ[GUARDED], flush=True)
time.sleep(float(sys.argv[1]))
"""

PICTURES = """
import os, subprocess, sys, time
from contextlib import contextmanager
from tools import pictures
from tools.guard import GUARDED

@contextmanager
def served(run):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(os.environ[GUARDED], flush=True)
    time.sleep(float(sys.argv[1]))
    yield ""

pictures.CHROMIUM, pictures.served = "chromium", served
sys.exit(pictures.main([*sys.argv[2:]]))
"""


def start(seconds: float, script: str = RUN, *words: str) -> tuple[subprocess.Popen[str], str]:
    """A run that ends by itself after so long, and its mark; a child and a grandchild of it wait for minutes."""
    environment = {name: value for name, value in os.environ.items() if name != GUARDED}
    command = [sys.executable, "-c", script, str(seconds), *words]
    run = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert run.stdout is not None
    return run, run.stdout.readline().strip()


def until_there_are(count: int, mark: str) -> None:
    deadline = time.monotonic() + GONE_WITHIN_S
    while len(found := descendants(mark)) != count:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_process(number):
    run, mark = start(600)
    until_there_are(2, mark)
    run.send_signal(number)
    run.communicate(timeout=GONE_WITHIN_S)
    until_there_are(0, mark)
    assert run.returncode == -number


def test_pictures_that_are_killed_leave_no_service(tmp_path):
    (tmp_path / "report.html").touch()
    words = (str(tmp_path), "--evaluation", str(tmp_path), "--output", str(tmp_path))
    run, mark = start(600, PICTURES, *words)
    until_there_are(1, mark)
    run.kill()
    run.communicate(timeout=GONE_WITHIN_S)
    until_there_are(0, mark)


def test_a_run_that_ends_by_itself_leaves_no_process():
    run, mark = start(0)
    until_there_are(0, mark)
    assert (run.communicate(timeout=GONE_WITHIN_S), run.returncode) == (("", None), 0)


def test_this_run_has_a_guard():
    commands = [cmdline(process) for process in psutil.process_iter()]
    assert [command for command in commands if "tools.guard" in command and command[-1] == os.environ[GUARDED]]


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
