"""A retriever as a Ray Serve deployment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import ray

from mempipe.direct.messages import SearchCall
from mempipe.direct.server import Address, DirectServer
from mempipe.retrieval.config import RetrievalConfig
from mempipe.retrieval.remote import RemoteRetriever
from mempipe.retrieval.retriever import BatchingRetriever, Retriever
from mempipe.serve.replicas.own_port import listen_at_node
from mempipe.types import SearchResult

ASK_S = 4.0
"""Seconds in which a retrieval service has to say that it answers; less than `/readyz` waits for that."""


class RetrieverReplica:
    """One copy of the index, or one client of a retrieval service; the searches that reach it share batches."""

    def __init__(self, config: RetrievalConfig) -> None:
        listen_at_node()
        if config.url:
            self._remote = retriever = RemoteRetriever(config.url, config)
        else:
            retriever, self._remote = Retriever(config.index, mode=config.mode, encoder_path=config.encoder_path), None
        self._retriever = BatchingRetriever(retriever, config)
        self._calls = DirectServer(self._search, SearchCall, host=ray.util.get_node_ip_address())

    async def snapshot(self) -> str:
        """Returns the hash of the index that answers now. Raises ServiceTimeout when a retrieval service does not."""
        if self._remote is None:
            return self._retriever.snapshot
        return await asyncio.to_thread(self._remote.ready, timeout_s=ASK_S)

    async def lease(self) -> AsyncIterator[Address]:
        """Yields where to search by direct calls (`mempipe.direct`)."""
        async for address in self._calls.lease():
            yield address

    async def _search(self, call: SearchCall) -> SearchResult:
        return await self._retriever.search(call.query, num_passages=call.num_passages, partition=call.partition)
