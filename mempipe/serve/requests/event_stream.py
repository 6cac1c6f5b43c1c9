"""Tells a client what happens while an answer is worked on, as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mempipe.answers.api import AnswerReply
from mempipe.answers.attempt_events import Emit, Event
from mempipe.answers.errors import ApiError
from mempipe.serve.http.errors import FAILED, error_body
from mempipe.serve.requests.idempotency import failed

PING_S = 10.0
"""Seconds of silence after which a stream says that it is alive."""
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
"""Characters that end a line for many readers, JavaScript and httpx among them, and that JSON leaves as they are."""
logger = logging.getLogger(__name__)


async def events(work: Callable[[Emit], Awaitable[AnswerReply]]) -> AsyncIterator[tuple[str, dict[str, Any]] | None]:
    """Yields what `work` tells while it works, then its answer or its error; None after a silence of PING_S.

    The work is cancelled when the caller stops to listen.
    """
    queue: asyncio.Queue[tuple[str, dict[str, Any]] | None] = asyncio.Queue()

    async def working() -> None:
        try:
            reply = await work(lambda name, data: queue.put_nowait((name, data)))
            queue.put_nowait(("answer", reply.model_dump()))
        except ApiError as error:
            failed(error.status)
            queue.put_nowait(("error", error_body(error)))
        except Exception:  # as the routes' own handler does; the status is sent, so a last event stands for 500
            logger.exception("a question failed")
            failed(500)
            queue.put_nowait(("error", error_body(ApiError(500, FAILED))))
        finally:
            queue.put_nowait(None)

    task = asyncio.create_task(working())
    try:
        while True:
            try:
                async with asyncio.timeout(PING_S):
                    event = await queue.get()
            except TimeoutError:
                yield None
                continue
            if event is None:
                return
            yield event
    finally:
        task.cancel()
        await asyncio.wait({task})


def event_stream(source: AsyncIterator[Event | None], *, headers: Mapping[str, str] | None = None) -> StreamingResponse:
    """Returns the response that sends each event; a comment for None, which keeps the connection open."""
    headers = {"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})}
    return _EventStream(_lines(source), media_type="text/event-stream", headers=headers)


class _EventStream(StreamingResponse):
    """Sends the events without a task that listens for a hang-up: the gate listens already (`mempipe.serve.http.gate`),
    and the first event would wait for that task."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


async def _lines(source: AsyncIterator[Event | None]) -> AsyncIterator[str]:
    async for event in source:
        if event is None:
            yield ": working\n\n"
        else:
            name, data = event
            text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False).translate(_LINE_ENDS)
            yield (f"event: {name}\n" if name else "") + f"data: {text}\n\n"
