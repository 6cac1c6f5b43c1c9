"""/v1/responses and /v1/conversations are those of the OpenAI API. A conversation's state is a memory."""

from __future__ import annotations

import asyncio
import json
import reprlib
import secrets
from collections.abc import AsyncIterator
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Response
from pydantic import TypeAdapter

from mempipe.answers.api import AnswerReply
from mempipe.answers.errors import ApiError
from mempipe.openai_api.listing import Page, PageRequest, asked_page
from mempipe.openai_api.responses_api import (
    ConversationReply,
    ConversationRequest,
    ConversationUpdate,
    DeletedConversationReply,
    DeletedResponseReply,
    InputItem,
    InputTokensReply,
    InputTokensRequest,
    ItemOfInput,
    ItemsRequest,
    ReasoningItem,
    ResponseReply,
    ResponseRequest,
)
from mempipe.openai_api.responses_reading import (
    REFERENCE,
    ReadResponse,
    in_response,
    read_items,
    read_response,
    response_of,
)
from mempipe.openai_api.responses_writing import ResponseEvents, begun, finished, of_input, of_memory
from mempipe.serve.requests.answer_jobs import AnswerJob
from mempipe.serve.requests.event_stream import event_stream, events
from mempipe.serve.routes.documented import (
    ALWAYS,
    ANSWERS,
    BEARER,
    IGNORED,
    LISTED,
    OF_A_BODY,
    ignored_header,
    refusals,
)
from mempipe.serve.routes.parts import Owner, Parts, PartsOfApp, RequestId
from mempipe.serve.state.responses import StoredResponse
from mempipe.serve.state.sessions import Session

router = APIRouter(prefix="/v1", tags=["openai"], dependencies=BEARER, responses=ALWAYS)
Asked = TypeVar("Asked", bound=ResponseRequest)
_ITEMS = TypeAdapter(list[ItemOfInput])


@router.post("/responses", response_model=ResponseReply, responses=ANSWERS | IGNORED)
async def create_response(
    asked: ResponseRequest, parts: PartsOfApp, owner: Owner, request_id: RequestId, response: Response
) -> Any:
    """Answers a question; the memory after each turn is a reasoning item before the answer.

    The next question resumes from it with `previous_response_id`, with a `conversation`, or with the items, or
    references to them, sent back in `input`. The response header `x-mempipe-ignored` lists fields that were sent and
    have no meaning here.
    """
    asked, read, history = await _read(asked, parts, owner)
    try:
        job = await parts.jobs.plan(read.asked, owner=owner, request_id=request_id, history=history)
    except ApiError as error:
        raise in_response(error, asked) from error
    keeps = asked.store is not False
    reply = begun(asked, response_id=f"resp_{secrets.token_hex(24)}", model=parts.answering.name, keeps=keeps)
    headers = ignored_header(read.ignored)
    if not asked.stream:
        response.headers.update(headers)
        return await _kept(finished(reply, await parts.jobs.run(job)), asked, parts, owner)
    written = ResponseEvents(reply, num_samples=read.asked.num_samples)
    return event_stream(written.of(_happening(reply, asked, job, parts, owner)), headers=headers)


@router.post("/responses/input_tokens", responses=refusals(404) | OF_A_BODY | LISTED)
async def count_input_tokens(
    asked: InputTokensRequest, parts: PartsOfApp, owner: Owner, response: Response
) -> InputTokensReply:
    """Counts the tokens of the first prompt of a question: those of the agent's own words, its memory, the
    instructions and the question.

    The response header `x-mempipe-ignored` lists fields that were sent and have no meaning here.
    """
    asked, read, history = await _read(asked, parts, owner)
    try:
        plan = await parts.jobs.look(read.asked, owner=owner, history=history)
        count = await parts.answering.num_prompt_tokens(plan)
    except ApiError as error:
        raise in_response(error, asked) from error
    response.headers.update(ignored_header(read.ignored))
    return InputTokensReply(input_tokens=count)


@router.get("/responses/{response}", responses=refusals(404))
async def response(response: str, parts: PartsOfApp, owner: Owner, stream: bool = False) -> ResponseReply:
    """Shows a stored response, without its trace."""
    if stream:
        raise ApiError(400, "a stored response is not a stream; leave stream out", param="stream")
    return ResponseReply.model_validate_json((await parts.store.responses.get(response, owner)).body)


