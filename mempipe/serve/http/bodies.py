"""Reads the body of a request before it takes a place of a replica, so that slow ones wait at their own cost."""

from __future__ import annotations

import os
from collections import Counter

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mempipe.serve.http import refusals
from mempipe.serve.http.errors import refuse
from mempipe.serve.http.gate import read_body, too_large
from mempipe.serve.http.keys import API
from mempipe.serve.http.paths import path_of

VARIABLE = "MEMPIPE_MAX_BODY_BYTES"
"""Holds the size of the largest body that Serve's proxy reads; without it DEFAULT_BYTES."""
DEFAULT_BYTES = 2**20
TIMEOUT_S = 10.0
"""Seconds for the beginning of a body; after them it has to come at LEAST_RATE."""
LEAST_RATE = 2**14
"""Bytes a second."""
MAX_PER_ADDRESS = 64
"""Bodies of one address that are on their way at the same time."""
MAX_BODIES = 256
"""Bodies in transit at the same time, as a multiple of the largest body."""


class Bodies:
    """Middleware of Serve's proxy for requests to the API (/v1 and /mcp); others pass.

    408: the body is too slow; 413: it is too large, which is said before it is read where its length is known; 429:
    too many of this address are on their way; 503: too many of all are.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._max_bytes = int(os.environ.get(VARIABLE, DEFAULT_BYTES))
        self._reading: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not path_of(scope).startswith(API) or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if not length.isdecimal() or int(length) > self._max_bytes:
            await self._too_large(scope, receive, send)
            return
        address = (scope.get("client") or ("",))[0]
        if self._reading[address] >= MAX_PER_ADDRESS:
            refusals.count("bodies_of_address")
            message = f"{MAX_PER_ADDRESS} bodies of this address are on their way, the most that are allowed"
            await refuse(429, message)(scope, receive, send)
            return
        if self._reading.total() >= MAX_BODIES:
            refusals.count("bodies")
            await refuse(503, "too many bodies are on their way; ask again later")(scope, receive, send)
            return
        self._reading[address] += 1
        try:
            body = await read_body(receive, max_bytes=self._max_bytes, timeout_s=TIMEOUT_S, least_rate=LEAST_RATE)
        except TimeoutError:
            refusals.count("slow_body")
            message = f"the body did not arrive within {TIMEOUT_S:g} s and then at {LEAST_RATE} bytes a second"
            await refuse(408, message)(scope, receive, send)
            return
        finally:
            self._reading[address] -= 1
            if not self._reading[address]:
                del self._reading[address]
        if body is None:
            return
        if len(body) > self._max_bytes:
            await self._too_large(scope, receive, send)
            return
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        await self._app(scope, replay, send)

    async def _too_large(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusals.count("large_body")
        await refuse(413, too_large(self._max_bytes))(scope, receive, send)


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
