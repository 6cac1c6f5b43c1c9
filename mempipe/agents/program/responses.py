"""Requests of the responses API as those of chat completions, and the gateway's replies as responses.

Frameworks that are written for the responses API, such as the OpenAI Agents SDK, ask the policy without a change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mempipe.agents.program.rendering import Refused
from mempipe.agents.program.tool_calls import Calls

_READ = {"input", "instructions", "tools", "previous_response_id", "stream"}
_SAME = {"model", "tool_choice", "metadata", "temperature", "top_p", "parallel_tool_calls", "user", "store"}
"""Fields that chat completions have too."""
_RENAMED = {"max_output_tokens": "max_completion_tokens"}
_IGNORED = {
    *("include", "reasoning", "truncation", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "stream_options", "top_logprobs", "max_tool_calls"),
}
_HARMLESS = {"background": False}
_TEXT_PARTS = ("input_text", "output_text", "text")
Messages = list[dict[str, Any]]


def chat_request(
    request: Any, earlier: Mapping[str, Messages], calls: Mapping[str, Calls]
) -> tuple[dict[str, Any], Messages]:
    """Returns the body of a request as one of chat completions, and its messages without the instructions, which a
    later request does not inherit. `earlier` are the messages of the trajectory's responses by id, their replies
    included; `calls` are those of its replies, by the id of each call.

    Raises Refused when it is not a request, or asks for something that the gateway does not give.
    """
    if not isinstance(request, dict):
        raise Refused("the body is not a JSON object")
    asked = {name: value for name, value in request.items() if value is not None and _HARMLESS.get(name) != value}
    text = asked.pop("text", {})
    if not isinstance(text, dict) or text.get("format", {"type": "text"}) != {"type": "text"}:
        raise Refused(f"text is {text!r:.100}; the gateway gives the format text alone")
    known = _READ | _SAME | _RENAMED.keys() | _IGNORED
    if unknown := sorted(asked.keys() - known):
        raise Refused(f"{', '.join(unknown)}: not taken; the gateway takes {', '.join(sorted(known))}")
    messages = [*_earlier(asked, earlier), *_messages(asked.get("input"), calls)]
    instructions = asked.get("instructions")
    shown = [{"role": "system", "content": instructions}, *messages] if instructions else messages
    body = {name: asked[name] for name in _SAME & asked.keys()} | {"messages": shown}
    body |= {chat: asked[name] for name, chat in _RENAMED.items() if name in asked}
    if asked.get("tools"):
        body["tools"] = _tools(asked["tools"])
    return body, messages


def response(completion: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a chat completion of the gateway as a response."""
    (choice,), usage = completion["choices"], completion["usage"]
    number = completion["id"].rpartition("-")[2]
    said, is_cut = choice["message"], choice["finish_reason"] == "length"
    status = "incomplete" if is_cut else "completed"
    output: list[dict[str, Any]] = []
    if said["content"]:
        part = {"type": "output_text", "text": said["content"], "annotations": []}
        message = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": status, "content": [part]}
        output.append(message)
    for call in said.get("tool_calls", ()):
        made = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"], "status": "completed"}
        output.append(made | call["function"])
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 0,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": "policy",
        "instructions": request.get("instructions"),
        "previous_response_id": request.get("previous_response_id"),
        "metadata": request.get("metadata") or {},
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "temperature": None,
        "top_p": None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def events(made: Mapping[str, Any]) -> Iterator[str]:
    """Yields a response as server-sent events: each item whole, then its end."""
    begun = {**made, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    told: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for index, item in enumerate(made["output"]):
        told += [(name, {"output_index": index, **fields}) for name, fields in _item_events(item)]
    told.append((f"response.{made['status']}", {"response": made}))
    for number, (name, fields) in enumerate(told):
        yield f"event: {name}\ndata: {json.dumps({'type': name, 'sequence_number': number, **fields})}\n\n"


def _item_events(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    is_call, at = item["type"] == "function_call", {"item_id": item["id"]}
    empty = {"arguments": ""} if is_call else {"content": []}
    yield "response.output_item.added", {"item": {**item, "status": "in_progress", **empty}}
    if is_call:
        yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
        yield "response.function_call_arguments.done", {**at, "name": item["name"], "arguments": item["arguments"]}
    else:
        (part,) = item["content"]
        at |= {"content_index": 0}
        yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
        yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
        yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**at, "part": part}
    yield "response.output_item.done", {"item": item}


def _earlier(request: Mapping[str, Any], earlier: Mapping[str, Messages]) -> Messages:
    previous = request.get("previous_response_id")
    if previous is None:
        return []
    if not isinstance(previous, str) or previous not in earlier:
        raise Refused(f"previous_response_id is {previous!r:.100}; no response of the policy in this attempt has it")
    return earlier[previous]


def _messages(items: Any, calls: Mapping[str, Calls]) -> Messages:
    """Returns the items of an input as chat messages. The calls of a reply are one message, its text included, also
    where their results are between them.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise Refused(f"input is {items!r:.100}; expected a text or a list of items")
    messages: Messages = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"))})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if (reply := _replied(messages, calls.get(call["id"]), calls)) is None:
                messages.append({"role": "assistant", "content": None})
                reply = messages[-1]
            reply.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
            messages.append(result)
        elif kind != "reasoning":
            raise Refused(f"input has an item of the type {kind!r:.100}; the gateway takes messages, calls and results")
    return messages


def _replied(messages: Messages, made: Calls | None, calls: Mapping[str, Calls]) -> dict[str, Any] | None:
    """Returns the message that a call of the reply `made` belongs to; None if it begins one."""
    last = next((message for message in reversed(messages) if message["role"] != "tool"), None)
    if last is None or last["role"] != "assistant":
        return None
    if last is messages[-1]:
        return last
    is_same = made is not None and any(calls.get(call["id"]) is made for call in last.get("tool_calls", ()))
    return last if is_same else None


def _content(content: Any) -> Any:
    """Returns a content with the parts of texts as chat completions name them."""
    if not isinstance(content, list):
        return content
    return [
        {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else part
        for part in content
    ]


def _tools(tools: Any) -> list[dict[str, Any]]:
    """Returns the tools as chat completions describe them."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused(f"tools is {tools!r:.100}; expected a list of them")
    if others := sorted({str(tool.get("type")) for tool in tools} - {"function"}):
        raise Refused(f"tools of the type {', '.join(others)[:100]}: the gateway shows functions alone")
    return [
        {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
        for tool in tools
    ]
