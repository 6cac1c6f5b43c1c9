"""Calls of tools in the policy's messages, in the form of its chat template."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from mempipe.agents.protocol import ChatTemplateError, Tokenizer, tool_call_texts, without_blocks
from mempipe.settings import ConfigError
from mempipe.text import replace_surrogates

HERMES = "hermes"
CALL_TAG, RESULT_TAG = "tool_call", "tool_response"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """A message of the policy with calls of tools: its whole text, and the parts that the program reads."""

    text: str
    content: str
    functions: list[tuple[str, dict[str, Any]]]  # name and arguments


ReadCalls = Callable[[str, str], Calls | None]
"""(message, tools as JSON) -> its calls; None if it has none, or one of them cannot be read."""


def reader_of(tool_parser: str, tokenizer: Tokenizer) -> ReadCalls:
    """Returns what reads the calls in the form that `agent.tool_parser` names. Raises ConfigError."""
    return _hermes if tool_parser == HERMES else _reader_of_vllm(tool_parser, tokenizer)


def check_tool_parser(name: str) -> None:
    """Raises ConfigError for a name that vLLM does not know."""
    if name != HERMES:
        _parser_of_vllm(name)


def reads_calls_of(tokenizer: Tokenizer, tools: list[dict[str, Any]], read: ReadCalls) -> bool:
    """Returns whether `read` finds a call of the first tool as the chat template writes it. True where the template
    writes none: then only the policy knows the form. Raises ConfigError for tools that the parser does not take.
    """
    name = tools[0]["function"]["name"]
    for no_arguments in ({}, "{}"):  # a template takes an object, or its JSON
        written = _written(tokenizer, tools, {"name": name, "arguments": no_arguments})
        if name in written:
            found = read(written, json.dumps(tools))
            return found is not None and found.functions == [(name, {})]
    return True


def _written(tokenizer: Tokenizer, tools: list[dict[str, Any]], function: dict[str, Any]) -> str:
    """Returns a message with this call as the chat template writes it, its header included; "" where it does not."""
    call = {"id": "call00000", "type": "function", "function": function}
    asked = {"role": "user", "content": "x"}
    chat: list[Any] = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        before = tokenizer.render_chat([asked], add_generation_prompt=False, tools=tools)
        after = tokenizer.render_chat(chat, add_generation_prompt=False, tools=tools)
    except ChatTemplateError:
        return ""
    return after.removeprefix(before) if after.startswith(before) else ""


def _hermes(text: str, tools: str) -> Calls | None:
    """Reads JSON objects with name and arguments between <tool_call> tags."""
    functions = []
    for block in tool_call_texts(text):
        try:
            functions.append(_function(json.loads(block, parse_constant=_refuse_constant)))
        except (ValueError, RecursionError):
            return None
    if not functions:
        return None
    return Calls(text=text, content=without_blocks(text, CALL_TAG).strip(), functions=functions)


def _reader_of_vllm(name: str, tokenizer: Tokenizer) -> ReadCalls:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    parser = _parser_of_vllm(name)

    @functools.lru_cache(maxsize=64)
    def made(tools: str) -> tuple[Any, ChatCompletionRequest]:
        asked = [{"role": "user", "content": ""}]
        try:
            request = ChatCompletionRequest.model_validate({"messages": asked, "tools": json.loads(tools)})
            return parser(tokenizer.pretrained, request.tools), request
        except Exception as error:  # a token that the model's vocabulary lacks, tools that vLLM does not take
            raise ConfigError(f"vLLM's tool parser {name!r} cannot be used: {error}") from error

    def read(text: str, tools: str) -> Calls | None:
        reading, request = made(tools)
        try:
            found = reading.extract_tool_calls(text, request)
            called = [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]
            functions = [_function({"name": function, "arguments": arguments}) for function, arguments in called]
        except Exception:  # whatever a parser does with a text that it does not expect
            return None
        return Calls(text=text, content=(found.content or "").strip(), functions=functions) if functions else None

    made("null")
    return read


def _parser_of_vllm(name: str) -> Callable[..., Any]:
    from vllm.tool_parsers import ToolParserManager  # takes seconds to import

    try:
        return ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join(sorted(ToolParserManager.list_registered()))
        raise ConfigError(f"agent.tool_parser is {name!r}; vLLM has {known}") from None


def _function(call: Any) -> tuple[str, dict[str, Any]]:
    """Returns name and arguments of a call. Raises ValueError."""
    call = json.loads(replace_surrogates(json.dumps(call, ensure_ascii=False)))  # escapes can spell them
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("a call without a name")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError("arguments in another form than an object")
    return call["name"], arguments


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
