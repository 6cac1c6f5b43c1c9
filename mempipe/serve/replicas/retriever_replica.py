"""A retriever as a Ray Serve deployment."""

from __future__ import annotations

from mempipe.retrieval.config import RetrievalConfig
from mempipe.retrieval.remote import RemoteRetriever
from mempipe.retrieval.retriever import BatchingRetriever, Retriever
from mempipe.types import SearchResult


class RetrieverReplica:
    """One copy of the index, or one client of a retrieval service; the searches that reach it share batches."""

    def __init__(self, config: RetrievalConfig) -> None:
        if config.url:
            retriever = RemoteRetriever(config.url, config)
        else:
            retriever = Retriever(config.index, mode=config.mode, encoder_path=config.encoder_path)
        self._retriever = BatchingRetriever(retriever, config)

    async def snapshot(self) -> str:
        """Returns the hash of the index."""
        return self._retriever.snapshot

    async def search(self, query: str, num_passages: int, partition: str) -> SearchResult:
        return await self._retriever.search(query, num_passages=num_passages, partition=partition)
