"""The gate before the routes of a service: limits that hold for every request, whatever it asks for.

A plain ASGI middleware, without Ray and without FastAPI.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mempipe.serve.http.paths import path_of
from mempipe.serve.http.places import Places
from mempipe.serve.http.retry_after import RETRY_AFTER_S, Returns, retry_header
from mempipe.serve.http.waits import wished_wait

BODY_TIMEOUT_S = 30.0
"""Seconds in which the body of a request has to arrive."""

Refuse = Callable[[int, str, float], Response]
"""Makes the answer of a refused request, in the error format of the service: from its status, its reason, and the
seconds after which it may be made again (429, 503)."""


def problem(status: int, detail: str, retry_after_s: float = RETRY_AFTER_S) -> JSONResponse:
    """Returns a refusal in FastAPI's error format, with Retry-After where it may be asked again (429, 503)."""
    return JSONResponse({"detail": detail}, status, retry_header(status, retry_after_s))


def too_large(max_bytes: int) -> str:
    """Returns the message to a client whose body is too long."""
    return f"the body has more than {max_bytes} bytes; send less at once"


async def read_body(
    receive: Receive, *, max_bytes: int, timeout_s: float, least_rate: float = math.inf
) -> bytes | None:
    """Reads the body, or more than `max_bytes` of one that is too long. Returns None when the client hung up.

    Raises TimeoutError for a body that has not arrived after `timeout_s` seconds, and the time that it takes at
    `least_rate` bytes a second.
    """
    body, more, started = bytearray(), True, asyncio.get_running_loop().time()
    while more and len(body) <= max_bytes:
        async with asyncio.timeout_at(started + timeout_s + len(body) / least_rate):
            message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)


class Gate:
    """ASGI middleware: reads the whole body first, bounds the requests in flight, and cancels a request when its client
    disconnects or its time is up.

    - 415: the body is compressed; 413: it has more than `max_body_bytes`; 408: it did not arrive within BODY_TIMEOUT_S;
      400: it is not text.
    - 503 with Retry-After: `max_in_flight` requests are in flight, or `timeout_s` seconds have passed. A request whose
      owner has fewer in flight than another one waits up to `max_wait_s` seconds for its turn
      (`mempipe.serve.http.places`) before it is refused, and one with `Prefer: wait=N` up to N seconds.
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
        takes_bytes: re.Pattern[str] | None = None,
        max_waiting: int = 0,
        max_wait_s: float = 0.0,
        are_several: Callable[[], bool] = lambda: False,
    ) -> None:
        """`timeout_s` is the time limit of one answer; None if the routes have their own limits. Only paths that
        begin with `takes_bodies` have a body; of others it is not read. A body is text, but on the paths that
        `takes_bytes` matches: a piece of a text may end within a character. At most `max_waiting` requests wait for a
        place, each at most `max_wait_s` seconds. `are_several` returns whether there is more than one owner.
        """
        self._takes_bodies = takes_bodies
        self._takes_bytes = takes_bytes
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._places = Places(max_in_flight, max_waiting=max_waiting, are_several=are_several)
        self._returns = Returns(max_in_flight)
        self._max_wait_s = max_wait_s
        self._timeout_s = timeout_s
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        if not path_of(scope).startswith(self._takes_bodies):
            await self._app(scope, _no_body, send)
            return
        encoding = Headers(scope=scope).get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            reason = f"content-encoding is {encoding[:40]!r}; send the body without one"
            await self._refuse(415, reason, RETRY_AFTER_S)(scope, receive, send)
            return
        try:
            body = await read_body(receive, max_bytes=self._max_body_bytes, timeout_s=BODY_TIMEOUT_S)
        except TimeoutError:
            reason = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
            await self._refuse(408, reason, RETRY_AFTER_S)(scope, receive, send)
            return
        if body is None:
            return
        if len(body) > self._max_body_bytes:
            await self._refuse(413, too_large(self._max_body_bytes), RETRY_AFTER_S)(scope, receive, send)
            return
        is_piece = self._takes_bytes is not None and self._takes_bytes.fullmatch(path_of(scope)) is not None
        if not is_piece and not _is_text(body):
            await self._refuse(400, "the body is not JSON in UTF-8", RETRY_AFTER_S)(scope, receive, send)
            return
        hung_up = asyncio.ensure_future(receive())  # nothing else can come after the body
        owner, now = scope.get("state", {}).get("owner", ""), asyncio.get_running_loop().time
        try:
            # A free place is taken without a task: with many clients each turn of the event loop takes milliseconds.
            if not (
                self._places.take_free(owner) or await self._take_place(owner, self._wait_s(owner, scope), hung_up)
            ):
                if not hung_up.done():
                    reason = f"{self._places.num_taken} requests are in flight, so that this one has no place now"
                    await self._refuse(503, reason, self._returns.next_s(now()))(scope, receive, send)
                return
            began = now()
            self._returns.taken(began)
            try:
                await self._answer(body, hung_up, scope, receive, send)
            finally:
                self._places.give_back(owner)
                ended = now()
                self._returns.freed(ended, ended - began)
        finally:
            hung_up.cancel()

    def _wait_s(self, owner: str, scope: Scope) -> float:
        """Returns how many seconds a request waits for a place: as long as it asks for, otherwise `max_wait_s` if
        another owner has more places, and 0 if none has, so that a load of one owner is shed at once.
        """
        wished = wished_wait(scope)
        if wished is None:
            return self._max_wait_s if self._places.is_behind(owner) else 0.0
        return min(wished, self._max_wait_s)

    async def _take_place(self, owner: str, wait_s: float, hung_up: asyncio.Future[Message]) -> bool:
        """Returns whether there was a place within `wait_s` seconds; a client that hangs up waits no longer."""
        taking = asyncio.ensure_future(self._places.take(owner, wait_s=wait_s))
        try:
            await asyncio.wait({taking, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if taking.done() and taking.result():
                self._places.give_back(owner)
            await _cancelled(taking)
            raise
        if not taking.done():
            await _cancelled(taking)
            return False
        return taking.result()

    async def _answer(
        self, body: bytes, hung_up: asyncio.Future[Message], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Runs the application until it has answered, the client has hung up, or the time is over."""
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
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
                    reason = f"no answer within {self._timeout_s:g} s"
                    await self._refuse(503, reason, RETRY_AFTER_S)(scope, receive, send)
        finally:
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


def _is_text(body: bytes) -> bool:
    """Returns whether the JSON reader can decode the body."""
    try:
        body.decode(json.detect_encoding(body), "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


async def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _cancelled(work: asyncio.Future[Any]) -> None:
    """Ends the work and waits until it has ended."""
    work.cancel()
    await asyncio.wait({work})
