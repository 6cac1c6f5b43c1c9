"""Requests of the chat completions API as messages, and the policy's messages as its replies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mempipe.agents.program.rendering import Refused, Said
from mempipe.agents.program.tool_calls import Calls

_READ = {
    "model",
    "messages",
    "tools",
    "tool_choice",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stream",
    "stream_options",
    "metadata",
}
_IGNORED = {
    *("temperature", "top_p", "top_k", "min_p", "seed"),  # the run decides: training needs samples of its distribution
    *("parallel_tool_calls", "user", "store", "prompt_cache_key", "safety_identifier", "service_tier"),
}
_HARMLESS = {
    "n": 1,
    "logprobs": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
}
"""Values that ask for nothing, as frameworks send them."""
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request as the gateway takes it."""

    messages: list[Said]
    tools: str  # their JSON, "" for none
    max_tokens: int | None
    stop_texts: list[str]
    memory: str | None  # the part of the messages that is the program's memory; None where it states none
    streams: bool
    streams_usage: bool


def read_request(request: Any, calls: Mapping[str, Calls]) -> ChatRequest:
    """Reads the body of a request; `calls` are those of this trajectory's replies, by the id that the program has got.

    Raises Refused when it is not a request, or asks for something that the gateway does not give.
    """
    if not isinstance(request, dict):
        raise Refused("the body is not a JSON object")
    asked = {name for name, value in request.items() if value is not None and _HARMLESS.get(name) != value}
    if unknown := sorted(asked - _READ - _IGNORED):
        raise Refused(f"{', '.join(unknown)}: not taken; the gateway takes {', '.join(sorted(_READ | _IGNORED))}")
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(f"messages is {messages!r:.100}; expected a list of them")
    said = [_said(message, calls) for message in messages]
    if said[-1].role not in ("user", "tool"):
        raise Refused(f"the last message is of the role {said[-1].role}; the policy answers user and tool")
    options = request.get("stream_options") or {}
    return ChatRequest(
        messages=said,
        tools=_tools(request),
        max_tokens=_max_tokens(request),
        stop_texts=_stop_texts(request.get("stop") or []),
        memory=_memory(request.get("metadata"), said),
        streams=bool(request.get("stream")),
        streams_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def reply(
    number: int, text: str, calls: Mapping[str, Calls], *, cut_off: bool, num_prompt_tokens: int, num_sampled: int
) -> dict[str, Any]:
    """Returns message `number` of the policy as a chat completion. `calls` are the calls in it, by their ids."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    for place, (call_id, found) in enumerate(calls.items()):
        name, arguments = found.functions[place]
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        message["content"] = found.content or None
        message.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
    finish_reason = "tool_calls" if calls else "length" if cut_off else "stop"
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt_tokens + num_sampled,
        },
    }


def events(completion: dict[str, Any], *, with_usage: bool) -> Iterator[str]:
    """Yields the completion as server-sent events: the whole message in one, then its end."""
    (choice,) = completion["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
    head = {name: completion[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    ended = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}]
    chunks.append({"choices": [ended]})
    if with_usage:
        chunks.append({"choices": [], "usage": completion["usage"]})
    for chunk in chunks:
        yield f"data: {json.dumps(head | chunk)}\n\n"
    yield "data: [DONE]\n\n"


def _said(message: Any, calls: Mapping[str, Calls]) -> Said:
    role = message.get("role") if isinstance(message, dict) else None
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise Refused(f"a message has the role {role!r:.100}; expected {', '.join(_ROLES)} or developer")
    if message.get("tool_calls"):
        return Said(role, _replied(message, calls).text)
    return Said(role, _text(message.get("content")))


def _replied(message: dict[str, Any], calls: Mapping[str, Calls]) -> Calls:
    """Returns the reply that this message with calls is."""
    try:
        sent = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
        known = calls.get(message["tool_calls"][0]["id"])
    except (LookupError, TypeError, ValueError):
        raise Refused("tool_calls: expected id, function.name and function.arguments as JSON text") from None
    if known is None or known.functions != sent:
        raise Refused(
            f"tool_calls of {sent[0][0]!r:.100}: no reply of the policy in this attempt; messages with calls are taken "
            "as the policy wrote them"
        )
    return known


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise Refused("the content of a message is neither a text nor parts of type text")


def _tools(request: dict[str, Any]) -> str:
    tools, choice = request.get("tools") or [], request.get("tool_choice") or "auto"
    if choice not in ("auto", "required", "none"):
        raise Refused(f"tool_choice is {choice!r:.100}; the policy decides itself which tool it calls")
    if choice == "none" or not tools:
        return ""
    try:
        named = all(isinstance(tool["function"]["name"], str) for tool in tools)
    except (LookupError, TypeError):
        named = False
    if not named:
        raise Refused("tools: expected a list of {type: function, function: {name, description, parameters}}")
    return json.dumps(tools, ensure_ascii=False)


def _stop_texts(stop: Any) -> list[str]:
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise Refused(f"stop is {stop!r:.100}; expected a text or a list of texts")
    return texts


def _memory(metadata: Any, said: Sequence[Said]) -> str | None:
    memory = metadata.get("memory") if isinstance(metadata, dict) else None
    if memory is None:
        return None
    if not isinstance(memory, str) or not any(memory in message.text for message in said):
        raise Refused(
            f"metadata.memory is {memory!r:.100}, which is in none of the messages; expected the part of them that is "
            "the program's memory, letter by letter"
        )
    return memory


def _max_tokens(request: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = request.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise Refused(f"{name} is {value!r:.100}; expected a whole number above 0")
    return request.get("max_completion_tokens") or request.get("max_tokens")
