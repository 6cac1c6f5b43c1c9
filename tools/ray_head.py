"""The head node of a Ray cluster with a dashboard, as `ray start --head` makes it, for tests and
benchmarks that submit jobs or deploy services."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mempipe.environment import EVERY_PROCESS
from tools.processes import Marked, Running, free_ports

BIN = Path(sys.executable).parent
PORTS = ["port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port"]

AUTHENTICATION = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}


@dataclass(frozen=True, kw_only=True)
class Head:
    marked: Marked
    """The processes of the node, and of the commands that are started with its environment."""
    dashboard: str


@contextmanager
def ray_head(environment: Mapping[str, str], *, num_cpus: int = 2, installed: bool = False) -> Iterator[Head]:
    """Yields a head on 127.0.0.1 with ports and a temporary folder of its own, started with these variables.

    With `installed` its jobs find mempipe without shipping it.
    """
    folder = Path(tempfile.mkdtemp(prefix="mp-", dir="/tmp"))  # sockets need a short path
    # The job's `python` is found on the path of the process that started the node, as with an activated environment.
    marked = Marked({"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **EVERY_PROCESS, **environment})
    if not installed:
        marked.environment.pop("PYTHONPATH")
    for name in AUTHENTICATION - environment.keys():
        marked.environment.pop(name, None)
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    command = [str(BIN / "ray"), "start", "--head", "--block"]
    command += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--temp-dir={folder}"]
    command += [f"--num-cpus={num_cpus}", f"--object-store-memory={256 * 2**20}"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    node = Running(command, marked=marked, cwd=folder)
    try:
        for name in ("dashboard-port", "dashboard-agent-listen-port"):  # the agent takes the jobs
            node.wait_until(lambda port=ports[name]: _is_open(port), every_s=0.2)
        yield Head(marked=marked, dashboard=f"http://127.0.0.1:{ports['dashboard-port']}")
    finally:
        node.kill_tree()  # an agent of the node without its server looks for it at full speed, for a minute
        marked.end()
        shutil.rmtree(folder, ignore_errors=True)


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
