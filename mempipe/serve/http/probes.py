"""The health of the service, for those who watch it without a key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from mempipe.answers.errors import ApiError

SHARED_FOR_S = 1.0


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
