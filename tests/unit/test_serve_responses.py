"""/v1/responses, /v1/conversations and /v1/completions with the official client, and memory as reasoning."""

from __future__ import annotations

import functools
import itertools
import json
import time
import typing
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from service_builders import QUESTIONS, Service, build_service, config_with_instructions, running

from mempipe.openai_api.completions_api import CompletionRequest
from mempipe.openai_api.responses_api import InputItem, ResponseRequest
from mempipe.openai_api.responses_reading import read_items, read_response
from mempipe.serve.http.keys import new_key
from mempipe.serve.state.responses import StoredResponse
from mempipe.serve.state.store import Store

TWO_HOPS = next(question for question in QUESTIONS if question.num_hops == 2)
GOLD = TWO_HOPS.golden_answers[0]
IGNORED = "x-mempipe-ignored"


@pytest.fixture(scope="module")
def shared(tokenizer, tmp_path_factory) -> Iterator[Service]:
    service = build_service(tokenizer, tmp_path_factory.mktemp("state"))
    with running(service):
        yield service


@pytest.fixture
def service(shared) -> Iterator[Service]:
    shared.engine.prompts.clear()
    shared.engine.limits.clear()
    yield shared
    shared.engine.says.clear()
    shared.engine.fault = None


def client_of(service: Service, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0, timeout=30)


def ask(service: Service, question: Any = TWO_HOPS.text, **fields: Any) -> Any:
    return client_of(service).responses.create(model="tiny", input=question, **fields)


def refused(service: Service, path: str = "responses", **body: Any) -> tuple[int, str | None]:
    answer = httpx.post(f"{service.url}/v1/{path}", json=body, timeout=30)
    return answer.status_code, answer.json()["error"]["param"]


def box(answer: str) -> str:
    return f"I know</think>\\boxed{{ {answer}}}"


def memories(response: Any) -> list[str]:
    return [part.text for item in response.output if item.type == "reasoning" for part in item.summary]


# Fields.


def test_every_field_of_the_official_client_is_a_field_here():
    assert set(typing.get_type_hints(ResponseCreateParamsBase)) <= set(ResponseRequest.model_fields)
    assert set(typing.get_type_hints(CompletionCreateParamsBase)) <= set(CompletionRequest.model_fields)


