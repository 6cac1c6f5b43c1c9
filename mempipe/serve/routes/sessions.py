"""/v1/sessions keeps a memory from one question to the next."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter

from mempipe.answers.api import DeletedReply, SessionReply, SessionsReply
from mempipe.serve.routes.documented import ALWAYS, BEARER, OF_A_BODY, refusals
from mempipe.serve.routes.parts import Owner, PartsOfApp

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], dependencies=BEARER, responses=ALWAYS)


@router.post("", responses=OF_A_BODY)
async def create_session(parts: PartsOfApp, owner: Owner) -> SessionReply:
    """Begins a conversation: a memory that questions with this `session` start from and leave behind."""
    return SessionReply(**asdict(await parts.store.create_session(owner)))


@router.get("")
async def sessions(parts: PartsOfApp, owner: Owner) -> SessionsReply:
    """Lists the caller's conversations, oldest first."""
    return SessionsReply(data=[SessionReply(**asdict(each)) for each in await parts.store.sessions(owner)])


@router.get("/{session}", responses=refusals(404))
async def session(session: str, parts: PartsOfApp, owner: Owner) -> SessionReply:
    """Shows a conversation with its memory."""
    return SessionReply(**asdict(await parts.store.session(session, owner)))


@router.delete("/{session}", responses=refusals(404))
async def delete_session(session: str, parts: PartsOfApp, owner: Owner) -> DeletedReply:
    """Forgets a conversation."""
    await parts.store.delete_session(session, owner)
    return DeletedReply(id=session)
