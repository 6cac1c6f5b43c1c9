"""Tickets that bound staleness: which groups may start, and which ones a learner step has to contain.

With `B` groups per step and `L` = max_off_policy_steps, the n-th group (from 0) starts only when `n < consumed + (L +
1) * B`, and a group started at version `v` is trained by the step that ends version `v + L` at the latest. The first
rule alone bounds how many groups are in flight, and it keeps the order of the questions, whichever driver asks first.
The second rule bounds the age of a straggler: a step takes the oldest groups first, and it waits while the groups that
it would leave for later could not all be trained in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from mempipe.beacons import reached


class Admission:
    """Hands out one ticket per group. Keys are idempotent: a group whose driver was restarted gets its first ticket
    again.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_off_policy_steps: int,
        policy_version: int = 0,
        adopted: Mapping[str, int] | None = None,
    ) -> None:
        """`adopted` are groups that an interrupted run finished before this stream began, and the versions at their
        starts; they take the first places."""
        self._groups_per_step = groups_per_step
        self._window = groups_per_step * (max_off_policy_steps + 1)
        self._max_off_policy_steps = max_off_policy_steps
        self._version = policy_version
        self._consumed: dict[str, int] = {}  # key -> version at its start
        self._outstanding = dict(adopted or {})  # the same, of those that are not consumed yet
        self._num_adopted = len(self._outstanding)
        self._changed = asyncio.Event()

    async def ticket(self, key: str, position: int) -> int:
        """Waits until group `key`, the `position`-th of the stream from 0, may start; returns the policy version it
        starts at.
        """
        if key in self._consumed:  # already consumed: a restarted worker replays the group and the result is discarded
            return self._consumed[key]
        while key not in self._outstanding:
            if self._num_adopted + position < len(self._consumed) + self._window:
                self._outstanding[key] = self._version
                break
            await self._changed.wait()
        return self._outstanding[key]

    async def choose(self, finished: Sequence[str]) -> list[str] | None:
        """Returns the groups that the step ending the current version trains, oldest first; None when the step has to
        wait until more groups finish.
        """
        reached("admission.choose", version=self._version, finished=len(finished))
        if len(finished) < self._groups_per_step:
            return None
        step = sorted(finished, key=self._outstanding.__getitem__)[: self._groups_per_step]
        left = sorted(started for key, started in self._outstanding.items() if key not in set(step))
        # Earliest deadline first: the i-th oldest is trained i // B steps after the next one.
        for i, started in enumerate(left):
            if self._version + 1 + i // self._groups_per_step > started + self._max_off_policy_steps:
                return None
        return step

    async def consume(self, keys: Iterable[str], *, policy_version: int) -> None:
        """Marks groups as consumed (trained on or dropped) and sets the policy version at which new groups start. Wakes
        all waiting `ticket` calls."""
        reached("admission.consume", version=policy_version)
        for key in keys:
            started_at = self._outstanding.pop(key, None)
            assert started_at is not None, f"group {key} was consumed without a ticket"
            assert self._version - started_at <= self._max_off_policy_steps, (
                f"group {key} of version {started_at} is too old at {self._version}"
            )
            self._consumed[key] = started_at
        self._version = policy_version
        self._changed.set()
        self._changed = asyncio.Event()
