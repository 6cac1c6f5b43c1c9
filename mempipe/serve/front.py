"""A middleware of Serve's HTTP proxy, before all replicas: it answers a request whose replica died with 503.

Serve itself would close the connection. Ray installs it when it is started with
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=mempipe.serve.front:middlewares, which `mempipe serve` sets itself.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mempipe.serve.errors import refuse
from mempipe.serve.gate import RETRY_AFTER_S

VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
PATH = "mempipe.serve.front:middlewares"


class Front:
    """Answers with 503 and Retry-After where nothing was answered, and adds Retry-After where Serve left it out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def completing(message: Message) -> None:
            nonlocal has_started
            has_started = True
            if message["type"] == "http.response.start" and message["status"] == 503:
                MutableHeaders(scope=message).setdefault("retry-after", str(RETRY_AFTER_S))
            await send(message)

        await self._app(scope, receive, completing)
        if not has_started:
            await refuse(503, "the replica that worked on this request is gone; ask again")(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Returns what Serve's proxy adds to its application."""
    return [Middleware(Front)]
