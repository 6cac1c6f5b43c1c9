"""A run whose own Ray cluster is killed says so and ends: Ray alone waits for ever, or a minute without a sentence."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from tools.processes import Marked, Running, command_line

LONGEST_S = 30.0
DRIVER = """
import asyncio, sys, time
import numpy as np
import ray
from mempipe.actors.cluster import connected
from mempipe.actors.lost import ClusterLost

class Silent:
    async def never(self):
        print("waits", flush=True)
        await asyncio.Event().wait()

try:
    with connected("", name="lost"):
        silent = ray.remote(num_cpus=0)(Silent).remote()
        never = silent.never.remote()
        print("up", flush=True)
        WORK
except ClusterLost as error:
    assert error.was_said
    sys.exit(1)
"""
WAITS = "ray.get(never)"
PUTS = "while True: time.sleep(1.0), ray.put(np.zeros(300_000))"
"""Ray ends a process that puts an object into the store of a raylet that is gone, without a word."""


def program(process: psutil.Process) -> str:
    """Returns the name of the file that a process runs; "" when it has ended."""
    return Path(command_line(process).partition(" ")[0]).name


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "work", "says"),
    [
        pytest.param("raylet", WAITS, "Ray's raylet on this node ended", marks=pytest.mark.jobs),
        ("raylet", PUTS, "Ray's raylet on this node ended"),
        pytest.param("gcs_server", WAITS, "the head", marks=pytest.mark.jobs),  # noticed later, and said alike
    ],
    ids=["raylet, waiting", "raylet, putting", "head, waiting"],
)
def test_a_run_whose_cluster_is_killed_ends_with_a_sentence(tmp_path: Path, name: str, work: str, says: str):
    script, marked = tmp_path / "waits.py", Marked()
    script.write_text(DRIVER.replace("WORK", work))
    try:
        driver = Running([sys.executable, str(script)], marked=marked, cwd=tmp_path)
        # A whole line: "did not come up in time" is said of a first raylet, which has been ended.
        driver.wait_until(lambda: "up" in driver.stdout.splitlines(), every_s=0.2)
        (victim,) = [process for process in marked.processes() if program(process) == name]
        victim.kill()
        killed = time.monotonic()
        ended = driver.wait()
        assert time.monotonic() - killed < LONGEST_S
        assert ended.returncode == 1
        said = ended.stdout + ended.stderr
        assert said.count("error: ") == said.count(f"error: the Ray cluster was lost: {says}") == 1
        assert "Traceback" not in said and "state-dump" not in said
    finally:
        marked.end()
