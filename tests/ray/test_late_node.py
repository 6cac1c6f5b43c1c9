"""A Ray node whose agents are late, as on a busy machine: Ray ends it, and the run starts another one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from mempipe.actors.cluster import NODE_IS_LATE, connected
from tools.processes import command_line

pytestmark = pytest.mark.jobs
AGENT = "dashboard/agent.py"


@pytest.fixture
def stopped_agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[psutil.Process]]:
    """Stops the first agent that this process starts, before it has told its port."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "30")
    stopped: list[psutil.Process] = []
    ended = threading.Event()

    def stop_first() -> None:
        while not stopped and not ended.is_set():
            for process in psutil.Process().children(recursive=True):
                try:
                    if any(word.endswith(AGENT) for word in process.cmdline()):
                        process.suspend()
                        stopped.append(process)
                        return
                except psutil.NoSuchProcess:
                    continue
            time.sleep(0.05)

    thread = threading.Thread(target=stop_first)
    thread.start()
    yield stopped
    ended.set()
    thread.join()
    for process in stopped:
        process.kill()  # one that is not stopped ends with its node


def test_a_late_node_is_started_again_and_leaves_nothing(stopped_agent, capsys):
    before = set(psutil.Process().children(recursive=True))
    with connected("", name="late"):
        assert ray.get(ray.remote(lambda: "at work").remote()) == "at work"
        assert len(stopped_agent) == 1
        new = set(psutil.Process().children(recursive=True)) - before
        programs = [Path(command_line(process).partition(" ")[0]).name for process in new]
        assert programs.count("gcs_server") == programs.count("raylet") == 1, "those of the first node are gone"
    assert capsys.readouterr().out.count(NODE_IS_LATE) == 1
