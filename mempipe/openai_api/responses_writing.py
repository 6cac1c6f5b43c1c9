"""Writes an answer as a response of the Responses API: its items, and in a stream the events that make them."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from mempipe.answers.api import MAX_ID_CHARS, AnswerReply, TurnReply
from mempipe.answers.attempt_events import Event
from mempipe.answers.replies import finish_reason
from mempipe.openai_api.responses_api import (
    CachedTokens,
    ConversationOfResponse,
    IncompleteDetails,
    InputItem,
    ItemOfInput,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ReasoningTokens,
    ResponseError,
    ResponseReply,
    ResponseRequest,
    ResponseUsage,
    SummaryText,
)
from mempipe.openai_api.responses_reading import MEMORY, THOUGHT
from mempipe.text import replace_surrogates


def begun(request: ResponseRequest, *, response_id: str, model: str, keeps: bool) -> ResponseReply:
    """Returns the response of a question that is being worked on; `keeps`: it will be stored."""
    conversation = request.conversation
    return ResponseReply(
        id=response_id,
        created_at=int(time.time()),
        status="in_progress",
        model=model,
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        conversation=ConversationOfResponse(id=conversation) if conversation is not None else None,
        max_output_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        metadata=request.metadata or {},
        store=keeps,
    )


def finished(response: ResponseReply, reply: AnswerReply) -> ResponseReply:
    """Returns the response with the answer and its usage."""
    is_whole, usage = finish_reason(reply.end_reason) == "stop", reply.usage
    items = [item for turn in reply.turns if (item := _reasoning(turn, response.id)) is not None]
    changes: dict[str, Any] = {
        "status": "completed" if is_whole else "incomplete",
        "completed_at": int(time.time()) if is_whole else None,
        "incomplete_details": None if is_whole else IncompleteDetails(),
        "output": [*items, _answer(reply, response.id, is_whole=is_whole)],
        "usage": ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=CachedTokens(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=ReasoningTokens(reasoning_tokens=usage.completion_tokens_details.reasoning_tokens),
            total_tokens=usage.total_tokens,
        ),
        "mempipe": reply,
    }
    return response.model_copy(update=changes)


def of_input(items: Sequence[InputItem], response_id: str) -> list[ItemOfInput]:
    """Returns the items of a request as the Responses API lists them, oldest first."""
    listed, seen = list[ItemOfInput](), set[str]()
    for index, item in enumerate(items):
        sent = json.dumps(item.model_dump(exclude_unset=True), ensure_ascii=False)
        fields = json.loads(replace_surrogates(sent))  # half a character cannot be sent back
        if item.type == "message" and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            empty = {"annotations": []} if item.role == "assistant" else {}
            fields["content"] = [{"type": kind, "text": fields["content"], **empty}]
        item_id = fields.get("id") or ""
        if not 0 < len(item_id) <= MAX_ID_CHARS or item_id in seen:  # a client that lists by pages needs one for each
            item_id = f"input_{index}_of_{response_id}"
        seen.add(item_id)
        listed.append(ItemOfInput.model_validate({"status": "completed", **fields, "id": item_id, "type": item.type}))
    return listed


def of_memory(memory: str, conversation: str) -> list[ReasoningItem]:
    """Returns the items of a conversation: its memory, as after a turn; none where it is empty."""
    summary = [SummaryText(text=memory)]
    return [ReasoningItem(id=f"{MEMORY}of_{conversation}", summary=summary, content=[])] if memory else []


def _reasoning(turn: TurnReply, response_id: str) -> ReasoningItem | None:
    """Returns the item of a turn; None for a turn without thought and memory."""
    memory = [SummaryText(text=turn.memory_after)] if turn.memory_after else []
    thought = [ReasoningText(text=turn.thought)] if turn.thought else []
    if not memory and not thought:
        return None
    kind = MEMORY if memory else THOUGHT
    return ReasoningItem(id=f"{kind}{turn.index}_of_{response_id}", summary=memory, content=thought)


def _answer(reply: AnswerReply, response_id: str, *, is_whole: bool) -> MessageItem:
    text = OutputText(text=reply.answer or "", logprobs=reply.attempts[0].logprobs or [])
    return MessageItem(id=f"msg_of_{response_id}", content=[text], status="completed" if is_whole else "incomplete")


class ResponseEvents:
    """Writes the events of one answer as those of the Responses API, each with its number in `sequence_number`.

    The item of a turn comes when the turn is finished. Of several attempts only one is shown, which is known at the
    end: then the items of its turns come with the answer.
    """

    def __init__(self, response: ResponseReply, *, num_samples: int) -> None:
        self._response = response
        self._shows_turns = num_samples == 1
        self._num_events = 0
        self._told: list[ReasoningItem | MessageItem] = []
        self._num_given_up = 0
        """Items of attempts that were given up because the index changed."""
        self._first_number, self._next_number = 0, 0
        """Numbers, in ids, of the first turn of this attempt and of its next one."""

    async def of(
        self, source: AsyncIterator[tuple[str, dict[str, Any]] | ResponseReply | None]
    ) -> AsyncIterator[Event | None]:
        """Yields the events; `source` gives what happens, and at its end the finished response. None is a ping."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._shown(self._response))
        async for event in source:
            if event is None:
                yield None
            elif isinstance(event, ResponseReply):
                output = [*self._told[: self._num_given_up], *map(self._numbered, event.output)]
                for item in output[len(self._told) :]:
                    for each in self._item(item):
                        yield each
                whole = event.model_copy(update={"output": output})
                yield self._event(f"response.{event.status}", response=self._shown(whole))
            elif event[0] == "turn" and self._shows_turns:
                turn = TurnReply.model_validate(event[1])
                self._next_number = self._first_number + turn.index + 1
                if (item := _reasoning(turn, self._response.id)) is not None:
                    for each in self._item(self._numbered(item)):
                        yield each
            elif event[0] == "restarted":
                self._num_given_up, self._first_number = len(self._told), self._next_number
            elif event[0] == "error":
                error = ResponseError(message=event[1]["error"]["message"])
                failed = self._response.model_copy(update={"status": "failed", "error": error})
                yield self._event("response.failed", response=self._shown(failed))

    def _numbered(self, item: ReasoningItem | MessageItem) -> ReasoningItem | MessageItem:
        """Returns the item with an id that no item of an attempt that was given up has."""
        if not self._first_number or isinstance(item, MessageItem):
            return item
        kind, number, rest = item.id.split("_", 2)
        return item.model_copy(update={"id": f"{kind}_{int(number) + self._first_number}_{rest}"})

    def _item(self, item: ReasoningItem | MessageItem) -> Iterator[Event]:
        """Yields the events that make an item."""
        at: dict[str, Any] = {"output_index": len(self._told)}
        self._told.append(item)
        empty: dict[str, Any] = {"status": "in_progress", "content": []}
        if isinstance(item, ReasoningItem):
            empty["summary"] = []
        yield self._event("response.output_item.added", **at, item=item.model_copy(update=empty).model_dump())
        at["item_id"] = item.id
        if isinstance(item, ReasoningItem):
            yield from self._texts(item, at)
        else:
            yield from self._message(item, at)
        del at["item_id"]
        yield self._event("response.output_item.done", **at, item=item.model_dump())

    def _texts(self, item: ReasoningItem, at: dict[str, Any]) -> Iterator[Event]:
        for index, thought in enumerate(item.content):
            here = at | {"content_index": index}
            yield self._event("response.content_part.added", **here, part=ReasoningText(text="").model_dump())
            yield self._event("response.reasoning_text.delta", **here, delta=thought.text)
            yield self._event("response.reasoning_text.done", **here, text=thought.text)
            yield self._event("response.content_part.done", **here, part=thought.model_dump())
        for index, memory in enumerate(item.summary):
            here = at | {"summary_index": index}
            yield self._event("response.reasoning_summary_part.added", **here, part=SummaryText(text="").model_dump())
            yield self._event("response.reasoning_summary_text.delta", **here, delta=memory.text)
            yield self._event("response.reasoning_summary_text.done", **here, text=memory.text)
            yield self._event("response.reasoning_summary_part.done", **here, part=memory.model_dump())

    def _message(self, item: MessageItem, at: dict[str, Any]) -> Iterator[Event]:
        for index, part in enumerate(item.content):
            here, logprobs = at | {"content_index": index}, [each.model_dump() for each in part.logprobs]
            yield self._event("response.content_part.added", **here, part=OutputText(text="").model_dump())
            yield self._event("response.output_text.delta", **here, delta=part.text, logprobs=logprobs)
            yield self._event("response.output_text.done", **here, text=part.text, logprobs=logprobs)
            yield self._event("response.content_part.done", **here, part=part.model_dump())

    def _event(self, name: str, **data: Any) -> Event:
        number = self._num_events
        self._num_events += 1
        return name, {"type": name, "sequence_number": number, **data}

    def _shown(self, response: ResponseReply) -> dict[str, Any]:
        return response.model_dump()
