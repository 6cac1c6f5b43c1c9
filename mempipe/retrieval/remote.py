"""A running retrieval service as a `Retriever`: the same searches over HTTP, repeated while the service cannot answer.

The service is `mempipe index serve` or any server with Search-R1's POST /retrieve. Ours says what it is at GET /health
and names the snapshot of every answer; another one's snapshot is "unknown", and it knows no partitions.
"""

from __future__ import annotations

import json
import logging
import math
import reprlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from mempipe.data.corpus import split_contents
from mempipe.faults import retry_pauses
from mempipe.retrieval.config import RetrievalConfig
from mempipe.retrieval.retriever import CACHED_RESULTS, MAX_BATCH, Query, ResultCache, RetrievalError, RetrievalTimeout
from mempipe.settings import ConfigError
from mempipe.text import replace_surrogates
from mempipe.types import Passage, SearchResult

SNAPSHOT_HEADER = "x-mempipe-snapshot"
UNKNOWN = "unknown"
LIMITS = ("max_passages", "max_query_chars", "max_queries")
"""What /health says besides the snapshot, that a client keeps to."""
MAX_ANSWER_BYTES = 2**28
NUM_ATTEMPTS = 3
"""An attempt may take this part of the time, so that one that hangs leaves some for others."""
logger = logging.getLogger(__name__)


