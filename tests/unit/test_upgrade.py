"""The benchmark of upgrades sees refused requests and mixed answers."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.upgrade import Seen, faults

OLD = {"model": "agent", "model_version": "w0", "index": "i0"}


def reply(*ids: str, memory: str = "", **versions: Any) -> dict[str, Any]:
    searches = [{"passages": [{"id": each} for each in ids]}]
    turn = {"action": "look", "memory_after": memory, "searches": searches}
    return {"question": "who?", "turns": [turn], **OLD, **versions}


def seen_of(*replies: dict[str, Any]) -> Seen:
    seen = Seen()
    for each in replies:
        seen.statuses["200"] += 1
        seen.note(each, partition="p")
    return seen


def test_versions_that_follow_one_another_are_no_fault():
    seen = seen_of(reply("1"), reply("1"), reply("1", memory="x", model_version="w1"), reply("new/1", index="i1"))
    assert faults(seen, num_upgrades=2) == [] and seen.replies.total() == 4


@pytest.mark.parametrize(
    ("replies", "fault"),
    [
        ([reply("1", "new/1")], "passages of another index"),
        ([reply("1"), reply("1", index="i1")], "passages of another index"),
        ([reply("1"), reply("1", memory="other")], "differ"),
        ([reply("1", model=name) for name in "abcd"], "4 combinations of versions answered; 3 were deployed"),
    ],
)
def test_a_mixture_is_a_fault(replies, fault):
    (found,) = faults(seen_of(*replies), num_upgrades=2)
    assert fault in found


def test_the_same_question_in_two_partitions_has_two_answers():
    seen = seen_of(reply("1"))
    seen.note(reply("1", memory="other"), partition="q")
    assert faults(seen, num_upgrades=0) == []


def test_a_refused_request_is_a_fault():
    seen = seen_of(reply("1"))
    seen.statuses["503"] += 2
    assert faults(seen, num_upgrades=0) == ["2 requests ended with 503"]
