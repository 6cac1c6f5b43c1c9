"""instructor: tool calls and the JSON modes of the API are refused. JSON in a code block is a text for the service; an
agent that was trained to answer questions does not write it, so the policy says it here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import instructor
import openai
import pytest
from instructor.core import InstructorRetryException
from pydantic import BaseModel
from served import GOLD, KEY, QUESTION, URL, engine

SAID = [{"role": "system", "content": "be brief"}, {"role": "user", "content": QUESTION}]
ASKED = {"model": "tiny", "messages": SAID, "max_retries": 0}
PLAIN = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=20)
ASYNC = openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=20)


class Answer(BaseModel):
    text: str


@pytest.mark.parametrize(
    ("mode", "model", "field"),
    [
        (instructor.Mode.TOOLS, Answer, "tools"),
        (instructor.Mode.PARALLEL_TOOLS, Iterable[Answer], "tools"),
        (instructor.Mode.JSON, Answer, "response_format"),
        (instructor.Mode.JSON_SCHEMA, Answer, "response_format"),
        (instructor.Mode.RESPONSES_TOOLS, Answer, "tools"),
    ],
)
def test_what_needs_a_tool_or_json_is_refused_by_name(mode, model, field):
    client = instructor.from_openai(PLAIN, mode=mode)
    with pytest.raises(InstructorRetryException, match=f"{field} is .* which this service cannot do; leave it out"):
        client.chat.completions.create(response_model=model, **ASKED)


def test_json_in_a_code_block_is_asked_for_again_until_the_policy_writes_it():
    client = instructor.from_openai(PLAIN, mode=instructor.Mode.MD_JSON)
    engine("Lima", '```json\n{"text": "Lima"}\n```')
    assert client.chat.completions.create(response_model=Answer, **{**ASKED, "max_retries": 2}).text == "Lima"
    assert "validation error" in engine()["prompts"][1]


def test_replies_without_a_response_model():
    client = instructor.from_openai(PLAIN)
    reply = client.chat.completions.create(response_model=None, **ASKED)
    assert reply.choices[0].message.content == GOLD and reply.usage.completion_tokens > 0
    chunks = client.chat.completions.create(response_model=None, stream=True, **ASKED)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == GOLD
    reply = asyncio.run(instructor.from_openai(ASYNC).chat.completions.create(response_model=None, **ASKED))
    assert reply.choices[0].message.content == GOLD
    engine("yes")
    history = [*SAID, {"role": "assistant", "content": GOLD}, {"role": "user", "content": "so?"}]
    reply = client.chat.completions.create(response_model=None, **{**ASKED, "messages": history})
    assert reply.choices[0].message.content == "yes" and GOLD in engine()["prompts"][0]
