"""POST /v1/chat/completions and GET /v1/models are those of the OpenAI API, so that its clients work unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Response

from mempipe.answers.answering import Answering
from mempipe.answers.api import ModelReply, ModelsReply
from mempipe.answers.attempt_events import Event
from mempipe.answers.errors import ApiError
from mempipe.openai_api.chat_api import ChatReply, ChatRequest
from mempipe.openai_api.chat_reading import in_chat, read_chat
from mempipe.openai_api.chat_writing import Chunks, chat_reply
from mempipe.serve.requests.event_stream import event_stream, events
from mempipe.serve.routes.documented import ALWAYS, ANSWERS, BEARER, IGNORED, ignored_header, refusals
from mempipe.serve.routes.parts import Owner, Parts, PartsOfApp, RequestId

router = APIRouter(prefix="/v1", tags=["openai"], dependencies=BEARER, responses=ALWAYS)


@router.post("/chat/completions", response_model=ChatReply, responses=ANSWERS | IGNORED)
async def chat(asked: ChatRequest, parts: PartsOfApp, owner: Owner, request_id: RequestId, response: Response) -> Any:
    """A chat completion; the field `mempipe` holds the trace, in a stream each event.

    The response header `x-mempipe-ignored` lists fields that were sent and have no meaning here.
    """
    played, ignored = await play_chat(asked, parts, owner=owner, request_id=request_id)
    headers = ignored_header(ignored)
    if not isinstance(played, ChatReply):
        return event_stream(played, headers=headers)
    response.headers.update(headers)
    return played


async def play_chat(
    asked: ChatRequest, parts: Parts, *, owner: str, request_id: str
) -> tuple[ChatReply | AsyncIterator[Event | None], list[str]]:
    """Returns the completion of a chat, or its chunks where it asks for a stream, and its fields without a meaning."""
    answering, agent = parts.answering, asked.mempipe.agent if asked.mempipe is not None else None
    read = read_chat(
        asked,
        takes_instructions=answering.takes_instructions(agent),
        keeps_metadata=answering.keeps_metadata,
        knows_user=answering.knows_user(agent),
        is_greedy=answering.is_greedy,
    )
    try:
        job = await parts.jobs.plan(read.asked, owner=owner, request_id=request_id, history=read.history)
    except ApiError as error:
        raise in_chat(error) from error
    with_reasoning = parts.include_reasoning if asked.include_reasoning is None else asked.include_reasoning
    if not asked.stream:
        reply = await parts.jobs.run(job)
        return chat_reply(reply, read, asked.stops, with_reasoning=with_reasoning), read.ignored
    chunks = Chunks(request_id, answering, read, asked, with_reasoning=with_reasoning)
    return chunks.of(events(lambda emit: parts.jobs.run(job, emit))), read.ignored


@router.get("/models")
async def models(parts: PartsOfApp) -> ModelsReply:
    """The served model, its version, and its agents with their budgets."""
    return ModelsReply(data=[_model(parts.answering)])


@router.get("/models/{model:path}", responses=refusals(404))
async def model(model: str, parts: PartsOfApp) -> ModelReply:
    """Shows the served model under its own name."""
    if model != parts.answering.name:
        raise ApiError(404, f"this service has {parts.answering.name!r}", param="model", code="model_not_found")
    return _model(parts.answering)


def _model(answering: Answering) -> ModelReply:
    return ModelReply(
        id=answering.name,
        root=answering.name,
        created=answering.created,
        version=answering.engine().version,
        agents=list(answering.agents),
        budgets=answering.budgets,
    )
