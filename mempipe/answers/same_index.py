"""Keeps all searches of a request in one index, also while another one takes its place."""

from __future__ import annotations

from mempipe.agents.protocol import SearchFn
from mempipe.faults import InfrastructureFault
from mempipe.types import SearchResult


class IndexChanged(InfrastructureFault):
    """Another index answered than at the beginning of the request."""


class SameIndex:
    """Searches for the attempts of one request."""

    def __init__(self, search: SearchFn) -> None:
        self._search = search
        self.snapshot: str | None = None
        """Hash of the index that answered first."""

    async def search(self, query: str, *, num_passages: int, partition: str) -> SearchResult:
        """Returns passages, best first. Raises IndexChanged when they are of another index than those before, and
        what the search raises."""
        result = await self._search(query, num_passages=num_passages, partition=partition)
        if self.snapshot is None:
            self.snapshot = result.snapshot
        elif self.snapshot != result.snapshot:
            raise IndexChanged(f"the index changed from {self.snapshot!r} to {result.snapshot!r}")
        return result
