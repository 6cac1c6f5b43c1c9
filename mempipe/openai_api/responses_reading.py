"""Reads a request of the Responses API as a question to the agent, and its earlier items as a memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from mempipe.answers.api import MAX_QUESTION_CHARS, AnswerRequest, Options
from mempipe.answers.errors import TOO_LONG, ApiError
from mempipe.openai_api.chat_api import ChatMessage
from mempipe.openai_api.chat_reading import INSTRUCTIONS, history
from mempipe.openai_api.fields import USER, of_messages, refuse_unsupported, unread
from mempipe.openai_api.responses_api import LOGPROBS, InputItem, ResponseRequest

MEMORY, THOUGHT = "memory_", "thought_"
"""How the ids of this service's reasoning items begin: of those that hold a memory, and of those that hold none. The
summary does not tell them apart: some clients send an item back with its thought in the summary."""
REFERENCE = "item_reference"
"""The type of an item that names an item of a stored response."""
_OF_RESPONSE = re.compile(r"\w+_of_(resp_[0-9a-f]+)", re.ASCII)
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResponse:
    """A request of the Responses API as the agent takes it."""

    asked: AnswerRequest
    memory: str | None
    """The last memory among the items of `input`; None where there is none."""
    said: list[ChatMessage]
    """The messages between that memory and the question."""
    ignored: list[str]

    def history(self, before: str = "") -> str | None:
        """Returns the messages before the question as a memory; None where nothing was. `before` is the memory of an
        earlier response; one in `input` takes its place.
        """
        return remembered(before if self.memory is None else self.memory, self.said)


def read_response(request: ResponseRequest, *, takes_instructions: bool, knows_user: bool) -> ReadResponse:
    """Returns the question of a request.

    `takes_instructions`: the agent has a place for instructions. `knows_user`: the agent or a tool of it learns who
    asks. Raises ApiError 400 with the field that is wrong or cannot be had.
    """
    refuse_unsupported(request)
    _refuse_other_formats(request.text)
    options = request.mempipe or Options()
    named = (request.conversation, request.previous_response_id, options.session)
    if len([each for each in named if each is not None]) > 1:
        message = "give one of conversation, previous_response_id and mempipe.session"
        raise ApiError(400, message, param="previous_response_id" if named[1] else "conversation")
    memory, messages, unknown = _read_items(request.input, "input")
    said = [message for message in messages if message.role not in INSTRUCTIONS]
    if not said or said[-1].role != "user" or not said[-1].content.strip():
        raise ApiError(400, "input: the last item is the question, of role 'user' and not blank", param="input")
    question, orders = said[-1].content, [request.instructions or ""]
    orders += [message.content for message in messages if message.role in INSTRUCTIONS]
    instructions = "\n".join(text for text in orders if text.strip())
    for name, text in (("input", question), ("instructions", instructions if takes_instructions else "")):
        if len(text) > MAX_QUESTION_CHARS:
            message = f"{name} has {len(text)} characters; at most {MAX_QUESTION_CHARS} are read"
            raise ApiError(400, message, param=name, code=TOO_LONG)
    if not takes_instructions:
        unknown |= {message.role for message in messages if message.role in INSTRUCTIONS}
    if request.conversation is not None:
        options = options.model_copy(update={"session": request.conversation})
    asked = AnswerRequest(
        question=question,
        instructions=instructions if instructions and takes_instructions else None,
        model=request.model,
        sampling=request.sampling,
        logprobs=LOGPROBS in (request.include or []),
        metadata=request.metadata or {},
        **dict(options) | request.options_of_user,
    )
    ignored = sorted(unread(request) | (request.model_fields_set & (set() if knows_user else USER)))
    ignored += [f"include.{each}" for each in request.include or [] if each != LOGPROBS]
    if request.stream_options is not None:
        ignored.append("stream_options")
    if request.instructions and not takes_instructions:
        ignored.append("instructions")
    ignored += of_messages("input", (), unknown)
    return ReadResponse(asked=asked, memory=memory, said=said[:-1], ignored=ignored)


def response_of(item: InputItem) -> str | None:
    """Returns the id of the response whose item a reference names; None for an id that this service did not give."""
    match = _OF_RESPONSE.fullmatch(item.id or "")
    return match[1] if match is not None else None


def read_items(items: Sequence[InputItem]) -> tuple[Callable[[str], str], list[str]]:
    """Returns how items change the memory of their conversation, and the names of skipped items. Raises ApiError 400.

    Messages are lines after the memory, and a memory among the items takes its place.
    """
    memory, messages, unknown = _read_items(items, "items")
    said = [each for each in messages if each.role not in INSTRUCTIONS]
    unknown |= {each.role for each in messages if each.role in INSTRUCTIONS}

    def noted(before: str) -> str:
        return remembered(before if memory is None else memory, said) or ""

    return noted, of_messages("items", (), unknown)


def in_response(error: ApiError, request: ResponseRequest) -> ApiError:
    """Returns the refusal of a question with the field of its request that it is about."""
    param = {"question": "input", "max_tokens": "max_output_tokens", "logprobs": "include"}.get(error.param or "")
    if param is None and error.param == "session" and request.conversation is not None:
        param = "conversation"
    if param is None and error.param is not None:
        of_options = error.param.partition(".")[0] in Options.model_fields
        param = f"mempipe.{error.param}" if of_options else error.param
    return ApiError(error.status, str(error), param=param, code=error.code)


def remembered(memory: str, messages: Sequence[ChatMessage]) -> str | None:
    """Returns a memory with messages that came after it; None where there is neither."""
    return "\n".join(filter(None, (memory, history(messages)))) or None


def _read_items(items: Sequence[InputItem], name: str) -> tuple[str | None, list[ChatMessage], set[str]]:
    """Returns the last memory among the items, the messages that it does not cover, and the types that are not read;
    `name` is the field that holds the items.

    A memory covers all that came before the question in whose turns it was written.
    """
    memory: str | None = None
    orders, messages, unread = list[ChatMessage](), list[ChatMessage](), set[str]()
    first, asked = 0, None  # places of the first message that counts, and of the last question
    for index, item in enumerate(items):
        where = f"{name}.{index}"
        if item.type == "message":
            message = _message({"role": item.role, "content": item.content}, where)
            if message.role == "user":
                asked = len(messages)
            (orders if message.role in INSTRUCTIONS else messages).append(message)
        elif item.type in _CALLS:
            call = {"function": {"name": item.name, "arguments": item.arguments or item.input}}
            messages.append(_message({"role": "assistant", "tool_calls": [call]}, where))
        elif item.type in _OUTPUTS:
            messages.append(_message({"role": "tool", "content": item.output}, where))
        elif item.type == REFERENCE:
            raise ApiError(400, f"{where} is an {REFERENCE}; send the whole item", param=where)
        elif item.type == "reasoning" and (item.id or "").startswith(MEMORY):
            if (written := _summary(item, where)) is not None:
                memory, first = written, len(messages) if asked is None else asked
        elif item.type != "reasoning" or not (item.id or "").startswith(THOUGHT):
            unread.add(item.type)
    return memory, orders + messages[first:], unread


def _message(fields: dict[str, Any], where: str) -> ChatMessage:
    try:
        return ChatMessage.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([where, *map(str, first["loc"])])
        reason = first["ctx"]["error"] if first["type"] == "value_error" else first["msg"]
        raise ApiError(400, f"{where}: {reason}", param=where) from error


def _summary(item: InputItem, where: str) -> str | None:
    """Returns the memory of a reasoning item; None where the turn wrote none."""
    if item.summary in (None, []):
        return None
    parts = item.summary if isinstance(item.summary, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        where = f"{where}.summary"
        raise ApiError(400, f"{where} holds no texts; send the item as the service gave it", param=where)
    return _message({"role": "user", "content": "\n".join(map(str, texts))}, where).content


def _refuse_other_formats(text: Any) -> None:
    """Raises ApiError 400 where the answer should be other than text."""
    form = text.get("format") if isinstance(text, dict) else None
    kind = form.get("type") if isinstance(form, dict) else "text" if form is None else None
    if kind != "text" or not isinstance(text, dict | None):
        message = "text.format asks for another format; this service answers with {'type': 'text'} only"
        raise ApiError(400, message, param="text.format", code="unsupported_value")
