"""Refuses strangers in Serve's proxy, before a replica hears of them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mempipe.answers.errors import ApiError
from mempipe.serve.http import refusals
from mempipe.serve.http.errors import error_reply, refuse
from mempipe.serve.http.keys import API, KeyRing, WatchedKeys, owner_of
from mempipe.settings import ConfigError

VARIABLE = "MEMPIPE_KEY_FILE"
"""Holds the path of the key file, "" if there is none; without it the proxy leaves the keys to the replicas."""
MAX_OPEN = 32
"""Requests without a key in progress at the same time: of pages, and of probes."""
MAX_PER_ADDRESS = 16
"""The same of one address."""
TIMEOUT_S = 30.0
"""Seconds in which a request without a key has to be answered, and its client has to read the answer."""
PROBES = ("/healthz", "/readyz", "/-/")
logger = logging.getLogger(__name__)


class Strangers:
    """Middleware of Serve's proxy. It answers 401 and 403 as `mempipe.serve.http.keys.Access` does, but without a
    replica and before the body is read.

    Requests that need no key have limits instead, pages apart from probes: 429 beyond MAX_PER_ADDRESS, 503 beyond
    MAX_OPEN and after TIMEOUT_S. Web sockets are closed, because the service has none.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing | None = None) -> None:
        """`keys` is None where only the replicas know them."""
        self._app = app
        self._keys = keys
        self._open: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        elif not scope["path"].startswith(API):
            await self._without_key(scope, receive, send)
        else:
            try:
                if self._keys is not None:
                    owner_of(scope, self._keys)
            except ApiError as error:
                refusals.count("key")
                await error_reply(error)(scope, receive, send)
                return
            await self._app(scope, receive, send)

    async def _without_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        in_progress = self._open[scope["path"].startswith(PROBES)]
        address, has_started = (scope.get("client") or ("",))[0], False
        if in_progress[address] >= MAX_PER_ADDRESS:
            refusals.count("requests_of_address")
            message = f"{MAX_PER_ADDRESS} requests of this address are in progress, the most that are allowed"
            await refuse(429, message)(scope, receive, send)
            return
        if in_progress.total() >= MAX_OPEN:
            refusals.count("requests")
            await refuse(503, "too many requests are in progress; ask again later")(scope, receive, send)
            return

        async def noting(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        in_progress[address] += 1
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._app(scope, receive, noting)
        except TimeoutError:
            refusals.count("slow_answer")
            if not has_started:  # else uvicorn closes the connection
                await refuse(503, f"no answer within {TIMEOUT_S:g} s")(scope, receive, send)
        finally:
            in_progress[address] -= 1
            if not in_progress[address]:
                del in_progress[address]


def keys_of_proxy() -> KeyRing | None:
    """Returns the keys that VARIABLE and MEMPIPE_API_KEYS name; None where the proxy does not know them."""
    if (file := os.environ.get(VARIABLE)) is None:
        return None
    try:
        return WatchedKeys(file)
    except ConfigError as error:
        logger.error("the proxy leaves the API keys to the replicas: %s", error)
        return None
