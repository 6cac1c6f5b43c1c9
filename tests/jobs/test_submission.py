"""The main job on a cluster of its own, submitted as a Ray job. It trains MemAgent."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from miniature import FEW_PROCESSES, MINIATURE, SHORT_WARM_START
from trained import GRAMMAR, NUM_QUESTIONS, check_trained

from mempipe.engines.checkpoint import latest, read_state
from mempipe.environment import EVERY_PROCESS
from tools.processes import ROOT, Marked, Running, free_ports

BIN = Path(sys.executable).parent
SETTINGS = [
    *MINIATURE,
    *FEW_PROCESSES,
    *SHORT_WARM_START,
    *GRAMMAR,
    "num_steps=2",
    "checkpoint.every_steps=1",
    "name=run",
]
PORTS = ["port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port"]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    marked: Marked
    dashboard: str


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head node with ports, temporary folder and token of its own."""
    folder = Path(tempfile.mkdtemp(prefix="mp-", dir="/tmp"))  # sockets need a short path
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
    # The job's `python` is found on the path of whoever started the node, as with an activated environment.
    marked = Marked({**token, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **EVERY_PROCESS})
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
    node = Running(command, marked=marked, cwd=folder)
    try:
        for name in ("dashboard-port", "dashboard-agent-listen-port"):  # the agent takes the jobs
            node.wait_until(lambda port=ports[name]: is_open(port), every_s=0.2)
        yield Cluster(marked=marked, dashboard=f"http://127.0.0.1:{ports['dashboard-port']}")
    finally:
        node.kill()
        marked.end()
        shutil.rmtree(folder, ignore_errors=True)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def submit(cluster: Cluster, *arguments: str, output: Path) -> Running:
    """`ray job submit` as the job's docstring has it; follows the log to the job's end."""
    command = [str(BIN / "ray"), "job", "submit", f"--address={cluster.dashboard}", "--working-dir=.", "--"]
    command += ["python", "-m", "jobs.train", *arguments, f"output={output}"]
    return Running(command, marked=cluster.marked, cwd=ROOT, writes=output)


def job_driver(cluster: Cluster) -> psutil.Process | None:
    for process in cluster.marked.processes():
        with suppress(psutil.NoSuchProcess):
            if process.cmdline()[1:3] == ["-m", "jobs.train"]:
                return process
    return None


def test_a_submitted_job_trains_and_leaves_checkpoint_and_report(cluster, tmp_path):
    client = submit(cluster, "jobs/configs/quickstart_memagent.yaml", *SETTINGS, "name=run", output=tmp_path)
    driver = client.wait_until(lambda: job_driver(cluster), every_s=0.1)
    assert driver.exe() == psutil.Process().exe()
    assert "_ray_pkg_" in driver.cwd()  # the uploaded copy
    assert not [name for name in (".venv", ".git", "runs") if (Path(driver.cwd()) / name).exists()]
    ended = client.wait()
    log = ended.stdout
    assert ended.returncode == 0 and "succeeded" in log, log + ended.stderr
    folder = tmp_path / "run"
    check_trained(folder, "memagent", num_steps=2)
    newest = latest(folder / "checkpoints")
    assert newest is not None and read_state(newest).position.step == 2
    report = json.loads((folder / "report.json").read_text())
    assert report["num_steps"] == 2 and report["num_questions"] == NUM_QUESTIONS
    _, _, of_the_job = log.partition("Tailing logs until the job exits")
    assert (
        "train: 2/2" in of_the_job and "pid=" not in of_the_job and "WARNING" not in of_the_job
    )  # plain lines of the run itself


def test_a_job_that_cannot_work_fails_with_its_sentence(cluster, tmp_path):
    ended = submit(cluster, "jobs/configs/quickstart.yaml", "algorithm.group_size=0", output=tmp_path).wait()
    log = ended.stdout + ended.stderr
    assert ended.returncode != 0
    assert "error: algorithm.group_size is 0" in log and "Traceback" not in log
