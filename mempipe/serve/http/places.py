"""The places of a service's requests, which owners take in a fair order."""

from __future__ import annotations

import asyncio
from collections import Counter, deque


class Places:
    """A limited number of places, and a queue for those who want to wait for one. For one event loop.

    A free place goes to the owner who has the fewest; among these to the one whose request has waited longest. So one
    request of an owner passes by the many of another.
    """

    def __init__(self, limit: int, *, max_waiting: int) -> None:
        """At most `limit` places are taken at the same time, and at most `max_waiting` requests wait."""
        self._limit = limit
        self._max_waiting = max_waiting
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        self._num_asked = 0

    @property
    def num_taken(self) -> int:
        return self._taken.total()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def take(self, owner: str, *, wait_s: float = 0.0) -> bool:
        """Takes a place, for which it waits at most `wait_s` seconds; returns whether there was one."""
        if self.num_taken < self._limit:
            self._taken[owner] += 1
            return True
        if not wait_s or self.num_waiting >= self._max_waiting:
            return False
        self._num_asked += 1
        turn = (self._num_asked, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            async with asyncio.timeout(wait_s):
                await turn[1]
            return True
        except TimeoutError:
            return _is_given(turn[1])
        except asyncio.CancelledError:
            if _is_given(turn[1]):
                self.give_back(owner)
            raise
        finally:
            self._forget(owner, turn)

    def give_back(self, owner: str) -> None:
        """Frees a place of an owner, which the next in the queue takes."""
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
        while self._waiting and self.num_taken < self._limit:
            chosen = min(self._waiting, key=lambda each: (self._taken[each], self._waiting[each][0][0]))
            turn = self._waiting[chosen][0]
            self._forget(chosen, turn)
            if not turn[1].done():
                self._taken[chosen] += 1
                turn[1].set_result(None)

    def _forget(self, owner: str, turn: tuple[int, asyncio.Future[None]]) -> None:
        queue = self._waiting.get(owner)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[owner]


def _is_given(place: asyncio.Future[None]) -> bool:
    return place.done() and not place.cancelled()
