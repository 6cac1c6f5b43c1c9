"""openai-agents: `Runner` with both of its models, and its MCP client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.mcp import MCPServerStreamableHttp
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel
from served import GOLD, KEY, QUESTION, SERVED, URL, engine

MODELS = [OpenAIChatCompletionsModel, OpenAIResponsesModel]
set_tracing_disabled(True)


class Answer(BaseModel):
    text: str


@function_tool
def look(place: str) -> str:
    return place


def agent(model: Any, **fields: Any) -> Agent:
    client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=20)
    return Agent(name="a", instructions="be brief", model=model(model="tiny", openai_client=client), **fields)


@pytest.mark.parametrize("model", MODELS)
def test_a_run_and_its_result_in_the_history(model):
    async def twice() -> tuple[str, str]:
        engine()
        first = await Runner.run(agent(model), QUESTION)
        assert "heed be brief" in engine("yes")["prompts"][0]
        again = [*first.to_input_list(), {"role": "user", "content": "so?"}]
        return first.final_output, (await Runner.run(agent(model), again)).final_output

    assert asyncio.run(twice()) == (GOLD, "yes")
    (prompt,) = engine()["prompts"]
    assert QUESTION in prompt and GOLD in prompt


@pytest.mark.parametrize("model", MODELS)
def test_a_stream(model):
    async def streamed() -> tuple[str, str]:
        run, text = Runner.run_streamed(agent(model), QUESTION), ""
        async for event in run.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        return text, run.final_output

    assert asyncio.run(streamed()) == (GOLD, GOLD)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("fields", "refused"),
    [({"tools": [look]}, "tools is .*'look'"), ({"output_type": Answer}, "response_format is|text.format asks")],
)
def test_tools_and_output_types_are_refused_by_name(model, fields, refused):
    with pytest.raises(BadRequestError, match=refused):
        asyncio.run(Runner.run(agent(model, **fields), QUESTION))


def test_its_mcp_client_asks():
    async def asked() -> dict[str, Any]:
        params = {"url": f"{SERVED['url']}/mcp", "headers": {"authorization": f"Bearer {KEY}"}, "timeout": 20}
        async with MCPServerStreamableHttp(params=params) as server:
            assert {"ask", "search"} <= {tool.name for tool in await server.list_tools()}
            return (await server.call_tool("ask", {"question": QUESTION})).structured_content

    engine()
    assert asyncio.run(asked())["answer"] == GOLD
