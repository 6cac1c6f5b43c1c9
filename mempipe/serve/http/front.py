"""Middleware of Serve's HTTP proxy, in front of all replicas: limits of connections, strangers and bodies, and 503 for
a request whose replica died or cannot be reached.

Serve itself would close the connection of the one, and let the other wait; `mempipe.serve.routing` bounds the wait
without any replica. Ray installs it when it is started with
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=mempipe.serve.http.front:middlewares, which `mempipe serve` sets itself.
"""

from __future__ import annotations

import os

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mempipe.serve.http import connections, refusals
from mempipe.serve.http.bodies import Bodies
from mempipe.serve.http.deadline import in_time
from mempipe.serve.http.errors import refuse
from mempipe.serve.http.keys import API
from mempipe.serve.http.paths import path_of
from mempipe.serve.http.retry_after import evenly_spread, retry_header
from mempipe.serve.http.strangers import Strangers, keys_of_proxy
from mempipe.serve.http.waits import WISHED, wished_wait

VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
PATH = "mempipe.serve.http.front:middlewares"
CHECK_VARIABLE = "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"
"""Ray Serve replaces a proxy that died after three checks, between which it waits 10 s by default."""
CHECK_EVERY_S = 2.0
TIMEOUT_VARIABLE = "MEMPIPE_TIMEOUT_S"
"""Holds the seconds that a request may take in a replica: for a place and an answer (`max_wait_s` and `timeout_s`), and
the slack in which the replica says that they are over. Without it DEFAULT_TIMEOUT_S."""
DEFAULT_TIMEOUT_S = 390.0
_OF_SERVE = (
    b"x-request-timeout-seconds",
    b"x-request-disconnect-disabled",
    b"x-session-id",
    b"serve-multiplexed-model-id",
)
"""Headers by which Serve would let a client change its limits or its replica, also with _ in place of -; it answers 500
to one that is not UTF-8."""

_OF_NO_APPLICATION = b"/-/routes"
"""In the text with which Serve answers 404 where it has no application: nothing is deployed yet."""


class Front:
    """ASGI middleware in Serve's proxy: turns a lost replica and an application that is not there yet into 503 with
    Retry-After, and adds Retry-After to Serve's own 503s, which clients of the API get in its form. A request is given
    up with 503 when its replica is late: a node that is cut off is not lost before Ray has noticed.

    Serve gives a request whose replica died early to another one, but its body has gone to the first: the second waits
    in vain for it and answers 408. If the whole body had arrived, the client is not at fault either.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._timeout_s = float(os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        WISHED.set(wished_wait(scope))
        await in_time(self._answer, scope, receive, send, timeout_s=self._timeout_s, cause="late_replica")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = {**scope, "headers": [pair for pair in scope["headers"] if _may_be_read(pair)]}
        has_body = has_started = is_full = is_lost = is_early = False
        held: Message | None = None  # the start of a 404 that may be Serve's

        async def noting() -> Message:
            nonlocal has_body
            message = await receive()
            has_body = has_body or (message["type"] == "http.request" and not message.get("more_body", False))
            return message

        async def completing(message: Message) -> None:
            nonlocal has_started, is_full, is_lost, is_early, held
            if message["type"] == "http.response.start":
                is_lost = message["status"] == 408 and has_body
                if message["status"] == 503:
                    _say_when(MutableHeaders(scope=message))
                    is_full = path_of(scope).startswith(API) and _is_text(message)  # replicas say it in JSON
                if message["status"] == 404 and _is_text(message):
                    held = message
                    return
            elif held is not None:
                start, held = held, None
                is_early = _OF_NO_APPLICATION in message.get("body", b"")
                if not is_early:
                    await send(start)
            if not (is_lost or is_full or is_early):
                has_started = True
                await send(message)

        await self._app(scope, noting, completing)
        if is_full:
            refusals.count("full_replicas")
            await refuse(503, "no replica has a place for this request now", evenly_spread())(scope, receive, send)
        elif is_early:
            refusals.count("starting")
            await refuse(503, "the service is starting or ending; ask again later", evenly_spread())(
                scope, receive, send
            )
        elif not has_started:
            refusals.count("lost_replica")
            await refuse(503, "the replica that worked on this request is gone; ask again")(scope, receive, send)


def _say_when(headers: MutableHeaders) -> None:
    """Adds when the request may be made again, unless the replica has said so."""
    if "retry-after" not in headers:
        headers.update(retry_header(503, evenly_spread()) or {})


def _is_text(start: Message) -> bool:
    return Headers(scope=start).get("content-type", "").startswith("text/plain")


def _may_be_read(header: tuple[bytes, bytes]) -> bool:
    """Returns whether Serve may read a header; it answers 500 to an id that is not UTF-8."""
    name, value = header
    return name.replace(b"_", b"-") not in _OF_SERVE and (name != b"x-request-id" or value.isascii())


def middlewares() -> list[Middleware]:
    """Returns what Serve's proxy adds to its application, before which connections have separate limits.

    Serve wraps its application in one after the other, so a request meets the last one first.
    """
    connections.install()
    return [Middleware(Front), Middleware(Bodies), Middleware(Strangers, keys=keys_of_proxy())]
