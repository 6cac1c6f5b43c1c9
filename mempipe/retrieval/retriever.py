"""Searches an index folder, and batches the searches of many callers.

A search ranks by vectors (inner product), by words (BM25) or by both (reciprocal rank fusion), as the index allows. An
answer does not depend on the searches that share its batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from mempipe.faults import InfrastructureFault
from mempipe.retrieval.bm25 import LexicalIndex
from mempipe.retrieval.cache import SizedCache, passage_bytes, result_bytes
from mempipe.retrieval.config import RetrievalConfig
from mempipe.retrieval.encoders import Encoder, check_same_encoder, make_encoder
from mempipe.retrieval.fusion import reciprocal_rank_fusion
from mempipe.retrieval.manifest import MANIFEST, Manifest, VectorFiles, open_manifest, search_mode, verify
from mempipe.retrieval.passages import ArrowPassages, JsonlPassages, Passages
from mempipe.retrieval.vectors import Scored, VectorIndex, open_shards, search_thread
from mempipe.settings import ConfigError
from mempipe.types import Passage, SearchResult

CACHED_PASSAGE_BYTES = 2**26
CACHED_RESULT_BYTES = 2**26
MAX_BATCH = 256  # searches
FUSION_DEPTH = 100
"""Passages of each ranking that fusion looks at, at least."""


class RetrievalError(InfrastructureFault):
    """A search could not be made; the query itself was fine."""


class RetrievalTimeout(RetrievalError):
    """A search was not answered within `retrieval.timeout_s`, waiting included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One search: at most `num_passages` passages of `partition` ("" = the whole corpus)."""

    text: str
    num_passages: int
    partition: str = ""


class Retriever:
    """An opened index. One `search` at a time; `check` and `cached` may be called while it runs."""

    def __init__(
        self,
        folder: str | Path,
        *,
        mode: str = "auto",
        encoder: Encoder | None = None,
        encoder_path: str = "",
        checksums: bool = False,
        vectors: VectorIndex | None = None,
    ) -> None:
        """Opens the index. `mode` is "dense", "lexical", "fusion", or "auto": all that the index has.

        `encoder` replaces loading the one that the manifest names; `encoder_path` is where that one lies now. `vectors`
        are the index's own, opened elsewhere. Every byte is read when the files changed since that was last done, and
        with `checksums` in any case. Raises ConfigError when a file is missing, truncated, or not what the manifest
        says, when the encoder is another, and when the index lacks what the mode needs.
        """
        folder = Path(folder)
        manifest, self.snapshot = open_manifest(folder)
        if checksums:
            verify(folder)
        self.mode = search_mode(mode, manifest, folder)
        if self.mode != search_mode("auto", manifest, folder):
            self.snapshot += f"-{mode}"  # the same index, other answers
        self._partitions = manifest.passages.partitions
        self._passages = _open_passages(folder, manifest)
        self.num_passages = len(self._passages)
        if self.num_passages != manifest.passages.count:
            found, expected = self.num_passages, manifest.passages.count
            raise ConfigError(f"index {folder} holds {found} passages, its manifest says {expected}; build it again")
        self._vectors = self._encoder = self._lexical = None
        if manifest.vectors is not None and self.mode != "lexical":
            if encoder is not None:
                check_same_encoder(encoder.spec(), manifest.vectors.encoder)
            self._vectors = vectors or open_shards(
                [folder / name for name in manifest.vectors.files], search=manifest.vectors.search
            )
            self._encoder = encoder or make_encoder(manifest.vectors.encoder, path=encoder_path)
            self._check_vectors(folder, manifest.vectors)
        if manifest.lexical is not None and self.mode != "dense":
            self._lexical = LexicalIndex.open(folder / manifest.lexical.folder)
        self._known_passages = SizedCache[int, Passage](CACHED_PASSAGE_BYTES, size_of=passage_bytes)
        self._cache = SizedCache[Query, SearchResult](CACHED_RESULT_BYTES, size_of=result_bytes)

    @property
    def partitions(self) -> list[str]:
        """Returns the names of the parts that can be searched on their own."""
        return list(self._partitions)

    def check(self, query: Query) -> None:
        """Raises ValueError for a query that this index cannot answer, whatever happens."""
        if query.num_passages < 1:
            raise ValueError(f"num_passages is {query.num_passages}; a search returns at least 1")
        if query.partition and query.partition not in self._partitions:
            raise ValueError(f"partition {query.partition!r} is none of the index's {len(self._partitions)}")

    def passage(self, row: int) -> Passage:
        """Returns a passage by its row. Raises IndexError when there is no such row."""
        return self._passages[row]

    def cached(self, query: Query) -> SearchResult | None:
        """Returns the answer if it is in the cache."""
        return self._cache.get(query)

    def search(self, queries: Sequence[Query]) -> list[SearchResult]:
        """Returns the answers in the order of `queries`; equal queries are searched once. Raises as `check` does.

        A partition, or a corpus, of fewer passages than asked for is returned whole by a search by vectors; a search by
        words returns the passages that share one with the query.
        """
        results: dict[Query, SearchResult] = {}
        missing: list[Query] = []
        for query in dict.fromkeys(queries):
            self.check(query)
            if (known := self.cached(query)) is not None:
                results[query] = known
            else:
                missing.append(query)
        if missing:
            for query, (rows, scores) in zip(missing, self._ranked(missing), strict=True):
                passages = [
                    replace(self._passage(row), score=score)
                    for row, score in zip(rows.tolist(), scores.tolist(), strict=True)
                ]
                results[query] = SearchResult(passages=passages, snapshot=self.snapshot)
                self._cache.put(query, results[query])
        return [results[query] for query in queries]

    def _passage(self, row: int) -> Passage:
        if (known := self._known_passages.get(row)) is not None:
            return known
        passage = self._passages[row]
        self._known_passages.put(row, passage)
        return passage

    def _ranked(self, queries: Sequence[Query]) -> list[Scored]:
        """Returns a ranking for every query.

        It searches those together that ask for the same number of passages of the same partition, since the depth of a
        search may change its answer.
        """
        vectors = self._encoder.encode_queries([query.text for query in queries]) if self._encoder else None
        groups: dict[tuple[int, str], list[int]] = {}
        for i, query in enumerate(queries):
            groups.setdefault((query.num_passages, query.partition), []).append(i)
        best: list[Scored | None] = [None] * len(queries)
        for (count, partition), members in groups.items():
            depth = max(count, FUSION_DEPTH) if self.mode == "fusion" else count
            rows = self._partitions[partition] if partition else None
            rankings = []
            if self._vectors is not None and vectors is not None:
                rankings.append(self._vectors.search(vectors[members], depth, rows=rows))
            if self._lexical is not None:
                rankings.append(self._lexical.search([queries[i].text for i in members], depth, rows=rows))
            for i, *of_query in zip(members, *rankings, strict=True):
                best[i] = of_query[0] if len(of_query) == 1 else _fused(of_query, count)
        return [found for found in best if found is not None]

    def _check_vectors(self, folder: Path, spec: VectorFiles) -> None:
        assert self._vectors is not None and self._encoder is not None
        for name, found, expected in (
            ("its vectors are {}", self._vectors.num_vectors, self.num_passages),
            ("its vectors have {} dimensions", self._vectors.dimension, spec.dimension),
            ("the encoder makes {} dimensions", self._encoder.dimension, spec.dimension),
        ):
            if found != expected:
                raise ConfigError(f"index {folder}: {name.format(found)}, {MANIFEST} says {expected}; build it again")


def _open_passages(folder: Path, manifest: Manifest) -> Passages:
    files = [folder / name for name in manifest.passages.files]
    return ArrowPassages(files) if manifest.passages.kind == "arrow" else JsonlPassages(files[0], files[1])


def _fused(rankings: Sequence[Scored], count: int) -> Scored:
    fused = reciprocal_rank_fusion([rows.tolist() for rows, _ in rankings])[:count]
    return np.array([row for row, _ in fused], dtype=np.int64), np.array(
        [score for _, score in fused], dtype=np.float32
    )


class Searcher(Protocol):
    """The interface that `BatchingRetriever` needs: an index (`Retriever`) or a service
    (`mempipe.retrieval.remote.RemoteRetriever`)."""

    snapshot: str

    def check(self, query: Query) -> None: ...
    def cached(self, query: Query) -> SearchResult | None: ...
    def search(self, queries: Sequence[Query]) -> list[SearchResult]: ...


class BatchingRetriever:
    """Gathers the searches of many trajectories for `batch_wait_ms` and makes them together in a thread; for one event
    loop at a time.
    """

    def __init__(self, retriever: Searcher, config: RetrievalConfig, *, max_batch: int = MAX_BATCH) -> None:
        self.snapshot = retriever.snapshot
        self.num_batches = 0
        self._retriever = retriever
        self._wait_s = config.batch_wait_ms / 1000
        self._timeout_s = config.timeout_s
        self._waiting: list[tuple[Query, asyncio.Future[SearchResult]]] = []
        self._max_batch = self._last_batch = max_batch
        self._flushing: asyncio.Task[None] | None = None
        self._thread = search_thread(config.num_threads)

    async def search(self, query: str, *, num_passages: int, partition: str = "") -> SearchResult:
        """Returns the best passages.

        Raises ValueError for a query that cannot be answered, RetrievalTimeout, and RetrievalError.
        """
        request = Query(text=query, num_passages=num_passages, partition=partition)
        self._retriever.check(request)  # here, so that one caller's mistake does not fail a batch
        if (known := self._retriever.cached(request)) is not None:
            return known
        future: asyncio.Future[SearchResult] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush())
        try:
            async with asyncio.timeout(self._timeout_s):
                return await future
        except TimeoutError as error:
            raise RetrievalTimeout(f"no passages within retrieval.timeout_s {self._timeout_s:g} s") from error

    def close(self) -> None:
        """Ends the thread; a running search finishes."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _flush(self) -> None:
        """Searches one batch after another until no query waits; the next batch is gathered during a search."""
        # After a batch of one nobody else is likely to come. A later caller waits for the running search
        # and joins the next batch.
        await asyncio.sleep(self._wait_s if self._last_batch > 1 else 0)
        while self._waiting:
            batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
            batch = [(query, future) for query, future in batch if not future.done()]  # without those who gave up
            self._last_batch = len(batch)
            if batch:
                await self._answer(batch)

    async def _answer(self, batch: Sequence[tuple[Query, asyncio.Future[SearchResult]]]) -> None:
        self.num_batches += 1
        queries = [query for query, _ in batch]
        results: list[SearchResult] = []
        failure: Exception | None = None
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._thread, self._retriever.search, queries)
        except Exception as error:  # of any kind: every waiting search must fail with it
            failure = error
        for i, (_, future) in enumerate(batch):
            if future.done():
                continue
            if failure is None:
                future.set_result(results[i])
            else:
                future.set_exception(_batch_failed(len(batch), failure))


def _batch_failed(num_searches: int, cause: Exception) -> RetrievalError:
    error = RetrievalError(f"a batch of {num_searches} searches failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
