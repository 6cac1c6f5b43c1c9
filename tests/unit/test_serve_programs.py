"""The agent service with a program: its memory goes from question to question, it learns who asks, and its errors are
told where only the machine's own users can read them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from scripted_play import tiny_tokenizer
from service_builders import QUESTIONS, Service, build_service, running

from mempipe.answers.answering import CachedPrompts
from mempipe.loader import load_config
from mempipe.serve.http.keys import new_key
from mempipe.types import Completion, FinishReason

EXAMPLE = Path(__file__).parents[2] / "examples" / "program_agent" / "config.yaml"
AGENT = "program_agent.agent"
TWO_HOPS = next(question for question in QUESTIONS if question.num_hops == 2)
GOLD = TWO_HOPS.golden_answers[0]
KEY, RECORD = new_key("ann")
FAULT = f"ZeroDivisionError: division by zero ({__file__}, line "


async def broken(question: str, client: AsyncOpenAI, search: Any) -> str:
    return str(1 / 0)


async def asked_by(question: str, client: AsyncOpenAI, search: Any, *, user: str) -> str:
    messages: Any = [{"role": "user", "content": question}]
    await client.chat.completions.create(model="policy", messages=messages, metadata={"memory": ""})
    return f"<{user}>"


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Service]:
    agents = {AGENT: load_config(EXAMPLE)}
    served = build_service(tiny_tokenizer(), tmp_path_factory.mktemp("state"), agent=AGENT, agents=agents)
    with running(served):
        yield served


def post(service: Service, path: str = "/v1/answer", *, key: str = "", **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{service.url}{path}", json=body, timeout=20, headers=headers)


def test_a_stream_says_which_turn_a_message_and_a_search_belong_to(service):
    """The turns themselves follow at the end: a program may go back to each of them."""
    lines = post(service, question=TWO_HOPS.text, stream=True).text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    turns = [(name, data["turn"]) for name, data in zip(names, told, strict=True) if "turn" in data]
    hops = [[("message", hop), ("search", hop), ("passages", hop), ("message", hop)] for hop in range(2)]
    assert turns == [*hops[0], *hops[1], ("message", 2)]
    assert [data["index"] for name, data in zip(names, told, strict=True) if name == "turn"] == [0, 1, 2]


def test_an_answer_comes_with_the_notes_of_each_context(service):
    reply = post(service, question=TWO_HOPS.text).json()
    assert reply["answer"] == GOLD
    first, second, last = reply["turns"]
    assert first["memory_before"] == "known nothing" and first["memory_limit"] == 64
    assert TWO_HOPS.evidence[0].value in first["memory_after"] == second["memory_before"]
    assert GOLD in second["memory_after"] == last["memory_before"]
    assert 0 < first["memory_tokens"] < second["memory_tokens"] <= 64


def test_a_session_goes_on_from_its_notes(service):
    session = post(service, "/v1/sessions").json()["id"]
    post(service, question=TWO_HOPS.text, session=session)
    kept = httpx.get(f"{service.url}/v1/sessions/{session}").json()["memory"]
    assert GOLD in kept and kept.endswith(f"{TWO_HOPS.text} {GOLD}")
    service.engine.says[:] = ["<answer>yes</answer>"]
    reply = post(service, question="is that so?", session=session).json()
    assert reply["answer"] == "yes" and reply["turns"][0]["memory_before"] == kept
    assert kept in service.engine.prompts[-1]


def test_a_request_may_lower_the_limit(service):
    reply = post(service, question=TWO_HOPS.text, budget={"memory_tokens": 3}).json()
    assert (reply["answer"], reply["end_reason"]) == (None, "memory_overflow")
    assert post(service, question=TWO_HOPS.text).json()["answer"] == GOLD


def test_without_a_memory_there_are_no_sessions(tmp_path):
    agents = {AGENT: load_config(EXAMPLE, ["budget.memory_tokens=null"])}
    served = build_service(tiny_tokenizer(), tmp_path, agent=AGENT, agents=agents)
    with running(served):
        session = post(served, "/v1/sessions").json()["id"]
        refused = post(served, question=TWO_HOPS.text, session=session)
        assert refused.status_code == 400 and "carries no memory" in refused.text
        turns = post(served, question=TWO_HOPS.text).json()["turns"]
        assert {turn["memory_after"] for turn in turns} == {""}


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": TWO_HOPS.text}]}
RESPONSE = {"model": "tiny", "input": TWO_HOPS.text}


@pytest.mark.parametrize(
    ("path", "body", "user"),
    [
        ("/v1/answer", {"question": TWO_HOPS.text}, ""),
        ("/v1/answer", {"question": TWO_HOPS.text, "user": "7"}, "/7"),
        ("/v1/chat/completions", CHAT, ""),
        ("/v1/chat/completions", CHAT | {"user": "7"}, "/7"),
        ("/v1/chat/completions", CHAT | {"user": None, "safety_identifier": "8"}, "/8"),
        ("/v1/chat/completions", CHAT | {"user": "7", "mempipe": {"user": "9"}}, "/7"),
        ("/v1/chat/completions", CHAT | {"user": "", "mempipe": {"user": "9"}}, "/9"),
        ("/v1/responses", RESPONSE | {"safety_identifier": "8"}, "/8"),
        ("/v1/completions", {"model": "tiny", "prompt": TWO_HOPS.text, "user": "../bob"}, "/../bob"),
    ],
)
def test_a_program_learns_who_asks(naming, path, body, user):
    """The key's name comes first, so nobody can pass for a user of another key."""
    reply = post(naming, path, key=KEY, **body)
    assert f"<ann{user}>" in reply.json().get("answer", reply.text), reply.text
    assert "user" not in reply.headers.get("x-mempipe-ignored", "")


