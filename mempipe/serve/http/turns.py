"""Requests that are let through one after the other, at a limited rate."""

from __future__ import annotations

import asyncio
import time
from collections import deque


class Turns:
    """Lets requests through: `burst` at once, then `per_second`. For one event loop.

    Addresses take turns, so one request of an address passes by the many of another.
    """

    def __init__(self, per_second: float, *, burst: int) -> None:
        self._per_second, self._burst = per_second, burst
        self._free, self._since = float(burst), time.monotonic()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By address; the one whose turn is next is first."""
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, address: str) -> None:
        """Returns when it is the request's turn. A request may be cancelled while it waits."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(address, deque()).append(turn)
        if self._timer is None:
            self._go_on()
        await turn

    def _go_on(self) -> None:
        """Gives the turns that are free, and comes back for the next one."""
        now = time.monotonic()
        self._free = min(self._burst, self._free + (now - self._since) * self._per_second)
        self._since, self._timer = now, None
        while self._waiting and self._free >= 1:
            address = next(iter(self._waiting))
            turns = self._waiting.pop(address)
            turn = turns.popleft()
            if turns:
                self._waiting[address] = turns
            if not turn.done():
                turn.set_result(None)
                self._free -= 1
        if self._waiting:
            wait_s = (1 - self._free) / self._per_second
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._go_on)
