"""The main job on a cluster of its own, submitted as a Ray job."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from miniature import FEW_PROCESSES, MINIATURE, ROOT, Marked

from mempipe.engines.checkpoint import latest, read_state

BIN = Path(sys.executable).parent
SHORT = ["num_steps=2", "warm_start=null", "evaluation.num_questions=4", "checkpoint.every_steps=1"]
PORTS = ["port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port"]

PATIENCE = {"RAY_agent_register_timeout_ms": "300000", "RAY_raylet_start_wait_time_s": "120"}
"""A node gives up on its own parts after half a minute, which a busy machine may need."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    marked: Marked
    dashboard: str


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head node with ports, temporary folder and token of its own."""
    folder = tempfile.mkdtemp(prefix="mp-", dir="/tmp")  # sockets need a short path
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
    # The job's `python` is found on the path of whoever started the node, as with an activated environment.
    marked = Marked(
        {**token, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0", **PATIENCE}
    )
    marked.environment.pop("PYTHONPATH")  # the job must get along with what was uploaded
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    command = [
        str(BIN / "ray"),
        "start",
        "--head",
        "--block",
        "--node-ip-address=127.0.0.1",
        "--dashboard-host=127.0.0.1",
    ]
    command += [f"--temp-dir={folder}", "--num-cpus=2", f"--object-store-memory={256 * 2**20}"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    node = subprocess.Popen(
        command, env=marked.environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for name in ("dashboard-port", "dashboard-agent-listen-port"):  # the agent takes the jobs
            wait_for_port(ports[name], node)
        yield Cluster(marked=marked, dashboard=f"http://127.0.0.1:{ports['dashboard-port']}")
    finally:
        node.terminate()
        marked.survivors(within_s=3)
        marked.end()
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def wait_for_port(port: int, node: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert node.poll() is None and time.monotonic() < deadline, f"ray start: nobody listens on port {port}"
            time.sleep(0.2)


def submit(cluster: Cluster, *arguments: str) -> subprocess.Popen[str]:
    """`ray job submit` as the job's docstring has it; follows the log to the job's end."""
    command = [str(BIN / "ray"), "job", "submit", f"--address={cluster.dashboard}", "--working-dir=.", "--"]
    command += ["python", "-m", "jobs.train", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=cluster.marked.environment, cwd=ROOT, text=True, stdout=pipe, stderr=subprocess.STDOUT
    )


def test_a_submitted_job_trains_and_leaves_checkpoint_and_report(cluster, tmp_path):
    client = submit(cluster, "jobs/configs/quickstart.yaml", *MINIATURE, *FEW_PROCESSES, *SHORT, f"output={tmp_path}")
    driver: psutil.Process | None = None
    while driver is None and client.poll() is None:
        time.sleep(0.1)
        driver = next((p for p in cluster.marked.processes() if p.cmdline()[1:3] == ["-m", "jobs.train"]), None)
    assert driver is not None, client.communicate()
    assert driver.exe() == psutil.Process().exe()
    assert "_ray_pkg_" in driver.cwd()  # the uploaded copy
    assert not [name for name in (".venv", ".git", "runs") if (Path(driver.cwd()) / name).exists()]
    log, _ = client.communicate(timeout=900)
    assert client.returncode == 0 and "succeeded" in log, log
    folder = tmp_path / "quickstart"
    newest = latest(folder / "checkpoints")
    assert newest is not None and read_state(newest)["position"]["step"] == 2
    report = json.loads((folder / "report.json").read_text())
    assert report["num_steps"] == 2 and report["num_questions"] == 4
    _, _, of_the_job = log.partition("Tailing logs until the job exits")
    assert (
        "train: 2/2" in of_the_job and "pid=" not in of_the_job and "WARNING" not in of_the_job
    )  # plain lines of the run itself


def test_a_job_that_cannot_work_fails_with_its_sentence(cluster):
    client = submit(cluster, "jobs/configs/quickstart.yaml", "algorithm.group_size=0")
    log, _ = client.communicate(timeout=300)
    assert client.returncode != 0
    assert "error: algorithm.group_size is 0" in log and "Traceback" not in log
