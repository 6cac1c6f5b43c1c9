"""The MCP server over standard input and output (`mempipe mcp`): passes the calls of one client on to a service."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TextIO

import anyio
import mcp_types as types
from mcp import Client
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from mempipe.agents.mcp_tools import connected_client, unavailable

KEY_VARIABLE = "MEMPIPE_API_KEY"
"""Holds the key for a service that wants one."""
TIMEOUT_S = 900.0
"""More than any answer takes; the service has its own limit."""


@contextmanager
def own_stdout() -> Iterator[TextIO]:
    """Yields standard output for the protocol alone: what else this process and its children print goes to standard
    error, also what they print until the service is up.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stdout:
        os.dup2(2, 1)
        yield stdout


def pass_on(url: str, stdout: TextIO) -> None:
    """Serves the tools of the service at `url` until standard input ends. Raises McpUnavailable when it does not answer
    at the start."""
    anyio.run(_pass_on, url, stdout)


async def _pass_on(url: str, stdout: TextIO) -> None:
    address = f"{url.rstrip('/')}/mcp"
    async with AsyncExitStack() as stack:
        with unavailable(address, timeout_s=TIMEOUT_S):
            client = connected_client(address, key=os.environ.get(KEY_VARIABLE, ""), timeout_s=TIMEOUT_S)
            service = await stack.enter_async_context(client)
        server = _bridge(service)
        read, write = await stack.enter_async_context(stdio_server(stdout=anyio.wrap_file(stdout)))
        await server.run(read, write, server.create_initialization_options())


def _bridge(service: Client) -> Server[Any]:
    async def list_tools(ctx: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return await service.list_tools()

    async def call_tool(ctx: ServerRequestContext[Any], params: types.CallToolRequestParams) -> types.CallToolResult:
        arguments = dict(params.arguments or {})
        return await service.call_tool(params.name, arguments, progress_callback=ctx.session.report_progress)

    instructions = service.instructions
    return Server("mempipe", instructions=instructions, on_list_tools=list_tools, on_call_tool=call_tool)
