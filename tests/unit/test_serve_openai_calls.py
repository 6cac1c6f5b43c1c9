"""Every call of the official client to the APIs that the service has: it works, or its error says why not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import openai
import pytest
from openai._resource import SyncAPIResource
from service_builders import QUESTIONS, Service, build_service, config_of, running

QUESTION = next(question for question in QUESTIONS if question.num_hops == 2)
MESSAGES: Any = [{"role": "user", "content": QUESTION.text}]
AGENTS = ("memsearcher", "react", "mem1")


@pytest.fixture(scope="module")
def service(tokenizer, tmp_path_factory) -> Iterator[Service]:
    agents = {agent: config_of(agent) for agent in AGENTS}
    service = build_service(tokenizer, tmp_path_factory.mktemp("state"), agents=agents)
    with running(service):
        yield service


@pytest.fixture(scope="module")
def client(service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60)


class Stored(NamedTuple):
    """What the calls are about."""

    client: openai.OpenAI
    response: str
    conversation: str
    item: str


@pytest.fixture
def stored(client) -> Stored:
    response = client.responses.create(model="tiny", input=QUESTION.text)
    conversation = client.conversations.create(items=response.output)
    (item,) = client.conversations.items.list(conversation.id)
    return Stored(client, response.id, conversation.id, item.id or "")


def whole(stream: Any) -> Any:
    with stream as events:
        return list(events)


WORKS: dict[str, Callable[[Stored], Any]] = {
    "chat.completions.create": lambda s: s.client.chat.completions.create(model="tiny", messages=MESSAGES),
    "chat.completions.parse": lambda s: s.client.chat.completions.parse(model="tiny", messages=MESSAGES),
    "chat.completions.stream": lambda s: whole(s.client.chat.completions.stream(model="tiny", messages=MESSAGES)),
    "completions.create": lambda s: s.client.completions.create(model="tiny", prompt=QUESTION.text),
    "conversations.create": lambda s: s.client.conversations.create(),
    "conversations.retrieve": lambda s: s.client.conversations.retrieve(s.conversation),
    "conversations.update": lambda s: s.client.conversations.update(s.conversation, metadata={"a": "b"}),
    "conversations.delete": lambda s: s.client.conversations.delete(s.conversation),
    "conversations.items.create": lambda s: s.client.conversations.items.create(s.conversation, items=MESSAGES),
    "conversations.items.list": lambda s: list(s.client.conversations.items.list(s.conversation)),
    "conversations.items.retrieve": lambda s: s.client.conversations.items.retrieve(
        s.item, conversation_id=s.conversation
    ),
    "models.list": lambda s: list(s.client.models.list()),
    "models.retrieve": lambda s: s.client.models.retrieve("tiny"),
    "responses.create": lambda s: s.client.responses.create(model="tiny", input=QUESTION.text),
    "responses.parse": lambda s: s.client.responses.parse(model="tiny", input=QUESTION.text),
    "responses.stream": lambda s: whole(s.client.responses.stream(model="tiny", input=QUESTION.text)),
    "responses.retrieve": lambda s: s.client.responses.retrieve(s.response),
    "responses.delete": lambda s: s.client.responses.delete(s.response),
    "responses.input_items.list": lambda s: list(s.client.responses.input_items.list(s.response)),
    "responses.input_tokens.count": lambda s: s.client.responses.input_tokens.count(model="tiny", input=QUESTION.text),
}
REFUSED: dict[str, tuple[int, str, Callable[[Stored], Any]]] = {
    "chat.completions.list": (404, "no chat completion is stored", lambda s: s.client.chat.completions.list()),
    "chat.completions.retrieve": (
        404,
        "no chat completion is stored",
        lambda s: s.client.chat.completions.retrieve("x"),
    ),
    "chat.completions.update": (
        404,
        "no chat completion is stored",
        lambda s: s.client.chat.completions.update("x", metadata={}),
    ),
    "chat.completions.delete": (404, "no chat completion is stored", lambda s: s.client.chat.completions.delete("x")),
    "chat.completions.messages.list": (
        404,
        "no chat completion is stored",
        lambda s: s.client.chat.completions.messages.list("x"),
    ),
    "conversations.items.delete": (
        400,
        "no message can be taken out of it",
        lambda s: s.client.conversations.items.delete(s.item, conversation_id=s.conversation),
    ),
    "models.delete": (404, "no request deletes it", lambda s: s.client.models.delete("tiny")),
    "responses.cancel": (404, "by closing its connection", lambda s: s.client.responses.cancel(s.response)),
    "responses.compact": (
        404,
        "so none is compacted",
        lambda s: s.client.responses.compact(model="tiny", input=QUESTION.text),
    ),
}
OVER_WEB_SOCKETS = {"responses.connect"}
"""The service has none (`mempipe.serve.http.strangers`)."""


def calls_of(resource: SyncAPIResource, name: str) -> Iterator[str]:
    for part in dir(type(resource)):
        if not part.startswith(("_", "with_")):
            value = getattr(resource, part)
            if isinstance(value, SyncAPIResource):
                yield from calls_of(value, f"{name}.{part}")
            elif inspect.ismethod(value):
                yield f"{name}.{part}"


def test_every_call_of_the_client_is_tried(client):
    tried = WORKS.keys() | REFUSED.keys() | OVER_WEB_SOCKETS
    for name in ("chat", "completions", "conversations", "models", "responses"):
        assert set(calls_of(getattr(client, name), name)) <= tried


@pytest.mark.parametrize("name", WORKS)
def test_a_call_works(stored, name):
    WORKS[name](stored)


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_has_no_meaning_here_says_why(stored, name):
    status, why, call = REFUSED[name]
    with pytest.raises(openai.APIStatusError) as refused:
        call(stored)
    assert (refused.value.status_code, why in refused.value.message) == (status, True), refused.value.message


@pytest.mark.parametrize("agent", AGENTS)
def test_the_first_prompt_is_counted_as_it_is_sampled_from(service, client, agent):
    service.engine.prompts.clear()
    asked: Any = {"model": "tiny", "input": QUESTION.text, "extra_body": {"mempipe": {"agent": agent}}}
    counted = client.responses.input_tokens.count(**asked)
    assert service.engine.prompts == []
    played = client.responses.create(**asked).model_extra["mempipe"]
    assert counted.input_tokens == played["turns"][0]["prompt_tokens"]


def test_the_memory_of_a_conversation_counts_even_while_it_answers(service, client, stored):
    of_question = client.responses.input_tokens.count(model="tiny", input=QUESTION.text).input_tokens
    service.engine.go_on.clear()
    with client.responses.create(model="tiny", input=QUESTION.text, conversation=stored.conversation, stream=True):
        asked: Any = {"model": "tiny", "input": QUESTION.text}
        resumed = [
            client.responses.input_tokens.count(**asked, conversation=stored.conversation),
            client.responses.input_tokens.count(**asked, previous_response_id=stored.response),
        ]
    service.engine.go_on.set()
    assert [each.input_tokens > of_question for each in resumed] == [True, True]


def test_a_wrong_request_for_a_count_is_refused_as_its_question_would_be(client):
    for fields in ({"input": "x " * 5000}, {"input": []}, {"input": "x", "tools": [{"type": "web_search"}]}):
        with pytest.raises(openai.BadRequestError):
            client.responses.input_tokens.count(model="tiny", **fields)
