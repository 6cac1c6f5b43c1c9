"""The agent `program` with models whose calls of tools have another form than that of Hermes: vLLM's parsers read them,
and the model's published chat template shows the same conversation.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from agent_builders import LOOKUP, build_question, hf_tokenizer, published_template
from openai import AsyncOpenAI
from program_builders import attempt, config_of

from mempipe.agents.program.tool_calls import _written, parser_of, reads_calls_of
from mempipe.checks.run import check_agent
from mempipe.engines.tokenizer import HFTokenizer
from mempipe.rollout import make_renderer
from mempipe.settings import ConfigError
from mempipe.types import Trajectory
from mempipe.user_code import UserCodeError

RESULT = 'A "city".\nBig.'
LLAMA = '{"name": "lookup", "parameters": {"place": "Paris"}}'
QWEN3_5 = "<tool_call>\n<function=lookup>\n<parameter=place>\nParis\n</parameter>\n</function>\n</tool_call>"
FORMS = [("llama3_1", "llama3_json", LLAMA), ("qwen3_5_nothink", "qwen3_coder", QWEN3_5)]

READ = [
    ("deepseekv3", "deepseek_v3"),
    ("gemma4", "gemma4"),
    ("glm4moe", "glm45"),
    ("lfm2_2_5", "lfm2"),
    ("llama3_2", "llama3_json"),
    ("nemotron_3_nano", "qwen3_coder"),
    ("qwen2_5", "hermes"),
    ("qwen3_instruct_2507", "hermes"),
    ("qwen3_5_think", "qwen3_coder"),
    ("qwen3_6", "qwen3_coder"),
]
MARK = re.compile(r"<\|[^|<>]{2,40}\|>|<｜[^<>]{2,40}｜>|\[[A-Z_]{3,}\]|</?[a-z_]{3,20}>")


def tokenizer_of(family: str) -> HFTokenizer:
    if family == "llama3_1":
        tokenizer = hf_tokenizer(family)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
        return HFTokenizer(tokenizer)
    return HFTokenizer(hf_tokenizer("qwen3", chat_template=published_template(family)))


async def solve(question: str, client: AsyncOpenAI, search: Any) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    reply = await client.chat.completions.create(model="policy", messages=messages, tools=[LOOKUP])
    (called,) = reply.choices[0].message.tool_calls or [None]
    if called is None:
        return "no call"
    assert (called.function.name, json.loads(called.function.arguments)) == ("lookup", {"place": "Paris"})
    messages += [reply.choices[0].message, {"role": "tool", "tool_call_id": called.id, "content": RESULT}]
    reply = await client.chat.completions.create(model="policy", messages=messages, tools=[LOOKUP])
    return reply.choices[0].message.content or ""


async def play(
    script: list[str], tokenizer: HFTokenizer, tool_parser: str, program: Any = solve, **budget: int
) -> Trajectory:
    limits = {"action_tokens": 200, "context_tokens": 4096, "memory_tokens": "null", **budget}
    played, _ = await attempt(script, program, config_of(f"agent.tool_parser={tool_parser}", **limits), tokenizer)
    return played


@pytest.mark.parametrize(("family", "parser", "call"), FORMS)
async def test_a_call_and_its_result_are_what_the_published_template_shows(family, parser, call):
    tokenizer = tokenizer_of(family)
    played = await play([call, "It is a city."], tokenizer, parser)
    assert played.answer == "It is a city."
    (context,) = played.contexts
    called = {"type": "function", "function": {"name": "lookup", "arguments": {"place": "Paris"}}}
    chat: list[Any] = [
        {"role": "user", "content": build_question().text},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": RESULT},
    ]
    whole = tokenizer.render_chat(chat, add_generation_prompt=True, tools=[LOOKUP]) + "It is a city."
    assert tokenizer.decode(context.token_ids[:-1]) == whole


@pytest.mark.parametrize(("template", "parser"), READ)
def test_a_parser_reads_the_calls_of_the_published_template(template, parser):
    text = published_template(template)
    tokenizer = hf_tokenizer("qwen3", chat_template=text)
    marks = sorted({*MARK.findall(text), "<|python_tag|>", "<|tool_call>", "<tool_call|>"})
    tokenizer.add_special_tokens({"additional_special_tokens": marks, "bos_token": "<|endoftext|>"})
    made = HFTokenizer(tokenizer)
    calls = [{"name": "lookup", "arguments": arguments} for arguments in ({}, "{}")]
    assert any("lookup" in _written(made, [LOOKUP], call) for call in calls)
    assert reads_calls_of(made, [LOOKUP], parser_of(parser, made))


@pytest.mark.parametrize(("family", "parser", "call"), FORMS)
async def test_a_message_without_a_call_is_a_text(family, parser, call):
    for text in ("Paris, I think.", call[:20], '{"name": 3}', "{" * 2000):
        assert (await play([text], tokenizer_of(family), parser)).answer == "no call"


@pytest.mark.parametrize(("family", "parser", "call"), FORMS)
async def test_a_parser_that_does_not_read_the_template_s_calls_is_refused(family, parser, call):
    with pytest.raises(UserCodeError, match=r"agent\.tool_parser is 'hermes', which does not read calls in the form"):
        await play([call], tokenizer_of(family), "hermes")


def test_a_parser_that_vllm_does_not_have_is_refused_before_anything_starts():
    config = config_of("agent.tool_parser=llama3")
    (finding,) = check_agent(config)
    assert finding.fatal and finding.text.startswith("agent.tool_parser is 'llama3'; vLLM has ")
    assert not any(finding.fatal for finding in check_agent(config_of("agent.tool_parser=llama3_json")))
    with pytest.raises(ConfigError, match=r"agent\.tool_parser is 'llama3'; vLLM has .*llama3_json"):
        make_renderer(config, tokenizer=tokenizer_of("llama3_1"))


HOSTILE = [
    '{"name": "\\ud800", "parameters": {"place": "\\ud800"}}',
    '{"name": "lookup", "parameters": ' + "[" * 3000 + "]" * 3000 + "}",
    '{"name": "lookup", "parameters": {"place": NaN}}',
    '{"name": "lookup", "parameters": "Paris"}',
    '{"name": null, "parameters": {}}',
    "<tool_call>\n<function=\ud800>\n<parameter=>\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>" * 500,
]


@pytest.mark.parametrize(("family", "parser", "call"), FORMS)
async def test_whatever_the_policy_writes_is_a_call_or_a_text(family, parser, call):
    async def asks(question: str, client: AsyncOpenAI, search: Any) -> str:
        messages: Any = [{"role": "user", "content": question}]
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[LOOKUP])
        (choice,) = reply.choices
        assert (choice.message.content is None) == bool(choice.message.tool_calls) or choice.message.content
        return "read"

    for text in HOSTILE:
        script = [text.encode(errors="replace").decode()]
        played = await play(script, tokenizer_of(family), parser, asks, action_tokens=20_000, context_tokens=32_000)
        assert played.answer == "read"


async def test_a_parser_for_another_vocabulary_is_refused_when_the_agent_is_made():
    with pytest.raises(ConfigError, match=r"vLLM's tool parser 'llama3_json' cannot be used: .*python_tag"):
        await play([], tokenizer_of("qwen3_5_nothink"), "llama3_json")


async def test_tools_that_vllm_does_not_take_are_refused_by_name():
    async def asks(question: str, client: AsyncOpenAI, search: Any) -> str:
        tools: Any = [{"type": "function", "function": {"name": "lookup", "parameters": 7}}]
        reply = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": question}], tools=tools
        )
        return reply.choices[0].message.content or ""

    with pytest.raises(
        UserCodeError, match=r"Error code: 400 - tools: vLLM's tool parser 'llama3_json' cannot be used"
    ):
        await play(["x"], tokenizer_of("llama3_1"), "llama3_json", asks)
