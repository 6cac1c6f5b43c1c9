"""GET /v1/corpus says what the service searches, and offers questions that it can answer."""

from __future__ import annotations

from fastapi import APIRouter

from mempipe.answers.api import CorpusReply
from mempipe.serve.routes.documented import ALWAYS, BEARER
from mempipe.serve.routes.parts import PartsOfApp

router = APIRouter(prefix="/v1", tags=["agent"], dependencies=BEARER, responses=ALWAYS)


@router.get("/corpus")
async def corpus(parts: PartsOfApp) -> CorpusReply:
    """The parts of the corpus, the part that is searched by default, and held-out questions with their answers."""
    return parts.corpus