@router.get("/responses/{response}/input_items", responses=refusals(404))
async def input_items(
    response: str, parts: PartsOfApp, owner: Owner, asked: Annotated[PageRequest, Query()]
) -> Page[ItemOfInput]:
    """Lists the items of the request that a stored response answers. What came before it is in its memory alone."""
    stored = await parts.store.responses.get(response, owner)
    return asked_page(_ITEMS.validate_json(stored.items or "[]"), asked)


@router.delete("/responses/{response}", responses=refusals(404))
async def delete_response(response: str, parts: PartsOfApp, owner: Owner) -> DeletedResponseReply:
    """Deletes a stored response."""
    await parts.store.responses.delete(response, owner)
    return DeletedResponseReply(id=response)


@router.post("/conversations", response_model=ConversationReply, responses=OF_A_BODY | LISTED)
async def create_conversation(
    parts: PartsOfApp, owner: Owner, response: Response, asked: ConversationRequest | None = None
) -> Any:
    """Begins a conversation: a session, whose memory notes the items.

    The response header `x-mempipe-ignored` lists items that were sent and have no meaning here.
    """
    asked = asked or ConversationRequest()
    noted, unknown = read_items(asked.items or [])
    session = await parts.store.sessions.create(owner, memory=noted(""), metadata=_json(asked.metadata))
    response.headers.update(ignored_header(unknown))
    return _conversation(session)


@router.get("/conversations/{conversation}", responses=refusals(404))
async def conversation(conversation: str, parts: PartsOfApp, owner: Owner) -> ConversationReply:
    """Shows a conversation; GET /v1/sessions/{session} shows its memory too."""
    return _conversation(await parts.store.sessions.get(conversation, owner))


@router.post("/conversations/{conversation}", responses=refusals(404, 409) | OF_A_BODY)
async def update_conversation(
    conversation: str, asked: ConversationUpdate, parts: PartsOfApp, owner: Owner
) -> ConversationReply:
    """Replaces the metadata of a conversation."""
    changed = await parts.store.sessions.change(conversation, owner, metadata=_json(asked.metadata))
    return _conversation(changed)


@router.get("/conversations/{conversation}/items", responses=refusals(404))
async def conversation_items(
    conversation: str, parts: PartsOfApp, owner: Owner, asked: Annotated[PageRequest, Query()]
) -> Page[ReasoningItem]:
    """Lists the items of a conversation. It keeps a memory in place of its messages, so that is the one item."""
    session = await parts.store.sessions.get(conversation, owner)
    return asked_page(of_memory(session.memory, session.id), asked)


@router.post(
    "/conversations/{conversation}/items",
    response_model=Page[ReasoningItem],
    responses=refusals(404, 409) | OF_A_BODY | LISTED,
)
async def add_items(conversation: str, asked: ItemsRequest, parts: PartsOfApp, owner: Owner, response: Response) -> Any:
    """Notes items in the memory of a conversation, which is returned; a memory among them takes its place.

    The response header `x-mempipe-ignored` lists items that were sent and have no meaning here.
    """
    noted, unknown = read_items(asked.items)
    session = await parts.store.sessions.change(conversation, owner, noted=noted)
    response.headers.update(ignored_header(unknown))
    return asked_page(of_memory(session.memory, session.id), PageRequest())


@router.get("/conversations/{conversation}/items/{item}", responses=refusals(404))
async def conversation_item(conversation: str, item: str, parts: PartsOfApp, owner: Owner) -> ReasoningItem:
    """Shows the item of a conversation: its memory."""
    session = await parts.store.sessions.get(conversation, owner)
    found = next((each for each in of_memory(session.memory, session.id) if each.id == item), None)
    if found is None:
        raise ApiError(404, f"the conversation keeps its memory and no item {item[:80]!r}", param="item")
    return found


@router.delete("/conversations/{conversation}/items/{item}", responses=refusals(400, 404))
async def delete_item(conversation: str, item: str, parts: PartsOfApp, owner: Owner) -> None:
    """Refuses: a message cannot be taken out of a memory."""
    await conversation_item(conversation, item, parts, owner)
    raise ApiError(
        400,
        "a conversation keeps its memory in place of its messages, and no message can be taken out of it; add a memory "
        "(an item of type reasoning) that takes its place, or delete the conversation",
        param="item",
    )


