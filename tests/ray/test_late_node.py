"""A Ray node whose agents are late, as on a busy machine: Ray ends it, and the run starts another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from mempipe.actors import cluster
from mempipe.actors.cluster import IDLE_AGENT, NODE_IS_LATE, connected
from tools.processes import command_line

pytestmark = pytest.mark.jobs
LATE_AGENT = """
import os, runpy, signal
with open({name!r}, "a+") as file:
    file.seek(0)
    is_first = not file.read()
    file.write(f"{{os.getpid()}} ")
if is_first:
    os.kill(os.getpid(), signal.SIGSTOP)
runpy.run_path({agent!r}, run_name="__main__")
"""


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file with the numbers of the node's agents. The first of them stops before it has told its ports."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "30")
    started, program = tmp_path / "started", tmp_path / "agent.py"
    program.write_text(LATE_AGENT.format(name=str(started), agent=str(IDLE_AGENT)))
    monkeypatch.setattr(cluster, "IDLE_AGENT", program)
    yield started
    psutil.Process(int(started.read_text().split()[0])).kill()  # one that is not stopped ends with its node


def test_a_late_node_is_started_again_and_leaves_nothing(agents, capsys):
    before = set(psutil.Process().children(recursive=True))
    with connected("", name="late"):
        assert ray.get(ray.remote(lambda: "at work").remote()) == "at work"
        assert len(agents.read_text().split()) == 2
        new = set(psutil.Process().children(recursive=True)) - before
        programs = [Path(command_line(process).partition(" ")[0]).name for process in new]
        assert programs.count("gcs_server") == programs.count("raylet") == 1, "those of the first node are gone"
    assert capsys.readouterr().out.count(NODE_IS_LATE) == 1
