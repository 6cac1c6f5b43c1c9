"""/v1/sessions keeps a memory from one question to the next."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from mempipe.answers.api import DeletedReply, SessionReply
from mempipe.openai_api.listing import OldestFirst, Page, page_of
from mempipe.serve.routes.documented import ALWAYS, BEARER, OF_A_BODY, refusals
from mempipe.serve.routes.parts import Owner, PartsOfApp, no_body

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], dependencies=BEARER, responses=ALWAYS)


@router.post("", responses=OF_A_BODY, dependencies=[Depends(no_body("a session begins with an empty memory"))])
async def create_session(parts: PartsOfApp, owner: Owner) -> SessionReply:
    """Begins a conversation: a memory that questions with this `session` start from and leave behind."""
    return SessionReply(**asdict(await parts.store.sessions.create(owner)))


@router.get("")
async def sessions(parts: PartsOfApp, owner: Owner, asked: Annotated[OldestFirst, Query()]) -> Page[SessionReply]:
    """Lists the caller's conversations, a hundred at once unless told otherwise."""
    found = await parts.store.sessions.of_owner(
        owner, limit=asked.limit + 1, after=asked.after, newest_first=asked.order == "desc"
    )
    return page_of([SessionReply(**asdict(each)) for each in found], limit=asked.limit)


@router.get("/{session}", responses=refusals(404))
async def session(session: str, parts: PartsOfApp, owner: Owner) -> SessionReply:
    """Shows a conversation with its memory."""
    return SessionReply(**asdict(await parts.store.sessions.get(session, owner)))


@router.delete("/{session}", responses=refusals(404))
async def delete_session(session: str, parts: PartsOfApp, owner: Owner) -> DeletedReply:
    """Forgets a conversation."""
    await parts.store.sessions.delete(session, owner)
    return DeletedReply(id=session)