def test_what_has_no_meaning_is_taken_and_listed(service):
    fields = {"include": ["reasoning.encrypted_content"], "truncation": "auto", "reasoning": {"effort": "low"}}
    fields |= {"tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}}, "instructions": "be brief"}
    fields |= {"background": False, "stream_options": {"include_obfuscation": False}}
    answer = client_of(service).responses.with_raw_response.create(model="tiny", input=TWO_HOPS.text, **fields)
    assert answer.parse().output_text == GOLD
    listed = set(answer.headers[IGNORED].split(", "))
    assert listed == (fields.keys() - {"include"}) | {"include.reasoning.encrypted_content"}


DEEP = functools.reduce(lambda inner, _: [inner], range(100), list[Any]())
REFUSED: dict[str, Any] = {
    "background": True,
    "tools": [{"type": "web_search"}],
    "tool_choice": "required",
    "text.format": {"text": {"format": {"type": "json_object"}}},
    "prompt": {"id": "p"},
    "moderation": {"model": "m"},
    "top_logprobs": 2,
    "max_output_tokens": 0,
    "nonsense": 1,
    "input.0.content": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
    "input.0.role": {"input": [{"type": "message", "content": "x"}]},
    "input.1": {"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "a"}]},
    "input.2": {"input": [*[{"role": "user", "content": "x"}] * 2, {"role": "user", "content": "x", "of": DEEP}]},
    "input.0": {"input": [3]},
    "input": {"input": [{"role": "system", "content": "x"}]},
    "model": "other",
    "mempipe.budget.max_turns": {"mempipe": {"budget": {"max_turns": 65}}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused_by_name(service, name):
    value = REFUSED[name]
    body = value if isinstance(value, dict) and value.keys() & {"input", "text", "mempipe"} else {name: value}
    assert refused(service, **{"input": "x", **body}) == (404 if name in ("model", "input.1") else 400, name)


# Responses.


def test_a_response_is_the_answer_with_the_memory_after_each_turn(service):
    response = ask(service, max_output_tokens=30, metadata={"ticket": "17"})
    assert (response.status, response.output_text, response.error) == ("completed", GOLD, None)
    turns = response.model_extra["mempipe"]["turns"]
    assert [item.type for item in response.output] == ["reasoning"] * 3 + ["message"]
    assert memories(response) == [turn["memory_after"] for turn in turns if turn["memory_after"]]
    thoughts = [part.text for item in response.output if item.type == "reasoning" for part in item.content]
    assert thoughts == [turn["thought"] for turn in turns]
    assert set(service.engine.limits) == {30} and response.metadata == {"ticket": "17"}
    used = response.usage
    assert used.total_tokens == used.input_tokens + used.output_tokens
    assert 0 < used.output_tokens_details.reasoning_tokens < used.output_tokens


def test_a_stored_response_can_be_read_and_deleted(service):
    client, response = client_of(service), ask(service)
    again = client.responses.retrieve(response.id)
    assert again.output == response.output and again.usage == response.usage
    assert "mempipe" not in again.model_extra
    client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    unstored = ask(service, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)
    with pytest.raises(openai.NotFoundError) as missing:
        ask(service, previous_response_id=unstored.id)
    assert missing.value.param == "previous_response_id" and missing.value.code == "previous_response_not_found"


def test_the_items_of_a_request_are_listed_page_by_page(service):
    said = [{"role": "user", "content": f"number {n}"} for n in range(4)]
    items = [*said, {"role": "assistant", "content": "five", "id": "a"}]
    items += [{"type": "function_call_output", "call_id": "c", "output": "half \ud83d", "id": "a"}, {"id": ""}]
    items[-1] |= {"role": "user", "content": [{"type": "input_text", "text": TWO_HOPS.text}]}
    body, headers = json.dumps({"input": items}), {"content-type": "application/json"}  # escapes half a character
    response = httpx.post(f"{service.url}/v1/responses", content=body, headers=headers, timeout=30).json()["id"]
    listed = client_of(service).responses.input_items
    newest = list(listed.list(response, limit=2))
    assert [item.id for item in newest][1:3] == [f"input_5_of_{response}", "a"] and len(newest) == len(items)
    page = listed.list(response, limit=3, order="asc", after=newest[-1].id)
    assert [item.content[0].text for item in page.data] == ["number 1", "number 2", "number 3"] and page.has_more
    assert newest[0].content[0].text == TWO_HOPS.text and newest[1].output == "half \ufffd"
    assert (newest[2].role, newest[2].content[0].type) == ("assistant", "output_text")
    (one,) = listed.list(ask(service).id)
    assert (one.role, one.content[0].text) == ("user", TWO_HOPS.text)
    for wrong in ({"after": "none"}, {"limit": 101}):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            listed.list(response, **wrong)
    with pytest.raises(openai.NotFoundError):
        listed.list("none")


def test_the_next_question_goes_on_from_the_memory_in_each_of_three_ways(service):
    """By the response's id, by its items sent back, and in a conversation: the policy reads the same."""
    client = client_of(service)
    first, conversation = ask(service), client.conversations.create()
    ask(service, conversation=conversation.id)
    question = {"role": "user", "content": "is that so?"}
    sent_back = [{"role": "user", "content": TWO_HOPS.text}, *(item.model_dump() for item in first.output), question]
    ways = (
        {"question": "is that so?", "previous_response_id": first.id},
        {"question": sent_back, "store": False},
        {"question": [question], "conversation": {"id": conversation.id}},
    )
    read = []
    for way in ways:
        service.engine.says[:] = [box("yes")]
        service.engine.prompts.clear()
        assert ask(service, **way).output_text == "yes"
        read.append(service.engine.prompts[0])
    assert f"<memory>{memories(first)[-1]}\n{TWO_HOPS.text} {GOLD}</memory>" in read[0]
    assert read[0] == read[1] == read[2]


def test_references_to_the_items_of_a_stored_response_stand_for_them(service):
    """Vercel's `ai` with `@ai-sdk/openai` sends the last answer back in this way, unless it is told `store: false`."""
    first = ask(service)
    said, asked = [{"role": "user", "content": [{"type": "input_text", "text": text}]} for text in (TWO_HOPS.text, "?")]
    reference = [{"type": "item_reference", "id": item.id} for item in first.output]
    service.engine.prompts.clear()
    for items in (reference, [item.model_dump() for item in first.output]):
        service.engine.says[:] = [box("yes")]
        assert ask(service, [said, *items, asked]).output_text == "yes"
    by_reference, whole = service.engine.prompts
    assert by_reference == whole and f"{memories(first)[-1]}\n{TWO_HOPS.text} {GOLD}</memory>" in whole
    others = (ask(service, store=False).output[0].id, f"memory_9_of_{first.id}", "rs_1", "msg_of_resp_\ud800", None)
    for unknown in others:
        body = {"input": [said, {"type": "item_reference", "id": unknown}, asked]}
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{service.url}/v1/responses", content=json.dumps(body).encode(), headers=headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (404, "input.1", "item_not_found")
        assert error["message"].endswith("which is not stored; send the whole item")


def test_a_thought_that_a_client_sends_back_as_a_summary_is_no_memory(service):
    """As llama-index does: thought and memory of an item are one text, and the last turn has a thought alone."""
    first = ask(service)
    sent_back = [{"role": "user", "content": TWO_HOPS.text}]
    for item in first.output[:-1]:
        text = "\n".join(part.text for part in [*item.content, *item.summary])
        sent_back.append({"type": "reasoning", "id": item.id, "summary": [{"type": "summary_text", "text": text}]})
    sent_back += [{"role": "assistant", "content": GOLD}, {"role": "user", "content": "is that so?"}]
    service.engine.says[:] = [box("yes")]
    service.engine.prompts.clear()
    answer = client_of(service).responses.with_raw_response.create(model="tiny", input=sent_back)
    assert f"{memories(first)[-1]}\n{TWO_HOPS.text} {GOLD}</memory>" in service.engine.prompts[0]
    assert IGNORED not in answer.headers


def test_a_conversation_is_a_session_and_begins_with_its_items(service):
    client = client_of(service)
    items = [{"type": "message", "role": "user", "content": "who?"}]
    items += [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Ann"}]}]
    made = client.conversations.create(items=items)
    assert client.conversations.retrieve(made.id).id == made.id
    session = httpx.get(f"{service.url}/v1/sessions/{made.id}").json()
    assert (session["memory"], session["num_questions"]) == ("who? Ann", 0)
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)
    assert refused(service, input="x", conversation=made.id) == (404, "conversation")
    assert refused(service, input="x", conversation="a", previous_response_id="b") == (400, "previous_response_id")


def test_the_items_of_a_conversation_count_as_what_its_key_stores(tokenizer, tmp_path):
    service = build_service(tokenizer, tmp_path, max_key_bytes=1000)
    items: list[Any] = [{"role": "user", "content": "x" * 600}]
    with running(service):
        conversations = client_of(service).conversations
        first = conversations.create(items=items)
        with pytest.raises(openai.RateLimitError, match=r"and may keep 1000 \(max_key_bytes\); delete documents, "):
            conversations.create(items=items)
        document = httpx.post(f"{service.url}/v1/documents").json()["id"]
        assert httpx.post(f"{service.url}/v1/documents/{document}/pieces", content=b"x" * 401).status_code == 429
        conversations.delete(first.id)
        conversations.create(items=items)


def test_a_conversation_lists_what_it_does_not_keep(service):
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "who?"}]
    body: dict[str, Any] = {"items": [*said, {"type": "web_search_call", "id": "a"}]}
    made = httpx.post(f"{service.url}/v1/conversations", json=body, timeout=30)
    more = httpx.post(f"{service.url}/v1/conversations/{made.json()['id']}/items", json=body, timeout=30)
    assert made.headers[IGNORED] == more.headers[IGNORED] == "items.system, items.web_search_call"
    assert IGNORED not in httpx.post(f"{service.url}/v1/conversations", timeout=30).headers


def test_a_conversation_keeps_what_a_client_notes_with_it(service):
    conversations = client_of(service).conversations
    made = conversations.create(metadata={"topic": "x"}, items=[{"role": "user", "content": "who?"}])
    assert made.metadata == conversations.retrieve(made.id).metadata == {"topic": "x"}
    assert conversations.update(made.id, metadata={"topic": "y"}).metadata == {"topic": "y"}
    ask(service, conversation=made.id)
    assert conversations.retrieve(made.id).metadata == {"topic": "y"}
    assert conversations.update(made.id, metadata=None).metadata == {}
    with pytest.raises(openai.NotFoundError):
        conversations.update("none", metadata={})


def test_the_one_item_of_a_conversation_is_its_memory(service):
    conversations = client_of(service).conversations
    made = conversations.create()
    assert list(conversations.items.list(made.id)) == []
    said = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "Ann"}]
    for _ in range(2):
        added = conversations.items.create(made.id, items=said)
    (item,) = conversations.items.list(made.id)
    assert item.summary[0].text == "who? Ann\nwho? Ann" and (added.first_id, added.last_id) == (item.id, item.id)
    ask(service, conversation=made.id)
    (item,) = conversations.items.list(made.id)
    assert item.summary[0].text == httpx.get(f"{service.url}/v1/sessions/{made.id}").json()["memory"]
    other = conversations.create(items=[{"role": "user", "content": "forget this"}])
    conversations.items.create(other.id, items=[item.model_dump(exclude_none=True)])  # a memory takes its place
    assert next(iter(conversations.items.list(other.id))).summary == item.summary
    assert conversations.items.retrieve(item.id, conversation_id=made.id) == item
    with pytest.raises(openai.BadRequestError, match="no message can be taken out of it; add a memory"):
        conversations.items.delete(item.id, conversation_id=made.id)
    for act in (conversations.items.retrieve, conversations.items.delete):
        with pytest.raises(openai.NotFoundError, match="keeps its memory and no item 'msg_1'"):
            act("msg_1", conversation_id=made.id)
    assert next(iter(conversations.items.list(made.id))) == item


