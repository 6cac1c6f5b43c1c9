"""Writes an answer as a chat completion: whole, or its events as chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from mempipe.answers.answering import Answering
from mempipe.answers.api import AnswerReply, TokenLogprob, TurnReply
from mempipe.answers.attempt_events import Event
from mempipe.answers.replies import finish_reason, reasoning
from mempipe.openai_api.chat_api import ChatChoice, ChatReply, ChatReplyMessage, ChatRequest, ChoiceLogprobs
from mempipe.openai_api.chat_reading import Chat
from mempipe.text import until_first


class Chunks:
    """Writes the events of one answer as chunks of a chat completion."""

    def __init__(
        self, request_id: str, answering: Answering, read: Chat, asked: ChatRequest, *, with_reasoning: bool
    ) -> None:
        """With `stream_options.include_usage` the last chunk has the usage, and all others have null.

        `with_reasoning` gives thought and memory of each turn when it is finished; of several attempts only one is
        shown, which is known at the end, and then they come before its content.
        """
        self._read = read
        self._stops = asked.stops
        self._with_usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
        self._with_reasoning = with_reasoning
        self._shows_turns = with_reasoning and read.asked.num_samples == 1
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
        if name == "turn" and self._shows_turns and (text := reasoning(TurnReply.model_validate(data))):
            return [self._chunk([_delta(0, {"reasoning_content": text})], mempipe=trace)]
        if name == "answer":
            return self._of_answer(AnswerReply.model_validate(data), trace)
        return [self._chunk([_delta(0, {})], mempipe=trace)]

    def _of_answer(self, reply: AnswerReply, trace: dict[str, Any]) -> list[Event]:
        choices, chunks = _choices(reply, self._read, self._stops), list[Event]()
        if self._with_reasoning and not self._shows_turns:
            chunks.append(self._chunk([_delta(0, {"reasoning_content": "".join(map(reasoning, reply.turns))})]))
        chunks += [self._chunk([_content(choice)]) for choice in choices]
        ends = [_delta(choice.index, {}, choice.finish_reason) for choice in choices]
        chunks += [self._chunk([end], **({"mempipe": trace} if end is ends[-1] else {})) for end in ends]
        if self._with_usage:
            chunks.append(("", {**self._head, "choices": [], "usage": reply.usage.model_dump()}))
        return chunks

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> Event:
        usage = {"usage": None} if self._with_usage else {}
        return "", {**self._head, "choices": choices, **usage, **more}


def _delta(index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish, **more}


def _content(choice: ChatChoice) -> dict[str, Any]:
    logprobs = choice.logprobs.model_dump() if choice.logprobs is not None else None
    return _delta(choice.index, {"content": choice.message.content}, logprobs=logprobs)


def chat_reply(reply: AnswerReply, read: Chat, stops: Sequence[str], *, with_reasoning: bool) -> ChatReply:
    """Returns an answer as a chat completion; `with_reasoning` its first choice tells the turns."""
    choices = _choices(reply, read, stops)
    if with_reasoning:
        choices[0].message.reasoning_content = "".join(map(reasoning, reply.turns))
    return ChatReply(
        id=reply.id,
        created=reply.created,
        model=reply.model,
        system_fingerprint=reply.model_version,
        choices=choices,
        usage=reply.usage,
        mempipe=reply,
    )


def _choices(reply: AnswerReply, read: Chat, stops: Sequence[str]) -> list[ChatChoice]:
    """Returns a choice for each attempt that the chat wants to see."""
    choices = list[ChatChoice]()
    for index, attempt in enumerate(reply.attempts[: read.num_choices]):
        content, logprobs = until_first(attempt.answer or "", stops), attempt.logprobs
        choice = ChatChoice(
            index=index,
            message=ChatReplyMessage(content=content),
            logprobs=ChoiceLogprobs(content=_holding(content, logprobs)) if logprobs is not None else None,
            finish_reason=finish_reason(attempt.end_reason),
        )
        choices.append(choice)
    return choices


def _holding(content: str, tokens: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    """Returns the first tokens of an answer, as many as hold `content`, with which it begins."""
    kept, said = list[TokenLogprob](), ""
    for token in tokens:
        if content in said:
            break
        kept.append(token)
        said += token.token
    return kept
