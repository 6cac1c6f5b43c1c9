"""Assigns a request id, writes one log record and updates the Prometheus metrics for every request."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mempipe.answers.api import AnswerReply
from mempipe.serve.http.paths import path_of

REQUEST_ID = "x-request-id"
OF_API = ("answer", "chat", "completions", "conversations", "corpus", "documents", "models", "responses", "sessions")
ROUTES = frozenset({"/", "/docs", "/mcp", "/healthz", "/readyz", *(f"/v1/{name}" for name in OF_API)})
MAX_PATH_CHARS = 200
"""Characters of a path in the log, which strangers could otherwise fill: it would keep nothing but their requests."""
_ID = re.compile(r"[!-~]{1,100}")
"""An id of a client that a header and a log can hold unchanged."""
logger = logging.getLogger(__name__)


class Metrics(Protocol):
    """Says where numbers go. `mempipe.serve.replicas.prometheus` sends them to Ray's metrics port."""

    def requested(self, path: str, status: int, seconds: float) -> None:
        """Counts an answered request to `path`."""
        ...

    def answered(self, reply: AnswerReply) -> None:
        """Counts an answered question."""
        ...


class NoMetrics:
    """Counts nothing."""

    def requested(self, path: str, status: int, seconds: float) -> None:
        pass

    def answered(self, reply: AnswerReply) -> None:
        pass


class Journal:
    """Gives every request an id: its own `x-request-id` of up to 100 printable characters, or a new one that is sent
    back. Writes one log record when it ends, with the fields `request_id`, `path`, `status` and `seconds`. Questions
    and answers are not logged.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        given = given if _ID.fullmatch(given) else ""
        request_id, started, status = given or uuid.uuid4().hex, time.perf_counter(), 499

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if not given:
                    MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app({**scope, "state": {**scope.get("state", {}), "request_id": request_id}}, receive, noting)
        except Exception:  # the application answers it outside of its middleware
            status = 500 if status == 499 else status
            raise
        finally:
            seconds = time.perf_counter() - started
            path = path_of(scope)
            fields = {
                "request_id": request_id,
                "path": path[:MAX_PATH_CHARS],
                "status": status,
                "seconds": round(seconds, 4),
            }
            logger.info("%(path)s %(status)s in %(seconds)s s", fields, extra=fields)
            self._metrics.requested(route_of(path), status, seconds)


def route_of(path: str) -> str:
    """Returns the part of the service that a path belongs to: one of few names, whatever a client asks for."""
    head = "/".join(path.split("/")[:3])
    return head if head in ROUTES else "other"
