"""A running retrieval service as a `Retriever`: the same searches over HTTP, repeated while the service cannot answer.

The service is `mempipe index serve` or any server with Search-R1's POST /retrieve. Ours says what it is at GET /health
and names the snapshot of every answer; another one's snapshot is "unknown", and it knows no partitions.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import reprlib
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from anyio.from_thread import start_blocking_portal

from mempipe.credentials import without_passwords
from mempipe.data.corpus import split_contents
from mempipe.faults import ServiceFault, ServiceTimeout
from mempipe.http_client import HttpClient, RetryPolicy
from mempipe.retrieval.cache import SizedCache, result_bytes
from mempipe.retrieval.config import RetrievalConfig
from mempipe.retrieval.retriever import CACHED_RESULT_BYTES, MAX_BATCH, Query
from mempipe.settings import ConfigError
from mempipe.text import replace_surrogates
from mempipe.types import Passage, SearchResult

SNAPSHOT_HEADER = "x-mempipe-snapshot"
UNKNOWN = "unknown"
LIMITS = ("max_passages", "max_query_chars", "max_queries")
"""Limits that /health names and that a client obeys."""
MAX_ANSWER_BYTES = 2**28
_SHAPE = 'expected {"document": {"id", "contents"}, "score"}'
logger = logging.getLogger(__name__)


class RemoteRetriever:
    """A client of the service at `url`. One `search` at a time; `check` and `cached` may be called while it runs."""

    def __init__(self, url: str, config: RetrievalConfig) -> None:
        """Asks the service for its description, and repeats the request for `config.timeout_s` while it cannot be
        reached.

        Raises ServiceTimeout when no service answered, ConfigError when it answers no search, or when its limits are
        below the run's.
        """
        policy = RetryPolicy(timeout_s=config.timeout_s, setting="retrieval.timeout_s")
        self.url = without_passwords(url.rstrip("/"))  # for messages
        self.snapshot = UNKNOWN
        self._timeout_s = config.timeout_s
        self._http = HttpClient(url, policy, max_answer_bytes=MAX_ANSWER_BYTES)
        self._closing = ExitStack()
        # Also when the process ends: a loop that is still open then would be waited for without end.
        self._end = weakref.finalize(self, self._closing.close)
        # The client is asynchronous, `search` is called from a thread: the requests run in a separate event loop.
        self._portal = self._closing.enter_context(start_blocking_portal(name="retrieval-client"))
        self._closing.callback(self._portal.call, self._http.close)
        self._under_way: concurrent.futures.Future[list[SearchResult]] | None = None
        self._cache = SizedCache[Query, SearchResult](CACHED_RESULT_BYTES, size_of=result_bytes)
        self._partitions: frozenset[str] | None = None  # None: the server knows no partitions
        self._limits: dict[str, int] = {}
        self._warned = False
        try:
            self._portal.call(self._meet, config)
        except BaseException:
            self.close()
            raise

    def check(self, query: Query) -> None:
        """Raises ValueError for a query that this service cannot answer, whatever happens."""
        if query.num_passages < 1:
            raise ValueError(f"num_passages is {query.num_passages}; a search returns at least 1")
        for name, value in (("max_passages", query.num_passages), ("max_query_chars", len(query.text))):
            if value > self._limits.get(name, value):
                raise ValueError(
                    f"a query has {value}, beyond {name} {self._limits[name]} of the service at {self.url}"
                )
        if not query.partition:
            return
        if self._partitions is None:
            raise ValueError(
                f"partition {query.partition!r}: the service at {self.url} knows no partitions; it is not a "
                "mempipe service"
            )
        if query.partition not in self._partitions:
            raise ValueError(f"partition {query.partition!r} is none of the {len(self._partitions)} of {self.url}")

    def cached(self, query: Query) -> SearchResult | None:
        """Returns the answer if it is known already."""
        return self._cache.get(query)

    def search(self, queries: Sequence[Query]) -> list[SearchResult]:
        """Returns the answers in the order of `queries`; equal queries are searched once. Raises as `check` does.

        Raises ServiceTimeout when the service did not answer in time, ServiceFault when it refused, when its answer
        cannot be read, and when `close` was called during the search.
        """
        self._under_way = self._portal.start_task_soon(self._search, queries)
        try:
            return self._under_way.result()
        except concurrent.futures.CancelledError as error:
            raise ServiceFault(f"the client of {self.url} was closed during a search") from error
        finally:
            self._under_way.cancel()  # a caller that is interrupted leaves no request that is repeated

    def ready(self, *, timeout_s: float) -> str:
        """Asks a mempipe service whether it answers, and returns the snapshot that it serves now; another server, which
        may answer one request at a time, is not asked. Raises ServiceTimeout."""
        return self.snapshot if self._partitions is None else self._portal.call(self._ready, timeout_s)

    def close(self) -> None:
        """Ends a search that is in flight, and closes the connections."""
        if self._under_way is not None:
            self._under_way.cancel()
        self._end()

    async def _search(self, queries: Sequence[Query]) -> list[SearchResult]:
        deadline = time.monotonic() + self._timeout_s
        results: dict[Query, SearchResult] = {}
        missing: dict[tuple[int, str], list[Query]] = {}  # by what the queries of one request have in common
        for query in dict.fromkeys(queries):
            self.check(query)
            if (known := self.cached(query)) is not None:
                results[query] = known
            else:
                missing.setdefault((query.num_passages, query.partition), []).append(query)
        size = min(self._limits.get("max_queries", MAX_BATCH), MAX_BATCH)
        for alike in missing.values():
            for first in range(0, len(alike), size):
                batch = alike[first : first + size]
                for query, result in zip(batch, await self._retrieve(batch, deadline), strict=True):
                    results[query] = result
                    self._cache.put(query, result)
        return [results[query] for query in queries]

    async def _meet(self, config: RetrievalConfig) -> None:
        deadline = time.monotonic() + self._timeout_s
        health = await self._health(deadline)
        if health is None:
            try:
                await self._retrieve([Query(text="a", num_passages=1)], deadline)
            except ServiceTimeout:
                raise
            except ServiceFault as fault:  # another try would get the same answer
                raise ConfigError(f"retrieval.url: a first search failed: {fault}") from fault
            return
        try:
            self.snapshot = str(health["snapshot"])
            self._limits = {name: int(health[name]) for name in LIMITS}
            self._partitions = frozenset((await self._http.request("GET", "partitions", deadline=deadline)).json())
        except (KeyError, TypeError, ValueError) as error:
            raise ServiceFault(f"{self.url}/health is not that of a mempipe retrieval service: {error!r}") from error
        for name in ("max_passages", "max_query_chars"):
            wanted, allowed = getattr(config, name), self._limits[name]
            if wanted > allowed:
                raise ConfigError(
                    f"retrieval.{name} is {wanted}, but the service at {self.url} allows {allowed}; lower it"
                )

    async def _ready(self, timeout_s: float) -> str:
        health = await self._health(time.monotonic() + timeout_s)
        if health is not None and str(health["snapshot"]) != self.snapshot:
            self._changed(str(health["snapshot"]))
        return self.snapshot

    async def _health(self, deadline: float) -> dict[str, Any] | None:
        """Returns what a mempipe service says of itself, None from another server. Raises ServiceTimeout."""
        try:
            health = (await self._http.request("GET", "health", deadline=deadline)).json()
        except ServiceTimeout:
            raise
        except (ServiceFault, ValueError):  # Search-R1's server has no such route
            return None
        return health if isinstance(health, dict) and "snapshot" in health else None

    async def _retrieve(self, batch: Sequence[Query], deadline: float) -> list[SearchResult]:
        """Returns the answers to queries that ask for the same number of passages of the same partition."""
        count, partition = batch[0].num_passages, batch[0].partition
        request: dict[str, Any] = {
            "queries": [replace_surrogates(query.text) for query in batch],
            "topk": count,
            "return_scores": True,
        }
        if partition:
            request["partition"] = partition
        answer = await self._http.request("POST", "retrieve", request, deadline=deadline)
        snapshot = answer.headers.get(SNAPSHOT_HEADER, UNKNOWN)
        try:
            found = answer.json()["result"]
            if not isinstance(found, list) or len(found) != len(batch):
                raise ValueError(f"{len(batch)} queries got {reprlib.repr(found)}")
            results = [SearchResult(passages=_passages(items, count), snapshot=snapshot) for items in found]
        except (KeyError, TypeError, ValueError) as error:
            reason = error if type(error) is ValueError else repr(error)  # a sentence, or the name of a missing field
            raise ServiceFault(f"{self.url}/retrieve sent an invalid answer: {reason}"[:500]) from error
        if snapshot != self.snapshot:
            self._changed(snapshot)
        return results

    def _changed(self, snapshot: str) -> None:
        if not self._warned:
            logger.warning(
                "%s serves snapshot %s now, it was %s before; every search records its own",
                self.url,
                snapshot,
                self.snapshot,
            )
            self._warned = True
        self.snapshot = snapshot
        self._cache = SizedCache[Query, SearchResult](CACHED_RESULT_BYTES, size_of=result_bytes)


def _passages(items: Any, count: int) -> list[Passage]:
    """Raises ValueError, KeyError or TypeError unless `items` are at most `count` scored documents."""
    if not isinstance(items, list) or len(items) > count:
        raise ValueError(f"a query for {count} passages got {reprlib.repr(items)}")
    for item in items:
        if not isinstance(item, dict) or not {"document", "score"} <= item.keys():
            raise ValueError(f"a passage is {reprlib.repr(item)}; {_SHAPE}")
        if not isinstance(item["document"], dict) or not {"id", "contents"} <= item["document"].keys():
            raise ValueError(f"a document is {reprlib.repr(item['document'])}; {_SHAPE}")
    return [_passage(item["document"], item["score"]) for item in items]


def _passage(document: Any, score: Any) -> Passage:
    identity, contents, partition = document["id"], document["contents"], document.get("partition", "")
    if not isinstance(contents, str) or not isinstance(partition, str) or type(identity) not in (str, int):
        raise TypeError(f"a document is {reprlib.repr(document)}")
    if type(score) not in (int, float) or not math.isfinite(score):
        raise TypeError(f"a score is {reprlib.repr(score)}")
    title, text = split_contents(replace_surrogates(contents))
    return Passage(
        id=replace_surrogates(str(identity)), title=title, text=text, score=float(score), partition=partition
    )
