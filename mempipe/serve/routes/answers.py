"""POST /v1/answer answers a question, as JSON or as server-sent events."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from mempipe.answers.api import AnswerReply, AnswerRequest
from mempipe.serve.requests.event_stream import event_stream, events
from mempipe.serve.routes.documented import ALWAYS, ANSWERS, BEARER
from mempipe.serve.routes.parts import Owner, PartsOfApp, RequestId

router = APIRouter(prefix="/v1", tags=["agent"], dependencies=BEARER, responses=ALWAYS)


@router.post("/answer", response_model=AnswerReply, responses=ANSWERS)
async def answer(asked: AnswerRequest, parts: PartsOfApp, owner: Owner, request_id: RequestId) -> Any:
    """Answers a question with a trace of every turn.

    With `stream` the answer is a stream of events: started, message, search, passages, turn, and at the end
    answer or error.
    """
    job = await parts.jobs.plan(asked, owner=owner, request_id=request_id)
    if not asked.stream:
        return await parts.jobs.run(job)
    return event_stream(events(lambda emit: parts.jobs.run(job, emit)))