def test_items_wait_for_the_question_that_is_in_flight(service):
    made = client_of(service).conversations.create()
    service.engine.go_on.clear()
    body = {"question": TWO_HOPS.text, "session": made.id, "stream": True}
    with httpx.stream("POST", f"{service.url}/v1/answer", json=body, timeout=20) as asking:
        lines = asking.iter_lines()
        next(lines)
        items = {"items": [{"role": "user", "content": "who?"}]}
        assert refused(service, f"conversations/{made.id}/items", **items) == (409, "session")
        service.engine.go_on.set()
        assert "event: answer" in [*lines]


def test_a_wrong_item_of_a_conversation_is_named(service):
    body = {"items": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "a"}]}
    refused = httpx.post(f"{service.url}/v1/conversations", json=body, timeout=30)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "items.1")


def test_a_response_belongs_to_its_key(tokenizer, tmp_path):
    (key, record), (other, second) = new_key("ann"), new_key("bob")
    service = build_service(tokenizer, tmp_path, keys=[record, second])
    with running(service):
        response = client_of(service, key).responses.create(input=TWO_HOPS.text)
        assert client_of(service, key).responses.retrieve(response.id).output_text == GOLD
        for call in (client_of(service, other).responses.retrieve, client_of(service, other).responses.delete):
            with pytest.raises(openai.NotFoundError):
                call(response.id)
        with pytest.raises(openai.NotFoundError):
            client_of(service, other).responses.create(input="x", previous_response_id=response.id)
        item = {"type": "item_reference", "id": response.output[0].id}
        with pytest.raises(openai.NotFoundError, match="is not stored"):
            client_of(service, other).responses.create(input=[item, {"role": "user", "content": "x"}])


