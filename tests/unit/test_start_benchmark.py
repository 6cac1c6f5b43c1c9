"""How `benchmarks.start` tells apart the processes of a run, and adds up their CPU-seconds."""

from __future__ import annotations

import pytest

from benchmarks.start import OTHERS, OWN, RAY, Usage, role


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/venv/bin/python -m mempipe.cli train quickstart.yaml", OWN),
        ("ray::LearnerActor.start", "LearnerActor"),
        ("ray::MapWorker(MapBatches(GroupStage)).submit", "GroupStage"),
        ("ray::IDLE", "IDLE"),
        ("/venv/lib/ray/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/x", RAY),
        ("/venv/bin/python -u /venv/lib/ray/dashboard/agent.py", RAY),
        ("sh -c true", OTHERS),
        ("", ""),
    ],
)
def test_a_process_is_known_by_its_command_line(command, expected):
    assert role(command) == expected


def test_a_worker_of_ray_is_counted_once_and_keeps_its_role_when_it_ends():
    usage, worker, other = Usage(), (7, 1.0), (7, 2.0)
    usage.count(worker, "IDLE", 1.0, "roles start")
    usage.count(worker, "LearnerActor", 3.0, "roles start")
    usage.count(worker, "", 4.0, "warm start")
    usage.count(other, "IDLE", 0.5, "warm start")  # the system gave the number of the process again
    assert {name: value for name, value in usage.by_role.items() if value} == {"LearnerActor": 4.0, "IDLE": 0.5}
    assert {name: value for name, value in usage.num_processes.items() if value} == {"LearnerActor": 1, "IDLE": 1}
    assert usage.by_phase == {"roles start": 3.0, "warm start": 1.5}
    assert usage.total == 4.5
