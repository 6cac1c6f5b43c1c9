"""A local Ray node that does not come up is started again. No node starts here; tests/ray/test_late_node.py has one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private import services

from mempipe.actors.cluster import IDLE_AGENT, NODE_IS_LATE, NODE_STARTS, connected
from mempipe.actors.lost import LaunchError


class Starts:
    """Counts the calls of `ray.init`; each raises the next error, the last one again and again."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = errors
        self.number = 0

    def __call__(self, **options: Any) -> None:
        self.number += 1
        raise self.errors[min(self.number, len(self.errors)) - 1]


LATE = Exception("The current node timed out during startup.")  # of this very class


def starts(monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> Starts:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    made = Starts(*errors)
    monkeypatch.setattr(ray, "init", made)
    return made


def test_a_node_that_is_late_is_started_four_times(monkeypatch, capsys):
    made = starts(monkeypatch, LATE)
    with pytest.raises(LaunchError, match=r"did not come up, 4 times; is the machine too busy\? The current node"):
        connected("", name="late").__enter__()
    assert made.number == NODE_STARTS == 4 and capsys.readouterr().out.count(NODE_IS_LATE) == 3


def test_another_error_is_raised_at_once(monkeypatch, capsys):
    made = starts(monkeypatch, LATE, LATE, ValueError("port"))
    with pytest.raises(ValueError, match="port"):
        connected("", name="late").__enter__()
    assert made.number == 3 and capsys.readouterr().out.count(NODE_IS_LATE) == 2


@pytest.mark.parametrize("metrics", [True, False])
def test_a_node_measures_itself_only_if_metrics_are_wanted(monkeypatch, metrics):
    """Ray's agent needs 130 MB, 3 CPU-seconds at the start and 1 per minute."""
    commands = []
    build = services._build_python_executable_command_memory_profileable

    def init(**_: Any) -> None:
        for component in ("dashboard_agent", "runtime_env_agent"):
            commands.append(services._build_python_executable_command_memory_profileable(component, ""))
        raise ValueError("that is all")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ValueError, match="that is all"):
        connected("", name="x", metrics=metrics).__enter__()
    ray_s = [sys.executable, "-u"]
    assert commands == [ray_s if metrics else [sys.executable, "-I", "-S", str(IDLE_AGENT)], ray_s]
    assert services._build_python_executable_command_memory_profileable is build


def test_an_idle_agent_names_no_port_and_ends_with_its_raylet(tmp_path):
    command = [
        sys.executable,
        "-IS",
        str(IDLE_AGENT),
        "agent.py",
        "--node-id=n1",
        f"--session-dir={tmp_path}",
        "--head",
    ]
    raylet = subprocess.Popen(["sh", "-c", '"$@" & echo $!; wait', "raylet", *command], stdout=subprocess.PIPE)
    assert raylet.stdout
    agent = psutil.Process(int(raylet.stdout.readline()))
    ports = {f"{port}_n1" for port in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")}
    until = time.monotonic() + 60
    while {*os.listdir(tmp_path)} != ports and time.monotonic() < until:
        time.sleep(0.02)
    assert {file.name: file.read_text() for file in Path(tmp_path).iterdir()} == dict.fromkeys(ports, "-1")
    assert agent.is_running()
    raylet.kill()
    raylet.wait()
    agent.wait(60)