def test_a_stream_has_the_official_events_and_ends_with_the_response(service):
    plain = ask(service)
    with client_of(service).responses.stream(model="tiny", input=TWO_HOPS.text) as stream:
        events = list(stream)
        final = stream.get_final_response()
    names = [event.type for event in events]
    assert names[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert names[-1] == "response.completed" and names.count("response.output_item.done") == 4
    assert names.count("response.reasoning_summary_text.delta") == 2
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (final.output_text, final.usage) == (GOLD, plain.usage)
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert done == [item.id for item in final.output] and len(set(done)) == 4
    assert client_of(service).responses.retrieve(final.id).output_text == GOLD
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == GOLD


def test_every_text_of_a_stream_is_added_to_a_part_that_was_begun(service):
    """The Node client of OpenAI stops with `missing content at index 0` where a delta belongs to no part."""
    built: dict[str, Any] = {}
    for event in ask(service, stream=True):
        if event.type == "response.output_item.added":
            built[event.item.id] = item = event.item.model_dump()
            assert item["content"] == [] and not item.get("summary")
        elif event.type in ("response.content_part.added", "response.reasoning_summary_part.added"):
            parts = built[event.item_id]["content" if event.type == "response.content_part.added" else "summary"]
            parts.append(event.part.model_dump())
        elif event.type in ("response.reasoning_text.delta", "response.output_text.delta"):
            built[event.item_id]["content"][event.content_index]["text"] += event.delta
        elif event.type == "response.reasoning_summary_text.delta":
            built[event.item_id]["summary"][event.summary_index]["text"] += event.delta
        elif event.type == "response.content_part.done":
            assert built[event.item_id]["content"][event.content_index] == event.part.model_dump()
        elif event.type == "response.output_item.done":
            assert {**built[event.item.id], "status": "completed"} == event.item.model_dump()
    assert [item["type"] for item in built.values()] == ["reasoning"] * 3 + ["message"]


def test_a_stream_of_several_attempts_shows_the_turns_of_the_answer(service):
    service.engine.says[:] = [box("Oslo"), box("Lima"), box("Lima")]
    options = {"mempipe": {"num_samples": 3}}
    events = list(ask(service, "where?", stream=True, temperature=1.0, extra_body=options))
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in items] == ["reasoning", "message"]
    assert events[-1].response.output_text == "Lima" and [each.id for each in items] == [
        each.id for each in events[-1].response.output
    ]