@router.delete("/conversations/{conversation}", responses=refusals(404))
async def delete_conversation(conversation: str, parts: PartsOfApp, owner: Owner) -> DeletedConversationReply:
    """Forgets a conversation."""
    await parts.store.sessions.delete(conversation, owner)
    return DeletedConversationReply(id=conversation)


def _conversation(session: Session) -> ConversationReply:
    metadata = json.loads(session.metadata or "{}")
    return ConversationReply(id=session.id, created_at=int(session.created_at), metadata=metadata)


def _json(metadata: dict[str, str] | None) -> str:
    return json.dumps(metadata) if metadata else ""


async def _read(asked: Asked, parts: Parts, owner: str) -> tuple[Asked, ReadResponse, str | None]:
    """Returns a request with whole items, as the agent takes it, and what it starts from. Raises ApiError."""
    agent = asked.mempipe.agent if asked.mempipe is not None else None
    asked = await _with_whole_items(asked, parts, owner)
    answering = parts.answering
    read = await asyncio.to_thread(  # the thousands of items of a long history take time
        read_response,
        asked,
        takes_instructions=answering.takes_instructions(agent),
        knows_user=answering.knows_user(agent),
    )
    previous = asked.previous_response_id
    memory = await _memory_after(previous, parts, owner) if previous is not None else ""
    return asked, read, read.history(memory)


async def _with_whole_items(asked: Asked, parts: Parts, owner: str) -> Asked:
    """Returns the request with the items of stored responses in place of references to them. Raises ApiError 404."""
    found: dict[str, dict[str | None, InputItem]] = {}
    items = list(asked.input)
    for index, item in enumerate(items):
        if item.type != REFERENCE:
            continue
        response_id = response_of(item)
        if response_id is not None and response_id not in found:
            found[response_id] = await _items_of(response_id, parts, owner)
        whole = found.get(response_id or "", {}).get(item.id)
        if whole is None:
            where = f"input.{index}"
            message = f"{where} refers to the item {reprlib.repr(item.id)}, which is not stored; send the whole item"
            raise ApiError(404, message, param=where, code="item_not_found")
        items[index] = whole
    return asked.model_copy(update={"input": items})


async def _items_of(response_id: str, parts: Parts, owner: str) -> dict[str | None, InputItem]:
    """Returns the output items of a stored response by their ids, none where it is not stored."""
    try:
        stored = await parts.store.responses.get(response_id, owner)
    except ApiError as error:
        if error.status != 404:
            raise
        return {}
    output = ResponseReply.model_validate_json(stored.body).output
    return {item.id: InputItem.model_validate(item.model_dump()) for item in output}


async def _memory_after(response_id: str, parts: Parts, owner: str) -> str:
    """Returns the memory that follows a stored response. Raises ApiError 404."""
    try:
        return (await parts.store.responses.get(response_id, owner)).memory
    except ApiError as error:
        raise ApiError(404, str(error), param="previous_response_id", code="previous_response_not_found") from error


async def _kept(reply: ResponseReply, asked: ResponseRequest, parts: Parts, owner: str) -> ResponseReply:
    """Stores a finished response, if it is to be stored and there is room; returns it with what became of that."""
    if reply.store:
        stored = await asyncio.to_thread(_stored, reply, asked)
        return reply.model_copy(update={"store": await parts.store.responses.keep(stored, owner)})
    return reply


def _stored(reply: ResponseReply, asked: ResponseRequest) -> StoredResponse:
    assert reply.mempipe is not None, "the response is finished"
    return StoredResponse(
        id=reply.id,
        body=reply.model_dump_json(exclude={"mempipe"}),
        memory=reply.mempipe.memory,
        items=_ITEMS.dump_json(of_input(asked.input, reply.id)).decode(),
    )


async def _happening(
    reply: ResponseReply, asked: ResponseRequest, job: AnswerJob, parts: Parts, owner: str
) -> AsyncIterator[tuple[str, dict[str, Any]] | ResponseReply | None]:
    """Yields what happens while the job is played, and at its end the stored response."""
    async for event in events(lambda emit: parts.jobs.run(job, emit)):
        if event is not None and event[0] == "answer":
            yield await _kept(finished(reply, AnswerReply.model_validate(event[1])), asked, parts, owner)
        else:
            yield event
