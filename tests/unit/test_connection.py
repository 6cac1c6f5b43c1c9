"""A cluster that cannot be reached, or does not start, is said in a sentence."""

from __future__ import annotations

import socket
import subprocess

import pytest
import ray

from mempipe.actors import launch
from mempipe.actors.launch import NODE_IS_LATE, LaunchError, connected


def test_nobody_at_the_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with (
        pytest.raises(LaunchError, match=rf"cannot reach the Ray cluster at '{address}'"),
        connected(address, name="x"),
    ):
        pass


def test_a_node_that_does_not_come_up(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def init(**options):
        raise error

    error = Exception("The current node timed out\n during startup.")
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(LaunchError, match=r"Ray did not start: The current node timed out during startup\.$"):
        connected("", name="x").__enter__()
    error = TypeError("init() got an unexpected keyword argument")  # a mistake of ours keeps its name and its trace
    with pytest.raises(TypeError):
        connected("", name="x").__enter__()


def test_a_node_that_comes_up_late_is_started_again_and_leaves_nothing(monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    parts: list[subprocess.Popen[bytes]] = []

    def init(**options):
        parts.append(subprocess.Popen(["sleep", "60"]))
        if len(parts) < 3:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(launch, "take_note_of_pool_arguments", lambda: None)  # asks the cluster
    with connected("", name="x"):
        late, again, node = parts
        assert late.wait(5) and again.wait(5) and node.poll() is None
    assert capsys.readouterr().out.count(NODE_IS_LATE) == 2
    node.kill()
    node.wait()
