"""The benchmark of upgrades sees refused requests and mixed answers."""

from __future__ import annotations

from typing import Any

import pytest
from service_builders import QUESTIONS, build_service, running

from benchmarks.asking import WAYS
from benchmarks.upgrade import Seen, faults, upgraded
from mempipe.engines.tiny import build_tokenizer
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.faults import InfrastructureFault

OLD = {"model": "agent", "model_version": "w0", "index": "i0"}


def reply(*ids: str, memory: str = "", **versions: Any) -> dict[str, Any]:
    searches = [{"passages": [{"id": each} for each in ids]}]
    turn = {"action": "look", "memory_after": memory, "searches": searches}
    return {"question": "who?", "turns": [turn], "memory": memory, **OLD, **versions}


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


def test_the_same_question_from_two_memories_has_two_answers():
    seen = seen_of(reply("1"))
    seen.note(reply("1", memory="other"), partition="p", start="earlier")
    assert faults(seen, num_upgrades=0) == []


@pytest.mark.parametrize(
    ("memory", "weights", "fault"), [("", "w0", []), ("x", "w0", ["differ"]), ("x", "w1", []), ("", "w1", [])]
)
def test_a_result_of_the_tool_is_that_of_a_reply_of_its_weights(memory, weights, fault):
    seen = seen_of(reply("1"))
    seen.note_tool({"model_version": weights, "memory": memory}, question="who?", partition="p")
    assert [found[-len("differ") :] for found in faults(seen, num_upgrades=0)] == fault


def test_a_refused_request_is_a_fault():
    seen = seen_of(reply("1"))
    seen.statuses["503"] += 2
    assert faults(seen, num_upgrades=0) == ["2 requests ended with 503"]


@pytest.mark.slow  # it starts a service
def test_clients_ask_in_every_way_and_see_what_is_not_answered(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.upgrade.REST_S", 0.0)
    build_tokenizer(tmp_path)
    service = build_service(load_tokenizer(str(tmp_path)), tmp_path)
    questions = [(question.text, "") for question in QUESTIONS[:2]]
    with running(service) as url:
        seen = upgraded(url, [], questions, num_requests=2 * len(WAYS), num_clients=2)
        assert faults(seen, num_upgrades=0) == [] and seen.ways["session"] == 2
        assert seen.replies.total() == 2 * (2 + 2 + 3 + 2 + 1)
        service.engine.fault = InfrastructureFault("no generator answered")
        seen = upgraded(url, [], questions, num_requests=len(WAYS), num_clients=2)
    assert seen.ways.total() == 0 and seen.statuses["session: 503"] == 1
    assert any(status.startswith("tool: ") for status in seen.statuses)
