"""The retrievers as Ray actors."""

from __future__ import annotations

from collections.abc import Sequence

from mempipe.actors.exchange import Answer, Desk, Request
from mempipe.config import RetrievalConfig
from mempipe.engines.retrieval import BatchingRetriever, Retriever
from mempipe.types import SearchResult


class RetrieverActor:
    """One copy of the index; searches of all trajectories that reach it share batches."""

    def __init__(self, config: RetrievalConfig) -> None:
        self._retriever = BatchingRetriever(Retriever(config.index), config)
        self._desk = Desk(self._search)

    async def ready(self) -> str:
        """The snapshot that is served."""
        return self._retriever.snapshot

    async def exchange(self, caller: str, requests: Sequence[Request]) -> list[Answer]:
        """Takes queries and gives results (`mempipe.actors.pools.RetrieverPool`)."""
        return await self._desk.exchange(caller, requests)

    async def _search(self, query: str, num_passages: int, partition: str) -> SearchResult:
        return await self._retriever.search(query, num_passages=num_passages, partition=partition)
