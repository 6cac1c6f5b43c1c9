"""How fast this machine is, by which every deadline of the suite is multiplied; and small disks."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

QUIET_S = 0.033
"""What `_work` takes on a quiet core of the machine on which the deadlines were set."""
NUM_TRIES = 20
LOOK_EVERY_S = 2.0
LEAST_SHARE = 0.1


def speed_factor() -> float:
    """Returns how many times as long as on that machine work takes on a core of this one, 1 at least."""
    return max(1.0, min(_work() for _ in range(NUM_TRIES)) / QUIET_S)


def _work() -> float:
    """Returns the seconds that a fixed amount of work takes."""
    started, total = time.perf_counter(), 0
    for number in range(1_000_000):
        total += number & 7
    return time.perf_counter() - started


class Patience:
    """A deadline that stands still for the share of the machine which other people's work takes."""

    def __init__(self, seconds: float, *, own: Callable[[], list[psutil.Process]]) -> None:
        """`own` are the processes that are waited for."""
        self._seconds, self._own = seconds, own
        self._started = self._next_look = time.monotonic()
        self._next_look += seconds
        self._busy, self._of_own = self._used()

    def is_over(self) -> bool:
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_EVERY_S
        busy, of_own = self._used()
        others = max(busy - self._busy - (of_own - self._of_own), 0.0) / (psutil.cpu_count() or 1)
        share = max(1 - others / (now - self._started), LEAST_SHARE)
        return (now - self._started) * share > self._seconds

    def _used(self) -> tuple[float, float]:
        """Returns the seconds of all cores that were used so far, and by the own processes."""
        times, of_own = psutil.cpu_times(), 0.0
        for process in self._own():
            with suppress(psutil.NoSuchProcess):
                used = process.cpu_times()
                of_own += used.user + used.system
        return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice, of_own  # `user` has the guests


def may_mount() -> bool:
    """Tells whether this user can mount a small disk."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True)
        if done.returncode == 0:
            subprocess.run(["umount", folder], check=True)
        return done.returncode == 0


@contextmanager
def small_disk(folder: Path, *, megabytes: int) -> Iterator[Path]:
    """A disk of so many megabytes, mounted at `folder` for the block."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
