"""The agent `program` with a client of the responses API: the same contexts as with chat completions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from agent_builders import LOOKUP, assert_token_exact, build_question, build_tokenizer
from openai import AsyncOpenAI
from program_builders import attempt, config_of

from mempipe.types import EndReason, Trajectory
from mempipe.user_code import UserCodeError

TOKENIZER = build_tokenizer()
TOOL: Any = {"type": "function", **LOOKUP["function"]}
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"place": "%s"}}\n</tool_call>'
DEEP = "[" * 600 + "]" * 600
NESTED = f'{{"input": "a", "tools": [{{"type": "function", "name": "f", "x": {DEEP}}}]}}'


async def play(script: list[str], program: Callable[..., Any], **budget: Any) -> Trajectory:
    limits = {"action_tokens": 200, "context_tokens": 4096, "memory_tokens": "null", **budget}
    played, engine = await attempt(script, program, config_of(**limits), TOKENIZER)
    assert_token_exact(played.contexts, engine)
    return played


def rendered(played: Trajectory) -> list[str]:
    return [TOKENIZER.decode(context.token_ids[:-1]) for context in played.contexts]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sent_back", ["by id", "calls, then results", "each call with its result"])
async def test_calls_and_results_stay_in_the_context(stream, sent_back):
    async def respond(client: AsyncOpenAI, **asked: Any) -> Any:
        if not stream:
            return await client.responses.create(model="policy", tools=[TOOL], instructions="Be brief.", **asked)
        async with client.responses.stream(model="policy", tools=[TOOL], instructions="Be brief.", **asked) as events:
            async for _ in events:
                pass
            return await events.get_final_response()

    async def program(question: str, client: AsyncOpenAI, search: Any) -> str:
        reply = await respond(client, input=question)
        text, first, second = reply.output
        assert text.content[0].text == "I look." and reply.status == "completed"
        assert [(call.name, call.arguments) for call in (first, second)] == [
            ("lookup", '{"place": "Paris"}'),
            ("lookup", '{"place": "Rome"}'),
        ]
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "A city."} for call in (first, second)
        ]
        if sent_back == "by id":
            reply = await respond(client, input=results, previous_response_id=reply.id)
        else:
            sent = [item.model_dump(exclude={"parsed_arguments", "status"}) for item in reply.output]
            if sent_back == "each call with its result":
                sent[2:], results = [results[0], sent[2]], results[1:]
            reply = await respond(client, input=[{"role": "user", "content": question}, *sent, *results])
        return reply.output_text

    played = await play(["I look.\n" + CALL % "Paris" + "\n" + CALL % "Rome", "Both are."], program)
    assert (played.end_reason, played.answer) == (EndReason.ANSWERED, "Both are.")
    calls = [
        {"type": "function", "function": {"name": "lookup", "arguments": {"place": place}}}
        for place in ("Paris", "Rome")
    ]
    chat: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": build_question().text},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        *({"role": "tool", "content": "A city."} for _ in calls),
    ]
    assert rendered(played) == [TOKENIZER.render_chat(chat, add_generation_prompt=True, tools=[LOOKUP]) + "Both are."]


async def test_calls_of_two_replies_stay_two_messages():
    async def program(question: str, client: AsyncOpenAI, search: Any) -> str:
        items: list[Any] = [{"role": "user", "content": question}]
        for _ in range(2):
            (call,) = (await client.responses.create(model="policy", tools=[TOOL], input=items)).output
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "A city."}
            items += [call.model_dump(exclude={"status"}), result]
        return (await client.responses.create(model="policy", tools=[TOOL], input=items)).output_text

    played = await play([CALL % "Paris", CALL % "Rome", "Both are."], program)
    assert played.answer == "Both are." and len(played.contexts) == 1


async def test_parts_and_roles_are_read_and_a_memory_is_stated():
    async def program(question: str, client: AsyncOpenAI, search: Any) -> str:
        content: Any = [{"type": "input_text", "text": "m0 "}, {"type": "input_text", "text": question}]
        asked: Any = [
            {"type": "message", "role": "developer", "content": "Short."},
            {"role": "user", "content": content},
        ]
        reply = await client.responses.create(
            model="policy",
            input=asked,
            metadata={"memory": "m0"},
            max_output_tokens=9,
            text={"format": {"type": "text"}},
        )
        assert (reply.status, reply.usage.output_tokens) == ("completed", 4)
        return reply.output_text

    played = await play(["Paris"], program, memory_tokens=8)
    chat = [{"role": "system", "content": "Short."}, {"role": "user", "content": f"m0 {build_question().text}"}]
    assert rendered(played) == [TOKENIZER.render_chat(chat, add_generation_prompt=True) + "Paris"]
    assert played.contexts[0].memory_before == "m0"


async def test_a_reply_that_is_cut_is_incomplete():
    async def program(question: str, client: AsyncOpenAI, search: Any) -> str:
        reply = await client.responses.create(model="policy", input=question, max_output_tokens=1)
        assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        return "done"

    assert (await play(["Paris is it"], program)).answer == "done"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"input": 7}, "input is 7; expected a text or a list of items"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "an item of the type 'item_reference'"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools of the type web_search"),
        ({"input": "a", "text": {"format": {"type": "json_object"}}}, "the gateway gives the format text alone"),
        ({"input": "a", "previous_response_id": "resp_9"}, "previous_response_id is 'resp_9'; no response"),
        ({"input": "a", "background": True}, "background: not taken"),
        (
            {"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}]},
            "tool_calls of 'f': no reply of the policy",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "neither a text nor"),
        ({"input": []}, "messages is"),
    ],
)
async def test_what_is_not_taken_is_refused_by_name(asked, words):
    async def program(question: str, client: AsyncOpenAI, search: Any) -> str:
        return (await client.responses.create(model="policy", **asked)).output_text

    with pytest.raises(UserCodeError) as refused:
        await play([], program)
    assert "Error code: 400" in str(refused.value) and words in str(refused.value)


async def post(client: Any, path: str, body: str) -> Any:
    return await client._client.post(f"{client.base_url}{path}", content=body, headers=client.auth_headers)


async def test_half_a_character_is_replaced_wherever_a_program_sends_it():
    """As a JavaScript program does that cuts a text inside an emoji."""
    half = "known \ud83d"
    bodies = {
        "chat/completions": {"messages": [{"role": "user", "content": half}], "metadata": {"memory": half}},
        "responses": {"input": half, "instructions": half, "metadata": {"memory": half, half: "1"}},
    }

    async def program(question: str, client: Any, search: Any) -> str:
        for path, body in bodies.items():
            reply = await post(client, path, json.dumps(body))
            assert reply.status_code == 200, reply.text
        assert reply.json()["instructions"] == "known \ufffd" and reply.json()["metadata"]["known \ufffd"] == "1"
        return "half \ud83d"

    played = await play(["Paris", "Rome"], program, memory_tokens=64)
    assert [context.memory_before for context in played.contexts] == ["known \ufffd"] * 2
    assert played.answer == "half \ufffd"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("responses", '{"input": "a", "previous_response_id": ["x"]}', "previous_response_id is ['x']; no response"),
        ("responses", '{"input": [{"type": "function_call", "call_id": ["x"]}]}', "the body is not a request"),
        ("responses", NESTED, "nested too deeply"),
        ("responses", "[" * 100_000, "nested too deeply"),
        ("chat/completions", '{"messages": ' + DEEP + "}", "a message has the role None"),
        ("chat/completions", '{"messages": [], "seed": 1e999}', "the number Infinity, which JSON does not have"),
        ("search", '{"query": NaN}', "the number NaN"),
        ("search", '{"query": ', "Expecting value"),
    ],
)
async def test_a_malformed_body_is_refused_and_the_attempt_goes_on(path, body, words):
    async def program(question: str, client: Any, search: Any) -> str:
        reply = await post(client, path, body)
        assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text
        return (await client.responses.create(model="policy", input=question)).output_text

    assert (await play(["Paris"], program)).answer == "Paris"
