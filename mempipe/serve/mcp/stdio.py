"""The MCP server over standard input and output (`mempipe mcp`): passes the calls of one client on to a service."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import anyio
import mcp_types as types
from mcp import Client
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from mempipe.agents.mcp_client import McpServer, McpUnavailable, with_client

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
    at the start; later that is the error of a call."""
    service = McpServer(url=f"{url.rstrip('/')}/mcp", api_key_env=KEY_VARIABLE, timeout_s=TIMEOUT_S)
    anyio.run(_pass_on, service, stdout)


async def _pass_on(service: McpServer, stdout: TextIO) -> None:
    server = await bridge(service)
    async with stdio_server(stdout=anyio.wrap_file(stdout)) as (read, write):
        await server.run(read, write, server.create_initialization_options())


async def bridge(service: McpServer) -> Server[Any]:
    """Returns a server that passes calls on to the service. Raises McpUnavailable."""

    async def instructions(client: Client) -> str | None:
        return client.instructions

    async def list_tools(ctx: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return await with_client(service, lambda client: client.list_tools())

    async def call_tool(ctx: ServerRequestContext[Any], params: types.CallToolRequestParams) -> types.CallToolResult:
        arguments, report = dict(params.arguments or {}), ctx.session.report_progress
        try:
            return await with_client(
                service, lambda client: client.call_tool(params.name, arguments, progress_callback=report)
            )
        except McpUnavailable as error:
            return types.CallToolResult(content=[types.TextContent(type="text", text=str(error))], is_error=True)

    return Server(
        "mempipe",
        instructions=await with_client(service, instructions),
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
