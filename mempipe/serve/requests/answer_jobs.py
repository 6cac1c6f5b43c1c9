"""Takes a request for an answer from its documents and its session to its reply."""

from __future__ import annotations

import asyncio
import threading
import weakref
from dataclasses import dataclass

from mempipe.answers.answering import Answering, Plan
from mempipe.answers.api import AnswerReply, AnswerRequest
from mempipe.answers.attempt_events import Emit
from mempipe.serve.requests.journal import Metrics
from mempipe.serve.state.sessions import Session
from mempipe.serve.state.store import Store


@dataclass(frozen=True, slots=True, weakref_slot=True)
class AnswerJob:
    """A question that is ready to be played."""

    plan: Plan
    request_id: str
    session: str | None = None
    """The session that the job has claimed; `AnswerJobs.run` frees it, as does the end of a job that is never run."""


class AnswerJobs:
    """Plans requests and plays them, with the memory of a session where one is named."""

    def __init__(self, answering: Answering, store: Store, metrics: Metrics, *, claim_s: float) -> None:
        """`claim_s` is how long one question may keep a session in seconds."""
        self._answering = answering
        self._store = store
        self._metrics = metrics
        self._claim_s = claim_s
        self._unrun: dict[str, weakref.finalize] = {}

    async def plan(self, asked: AnswerRequest, *, owner: str, request_id: str, history: str | None = None) -> AnswerJob:
        """Returns the request's job, with its session claimed and its document read.

        `history` holds earlier messages as a memory; that of a session comes before it. Raises ApiError.
        """
        text = await self._text(asked, owner)
        if asked.session is None:
            return AnswerJob(await self._answering.plan(asked, text=text, memory=history, owner=owner), request_id)
        session = await self._claimed(asked.session, owner)
        try:
            memory = _joined(session.memory, history)
            plan = await self._answering.plan(asked, text=text, memory=memory, owner=owner)
        except BaseException:  # also a caller that hung up: whoever is not answered leaves the session free
            await asyncio.shield(self._store.sessions.release(session.id, None))
            raise
        job = AnswerJob(plan, request_id, session.id)
        self._unrun[session.id] = weakref.finalize(job, self._free, session.id)
        return job

    async def look(self, asked: AnswerRequest, *, owner: str, history: str | None = None) -> Plan:
        """Returns the plan of a question that is not played: its session may work on another one. Raises ApiError."""
        text = await self._text(asked, owner)
        if asked.session is not None:
            history = _joined((await self._store.sessions.get(asked.session, owner)).memory, history)
        return await self._answering.plan(asked, text=text, memory=history, owner=owner)

    async def _text(self, asked: AnswerRequest, owner: str) -> str:
        """Returns the text that the agent reads, "" for none. Raises ApiError."""
        if asked.document is not None:
            return await self._store.documents.text(asked.document, owner)
        return asked.text or ""

    async def _claimed(self, session: str, owner: str) -> Session:
        """Claims a session. The thread that does so continues after the caller has disconnected, and then the session
        is freed."""
        claiming = asyncio.ensure_future(self._store.sessions.claim(session, owner, for_s=self._claim_s))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            claiming.add_done_callback(lambda done: done.exception() or self._free(session))
            raise

    def _free(self, session: str) -> None:
        """Frees a session whose question is not answered, in a separate thread."""
        self._unrun.pop(session, None)
        threading.Thread(target=self._store.sessions.release_now, args=(session, None), daemon=True).start()

    async def run(self, job: AnswerJob, emit: Emit | None = None) -> AnswerReply:
        """Plays the job and returns its answer. Frees the job's session, also when there is no answer.

        `emit` hears what happens meanwhile; None for a caller that waits for the answer alone.
        """
        memory = None
        if job.session is not None:
            self._unrun.pop(job.session).detach()
        try:
            reply = await self._answering.answer(job.plan, request_id=job.request_id, session=job.session, emit=emit)
            memory = reply.memory
            self._metrics.answered(reply)
            return reply
        finally:
            if job.session is not None:
                await asyncio.shield(self._store.sessions.release(job.session, memory))


def _joined(memory: str, history: str | None) -> str:
    """Returns a memory with earlier messages on the lines after it."""
    return "\n".join(filter(None, (memory, history)))
