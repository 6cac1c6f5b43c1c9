"""The retrievers as Ray actors. Only the processes that hold an index import faiss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from mempipe.actors.batched_calls import Answer, BatchedServer, Request
from mempipe.actors.handles import Handle
from mempipe.beacons import reached
from mempipe.retrieval.config import RetrievalConfig
from mempipe.retrieval.manifest import open_manifest, vector_files
from mempipe.types import SearchResult

if TYPE_CHECKING:
    from mempipe.retrieval.encoders import Vectors
    from mempipe.retrieval.vectors import Rows, Scored


class ShardActor:
    """Part `number` of `retrieval.shard_actors` of an index's vectors."""

    def __init__(self, config: RetrievalConfig, number: int) -> None:
        from mempipe.retrieval.vectors import open_shards, search_thread

        manifest, _ = open_manifest(Path(config.index))
        files = vector_files(manifest, Path(config.index), part=number, num_parts=config.shard_actors)
        self._vectors = open_shards(files, search=manifest.vectors.search if manifest.vectors else "")
        self._thread = search_thread(config.num_threads)

    def shape(self) -> tuple[int, int]:
        """Returns the number of vectors and their dimension."""
        return self._vectors.num_vectors, self._vectors.dimension

    def search(self, vectors: Vectors, count: int, rows: Rows | None) -> list[Scored]:
        return self._thread.submit(self._vectors.search, vectors, count, rows=rows).result()


class RemoteShard:
    """A `ShardActor` as the retriever sees it (`mempipe.retrieval.vectors.VectorIndex`)."""

    def __init__(self, actor: Handle) -> None:
        self._actor = actor
        self.num_vectors, self.dimension = ray.get(actor.shape.remote())

    def search(self, vectors: Vectors, count: int, *, rows: Rows | None = None) -> list[Scored]:
        return ray.get(self._actor.search.remote(vectors, count, rows))


class RetrieverActor:
    """One copy of the index, or one client of the service; the searches of all trajectories that call it share batches.
    With `shards` these hold the vectors, and an answer merges their results.
    """

    def __init__(self, config: RetrievalConfig, shards: Sequence[Handle] = (), *, together: bool = True) -> None:
        """Without `together` every search is a separate batch: in another batch an encoder rounds the vector of the
        same query differently.
        """
        from mempipe.retrieval.remote import RemoteRetriever
        from mempipe.retrieval.retriever import MAX_BATCH, BatchingRetriever, Retriever
        from mempipe.retrieval.vectors import Shards

        reached("retriever.start")
        if config.url:
            retriever = RemoteRetriever(config.url, config)
        else:
            vectors = Shards([RemoteShard(actor) for actor in shards], num_threads=len(shards)) if shards else None
            retriever = Retriever(config.index, mode=config.mode, encoder_path=config.encoder_path, vectors=vectors)
        self._retriever = BatchingRetriever(retriever, config, max_batch=MAX_BATCH if together else 1)
        self._desk = BatchedServer(self._search)

    async def ready(self) -> str:
        """Returns the snapshot that is served."""
        return self._retriever.snapshot

    async def exchange(self, caller: str, requests: Sequence[Request]) -> list[Answer]:
        """Answers the queries of `mempipe.actors.pools.RetrieverPool` with results."""
        return await self._desk.exchange(caller, requests)

    async def under_way(self) -> int:
        """Counts the running searches."""
        return self._desk.num_under_way

    async def _search(self, query: str, num_passages: int, partition: str) -> SearchResult:
        reached("retriever.search")
        return await self._retriever.search(query, num_passages=num_passages, partition=partition)
