"""/healthz and /readyz are for whoever watches the service; both answer under any load and without a key."""

from __future__ import annotations

from fastapi import APIRouter

from mempipe.answers.api import StatusReply
from mempipe.serve.routes.documented import refusals
from mempipe.serve.routes.parts import PartsOfApp

router = APIRouter(tags=["operations"])


@router.get("/healthz")
async def healthz() -> StatusReply:
    """Returns whether this process answers at all."""
    return StatusReply(status="ok")


@router.get("/readyz", responses=refusals(503))
async def readyz(parts: PartsOfApp) -> StatusReply:
    """Returns whether a question would be answered: engine and retriever are there."""
    detail, answering = await parts.health(), parts.answering
    return StatusReply(status="ok", model=answering.name, model_version=answering.engine().version, detail=detail)
