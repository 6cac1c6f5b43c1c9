"""A run whose own Ray cluster is killed says so and ends: Ray alone waits for ever, or a minute without a sentence."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tools.processes import Marked, Running

LONGEST_S = 30.0
WAITS = """
import asyncio, sys
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
        ray.get(never)
except ClusterLost as error:
    sys.exit(f"error: {error}")
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raylet", "Ray's raylet on this node ended"),
        pytest.param("gcs_server", "the head", marks=pytest.mark.jobs),  # noticed later, and said alike
    ],
)
def test_a_run_whose_cluster_is_killed_ends_with_a_sentence(tmp_path: Path, name: str, says: str):
    script, marked = tmp_path / "waits.py", Marked()
    script.write_text(WAITS)
    try:
        driver = Running([sys.executable, str(script)], marked=marked, cwd=tmp_path)
        driver.wait_until(lambda: "up" in driver.stdout, every_s=0.2)
        (victim,) = [process for process in marked.processes() if process.name() == name]
        victim.kill()
        killed = time.monotonic()
        ended = driver.wait()
        assert time.monotonic() - killed < LONGEST_S
        assert ended.returncode == 1
        said = ended.stdout + ended.stderr
        assert f"error: the Ray cluster was lost: {says}" in said and "Traceback" not in said
    finally:
        marked.end()
