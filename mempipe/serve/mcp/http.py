"""The MCP server over streamable HTTP, as an ASGI application that starts with its first request."""

from __future__ import annotations

import asyncio

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.types import Receive, Scope, Send

from mempipe.serve.mcp.server import make_server
from mempipe.serve.routes.parts import Parts


class McpOverHttp:
    """Answers each request by itself: sessions of the protocol would tie a client to one replica."""

    def __init__(self, parts: Parts, *, max_body_bytes: int) -> None:
        self._parts = parts
        self._max_body_bytes = max_body_bytes
        self._started: asyncio.Future[StreamableHTTPSessionManager] | None = None
        self._running: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
            self._running = asyncio.create_task(self._run(self._started))
        manager = await asyncio.shield(self._started)
        await manager.handle_request(scope, receive, send)

    async def _run(self, started: asyncio.Future[StreamableHTTPSessionManager]) -> None:
        """Runs the manager as long as the process lives; Serve tells no application when it starts or ends."""
        server = make_server(self._parts)
        # Access has checked host and origin; the SDK would take requests to the names of this machine alone.
        unchecked = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        server.streamable_http_app(
            stateless_http=True, max_request_body_size=self._max_body_bytes, transport_security=unchecked
        )
        async with server.session_manager.run():
            started.set_result(server.session_manager)
            await asyncio.Event().wait()
