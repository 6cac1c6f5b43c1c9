"""The gate before the routes of a service: limits that hold for every request, whatever it asks for.

A plain ASGI middleware, without Ray and without FastAPI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

RETRY_AFTER_S = 1
BODY_TIMEOUT_S = 30.0
"""Seconds in which the body of a request has to arrive."""

Refuse = Callable[[int, str], Response]
"""Makes the answer of a refused request from its status and reason, in the error format of the service."""


def problem(status: int, detail: str) -> JSONResponse:
    """Returns a refusal in FastAPI's error format, with Retry-After where it may be asked again (429, 503)."""
    return JSONResponse({"detail": detail}, status, retry_header(status))


def retry_header(status: int) -> dict[str, str] | None:
    """Returns the Retry-After header of an answer with this status; None where it has none."""
    return {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else None


class Gate:
    """Reads the body before anything else does, lets a limited number of requests in, and ends those that nobody
    waits for any more.

    - 413: the body has more than `max_body_bytes`; 408: it did not arrive within BODY_TIMEOUT_S.
    - 503 with Retry-After: `max_in_flight` requests are in flight, or `timeout_s` seconds have passed.
    - A request whose client has hung up is cancelled, so that its place and its work are free at once.

    Requests without a body (GET, HEAD, DELETE) pass: health, metrics and documentation answer under any load.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        max_in_flight: int,
        timeout_s: float | None = None,
        refuse: Refuse = problem,
        takes_bodies: str | tuple[str, ...] = "/",
    ) -> None:
        """`timeout_s` is the time limit of one answer; None where the routes have limits of their own. Only paths that
        begin with `takes_bodies` have a body; of others it is not read.
        """
        self._takes_bodies = takes_bodies
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_in_flight = max_in_flight
        self._timeout_s = timeout_s
        self._refuse = refuse
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        if not scope["path"].startswith(self._takes_bodies):
            await self._app(scope, _no_body, send)
            return
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await self._body(receive)
        except TimeoutError:
            await self._refuse(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s")(scope, receive, send)
            return
        if body is None:
            return
        if len(body) > self._max_body_bytes:
            reason = f"the body has more than {self._max_body_bytes} bytes; send less at once"
            await self._refuse(413, reason)(scope, receive, send)
            return
        if self._in_flight >= self._max_in_flight:
            reason = f"{self._in_flight} requests are in flight, the most that are allowed"
            await self._refuse(503, reason)(scope, receive, send)
            return
        self._in_flight += 1
        try:
            await self._answer(body, scope, receive, send)
        finally:
            self._in_flight -= 1

    async def _body(self, receive: Receive) -> bytes | None:
        """Reads the body, or a part that is too long already. Returns None when the client hung up."""
        body = bytearray()
        more = True
        while more and len(body) <= self._max_body_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return bytes(body)

    async def _answer(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application until it has answered, the client has hung up, or the time is over."""
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        hung_up = asyncio.ensure_future(receive())  # nothing else can come after the body
        response = _Response(send)

        async def replay() -> Message:
            return unread.pop() if unread else await asyncio.shield(hung_up)

        work = asyncio.ensure_future(self._app(scope, replay, response.send))
        try:
            await asyncio.wait({work, hung_up}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done() or response.is_whole:
                await work
            elif not hung_up.done():
                await _cancelled(work)
                if not response.has_started:
                    await self._refuse(503, f"no answer within {self._timeout_s:g} s")(scope, receive, send)
        finally:
            hung_up.cancel()
            await _cancelled(work)


class _Response:
    """Passes a response on and notes how far it is."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_started = False
        self.is_whole = False

    async def send(self, message: Message) -> None:
        await self._send(message)
        self.has_started = True
        self.is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)


async def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _cancelled(work: asyncio.Future[None]) -> None:
    """Ends the work and waits until it has ended."""
    work.cancel()
    await asyncio.wait({work})