@pytest.mark.parametrize("user", [7, {"id": "7"}, "x" * 201])
def test_a_user_that_is_no_short_text_is_refused(naming, user):
    """Its questions would otherwise be those of the key's other users."""
    reply = post(naming, "/v1/chat/completions", key=KEY, **CHAT, user=user)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "user"


@pytest.fixture(scope="module")
def naming(tmp_path_factory) -> Iterator[Service]:
    agents = {AGENT: load_config(EXAMPLE, [f"agent.program={__name__}:asked_by"])}
    state = tmp_path_factory.mktemp("naming")
    served = build_service(tiny_tokenizer(), state, agent=AGENT, agents=agents, keys=[RECORD])
    with running(served):
        yield served


@pytest.mark.parametrize("keys", [[], [RECORD]], ids=["own_machine", "with_keys"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_program_is_told_to_its_owner_alone(tmp_path, capfd, caplog, keys, stream):
    agents = {AGENT: load_config(EXAMPLE, [f"agent.program={__name__}:broken"])}
    served = build_service(tiny_tokenizer(), tmp_path, agent=AGENT, agents=agents, keys=keys)
    with running(served):
        body = {"model": "tiny", "messages": [{"role": "user", "content": TWO_HOPS.text}], "stream": stream}
        reply = post(served, "/v1/chat/completions", key=KEY if keys else "", **body)
    assert reply.status_code == (200 if stream else 500)
    assert (FAULT in reply.text) == (not keys)
    assert ("the service failed; its log says why" in reply.text) == bool(keys)
    assert FAULT in caplog.text + capfd.readouterr().err


@pytest.mark.parametrize(
    ("prompts", "cached", "contexts"),
    [
        (["abc", "abcXde", "abcXdeXfg"], 2 + 1 + 1, [0, 0, 0]),
        (["abc", "abd", "abcXef", "abdXef"], 2 + 2 + 1 + 1, [0, 1, 0, 1]),  # side by side
        (["abc", "abc", "abcXde", "abcXde"], 2 + 2 + 1 + 1, [0, 1, 0, 1]),  # equal ones
        (["abc", "abcXde", "abcXfg"], 2 + 1 + 5, [0, 0, 1]),  # a branch is a context that counts whole
    ],
)
def test_each_cached_token_counts_once_in_whatever_context(prompts, cached, contexts):
    """Of each prompt all tokens but the last are cached; the policy always writes X."""
    counted = CachedPrompts()
    count, places = counted.reader(), list[int]()
    for prompt in prompts:
        said = Completion(
            token_ids=[ord("X")],
            logprobs=[0.0],
            finish_reason=FinishReason.STOP,
            policy_version=0,
            num_cached_tokens=len(prompt) - 1,
        )
        places.append(count([ord(letter) for letter in prompt], said))
    assert counted.num_tokens == cached and places == contexts


@pytest.mark.parametrize("keys", [[], [RECORD]], ids=["own_machine", "with_keys"])
def test_the_command_line_of_a_program_is_not_for_callers_with_a_key(tmp_path, caplog, capfd, keys):
    command = ["sh", "-c", "kill -9 $$", "--token=of-the-operator"]
    agents = {AGENT: load_config(EXAMPLE, [f"agent.program={json.dumps(command)}"])}
    served = build_service(tiny_tokenizer(), tmp_path, agent=AGENT, agents=agents, keys=keys)
    with running(served):
        reply = post(served, question=TWO_HOPS.text, key=KEY if keys else "")
    assert reply.status_code == 503 and ("of-the-operator" in reply.text) == (not keys)
    assert ("its program was stopped" in reply.text) == bool(keys)
    assert not keys or "of-the-operator" in caplog.text + capfd.readouterr().err
