"""llama-index-llms-openai-like: `OpenAILike` and `OpenAILikeResponses`, plain, streamed and async."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from openai import BadRequestError
from served import GOLD, KEY, QUESTION, URL, engine

ASKED = {"model": "tiny", "api_base": URL, "api_key": KEY, "temperature": 0, "max_retries": 0, "timeout": 20}
SAID = [ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content=QUESTION)]


class Answer(BaseModel):
    text: str


def of_chat(**settings: object) -> OpenAILike:
    return OpenAILike(is_chat_model=True, max_tokens=60, **ASKED, **settings)


def test_a_chat_with_a_system_message_a_limit_and_a_seed():
    engine()
    reply = of_chat(additional_kwargs={"seed": 7}).chat(SAID)
    seen = engine()
    assert reply.message.content == GOLD
    assert "heed be brief" in seen["prompts"][0] and max(seen["limits"]) <= 60 and None not in seen["seeds"]
    assert reply.additional_kwargs["total_tokens"] > reply.additional_kwargs["completion_tokens"] > 0


def test_streams_of_a_chat_and_their_usage():
    chunks = [*of_chat(additional_kwargs={"stream_options": {"include_usage": True}}).stream_chat(SAID)]
    assert chunks[-1].message.content == "".join(chunk.delta or "" for chunk in chunks) == GOLD
    assert chunks[-1].raw.usage.completion_tokens > 0


def test_async_calls_at_once_and_an_async_stream():
    async def all_of_them() -> list[str]:
        model = of_chat()
        one, other = await asyncio.gather(model.achat(SAID), model.achat(SAID))
        deltas = [chunk.delta or "" async for chunk in await model.astream_chat(SAID)]
        return [one.message.content, other.message.content, "".join(deltas)]

    assert asyncio.run(all_of_them()) == [GOLD] * 3


def test_bare_prompts():
    model = OpenAILike(is_chat_model=False, max_tokens=60, **ASKED)
    assert model.complete(QUESTION).text == GOLD
    assert [*model.stream_complete(QUESTION)][-1].text == GOLD
    assert asyncio.run(model.acomplete(QUESTION)).text == GOLD
    assert of_chat().complete(QUESTION).text == GOLD


def test_a_chat_engine_keeps_the_history():
    talk = SimpleChatEngine.from_defaults(llm=of_chat(), system_prompt="be brief")
    assert talk.chat(QUESTION).response == GOLD
    engine("yes")
    assert talk.chat("so?").response == "yes"
    (prompt,) = engine()["prompts"]
    assert QUESTION in prompt and GOLD in prompt and "so?" in prompt
    engine("no")
    assert "".join(talk.stream_chat("and so?").response_gen) == "no"


def test_responses_go_on_from_a_response():
    model = OpenAILikeResponses(max_output_tokens=60, track_previous_responses=True, **ASKED)
    assert model.chat(SAID).message.content == GOLD
    engine("yes")
    assert model.chat([ChatMessage(role="user", content="so?")]).message.content == "yes"
    assert GOLD in engine()["prompts"][0]


def test_responses_in_the_history_bring_the_memory_back():
    model = OpenAILikeResponses(max_output_tokens=60, store=True, **ASKED)
    last = [*model.stream_chat(SAID)][-1].message
    assert last.content == GOLD
    engine("yes")
    assert model.chat([*SAID, last, ChatMessage(role="user", content="so?")]).message.content == "yes"
    (prompt,) = engine()["prompts"]
    assert prompt.count(GOLD) == 2  # in a fact of the memory, and as the last answer


def test_a_tool_and_an_output_type_are_refused_by_name():
    model = of_chat(is_function_calling_model=True)
    with pytest.raises(BadRequestError, match=r"tools is .* which this service cannot do; leave it out"):
        model.chat_with_tools([FunctionTool.from_defaults(lambda: "", name="look")], user_msg=QUESTION)
    with pytest.raises(BadRequestError, match=r"tools is .* which this service cannot do; leave it out or send \[\]"):
        model.as_structured_llm(Answer).chat(SAID)
    model = of_chat(is_function_calling_model=True, should_use_structured_outputs=True)
    with pytest.raises(BadRequestError, match=r"response_format is .* which this service cannot do; leave it out"):
        model.as_structured_llm(Answer).chat(SAID)
