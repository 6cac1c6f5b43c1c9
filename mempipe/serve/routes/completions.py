"""POST /v1/completions is that of the OpenAI API: its prompt is a bare question, which is answered as a chat is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Response

from mempipe.answers.attempt_events import Event
from mempipe.answers.errors import ApiError
from mempipe.openai_api.chat_api import ChatReply
from mempipe.openai_api.completions_api import CompletionChoice, CompletionReply, CompletionRequest
from mempipe.openai_api.fields import refuse_unsupported, unread
from mempipe.serve.requests.event_stream import event_stream
from mempipe.serve.routes.chat import play_chat
from mempipe.serve.routes.documented import ALWAYS, ANSWERS, BEARER, IGNORED, ignored_header
from mempipe.serve.routes.parts import Owner, PartsOfApp, RequestId

router = APIRouter(prefix="/v1", tags=["openai"], dependencies=BEARER, responses=ALWAYS)


@router.post("/completions", response_model=CompletionReply, responses=ANSWERS | IGNORED)
async def complete(
    asked: CompletionRequest, parts: PartsOfApp, owner: Owner, request_id: RequestId, response: Response
) -> Any:
    """Answers a bare question; the field `mempipe` holds the trace, in a stream each event.

    The response header `x-mempipe-ignored` lists fields that were sent and have no meaning here.
    """
    refuse_unsupported(asked)
    try:
        played, of_chat = await play_chat(asked.as_chat(), parts, owner=owner, request_id=request_id)
    except ApiError as error:
        param = "prompt" if error.param == "messages" else error.param
        raise ApiError(error.status, str(error), param=param, code=error.code) from error
    headers = ignored_header(sorted({*unread(asked), *of_chat}))
    if not isinstance(played, ChatReply):
        return event_stream(_chunks(played), headers=headers)
    response.headers.update(headers)
    return _completion(played)


def _completion(reply: ChatReply) -> CompletionReply:
    choices = [
        CompletionChoice(index=each.index, text=each.message.content, finish_reason=each.finish_reason)
        for each in reply.choices
    ]
    head = {name: getattr(reply, name) for name in ("id", "created", "model", "system_fingerprint", "usage", "mempipe")}
    return CompletionReply(choices=choices, **head)


async def _chunks(source: AsyncIterator[Event | None]) -> AsyncIterator[Event | None]:
    """Yields the chunks of a chat as those of a completion."""
    async for event in source:
        if event is None or isinstance(event[1], str) or "choices" not in event[1]:
            yield event
            continue
        choices = [
            {
                "index": choice["index"],
                "text": choice["delta"].get("content", ""),
                "logprobs": None,
                "finish_reason": choice["finish_reason"],
            }
            for choice in event[1]["choices"]
        ]
        yield "", {**event[1], "object": "text_completion", "choices": choices}
