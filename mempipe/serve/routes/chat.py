"""POST /v1/chat/completions and GET /v1/models are those of the OpenAI API, so that its clients work unchanged."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Response

from mempipe.serve.answers.answering import Answering
from mempipe.serve.answers.api import AnswerReply, AttemptReply, ModelReply, ModelsReply
from mempipe.serve.answers.chat_api import ChatChoice, ChatReply, ChatReplyMessage, ChatRequest, ChoiceLogprobs
from mempipe.serve.answers.chat_reading import Chat, in_chat, read_chat
from mempipe.serve.answers.event_stream import Event, event_stream, events
from mempipe.serve.http.errors import ApiError
from mempipe.serve.routes.documented import ALWAYS, ANSWERS, BEARER, IGNORED, IGNORED_HEADER, refusals
from mempipe.serve.routes.parts import Owner, PartsOfApp, RequestId

router = APIRouter(prefix="/v1", tags=["openai"], dependencies=BEARER, responses=ALWAYS)


@router.post("/chat/completions", response_model=ChatReply, responses=ANSWERS | IGNORED)
async def chat(asked: ChatRequest, parts: PartsOfApp, owner: Owner, request_id: RequestId, response: Response) -> Any:
    """A chat completion; the field `mempipe` holds the trace, in a stream each event.

    The response header `x-mempipe-ignored` names what was sent and has no meaning here.
    """
    answering, agent = parts.answering, asked.mempipe.agent if asked.mempipe is not None else None
    read = read_chat(
        asked,
        takes_instructions=answering.takes_instructions(agent),
        keeps_metadata=answering.keeps_metadata,
        is_greedy=answering.is_greedy,
    )
    try:
        job = await parts.jobs.plan(read.asked, owner=owner, request_id=request_id, history=read.history)
    except ApiError as error:
        raise in_chat(error) from error
    headers = {IGNORED_HEADER: ", ".join(read.ignored)} if read.ignored else {}
    if not asked.stream:
        response.headers.update(headers)
        return _reply(await parts.jobs.run(job), read, asked.stops)
    with_usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
    chunks = _Chunks(request_id, answering, read, stops=asked.stops, with_usage=with_usage)
    return event_stream(chunks.of(events(lambda emit: parts.jobs.run(job, emit))), headers=headers)


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

    def __init__(
        self, request_id: str, answering: Answering, read: Chat, *, stops: Sequence[str], with_usage: bool
    ) -> None:
        """With usage the last chunk says what was used, and all others that they do not."""
        self._read = read
        self._stops = stops
        self._with_usage = with_usage
        self._head: dict[str, Any] = {"id": request_id, "object": "chat.completion.chunk", "created": int(time.time())}
        self._head |= {"model": answering.name, "system_fingerprint": answering.engine().version}

    async def of(self, source: AsyncIterator[tuple[str, dict[str, Any]] | None]) -> AsyncIterator[Event | None]:
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
        yield "", "[DONE]"

    def _of_event(self, name: str, data: dict[str, Any]) -> list[Event]:
        """Returns the chunks of one event; the text of the answer is the only content."""
        trace = {"event": name, **data}
        if name == "started":
            self._head["system_fingerprint"] = data["model_version"]
            start = {"role": "assistant", "content": ""}
            return [self._chunk([_delta(index, start) for index in range(self._read.num_choices)], mempipe=trace)]
        if name == "answer":
            choices = _choices(AnswerReply.model_validate(data), self._read, self._stops)
            chunks = [self._chunk([_content(choice)]) for choice in choices]
            ends = [_delta(choice.index, {}, choice.finish_reason) for choice in choices]
            chunks += [self._chunk([end], **({"mempipe": trace} if end is ends[-1] else {})) for end in ends]
            return (
                [*chunks, ("", {**self._head, "choices": [], "usage": data["usage"]})] if self._with_usage else chunks
            )
        return [self._chunk([_delta(0, {})], mempipe=trace)]

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> Event:
        usage = {"usage": None} if self._with_usage else {}
        return "", {**self._head, "choices": choices, **usage, **more}


def _delta(index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish, **more}


def _content(choice: ChatChoice) -> dict[str, Any]:
    logprobs = choice.logprobs.model_dump() if choice.logprobs is not None else None
    return _delta(choice.index, {"content": choice.message.content}, logprobs=logprobs)


def _reply(reply: AnswerReply, read: Chat, stops: Sequence[str]) -> ChatReply:
    return ChatReply(
        id=reply.id,
        created=reply.created,
        model=reply.model,
        system_fingerprint=reply.model_version,
        choices=_choices(reply, read, stops),
        usage=reply.usage,
        mempipe=reply,
    )


def _choices(reply: AnswerReply, read: Chat, stops: Sequence[str]) -> list[ChatChoice]:
    """Returns a choice for each attempt that the chat wants to see."""
    return [
        ChatChoice(
            index=index,
            message=ChatReplyMessage(content=_until(stops, (attempt.answer or "").strip())),
            logprobs=ChoiceLogprobs(content=attempt.logprobs) if attempt.logprobs is not None else None,
            finish_reason=_finish_reason(attempt),
        )
        for index, attempt in enumerate(reply.attempts[: read.num_choices])
    ]


def _until(stops: Sequence[str], text: str) -> str:
    """Returns the text before the first of `stops` in it."""
    return text[: min([text.find(stop) for stop in stops if stop in text], default=len(text))]


def _finish_reason(attempt: AttemptReply) -> Literal["length", "stop"]:
    return "length" if attempt.end_reason in ("length", "max_turns", "context_limit") else "stop"


def _model(answering: Answering) -> ModelReply:
    version = answering.engine().version
    return ModelReply(id=answering.name, created=answering.created, version=version, agents=list(answering.agents))
