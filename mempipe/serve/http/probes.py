"""The health of the service, for those who watch it without a key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mempipe.answers.errors import ApiError

SHARED_FOR_S = 1.0


class SharedReplies:
    """Middleware of Serve's proxy for probes, which need no key: it asks the application once a second at most for each
    method and path, and sends all callers the same reply. The paths must be few, and their replies small.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self._found: dict[tuple[str, str], tuple[float, list[Message]]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked, now = (scope["method"], scope["path"]), asyncio.get_running_loop().time
        async with self._locks.setdefault(asked, asyncio.Lock()):
            until, reply = self._found.get(asked, (0.0, []))
            if now() >= until:
                reply = await self._ask(scope)
                self._found[asked] = (now() + SHARED_FOR_S, reply)
        for message in reply:
            await send(message)

    async def _ask(self, scope: Scope) -> list[Message]:
        reply: list[Message] = []
        unread: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]
        is_over = asyncio.Event()

        async def no_body() -> Message:
            if unread:
                return unread.pop()
            await is_over.wait()  # the caller may leave, but not the others who wait for the same reply
            return {"type": "http.disconnect"}

        async def note(message: Message) -> None:
            reply.append(message)

        try:
            await self._app(scope, no_body, note)
        finally:
            is_over.set()
        return reply


class SharedHealth:
    """Asks for the health once a second at most, and tells all callers: /readyz needs no key, and each look at it
    calls engine and retriever."""

    def __init__(self, health: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._health = health
        self._lock = asyncio.Lock()
        self._found: dict[str, Any] | ApiError = {}
        self._until = 0.0

    async def __call__(self) -> dict[str, Any]:
        """Returns the state of each part. Raises ApiError 503 when one is not ready."""
        now = asyncio.get_running_loop().time
        async with self._lock:
            if now() >= self._until:
                try:
                    self._found = await self._health()
                except ApiError as error:
                    self._found = error
                self._until = now() + SHARED_FOR_S
        if isinstance(self._found, ApiError):
            raise ApiError(self._found.status, str(self._found))
        return self._found
