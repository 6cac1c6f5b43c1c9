"""The places of a service's requests, which owners take in a fair order."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

Turn = tuple[int, asyncio.Future[bool]]
"""A waiting request: its number, and whether it was given a place, once that is known."""


class Places:
    """A limited number of places, and a queue for those who want to wait for one. For one event loop.

    A free place goes to the owner who has the fewest; among these to the one whose request has waited longest. So one
    request of an owner passes by the many of another. Where there are several owners, the last free place goes only to
    one who has none. In a full queue a request takes the turn of the owner who has most in it.
    """

    def __init__(self, limit: int, *, max_waiting: int, are_several: Callable[[], bool] = lambda: False) -> None:
        """At most `limit` places are taken at the same time, and at most `max_waiting` requests wait. `are_several`
        returns whether there is more than one owner.
        """
        self._limit = limit
        self._max_waiting = max_waiting
        self._are_several = are_several
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[Turn]] = {}
        self._num_asked = 0

    @property
    def num_taken(self) -> int:
        return self._taken.total()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def is_behind(self, owner: str) -> bool:
        """Returns whether another owner has more places."""
        return any(taken > self._taken[owner] for taken in self._taken.values())

    def take_free(self, owner: str) -> bool:
        """Takes a place if one is free for the owner; returns whether there was one."""
        if is_free := self._is_free_for(owner):
            self._taken[owner] += 1
        return is_free

    async def take(self, owner: str, *, wait_s: float = 0.0) -> bool:
        """Takes a place, for which it waits at most `wait_s` seconds; returns whether there was one."""
        if self.take_free(owner):
            return True
        if not wait_s or not self._has_room_for(owner):
            return False
        self._num_asked += 1
        turn = (self._num_asked, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            async with asyncio.timeout(wait_s):
                return await turn[1]
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
        while self._waiting:
            chosen = min(self._waiting, key=lambda each: (self._taken[each], self._waiting[each][0][0]))
            if not self._is_free_for(chosen):
                return
            turn = self._waiting[chosen][0]
            self._forget(chosen, turn)
            if not turn[1].done():
                self._taken[chosen] += 1
                turn[1].set_result(True)

    def _is_free_for(self, owner: str) -> bool:
        free = self._limit - self.num_taken
        return free > 1 or (free == 1 and (not self._taken[owner] or not self._are_several()))

    def _has_room_for(self, owner: str) -> bool:
        """Returns whether one more request of the owner may wait. In a full queue the newest one of the owner who has
        most is refused for it, unless that would only change places.
        """
        if self.num_waiting < self._max_waiting:
            return True
        most = max(self._waiting, key=lambda each: len(self._waiting[each]), default=owner)
        if len(self._waiting.get(most, ())) <= len(self._waiting.get(owner, ())) + 1:
            return False
        turn = self._waiting[most][-1]
        self._forget(most, turn)
        if not turn[1].done():
            turn[1].set_result(False)
        return True

    def _forget(self, owner: str, turn: Turn) -> None:
        queue = self._waiting.get(owner)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[owner]


def _is_given(place: asyncio.Future[bool]) -> bool:
    return place.done() and not place.cancelled() and place.result()
