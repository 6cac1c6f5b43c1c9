"""A time limit for the whole answer of an ASGI application."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mempipe.serve.http import refusals
from mempipe.serve.http.errors import refuse


async def in_time(
    app: ASGIApp, scope: Scope, receive: Receive, send: Send, *, timeout_s: float, cause: refusals.Cause
) -> None:
    """Runs the application, and cancels it after `timeout_s` seconds: the client gets 503, counted under `cause`. If
    the answer has begun, it stays unfinished, and uvicorn closes the connection.
    """
    has_started = False

    async def noting(message: Message) -> None:
        nonlocal has_started
        if not limit.expired():  # Serve answers its own cancellation with 499
            has_started = True
            await send(message)

    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            await app(scope, receive, noting)
    except TimeoutError:
        if not limit.expired():  # the application's own
            raise
    if limit.expired():
        refusals.count(cause)
        if not has_started:
            await refuse(503, f"no answer within {timeout_s:g} s")(scope, receive, send)
