"""Ends every process that a test run has started when the run ends, whether it finishes or is interrupted or killed.

A killed process cannot end its children, and a Ray cluster or a run in a session of its own gets no Ctrl-C. So a second
process waits for the end of the first one. It finds the descendants by an environment variable, which they inherit.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
GUARDED = "MEMPIPE_GUARDED"
"""Holds the mark of the test run that a process descends from."""
GIVE_UP_S = 60.0
LOOK_EVERY_S = 0.1


def leave_nothing_behind() -> None:
    """Starts the guard of this process and all processes that it starts from now on. Linux only.

    A process that descends from a guarded one starts no guard: the workers of pytest-xdist have that of their parent.
    """
    if GUARDED in os.environ:
        return
    mark, environment = uuid.uuid4().hex, dict(os.environ)
    os.environ[GUARDED] = mark
    subprocess.Popen(
        [sys.executable, "-m", "tools.guard", str(os.getpid()), mark],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the others
    )


def descendants(mark: str) -> list[psutil.Process]:
    """Returns the processes that live and carry the mark."""
    return [process for process in psutil.process_iter() if _carries(process, mark)]


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(GUARDED) == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _wait_for_the_end_of(parent: int) -> None:
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(parent)
        if os.getppid() == parent:  # else it has ended already, and its number may be that of another process
            select.select([descriptor], [], [])


def main(parent: int, mark: str) -> None:
    _wait_for_the_end_of(parent)
    give_up = time.monotonic() + GIVE_UP_S
    while (found := descendants(mark)) and time.monotonic() < give_up:  # again: a process may start another meanwhile
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
