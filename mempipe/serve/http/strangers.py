"""Refuses strangers in Serve's proxy, before a replica hears of them."""

from __future__ import annotations

import logging
import os
from collections import Counter

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mempipe.answers.errors import ApiError
from mempipe.serve.http import connections, refusals
from mempipe.serve.http.deadline import in_time
from mempipe.serve.http.errors import Refusal, refuse
from mempipe.serve.http.keys import API, KeyRing, WatchedKeys, owner_of
from mempipe.serve.http.paths import path_of
from mempipe.serve.http.probes import SharedReplies
from mempipe.serve.http.turns import Turns
from mempipe.settings import ConfigError

VARIABLE = "MEMPIPE_KEY_FILE"
"""Holds the path of the key file, "" if there is none; without it the proxy leaves the keys to the replicas."""
PAGES_PER_SECOND = 20.0
"""Requests without a key that reach a replica."""
PAGES_AT_ONCE = 60
"""The same at once, when there were none before."""
MAX_WAITING = 256
"""Requests without a key that wait for their turn or their answer."""
MAX_PER_ADDRESS = 16
"""The same of one address."""
TIMEOUT_S = 30.0
"""Seconds in which a request without a key has to be answered, and its client has to read the answer."""
PROBES = ("/healthz", "/readyz")
OF_SERVE = ("/-/healthz", "/-/routes")
"""Serve's proxy answers these itself."""
NO_WEB_SOCKET = "the service has no web sockets; POST /v1/responses with `stream: true` sends events"
logger = logging.getLogger(__name__)


class Strangers:
    """Middleware of Serve's proxy. It answers 401 and 403 as `mempipe.serve.http.keys.Access` does, but without a
    replica and before the body is read.

    Requests that need no key have limits instead. Probes share a reply (`mempipe.serve.http.probes.SharedReplies`).
    Pages and unknown paths reach a replica at a limited rate, in turn by address: 429 beyond MAX_PER_ADDRESS, 503
    beyond MAX_WAITING and after TIMEOUT_S. A request for a web socket gets 404, because the service has none.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing | None = None) -> None:
        """`keys` is None where only the replicas know them."""
        self._app = app
        self._keys = keys
        self._probes = SharedReplies(app)
        self._turns = Turns(PAGES_PER_SECOND, burst=PAGES_AT_ONCE)
        self._pages: Counter[str] = Counter()
        """In progress, by address."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_of(scope) in OF_SERVE:
            await self._app(scope, receive, send)
        elif path_of(scope) in PROBES and scope["method"] in ("GET", "HEAD"):
            await _in_time(self._probes, scope, receive, send)
        elif not path_of(scope).startswith(API):
            await (_no_web_socket if _wants_web_socket(scope) else self._without_key)(scope, receive, send)
        else:
            try:
                if self._keys is not None:
                    owner_of(scope, self._keys)
            except ApiError as error:
                refusals.count("key")
                await Refusal(error)(scope, receive, send)
                return
            await (_no_web_socket if _wants_web_socket(scope) else self._app)(scope, receive, send)

    async def _without_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = (scope.get("client") or ("",))[0]
        if self._pages[address] >= MAX_PER_ADDRESS:
            refusals.count("requests_of_address")
            message = f"{MAX_PER_ADDRESS} requests of this address are in progress, the most that are allowed"
            await refuse(429, message)(scope, receive, send)
            return
        if self._pages.total() >= MAX_WAITING:
            refusals.count("requests")
            await refuse(503, "too many requests are in progress; ask again later")(scope, receive, send)
            return

        async def in_turn(scope: Scope, receive: Receive, send: Send) -> None:
            await self._turns.take(address)
            await self._app(scope, receive, send)

        self._pages[address] += 1
        try:
            await _in_time(in_turn, scope, receive, send)
        finally:
            self._pages[address] -= 1
            if not self._pages[address]:
                del self._pages[address]


def _wants_web_socket(scope: Scope) -> bool:
    return Headers(scope=scope).get(connections.OTHER_PROTOCOL, "").strip().lower() == "websocket"


async def _no_web_socket(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(404, NO_WEB_SOCKET, code="unknown_url")
    await Refusal(error)(scope, receive, send)


async def _in_time(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await in_time(app, scope, receive, send, timeout_s=TIMEOUT_S, cause="slow_answer")


def keys_of_proxy() -> KeyRing | None:
    """Returns the keys that VARIABLE and MEMPIPE_API_KEYS name; None where the proxy does not know them."""
    if (file := os.environ.get(VARIABLE)) is None:
        return None
    try:
        return WatchedKeys(file)
    except ConfigError as error:
        logger.error("the proxy leaves the API keys to the replicas: %s", error)
        return None
