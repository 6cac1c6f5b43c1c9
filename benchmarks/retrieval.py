"""Searches per second and latency: the actor pool against one search at a time, and against faiss itself in batches of
the same size.

    python -m benchmarks.retrieval [--corpus wiki_mini.jsonl] [--passages 1000000] [--seconds 8]

Every caller asks one new question after the other. "one at a time" is a server that makes each request's search by
itself, one after the other, as MemSearcher's and Search-R1's do; "pool" is `RetrieverPool` over a `RetrieverActor`;
"faiss" calls `index.search` in this process with batches as large as the pool's were on average, and neither encodes
nor looks a passage up. All in one run; so is the build rate.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from rich.console import Console
from rich.table import Table

from benchmarks.rows import Row, record
from mempipe.actors.cluster import connected
from mempipe.actors.handles import start_actor
from mempipe.actors.launch import MAX_CALLS
from mempipe.actors.pools import RetrieverPool
from mempipe.actors.retriever import RetrieverActor
from mempipe.data.corpus import CorpusPosition, corpus_files
from mempipe.retrieval.build import IndexBuild, encode_segment, passages_to_batch, write_vectors
from mempipe.retrieval.config import IndexConfig, RetrievalConfig
from mempipe.retrieval.encoders import HashingEncoder, make_encoder
from mempipe.retrieval.manifest import read_manifest
from mempipe.retrieval.retriever import Query, Retriever
from mempipe.retrieval.vectors import read_index, search_thread
from mempipe.types import Passage

NUM_PASSAGES = 5
CALLERS = (1, 8, 64)
DIMENSION = 768
WORDS = [f"w{i}" for i in range(20_000)]


class OneAtATime:
    """An actor that makes every search by itself."""

    def __init__(self, index: str) -> None:
        self._retriever = Retriever(index)
        self._thread = search_thread(0)

    def search(self, query: str, num_passages: int) -> Any:
        return self._thread.submit(self._retriever.search, [Query(text=query, num_passages=num_passages)]).result()[0]


class Counted(RetrieverActor):
    async def num_batches(self) -> int:
        return self._retriever.num_batches


@dataclass
class Rate:
    per_second: float
    p50_ms: float
    p99_ms: float
    count: int


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


def real_index(folder: Path, corpus: str, encoder: dict[str, Any]) -> tuple[Path, float, float]:
    """Builds and returns the index, and passages per second of the whole build and of the encoder alone, in this
    process."""
    config = IndexConfig(corpus=[corpus], output=str(folder), encoder=encoder)
    started = time.perf_counter()
    build, made = IndexBuild(config, corpus_files(config.corpus)), make_encoder(encoder)
    for segment in build.read():
        encode_segment(build.folder, segment.number, made)
    manifest = build.finish(made)
    whole = time.perf_counter() - started
    retriever = Retriever(folder, encoder=made)
    passages = [retriever._passages[row] for row in range(retriever.num_passages)]
    started = time.perf_counter()
    made.encode_passages(passages)
    return folder, manifest.passages.count / whole, len(passages) / (time.perf_counter() - started)


def compare(console: Console, title: str, index: Path, *, seconds: float) -> None:
    manifest, _ = read_manifest(index)
    assert manifest.vectors
    encoder = make_encoder(manifest.vectors.encoder)
    config = RetrievalConfig(index=str(index), timeout_s=600)
    asked = itertools.islice(questions(99), 4096)
    vectors = encoder.encode_queries(list(asked))
    table = Table(title=title, title_justify="left")
    for column in ("callers", "", "searches/s", "p50 ms", "p99 ms", "mean batch", "pool / this"):
        table.add_column(column, justify="right" if column != "" else "left")
    for callers in CALLERS:
        alone = start_actor(OneAtATime, {"num_cpus": 0, "max_concurrency": 1}, str(index))
        ray.get(alone.search.remote("warm up", NUM_PASSAGES))
        rate_alone = asyncio.run(
            measured(
                lambda text, alone=alone: alone.search.remote(text, NUM_PASSAGES),
                questions(callers),
                callers=callers,
                seconds=seconds,
            )
        )
        ray.kill(alone)
        actor = start_actor(Counted, {"num_cpus": 0, "max_concurrency": MAX_CALLS}, config)

        async def through_pool(actor: Any = actor, callers: int = callers) -> Rate:
            pool = RetrieverPool([actor], config=config)
            search = lambda text: pool.search(text, num_passages=NUM_PASSAGES, partition="")  # noqa: E731
            await search("warm up")
            return await measured(search, questions(callers + 1000), callers=callers, seconds=seconds)

        rate = asyncio.run(through_pool())
        batch = rate.count / max(ray.get(actor.num_batches.remote()) - 1, 1)
        ray.kill(actor)
        size = max(round(batch), 1)
        alone_faiss = faiss_rate(index / manifest.vectors.files[0], vectors, batch=size, seconds=seconds)
        for name, found in (("one at a time", rate_alone), ("pool", rate)):
            ratio = f"{rate.per_second / found.per_second:.2f}"
            table.add_row(
                str(callers), name, f"{found.per_second:,.1f}", f"{found.p50_ms:,.1f}", f"{found.p99_ms:,.1f}",
                f"{batch:.1f}" if name == "pool" else "1", ratio,
            )  # fmt: skip
        ratio = f"{rate.per_second / alone_faiss:.2f}"
        table.add_row(str(callers), "faiss", f"{alone_faiss:,.1f}", "", "", str(size), ratio)
        row = Row(
            name=f"search by vectors, {title}, {callers} at a time",
            unit="searches/s",
            values=[rate.per_second],
            peer="one at a time",
            peer_is_own=True,
            of_peer=[rate_alone.per_second],
            limit="faiss alone",
            of_limit=[alone_faiss],
        )
        record(row)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--corpus", default="../shared/data/wiki_mini.jsonl", help="real passages; left out when the file is not there"
    )
    parser.add_argument("--encoder", default="hashing", help="hashing, or a sentence-transformers model")
    parser.add_argument("--passages", type=int, default=1_000_000, help="synthetic ones; 0: none")
    parser.add_argument("--seconds", type=float, default=8.0)
    arguments = parser.parse_args()
    console = Console(width=110)
    console.print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, {NUM_PASSAGES} passages a search"
    )
    with tempfile.TemporaryDirectory() as scratch, connected("", name="bench"):
        if Path(arguments.corpus).exists():
            spec = (
                {"kind": "hashing"}
                if arguments.encoder == "hashing"
                else {"kind": "sentence_transformers", "path": arguments.encoder}
            )
            index, whole, alone = real_index(Path(scratch) / "real", arguments.corpus, spec)
            console.print(
                f"build ({spec['kind']}): {whole:,.0f} passages/s, the encoder alone {alone:,.0f}: "
                f"{whole / alone:.2f} of it"
            )
            compare(console, f"{arguments.corpus}, {spec['kind']}", index, seconds=arguments.seconds)
        if arguments.passages:
            index = synthetic_index(Path(scratch) / "synthetic", arguments.passages)
            compare(
                console, f"{arguments.passages:,} synthetic vectors of {DIMENSION}", index, seconds=arguments.seconds
            )


if __name__ == "__main__":
    main()
