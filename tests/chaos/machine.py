"""How fast this machine is at the moment, by which every deadline of the suite is multiplied; and small disks."""

from __future__ import annotations

import multiprocessing
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

QUIET_S = 0.25
"""What `_work` takes on a quiet core of the machine on which the deadlines were set."""
PROCESSES = 2


def speed_factor() -> float:
    """Returns how many times as long as on a quiet machine of two such cores work takes here now, 1 at least."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(PROCESSES) as pool:
        return max(1.0, max(pool.map(_work, range(PROCESSES))) / QUIET_S)


def _work(_: int) -> float:
    """Returns the seconds that a fixed amount of work takes."""
    started, total = time.perf_counter(), 0
    for number in range(5_000_000):
        total += number & 7
    return time.perf_counter() - started


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
