"""Searches per second and latency, by vectors and by words: the actor pool against one search at a time, and against
faiss itself in batches of the same size, or tantivy.

    python -m benchmarks.retrieval [--corpus FILE] [--passages 1000000] [--rounds 3] [--seconds 2]

Every caller asks one new question after the other. "one at a time" is a server that makes each request's search by
itself, one after the other, as MemSearcher's and Search-R1's do; "pool" is `RetrieverPool` over a `RetrieverActor`;
"in process" is the `BatchingRetriever` of such an actor in the callers' process, without Ray; "faiss alone" calls
`index.search` in this process with batches as large as those of "in process" were on average, and neither encodes nor
looks a passage up; "tantivy" searches and reads the passages in this process for one caller. They take turns within
each round. The build rate is of the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import ray
from rich.console import Console
from rich.table import Table

from benchmarks.corpora import CORPUS, questions_about, read_passages
from benchmarks.rows import Row, record, spread
from mempipe.actors.cluster import connected
from mempipe.actors.handles import start_actor
from mempipe.actors.launch import MAX_CALLS
from mempipe.actors.pools import RetrieverPool
from mempipe.actors.retriever import RetrieverActor
from mempipe.data.corpus import CorpusPosition
from mempipe.retrieval.build import IndexBuild, build_index, passages_to_batch, write_vectors
from mempipe.retrieval.config import IndexConfig, RetrievalConfig
from mempipe.retrieval.encoders import HashingEncoder, make_encoder
from mempipe.retrieval.manifest import read_manifest
from mempipe.retrieval.retriever import BatchingRetriever, Query, Retriever
from mempipe.retrieval.vectors import read_index, search_thread
from mempipe.types import Passage

NUM_PASSAGES = 5
CALLERS = (1, 8, 64)
ALONE, POOL, IN_PROCESS = "one at a time", "pool", "in process"
DIMENSION = 768
WORDS = [f"w{i}" for i in range(20_000)]


class OneAtATime:
    """An actor that makes every search by itself."""

    def __init__(self, index: str, mode: str) -> None:
        self._retriever = Retriever(index, mode=mode)
        self._thread = search_thread(0)

    def search(self, query: str, num_passages: int) -> Any:
        return self._thread.submit(self._retriever.search, [Query(text=query, num_passages=num_passages)]).result()[0]


@dataclass
class Rate:
    per_second: float
    p50_ms: float
    p99_ms: float
    count: int


@dataclass
class Round:
    rates: dict[str, Rate]
    batch: float
    """Searches in a batch of the process's own, on average."""
    other: float


async def measured(
    search: Callable[[str], Awaitable[Any]], queries: Iterator[str], *, callers: int, seconds: float
) -> Rate:
    """Measures callers that ask again as soon as they have an answer; calls in flight at the end are waited for and
    counted."""
    latencies: list[float] = []
    started = time.perf_counter()

    async def caller() -> None:
        while time.perf_counter() - started < seconds:
            asked = time.perf_counter()
            await search(next(queries))
            latencies.append(time.perf_counter() - asked)

    await asyncio.gather(*(caller() for _ in range(callers)))
    took = time.perf_counter() - started
    p50, p99 = np.percentile(latencies, [50, 99]) * 1000
    return Rate(len(latencies) / took, p50, p99, len(latencies))


def faiss_rate(file: Path, vectors: np.ndarray, *, batch: int, seconds: float) -> float:
    index, thread = read_index(file), search_thread(0)
    batches = itertools.cycle(vectors[i : i + batch] for i in range(0, len(vectors) - batch + 1, batch))
    count, started = 0, time.perf_counter()
    while (took := time.perf_counter() - started) < seconds:
        thread.submit(index.search, next(batches), NUM_PASSAGES).result()
        count += batch
    return count / took


def tantivy_search(passages: Sequence[Passage]) -> Callable[[str], object] | None:
    """Returns a search of the passages by tantivy's BM25, for any of the query's words, which reads title and text of
    what it finds; None where the package is not installed."""
    if find_spec("tantivy") is None:
        return None
    tantivy: Any = import_module("tantivy")
    schema = tantivy.SchemaBuilder().add_text_field("title", stored=True).add_text_field("text", stored=True).build()
    index = tantivy.Index(schema)
    writer = index.writer()
    for passage in passages:
        writer.add_document(tantivy.Document(title=passage.title, text=passage.text))
    writer.commit()
    index.reload()
    searcher = index.searcher()

    def search(query: str) -> object:
        parsed, _ = index.parse_query_lenient(query.lower(), ["title", "text"])  # OR would be an operator
        return [searcher.doc(address).to_dict() for _, address in searcher.search(parsed, NUM_PASSAGES).hits]

    return search