class RemoteRetriever:
    """The service at `url`. One `search` at a time; `check` and `cached` may be called while it runs."""

    def __init__(self, url: str, config: RetrievalConfig) -> None:
        """Asks the service what it is, and repeats that for `config.timeout_s` while it cannot be reached.

        Raises RetrievalError when nothing at `url` can be searched, ConfigError when the service's limits are below the
        run's.
        """
        self.url = url.rstrip("/")
        self.snapshot = UNKNOWN
        self._timeout_s = config.timeout_s
        # An address inside the cluster: neither the environment's proxy nor its passwords are for it.
        self._client = httpx.Client(base_url=self.url, trust_env=False, follow_redirects=False)
        self._cache = ResultCache(CACHED_RESULTS)
        self._partitions: frozenset[str] | None = None  # of a server that knows none
        self._limits: dict[str, int] = {}
        self._warned = False
        self._meet(config)

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
                f"partition {query.partition!r}: the service at {self.url} knows no partitions; it is no mempipe "
                "service"
            )
        if query.partition not in self._partitions:
            raise ValueError(f"partition {query.partition!r} is none of the {len(self._partitions)} of {self.url}")

    def cached(self, query: Query) -> SearchResult | None:
        """The answer, if it is known already."""
        return self._cache.get(query)

    def search(self, queries: Sequence[Query]) -> list[SearchResult]:
        """The answers in the order of `queries`; equal queries are searched once. Raises as `check` does.

        Raises RetrievalTimeout when the service did not answer in time however often it was asked, RetrievalError when
        it refused or answered what is no answer.
        """
        deadline = time.monotonic() + self._timeout_s
        results: dict[Query, SearchResult] = {}
        missing: dict[tuple[int, str], list[Query]] = {}  # by what one request has in common
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
                for query, result in zip(batch, self._retrieve(batch, deadline), strict=True):
                    results[query] = result
                    self._cache.put(query, result)
        return [results[query] for query in queries]

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _meet(self, config: RetrievalConfig) -> None:
        deadline = time.monotonic() + self._timeout_s
        try:
            health = self._ask("GET", "/health", deadline).parsed()
        except (_Refused, ValueError):  # Search-R1's server has no such route
            health = None
        if not isinstance(health, dict) or "snapshot" not in health:
            self._retrieve([Query(text="a", num_passages=1)], deadline)
            return
        try:
            self.snapshot = str(health["snapshot"])
            self._limits = {name: int(health[name]) for name in LIMITS}
            self._partitions = frozenset(self._ask("GET", "/partitions", deadline).parsed())
        except (KeyError, TypeError, ValueError) as error:
            raise RetrievalError(f"{self.url}/health is not that of a mempipe retrieval service: {error!r}") from error
        for name in ("max_passages", "max_query_chars"):
            wanted, allowed = getattr(config, name), self._limits[name]
            if wanted > allowed:
                raise ConfigError(
                    f"retrieval.{name} is {wanted}, but the service at {self.url} allows {allowed}; lower it"
                )

    def _retrieve(self, batch: Sequence[Query], deadline: float) -> list[SearchResult]:
        """The answers to queries that ask for the same number of passages of the same partition."""
        count, partition = batch[0].num_passages, batch[0].partition
        request: dict[str, Any] = {
            "queries": [replace_surrogates(query.text) for query in batch],
            "topk": count,
            "return_scores": True,
        }
        reply = self._ask("POST", "/retrieve", deadline, request | ({"partition": partition} if partition else {}))
        snapshot = reply.headers.get(SNAPSHOT_HEADER, UNKNOWN)
        try:
            found = reply.parsed()["result"]
            if not isinstance(found, list) or len(found) != len(batch):
                raise ValueError(f"{len(batch)} queries got {reprlib.repr(found)}")
            results = [SearchResult(passages=_passages(items, count), snapshot=snapshot) for items in found]
        except (KeyError, TypeError, ValueError) as error:
            raise RetrievalError(f"{self.url}/retrieve answered what is no answer: {error!r}"[:500]) from error
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
        self._cache = ResultCache(CACHED_RESULTS)

    def _ask(self, method: str, path: str, deadline: float, body: dict[str, Any] | None = None) -> _Reply:
        """The reply of status 200. Requests change nothing at the service, so any that brought no answer may be made
        again.

        Also after 500: that is what a Serve proxy answers for a replica that died.
        """
        pauses = retry_pauses()
        while True:
            pause = next(pauses)
            try:
                reply = self._attempt(method, path, deadline, body)
                if reply.status == 200:
                    return reply
                failure = f"{reply.status}: {reply.content.decode(errors='replace')[:300]}"
                if reply.status not in (429, *range(500, 600)):
                    raise _Refused(f"{self.url}{path} answered {failure}")
                pause = max(pause, reply.retry_after_s)
            except httpx.RequestError as error:
                failure = repr(error)
            if time.monotonic() + pause >= deadline:
                raise RetrievalTimeout(
                    f"{self.url}{path}: nothing within retrieval.timeout_s {self._timeout_s:g} s, at last {failure}"
                )
            time.sleep(pause)

    def _attempt(self, method: str, path: str, deadline: float, body: dict[str, Any] | None) -> _Reply:
        """One try. Raises httpx.RequestError, also for an answer that comes too slowly or has no end."""
        until = min(time.monotonic() + self._timeout_s / NUM_ATTEMPTS, deadline)
        timeout = max(until - time.monotonic(), 0.001)
        with self._client.stream(method, path, json=body, timeout=timeout) as response:
            content = bytearray()
            for piece in response.iter_bytes():
                content += piece
                if time.monotonic() > until:  # httpx limits the wait for each piece only
                    raise httpx.ReadTimeout("the answer came too slowly")
                if len(content) > MAX_ANSWER_BYTES:
                    raise httpx.ReadError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
            return _Reply(status=response.status_code, headers=response.headers, content=bytes(content))


class _Refused(RetrievalError):
    """The service answered that the request is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def retry_after_s(self) -> float:
        value = self.headers.get("retry-after", "")
        return float(value) if value.isascii() and value.isdigit() else 0.0

    def parsed(self) -> Any:
        """Raises ValueError for what is no JSON."""
        try:
            return json.loads(self.content)
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error


def _passages(items: Any, count: int) -> list[Passage]:
    """Raises ValueError, KeyError or TypeError unless `items` are at most `count` scored documents."""
    if not isinstance(items, list) or len(items) > count:
        raise ValueError(f"a query for {count} passages got {reprlib.repr(items)}")
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
