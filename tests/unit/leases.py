"""A Serve deployment whose replicas are in this process, as the handle that direct calls use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from mempipe.direct.server import Address, DirectServer


class Lease:
    """What a Serve handle's streaming call gives back."""

    def __init__(self, addresses: AsyncIterator[Address]) -> None:
        self._addresses = addresses
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[Address]:
        return self._addresses

    def cancel(self) -> None:
        self.cancelled = True


class Deployment:
    """A Serve handle whose replicas take turns; `limit` leases are open at most, and further ones wait, as in Serve."""

    def __init__(self, *servers: DirectServer, limit: int = 100) -> None:
        self.servers = list(servers)
        self.num_open = 0
        self.num_leases = 0
        self.leases: list[Lease] = []
        self.refusals: list[Exception] = []
        self._free = asyncio.Semaphore(limit)

    def options(self, *, stream: bool) -> Deployment:
        assert stream
        return self

    @property
    def lease(self) -> Deployment:
        return self

    def remote(self) -> Lease:
        self.leases.append(Lease(self._stream()))
        return self.leases[-1]

    async def _stream(self) -> AsyncIterator[Address]:
        if self.refusals:
            raise self.refusals.pop(0)
        async with self._free:
            self.num_open += 1
            self.num_leases += 1
            try:
                async for address in self.servers[self.num_leases % len(self.servers)].lease():
                    yield address
            finally:
                self.num_open -= 1
