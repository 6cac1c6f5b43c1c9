"""A local Ray node that does not come up is started again. No node starts here; tests/ray/test_late_node.py has one."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from mempipe.actors.cluster import NODE_IS_LATE, NODE_STARTS, connected
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
