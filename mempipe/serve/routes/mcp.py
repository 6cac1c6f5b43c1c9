"""POST /mcp is the agent as tools for other agents, by the Model Context Protocol (`mempipe.serve.mcp`)."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.routing import Route

from mempipe.serve.mcp.errors import PATH
from mempipe.serve.mcp.http import McpOverHttp
from mempipe.serve.routes.parts import Parts


def add_mcp(app: FastAPI, parts: Parts, *, max_body_bytes: int) -> None:
    """Adds the route, which takes POST alone: there are no sessions of the protocol to follow or to end."""
    route = Route(PATH, endpoint=McpOverHttp(parts, max_body_bytes=max_body_bytes), methods=["POST"])
    app.router.routes.append(route)