def rate_of(search: Callable[[str], object], queries: Iterator[str], *, seconds: float) -> float:
    """Measures the searches per second of one caller in this process."""
    count, started = 0, time.perf_counter()
    while (took := time.perf_counter() - started) < seconds:
        search(next(queries))
        count += 1
    return count / took


def questions(seed: int, words_each: int = 6) -> Iterator[str]:
    rng = np.random.default_rng(seed)
    while True:
        yield " ".join(WORDS[i] for i in rng.integers(len(WORDS), size=words_each))


def synthetic_index(folder: Path, count: int) -> Path:
    """Makes random vectors of length 1 under a hashing encoder's name: its queries are as good as any for speed."""
    encoder = HashingEncoder(dimension=DIMENSION)
    # pyrefly: ignore
    config = IndexConfig(corpus=[], output=str(folder), encoder=encoder.spec(), faiss={"shard_passages": max(count, 1)})
    build, rng = IndexBuild(config, []), np.random.default_rng(0)
    for number, first in enumerate(range(0, count, config.segment_passages)):
        rows = range(first, min(first + config.segment_passages, count))
        passages = [
            Passage(id=str(row), title=f"Passage {row}", text="a passage of about a hundred words " * 14)
            for row in rows
        ]
        build.write_segment(number, passages_to_batch(passages), CorpusPosition())
        vectors = rng.standard_normal((len(rows), DIMENSION), dtype=np.float32)
        write_vectors(build.folder, number, vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    build.finish(encoder)
    return folder


def real_index(folder: Path, passages: Sequence[Passage], encoder: dict[str, Any]) -> tuple[float, float]:
    """Builds the index; returns passages per second of the whole build and of the encoder alone, in this process."""
    made = make_encoder(encoder)
    started = time.perf_counter()
    build_index(passages, folder, encoder=made, lexical=True)
    whole = time.perf_counter() - started
    started = time.perf_counter()
    made.encode_passages(passages)
    return len(passages) / whole, len(passages) / (time.perf_counter() - started)


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Searches of one index in one mode, ours and others'."""

    title: str
    index: Path
    mode: Literal["dense", "lexical"]
    queries: Callable[[int], Iterator[str]]
    """Makes the queries of a seed."""
    other: str
    other_rate: Callable[[int], float]
    """Measures the other's searches per second, in batches of this size if it makes batches."""

    async def rounds(self, *, callers: int, rounds: int, seconds: float) -> list[Round]:
        config = RetrievalConfig(index=str(self.index), mode=self.mode, timeout_s=600)
        alone = start_actor(OneAtATime, {"num_cpus": 0, "max_concurrency": 1}, str(self.index), self.mode)
        actor = start_actor(RetrieverActor, {"num_cpus": 0, "max_concurrency": MAX_CALLS}, config)
        pool = RetrieverPool([actor], config=config)
        own = BatchingRetriever(Retriever(config.index, mode=config.mode), config)
        ways: dict[str, Callable[[str], Awaitable[Any]]] = {
            ALONE: lambda text: alone.search.remote(text, NUM_PASSAGES),
            POOL: lambda text: pool.search(text, num_passages=NUM_PASSAGES, partition=""),
            IN_PROCESS: lambda text: own.search(text, num_passages=NUM_PASSAGES),
        }
        for search in ways.values():
            await search("warm up")
        found = []
        for number in range(rounds):
            before = own.num_batches
            rates = {
                name: await measured(
                    search, self.queries(1000 * number + callers + place), callers=callers, seconds=seconds
                )
                for place, (name, search) in enumerate(ways.items())
            }
            batch = rates[IN_PROCESS].count / max(own.num_batches - before, 1)
            found.append(Round(rates, batch, self.other_rate(max(round(batch), 1))))
        own.close()
        for each in (alone, actor):
            ray.kill(each)
        return found


def compare(console: Console, contest: Contest, *, rounds: int, seconds: float) -> None:
    """Prints the medians over rounds, and records the rows."""
    table = Table(title=contest.title, title_justify="left")
    for column in ("callers", "", "searches/s", "p50 ms", "p99 ms", "mean batch", "pool / this"):
        table.add_column(column, justify="right" if column != "" else "left")
    for callers in CALLERS:
        found = asyncio.run(contest.rounds(callers=callers, rounds=rounds, seconds=seconds))
        pool, alone, own = ([each.rates[name].per_second for each in found] for name in (POOL, ALONE, IN_PROCESS))
        others = [each.other for each in found]
        for name, rates in ((ALONE, alone), (POOL, pool), (IN_PROCESS, own), (contest.other, others)):
            ratios = [one / other for one, other in zip(pool, rates, strict=True)]
            cells = [
                f"{median(getattr(each.rates[name], part) for each in found):,.1f}" if name != contest.other else ""
                for part in ("p50_ms", "p99_ms")
            ]
            batch = f"{median(each.batch for each in found):.1f}" if name == IN_PROCESS else ""
            ratio = spread(ratios) if name != POOL else ""
            table.add_row(str(callers), name, f"{median(rates):,.1f}", *cells, batch, ratio)
        name = f"{contest.title}, {callers} at a time"
        is_peer = contest.mode == "lexical"
        yardstick: dict[str, Any] = (
            {"peer": contest.other, "of_peer": others} if is_peer else {"limit": contest.other, "of_limit": others}
        )
        by_pool = yardstick if is_peer else yardstick | {"peer": ALONE, "of_peer": alone, "peer_is_own": True}
        record(
            Row(name=f"search, {name}", unit="searches/s", values=pool, **by_pool),
            Row(name=f"search in one process, {name}", unit="searches/s", values=own, **yardstick),
        )
    console.print(table)


def by_vectors(title: str, index: Path, queries: Callable[[int], Iterator[str]], *, seconds: float) -> Contest:
    """Returns the contest with faiss."""
    manifest, _ = read_manifest(index)
    assert manifest.vectors
    vectors = make_encoder(manifest.vectors.encoder).encode_queries(list(itertools.islice(queries(99), 4096)))
    file = index / manifest.vectors.files[0]
    return Contest(
        title=f"by vectors, {title}",
        index=index,
        mode="dense",
        queries=queries,
        other="faiss alone",
        other_rate=lambda batch: faiss_rate(file, vectors, batch=batch, seconds=seconds),
    )


def by_words(
    title: str, index: Path, passages: Sequence[Passage], queries: Callable[[int], Iterator[str]], *, seconds: float
) -> Contest | None:
    """Returns the contest with tantivy; None where it is not installed."""
    if (search := tantivy_search(passages)) is None:
        return None
    return Contest(
        title=f"by words, {title}",
        index=index,
        mode="lexical",
        queries=queries,
        other="tantivy",
        other_rate=lambda _: rate_of(search, queries(98), seconds=seconds),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", default=CORPUS, help="real passages, or a text")
    parser.add_argument("--encoder", default="hashing", help="hashing, or a sentence-transformers model")
    parser.add_argument("--passages", type=int, default=1_000_000, help="synthetic ones; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="per side, round and number of callers")
    arguments = parser.parse_args()
    console, seconds = Console(width=110), arguments.seconds
    console.print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, {NUM_PASSAGES} passages a search"
    )
    with tempfile.TemporaryDirectory() as scratch, connected("", name="bench"):
        spec = (
            {"kind": "hashing"}
            if arguments.encoder == "hashing"
            else {"kind": "sentence_transformers", "path": arguments.encoder}
        )
        index, passages = Path(scratch) / "real", read_passages(arguments.corpus)
        whole, alone = real_index(index, passages, spec)
        console.print(
            f"build ({spec['kind']} and words): {whole:,.0f} passages/s, the encoder alone {alone:,.0f}: "
            f"{whole / alone:.2f} of it"
        )
        title = f"{len(passages):,} passages of {Path(arguments.corpus).stem}"
        asked = partial(questions_about, passages)
        contests = [by_vectors(f"{title}, {spec['kind']}", index, asked, seconds=seconds)]
        if (words := by_words(title, index, passages, asked, seconds=seconds)) is not None:
            contests.append(words)
        else:
            console.print("search by words is not measured: `pip install tantivy` installs the other implementation")
        if arguments.passages:
            index = synthetic_index(Path(scratch) / "synthetic", arguments.passages)
            title = f"{arguments.passages:,} synthetic vectors of {DIMENSION}"
            contests.append(by_vectors(title, index, questions, seconds=seconds))
        for contest in contests:
            compare(console, contest, rounds=arguments.rounds, seconds=seconds)


if __name__ == "__main__":
    main()
