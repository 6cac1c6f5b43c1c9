"""An answer is found in one index, whatever is deployed meanwhile."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import service_builders
from service_builders import QUESTIONS, Service, build_service, running

from mempipe.answers import answering
from mempipe.engines.tiny import build_tokenizer
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.types import SearchResult

TWO_HOPS = next(question for question in QUESTIONS if question.num_hops == 2)
GOLD = TWO_HOPS.golden_answers[0]
SNAPSHOTS: list[str] = []
"""Indexes that answer the next searches; the last one answers all further ones."""


async def changing(query: str, *, num_passages: int, partition: str) -> SearchResult:
    found = await service_builders.search(query, num_passages=num_passages, partition=partition)
    snapshot = SNAPSHOTS.pop(0) if len(SNAPSHOTS) > 1 else SNAPSHOTS[0]
    passages = [dataclasses.replace(passage, id=f"{snapshot}/{passage.id}") for passage in found.passages]
    return SearchResult(passages=passages, snapshot=snapshot)


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    build_tokenizer(folder)
    with running(service := build_service(load_tokenizer(str(folder)), folder, index=changing)):
        yield service


@pytest.fixture(autouse=True)
def indexes() -> Iterator[list[str]]:
    SNAPSHOTS[:] = ["old", "new"]
    yield SNAPSHOTS


def ask(service: Service, **more: Any) -> httpx.Response:
    return httpx.post(f"{service.url}/v1/answer", json={"question": TWO_HOPS.text, **more}, timeout=20)


def passages_of(reply: dict[str, Any]) -> set[str]:
    """The indexes of all passages that the turns show."""
    shown = [passage for turn in reply["turns"] for search in turn["searches"] for passage in search["passages"]]
    return {passage["id"].split("/")[0] for passage in shown}


def test_an_answer_that_the_old_index_began_is_found_in_the_new_one(service):
    reply = ask(service).json()
    assert (reply["answer"], reply["index"], passages_of(reply)) == (GOLD, "new", {"new"})


def test_all_attempts_of_a_request_search_one_index(service, indexes):
    indexes[:] = ["old", "old", "old", "new"]
    reply = ask(service, num_samples=3, sampling={"temperature": 1.0}).json()
    assert (reply["index"], passages_of(reply)) == ("new", {"new"})


def test_an_index_that_does_not_change_is_named(service, indexes):
    indexes[:] = ["old"]
    assert ask(service).json()["index"] == "old"


def test_an_index_that_changes_again_and_again_is_503(service, indexes, monkeypatch):
    monkeypatch.setattr(answering, "MAX_RESTARTS", 1)
    indexes[:] = ["1", "2", "3", "4"]
    answer = ask(service)
    assert answer.status_code == 503 and "the index changed" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1


def test_usage_counts_the_attempt_that_answered(service, indexes):
    changed = ask(service).json()["usage"]
    indexes[:] = ["new"]
    assert changed == ask(service).json()["usage"]


def test_a_stream_says_that_it_starts_again(service):
    with httpx.stream(
        "POST", f"{service.url}/v1/answer", json={"question": TWO_HOPS.text, "stream": True}, timeout=20
    ) as response:
        lines = list(response.iter_lines())
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    turns = names[names.index("restarted") + 1 :].count("turn")
    answer = json.loads(next(line for line in reversed(lines) if line.startswith("data: ")).removeprefix("data: "))
    assert names[-1] == "answer" and turns == len(answer["turns"]) and answer["index"] == "new"


def test_streams_of_the_openai_api_end_with_the_answer(service, indexes):
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        messages: Any = [{"role": "user", "content": TWO_HOPS.text}]
        chunks = client.chat.completions.create(model="tiny", messages=messages, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == GOLD
        indexes[:] = ["old", "new"]
        with client.responses.stream(model="tiny", input=TWO_HOPS.text) as stream:
            told = [event for event in stream if event.type == "response.output_text.done"]
            final = stream.get_final_response()
    assert [event.text for event in told] == [GOLD] and final.output_text == GOLD
    ids = [item.to_dict()["id"] for item in final.output]
    assert len(set(ids)) == len(ids) > 3  # those of the attempt that was given up, too
