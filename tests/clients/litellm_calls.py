"""litellm: `completion`, `text_completion` and `responses`, plain, streamed and async."""

from __future__ import annotations

import asyncio
import os

import pytest
from served import GOLD, KEY, QUESTION, URL, engine

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # it would fetch one from elsewhere when imported
import litellm

ASKED = {"model": "openai/tiny", "api_base": URL, "api_key": KEY, "max_tokens": 60, "max_retries": 0, "timeout": 20}
SAID = [{"role": "system", "content": "be brief"}, {"role": "user", "content": QUESTION}]


def test_a_chat_with_a_system_message_a_limit_and_a_seed():
    engine()
    reply = litellm.completion(messages=SAID, seed=7, temperature=0, **ASKED)
    seen = engine()
    assert reply.choices[0].message.content == GOLD and reply.choices[0].finish_reason == "stop"
    assert "heed be brief" in seen["prompts"][0] and max(seen["limits"]) <= 60 and None not in seen["seeds"]
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens > 0


def test_a_stream_with_usage():
    chunks = [*litellm.completion(messages=SAID, stream=True, stream_options={"include_usage": True}, **ASKED)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == GOLD
    assert chunks[-1].usage.completion_tokens > 0
    assert litellm.stream_chunk_builder(chunks, messages=SAID).choices[0].message.content == GOLD


def test_async_calls_at_once_and_an_async_stream():
    async def ask() -> str:
        reply = await litellm.acompletion(messages=SAID, **ASKED)
        return reply.choices[0].message.content

    async def stream() -> str:
        chunks = await litellm.acompletion(messages=SAID, stream=True, **ASKED)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def all_of_them() -> list[str]:
        return await asyncio.gather(ask(), ask(), stream())

    assert asyncio.run(all_of_them()) == [GOLD] * 3


def test_its_own_reply_in_the_history():
    reply = litellm.completion(messages=SAID, **ASKED)
    engine("yes")
    history = [*SAID, reply.choices[0].message.model_dump(), {"role": "user", "content": "so?"}]
    assert litellm.completion(messages=history, **ASKED).choices[0].message.content == "yes"
    (prompt,) = engine()["prompts"]
    assert QUESTION in prompt and GOLD in prompt and "so?" in prompt


def test_several_choices_and_a_stop_text():
    engine("Oslo", "Lima and more")
    reply = litellm.completion(messages=SAID, n=2, temperature=1, stop=[" and"], **ASKED)
    assert sorted(choice.message.content for choice in reply.choices) == ["Lima", "Oslo"]


def test_the_thoughts_are_sent_when_they_are_asked_for():
    reply = litellm.completion(messages=SAID, extra_body={"include_reasoning": True}, **ASKED)
    assert reply.choices[0].message.reasoning_content and reply.choices[0].message.content == GOLD


def test_a_bare_prompt():
    asked = {**ASKED, "model": "text-completion-openai/tiny"}
    assert litellm.text_completion(prompt=QUESTION, **asked).choices[0].text == GOLD
    chunks = litellm.text_completion(prompt=QUESTION, stream=True, **asked)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == GOLD


def test_responses_go_on_from_a_response():
    asked = {name: ASKED[name] for name in ("model", "api_base", "api_key")}
    engine()
    first = litellm.responses(input=QUESTION, instructions="be brief", max_output_tokens=60, **asked)
    assert first.output[-1].content[0].text == GOLD
    assert "heed be brief" in engine()["prompts"][0]
    engine("yes")
    again = litellm.responses(input="so?", previous_response_id=first.id, **asked)
    assert again.output[-1].content[0].text == "yes" and GOLD in engine()["prompts"][0]
    events = [*litellm.responses(input=QUESTION, stream=True, **asked)]
    assert events[-1].type == "response.completed" and events[-1].response.output[-1].content[0].text == GOLD


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [TOOL]),
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"1": 5}),
        ("presence_penalty", 0.5),
        ("top_logprobs", 3),
    ],
)
def test_what_the_service_cannot_do_is_refused_by_name(field, value):
    with pytest.raises(litellm.BadRequestError, match=f"{field} is .* which this service cannot do; leave it out"):
        litellm.completion(messages=SAID, **{field: value}, **ASKED)


def test_a_wrong_key_and_a_wrong_model_are_told_apart():
    with pytest.raises(litellm.AuthenticationError, match="key"):
        litellm.completion(messages=SAID, **{**ASKED, "api_key": "wrong"})
    with pytest.raises(litellm.NotFoundError, match="'tiny'"):
        litellm.completion(messages=SAID, **{**ASKED, "model": "openai/other"})