def test_a_fault_in_a_stream_is_response_failed(service):
    from mempipe.faults import InfrastructureFault

    service.engine.fault = InfrastructureFault("gone")
    last = list(ask(service, stream=True))[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "server_error"


def test_a_cut_answer_is_incomplete(service):
    response = ask(service, max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    last = list(ask(service, max_output_tokens=3, stream=True))[-1]
    assert last.type == "response.incomplete"


def test_logprobs_are_those_of_the_answer(service):
    response = ask(service, include=["message.output_text.logprobs"])
    (part,) = response.output[-1].content
    assert "".join(each.token for each in part.logprobs).strip() == GOLD


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_character_is_replaced_wherever_it_is_repeated(service, stream):
    body = {"input": "where\ud800?", "instructions": "\ud800", "metadata": {"\ud800": "\ud800"}, "stream": stream}
    service.engine.says[:] = [box("Lima")]
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{service.url}/v1/responses", content=json.dumps(body).encode(), headers=headers, timeout=30)
    assert answer.status_code == 200 and "Lima" in answer.text
    if not stream:
        assert answer.json()["metadata"] == {"\ufffd": "\ufffd"} and answer.json()["instructions"] == "\ufffd"


async def test_the_async_client_works(service):
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        assert (await client.responses.create(input=TWO_HOPS.text)).output_text == GOLD
        stream = await client.responses.create(input=TWO_HOPS.text, stream=True)
        events = [event async for event in stream]
        assert events[-1].response.output_text == GOLD


def test_langchain_goes_on_from_a_response(service):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai of the extra `dev` is not installed")
    model = langchain.ChatOpenAI(
        base_url=f"{service.url}/v1", api_key="none", model="tiny", use_responses_api=True, max_tokens=60, temperature=0
    )
    first = model.invoke(TWO_HOPS.text)
    assert first.text == GOLD and first.usage_metadata["output_token_details"]["reasoning"] > 0
    service.engine.says[:] = [box("yes")]
    service.engine.prompts.clear()
    assert model.invoke("is that so?", previous_response_id=first.response_metadata["id"]).text == "yes"
    assert f"{TWO_HOPS.text} {GOLD}</memory>" in service.engine.prompts[0]
    assert "".join(chunk.text for chunk in model.stream(TWO_HOPS.text)) == GOLD
    service.engine.says[:] = [box("yes")]
    service.engine.prompts.clear()
    assert model.invoke([("human", TWO_HOPS.text), first, ("human", "is that so?")]).text == "yes"
    assert f"{TWO_HOPS.text} {GOLD}</memory>" in service.engine.prompts[0]


def test_instructions_are_read_where_there_is_a_place_for_them(tokenizer, tmp_path):
    service = build_service(tokenizer, tmp_path, agents={"memsearcher": config_with_instructions(tmp_path)})
    with running(service):
        service.engine.says[:] = [box("Lima")]
        said = [{"role": "developer", "content": "use words"}, {"role": "user", "content": "where?"}]
        assert ask(service, said, instructions="be brief").output_text == "Lima"
        assert "where? heed be brief\nuse words" in service.engine.prompts[0]
        with pytest.raises(openai.BadRequestError) as long:
            ask(service, "where?", instructions="word " * 100)
        assert long.value.param == "input"


def test_foreign_items_are_history_and_what_is_not_read_is_listed():
    items = [
        {"role": "user", "content": "how warm is it?"},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Lima"}'},
        {"type": "function_call_output", "call_id": "1", "output": "21 degrees"},
        {"type": "reasoning", "id": "rs_foreign", "summary": [{"type": "summary_text", "text": "secret"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is\n21."}]},
    ]
    expected = 'how warm is it? weather {"city": "Lima"} 21 degrees It is 21.'
    noted, unread = read_items([InputItem.model_validate(item) for item in items])
    assert (noted(""), unread) == (expected, ["items.reasoning"])
    request = ResponseRequest.model_validate({"input": [*items, {"role": "user", "content": "so?"}]})
    read = read_response(request, takes_instructions=True, knows_user=True)
    assert (read.history(), read.history("before")) == (expected, f"before\n{expected}")
    assert read.ignored == ["input.reasoning"]
    call = items[1] | {"arguments": "half a character: \ud800"}
    noted, unread = read_items([InputItem.model_validate(call)])
    assert (noted(""), unread) == ("weather half a character: \ufffd", [])
    ours = {"type": "reasoning", "id": "memory_0", "summary": [{"type": "summary_text", "text": "known"}]}
    request = ResponseRequest.model_validate({"input": [*items, ours, {"role": "user", "content": "so?"}]})
    assert read_response(request, takes_instructions=True, knows_user=True).history("before") == f"known\n{expected}"


def test_many_memories_are_read_as_fast_as_other_items():
    def read(items: list[Any]) -> Any:
        asked = ResponseRequest.model_validate({"input": [*items, {"role": "user", "content": "now?"}]})
        return read_response(asked, takes_instructions=True, knows_user=False)

    def turn(number: int) -> list[dict[str, Any]]:
        memory = {"type": "reasoning", "id": f"memory_{number}", "summary": [{"text": f"m{number}"}]}
        said = [{"role": "system", "content": f"s{number}"}, {"role": "assistant", "content": f"a{number}"}]
        return [*said, memory]

    def seconds(num_turns: int) -> float:
        items, begun = [{"role": "user", "content": "first?"}], time.process_time()
        read([*items, *itertools.chain.from_iterable(map(turn, range(num_turns)))])
        return time.process_time() - begun

    found = read([{"role": "user", "content": "old?"}, *turn(0), {"role": "user", "content": "q?"}, *turn(1), *turn(2)])
    assert found.history() == "m2\nq? a1 a2" and found.asked.instructions == "s0\ns1\ns2"
    assert read(turn(0)).history() == "m0"
    assert min(seconds(2000) for _ in range(3)) < 10 * min(seconds(500) for _ in range(3))


async def test_old_responses_make_room(tmp_path):
    store = Store(tmp_path / "service.sqlite", lifetime_s=60, max_items=3)
    for i in range(5):
        await store.responses.keep(StoredResponse(id=f"resp_{i}", body="{}", memory=""), "ann")
    await store.responses.keep(StoredResponse(id="resp_of_bob", body="{}", memory=""), "bob")
    with store.database.open() as database:
        kept = [row["id"] for row in database.execute("SELECT id FROM responses WHERE owner='ann' ORDER BY id")]
    assert kept == ["resp_2", "resp_3", "resp_4"]


# Completions.


def test_a_completion_answers_a_bare_question(service):
    client = client_of(service)
    answer = client.completions.with_raw_response.create(model="tiny", prompt=TWO_HOPS.text, user="ann", best_of=1)
    completion = answer.parse()
    (choice,) = completion.choices
    assert (choice.text, choice.finish_reason, answer.headers[IGNORED]) == (GOLD, "stop", "best_of, user")
    assert completion.usage.completion_tokens > 0 and completion.object == "text_completion"
    chunks = list(
        client.completions.create(
            model="tiny", prompt=[TWO_HOPS.text], stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(each.text for chunk in chunks for each in chunk.choices) == GOLD
    assert chunks[-1].usage == completion.usage
    assert client.completions.create(model="tiny", prompt=TWO_HOPS.text, stop=GOLD[1:]).choices[0].text == GOLD[0]


@pytest.mark.parametrize(
    "name, value",
    [("echo", True), ("suffix", "x"), ("logprobs", 1), ("best_of", 2), ("prompt", ["a", "b"]), ("prompt", [1, 2])],
)
def test_what_a_completion_cannot_do_is_refused_by_name(service, name, value):
    assert refused(service, "completions", **{"model": "tiny", "prompt": "x", name: value}) == (400, name)
    assert refused(service, "completions", model="tiny", prompt="x" * 100_001) == (400, "prompt")


# Memory where chat clients show it.


def test_thought_and_memory_are_reasoning_content_where_they_are_asked_for(service, tokenizer, tmp_path):
    client, asked = client_of(service), [{"role": "user", "content": TWO_HOPS.text}]
    plain = client.chat.completions.create(model="tiny", messages=asked)
    assert "reasoning_content" not in plain.choices[0].message.model_extra
    wanted = {"include_reasoning": True}
    shown = client.chat.completions.create(model="tiny", messages=asked, extra_body=wanted)
    told = shown.choices[0].message.model_extra["reasoning_content"]
    turns = shown.model_extra["mempipe"]["turns"]
    assert f"{turns[0]['thought']}\n\nMemory: {turns[0]['memory_after']}\n\n" in told
    assert shown.choices[0].message.content == GOLD
    chunks = list(client.chat.completions.create(model="tiny", messages=asked, stream=True, extra_body=wanted))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.model_extra.get("reasoning_content", "") for delta in deltas) == told
    assert "".join(delta.content or "" for delta in deltas) == GOLD
    by_default = build_service(tokenizer, tmp_path, include_reasoning=True)
    with running(by_default):
        client = client_of(by_default)
        shown = client.chat.completions.create(model="tiny", messages=asked)
        assert shown.choices[0].message.model_extra["reasoning_content"] == told
        off = client.chat.completions.create(model="tiny", messages=asked, extra_body={"include_reasoning": False})
        assert "reasoning_content" not in json.dumps(off.model_dump()["choices"])


def test_usage_says_what_was_cached_and_what_a_history_would_have_taken(service, monkeypatch):
    from dataclasses import replace

    generate = service.engine.generate

    async def half_cached(token_ids, **more):
        return replace(await generate(token_ids, **more), num_cached_tokens=len(token_ids) - 1)

    reply = client_of(service).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": TWO_HOPS.text}]
    )
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    trace = reply.model_extra["mempipe"]
    assert trace["full_history_tokens"] == sum(turn["full_history_tokens"] for turn in trace["turns"]) > 0
    monkeypatch.setattr(service.engine, "generate", half_cached)
    reply = client_of(service).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": TWO_HOPS.text}]
    )
    calls = len(service.engine.prompts) // 2
    assert reply.usage.prompt_tokens_details.cached_tokens == reply.usage.prompt_tokens - calls
