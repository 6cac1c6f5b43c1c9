"""POST /v1/chat/completions and GET /v1/models are those of the OpenAI API, so that its clients work unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter

from mempipe.serve.answering import Answering
from mempipe.serve.api import (
    AnswerReply,
    AnswerRequest,
    ChatChoice,
    ChatReply,
    ChatReplyMessage,
    ChatRequest,
    ModelReply,
    ModelsReply,
    Sampling,
)
from mempipe.serve.conversation import noted
from mempipe.serve.errors import ApiError
from mempipe.serve.event_stream import Event, event_stream, events
from mempipe.serve.routes.documented import ALWAYS, ANSWERS, BEARER, refusals
from mempipe.serve.routes.parts import Owner, PartsOfApp, RequestId

router = APIRouter(prefix="/v1", tags=["openai"], dependencies=BEARER, responses=ALWAYS)


@router.post("/chat/completions", response_model=ChatReply, responses=ANSWERS)
async def chat(asked: ChatRequest, parts: PartsOfApp, owner: Owner, request_id: RequestId) -> Any:
    """A chat completion; the field `mempipe` holds the trace, in a stream each event."""
    job = await parts.jobs.plan(_asked_in(asked), owner=owner, request_id=request_id, history=_history(asked))
    if not asked.stream:
        return _reply(await parts.jobs.run(job))
    with_usage = asked.stream_options is not None and asked.stream_options.include_usage
    chunks = _Chunks(request_id, parts.answering)
    return event_stream(chunks.of(events(lambda emit: parts.jobs.run(job, emit)), with_usage=with_usage))


@router.get("/models")
async def models(parts: PartsOfApp) -> ModelsReply:
    """The served model, its version and its agents."""
    return ModelsReply(data=[_model(parts.answering)])


@router.get("/models/{model:path}", responses=refusals(404))
async def model(model: str, parts: PartsOfApp) -> ModelReply:
    """Shows the served model under its own name."""
    if model != parts.answering.name:
        raise ApiError(404, f"this service has {parts.answering.name!r}", param="model", code="model_not_found")
    return _model(parts.answering)


class _Chunks:
    """Writes the events of one answer as chunks of a chat completion."""

    def __init__(self, request_id: str, answering: Answering) -> None:
        self._head: dict[str, Any] = {"id": request_id, "object": "chat.completion.chunk", "created": 0}
        self._head |= {"model": answering.name, "system_fingerprint": answering.engine().version}

    async def of(
        self, source: AsyncIterator[tuple[str, dict[str, Any]] | None], *, with_usage: bool
    ) -> AsyncIterator[Event | None]:
        """Yields the chunks, which have no names as clients of the OpenAI API expect; a ping for a ping."""
        async for event in source:
            if event is None:
                yield None
                continue
            name, data = event
            if name == "error":
                yield "", data
                return
            for chunk in self._of_event(name, data):
                yield chunk
            if name == "answer" and with_usage:
                yield "", {**self._head, "choices": [], "usage": data["usage"]}
        yield "", "[DONE]"

    def _of_event(self, name: str, data: dict[str, Any]) -> list[Event]:
        """Returns the chunks of one event; the text of the answer is the only content."""
        trace = {"event": name, **data}
        if name == "started":
            self._head["system_fingerprint"] = data["model_version"]
            return [self._chunk({"role": "assistant", "content": ""}, mempipe=trace)]
        if name == "answer":
            reply = AnswerReply.model_validate(data)
            self._head["created"] = reply.created
            content = self._chunk({"content": reply.answer or ""})
            return [content, self._chunk({}, _finish_reason(reply), mempipe=trace)]
        return [self._chunk({}, mempipe=trace)]

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> Event:
        return "", {**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


def _asked_in(chat: ChatRequest) -> AnswerRequest:
    """Returns the last message of a chat as a request for an answer."""
    sampling = Sampling(temperature=chat.temperature, top_p=chat.top_p)
    question = chat.messages[-1].content
    return AnswerRequest(question=question, model=chat.model, sampling=sampling, **dict(chat.mempipe))


def _history(chat: ChatRequest) -> str | None:
    """Returns what was said before, as a memory; None where nothing was."""
    memory, question = "", ""
    for message in chat.messages[:-1]:
        if message.role == "user":
            memory, question = noted(memory, question, None) if question else memory, message.content
        else:
            memory, question = noted(memory, question, message.content), ""
    return (noted(memory, question, None) if question else memory) or None


def _reply(reply: AnswerReply) -> ChatReply:
    choice = ChatChoice(message=ChatReplyMessage(content=reply.answer or ""), finish_reason=_finish_reason(reply))
    return ChatReply(
        id=reply.id,
        created=reply.created,
        model=reply.model,
        system_fingerprint=reply.model_version,
        choices=[choice],
        usage=reply.usage,
        mempipe=reply,
    )


def _finish_reason(reply: AnswerReply) -> Literal["length", "stop"]:
    return "length" if reply.end_reason in ("length", "max_turns", "context_limit") else "stop"


def _model(answering: Answering) -> ModelReply:
    version = answering.engine().version
    return ModelReply(id=answering.name, created=0, version=version, agents=list(answering.agents))
