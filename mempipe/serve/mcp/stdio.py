"""The MCP server over standard input and output (`mempipe mcp`): passes the calls of one client on to a service."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import anyio
import httpx2
import mcp_types as types
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

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
    """Serves the tools of the service at `url` until standard input ends."""
    anyio.run(_pass_on, url, stdout)


async def _pass_on(url: str, stdout: TextIO) -> None:
    key = os.environ.get(KEY_VARIABLE)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx2.AsyncClient(headers=headers, timeout=TIMEOUT_S) as http:
        transport = streamable_http_client(f"{url.rstrip('/')}/mcp", http_client=http)
        async with Client(transport, read_timeout_seconds=TIMEOUT_S) as service:
            server = _bridge(service)
            async with stdio_server(stdout=anyio.wrap_file(stdout)) as (read, write):
                await server.run(read, write, server.create_initialization_options())


def _bridge(service: Client) -> Server[Any]:
    async def list_tools(ctx: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return await service.list_tools()

    async def call_tool(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        return await service.call_tool(params.name, dict(params.arguments or {}))

    instructions = service.instructions
    return Server("mempipe", instructions=instructions, on_list_tools=list_tools, on_call_tool=call_tool)
