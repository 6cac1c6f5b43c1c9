"""Calls of tools in the policy's messages, in the form of its chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from mempipe.agents.protocol import (
    ChatTemplateError,
    ParseCalls,
    ParsedCalls,
    Tokenizer,
    UnreadableCall,
    tool_call_texts,
    without_blocks,
)
from mempipe.text import call_json, replace_surrogates

HERMES = "hermes"
CALL_TAG, RESULT_TAG = "tool_call", "tool_response"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """A message of the policy with calls of tools: its whole text, and the parts that the program reads."""

    text: str
    content: str
    functions: list[tuple[str, dict[str, Any]]]  # name and arguments


def parser_of(tool_parser: str, tokenizer: Tokenizer) -> ParseCalls:
    """Returns the parser that `agent.tool_parser` names. Raises ConfigError."""
    return _hermes if tool_parser == HERMES else tokenizer.tool_parser(tool_parser)


def calls_in(text: str, tools: str, parse: ParseCalls) -> Calls | None:
    """Returns the calls in a message of the policy. None if it has none, or one of them cannot be read."""
    try:
        parsed = parse(text, tools)
        functions = [(replace_surrogates(name), _arguments(arguments)) for name, arguments in parsed.calls]
    except UnreadableCall:
        return None
    return Calls(text=text, content=parsed.content.strip(), functions=functions) if functions else None


def reads_calls_of(tokenizer: Tokenizer, tools: list[dict[str, Any]], parse: ParseCalls) -> bool:
    """Returns whether `parse` finds a call of the first tool as the chat template writes it. True where the template
    writes none: then only the policy knows the form. Raises ConfigError for tools that the parser does not take.
    """
    name = tools[0]["function"]["name"]
    for no_arguments in ({}, "{}"):  # a template takes an object, or its JSON
        written = _written(tokenizer, tools, {"name": name, "arguments": no_arguments})
        if name in written:
            found = calls_in(written, json.dumps(tools), parse)
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


def _hermes(text: str, tools: str) -> ParsedCalls:
    """Reads JSON objects with name and arguments between <tool_call> tags."""
    calls = []
    for block in tool_call_texts(text):
        try:
            call = json.loads(block)
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                raise UnreadableCall("a call is a JSON object with a name")
            calls.append((call["name"], json.dumps(call.get("arguments", {}))))
        except (ValueError, RecursionError) as error:
            raise UnreadableCall(str(error)) from error
    return ParsedCalls(without_blocks(text, CALL_TAG), calls)


def _arguments(text: str) -> dict[str, Any]:
    """Returns the arguments of a call from their JSON. Raises UnreadableCall."""
    try:
        arguments = call_json(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableCall(str(error)) from error
    if not isinstance(arguments, dict):
        raise UnreadableCall("the arguments of a call are a JSON object")
    return arguments
