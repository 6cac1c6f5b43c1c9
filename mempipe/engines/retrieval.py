"""Dense retrieval: an index folder of passages and vectors, exact search in it, and a batching front for many concurrent searches.

An index folder appears whole or not at all:

    passages.arrow    id, title, text, partition of every passage, memory-mapped
    index.faiss       their vectors in the same order (flat, inner product), memory-mapped
    manifest.json     encoder, dimension, counts, row range of every partition, size and sha256 of the other two

A passage's score is the inner product in float64, rounded to float32; passages are ordered by score, then by row. So an answer does not
depend on the searches that share its batch, nor on the library that proposed the candidates.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import json
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mempipe.agents.protocol import replace_surrogates
from mempipe.config import ConfigError, RetrievalConfig
from mempipe.engines.encoders import Encoder, HashingEncoder, Vectors, check_same_encoder, make_encoder
from mempipe.faults import InfrastructureFault
from mempipe.types import Passage, SearchResult

Scored = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""Rows and their scores, best first."""

FORMAT = 1
PASSAGES, VECTORS, MANIFEST = "passages.arrow", "index.faiss", "manifest.json"
ENCODE_BATCH = 4096  # passages
CACHED_RESULTS = 10_000
CACHED_PASSAGES = 65_536
MAX_BATCH = 256  # searches
SCAN_LIMIT = 2**20
"""Numbers (rows x non-zero columns) up to which a query is scored against every row; beyond, faiss proposes candidates."""
NUM_SPARE = 16
"""Candidates beyond those asked for: faiss rounds otherwise, so that passages of nearly the same score may come in another order."""
_COLUMNS = pa.schema([("id", pa.string()), ("title", pa.string()), ("text", pa.string()), ("partition", pa.string())])


class RetrievalError(InfrastructureFault):
    """A search could not be made; the query itself was fine."""


class RetrievalTimeout(RetrievalError):
    """A search was not answered within `retrieval.timeout_s`, waiting included."""


def build_index(passages: Iterable[Passage], folder: str | Path, *, encoder: Encoder | None = None) -> dict[str, Any]:
    """Encodes the passages (by default with a HashingEncoder) and writes the index folder; returns its manifest.

    Passages of one partition must come one after the other. The same passages and encoder give the same bytes. Raises ConfigError when
    they do not, when there are none, and when `folder` exists and holds anything; OSError when the disk is full. Nothing is left then.
    """
    folder, encoder = Path(folder), encoder or HashingEncoder()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"index folder {folder} exists; remove it or choose another")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        manifest = _write_files(passages, partial, encoder)
        for name in (PASSAGES, VECTORS, MANIFEST):
            _sync(partial / name)
        partial.replace(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One search: at most `num_passages` passages of `partition` ("" = the whole corpus)."""

    text: str
    num_passages: int
    partition: str = ""


class Retriever:
    """An opened index. One `search` at a time; `check` and `cached` may be called while it runs."""

    def __init__(self, folder: str | Path, *, encoder: Encoder | None = None, checksums: bool = False) -> None:
        """`encoder` spares loading the one that the manifest names; `checksums` reads every byte.

        Raises ConfigError when a file is missing, truncated, or not what the manifest says, and when the encoder is another.
        """
        folder = Path(folder)
        manifest, self.snapshot = _read_manifest(folder)
        if checksums:
            verify(folder)
        if encoder is not None:
            check_same_encoder(encoder.spec(), manifest["encoder"])
        self._partitions: dict[str, list[int]] = manifest["partitions"]
        self._index = _open_vectors(folder / VECTORS)
        self._columns = _open_passages(folder / PASSAGES)
        self._first_rows = np.cumsum([0, *(len(columns[0]) for columns in self._columns)])
        self._encoder = encoder or make_encoder(manifest["encoder"])
        self.num_passages, dimension = int(manifest["num_passages"]), int(manifest["dimension"])
        for name, found, expected in (
            (f"{VECTORS} holds {{}} vectors", self._index.ntotal, self.num_passages),
            (f"{PASSAGES} holds {{}} passages", int(self._first_rows[-1]), self.num_passages),
            (f"{VECTORS} has {{}} dimensions", self._index.d, dimension),
            ("the encoder makes {} dimensions", self._encoder.dimension, dimension),
        ):
            if found != expected:
                raise ConfigError(f"index {folder}: {name.format(found)}, its manifest says {expected}; build it again")
        # A view of the memory-mapped file, [num_passages, dimension].
        self._vectors = faiss.rev_swig_ptr(self._index.get_xb(), self.num_passages * dimension).reshape(self.num_passages, dimension)
        self._gpu_index = _gpu_copy(self._index)
        self._row = functools.lru_cache(maxsize=CACHED_PASSAGES)(self._read_row)
        self._cache = _Cache(CACHED_RESULTS)

    @property
    def partitions(self) -> list[str]:
        """Names of the parts that can be searched on their own."""
        return list(self._partitions)

    def check(self, query: Query) -> None:
        """Raises ValueError for a query that this index cannot answer, whatever happens."""
        if query.num_passages < 1:
            raise ValueError(f"num_passages is {query.num_passages}; a search returns at least 1")
        if query.partition and query.partition not in self._partitions:
            raise ValueError(f"partition {query.partition!r} is none of the index's {len(self._partitions)}")

    def cached(self, query: Query) -> SearchResult | None:
        """The answer, if it is known already."""
        return self._cache.get(query, self.snapshot)

    def search(self, queries: Sequence[Query]) -> list[SearchResult]:
        """The answers in the order of `queries`; equal queries are searched once. Raises as `check` does.

        A partition of fewer passages than asked for is returned whole; a text without a known word gets passages of score 0.
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
            vectors = self._encoder.encode_queries([query.text for query in missing])
            for query, (rows, scores) in zip(missing, self._best_rows(missing, vectors), strict=True):
                passages = [Passage(**self._row(row), score=score) for row, score in zip(rows.tolist(), scores.tolist(), strict=True)]
                results[query] = SearchResult(passages=passages, snapshot=self.snapshot)
                self._cache.put(query, self.snapshot, results[query])
        return [results[query] for query in queries]

    def _best_rows(self, queries: Sequence[Query], vectors: Vectors) -> list[Scored]:
        best: dict[int, Scored] = {}
        for_faiss: dict[str, list[int]] = {}
        for i, (query, vector) in enumerate(zip(queries, vectors, strict=True)):
            start, stop = self._range(query.partition)
            if (stop - start) * np.count_nonzero(vector) <= SCAN_LIMIT:
                best[i] = self._scan(query, vector)
            else:
                for_faiss.setdefault(query.partition, []).append(i)
        for partition, members in for_faiss.items():
            depth = max(queries[i].num_passages for i in members) + NUM_SPARE
            for i, rows in zip(members, self._candidates(vectors[members], partition, depth), strict=True):
                rows = np.sort(rows[rows >= 0])  # faiss fills up with -1
                rows, scores = _rank(rows, self._vectors[rows], vectors[i])
                count = queries[i].num_passages
                # With equal scores down to the last candidate, more of them may lie outside, and the first rows are due.
                tied = len(rows) >= count and scores[count - 1] == scores[-1]
                best[i] = self._scan(queries[i], vectors[i]) if tied else (rows[:count], scores[:count])
        return [best[i] for i in range(len(queries))]

    def _candidates(self, vectors: Vectors, partition: str, depth: int) -> npt.NDArray[np.int64]:
        """Rows [num_queries, depth] of about the best scores, by faiss; on GPUs when the whole corpus is searched."""
        start, stop = self._range(partition)
        depth = min(depth, stop - start)
        if not partition:
            return (self._gpu_index or self._index).search(vectors, depth)[1]
        selector: Any = {"sel": faiss.IDSelectorRange(start, stop)}
        return self._index.search(vectors, depth, params=faiss.SearchParameters(**selector))[1]

    def _scan(self, query: Query, vector: Vectors) -> Scored:
        """The best rows by scoring every one of the partition, block by block."""
        start, stop = self._range(query.partition)
        size = max(SCAN_LIMIT // max(np.count_nonzero(vector), 1), 1)
        blocks = [np.arange(first, min(first + size, stop)) for first in range(start, stop, size)]
        ranked = [_rank(rows, self._vectors[rows[0] : rows[-1] + 1], vector, count=query.num_passages) for rows in blocks]
        if len(ranked) == 1:
            return ranked[0]
        rows, scores = (np.concatenate(parts) for parts in zip(*ranked, strict=True))
        order = np.argsort(-scores, kind="stable")[: query.num_passages]
        return rows[order], scores[order]

    def _range(self, partition: str) -> tuple[int, int]:
        start, stop = self._partitions[partition] if partition else (0, self.num_passages)
        return start, stop

    def _read_row(self, row: int) -> dict[str, str]:
        # Not Table.take: it joins all chunks of a column first.
        chunk = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        place = row - int(self._first_rows[chunk])
        return {name: column[place].as_py() for name, column in zip(_COLUMNS.names, self._columns[chunk], strict=True)}


class BatchingRetriever:
    """The searches of many trajectories, gathered for `batch_wait_ms` and made together in a thread; for one event loop at a time."""

    def __init__(self, retriever: Retriever, config: RetrievalConfig) -> None:
        self.snapshot = retriever.snapshot
        self.num_batches = 0
        self._retriever = retriever
        self._wait_s = config.batch_wait_ms / 1000
        self._timeout_s = config.timeout_s
        self._waiting: list[tuple[Query, asyncio.Future[SearchResult]]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retriever")

    async def search(self, query: str, *, num_passages: int, partition: str = "") -> SearchResult:
        """The best passages. Raises ValueError for a query that cannot be answered, RetrievalTimeout, and RetrievalError."""
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
        """Ends the thread; a search under way finishes."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _flush(self) -> None:
        """Makes batch after batch until nobody waits; while one is searched, the next one gathers."""
        await asyncio.sleep(self._wait_s)
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            batch = [(query, future) for query, future in batch if not future.done()]  # without those who gave up
            if batch:
                await self._answer(batch)

    async def _answer(self, batch: Sequence[tuple[Query, asyncio.Future[SearchResult]]]) -> None:
        self.num_batches += 1
        queries = [query for query, _ in batch]
        results: list[SearchResult] = []
        failure: Exception | None = None
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._thread, self._retriever.search, queries)
        except Exception as error:  # whatever it is, those who wait must hear of it
            failure = error
        for i, (_, future) in enumerate(batch):
            if future.done():
                continue
            if failure is None:
                future.set_result(results[i])
            else:
                future.set_exception(_batch_failed(len(batch), failure))


def check_index(folder: str | Path) -> None:
    """Raises ConfigError unless the files of an index are there and as long as its manifest says; reads nothing else."""
    _read_manifest(Path(folder))


def verify(folder: str | Path) -> None:
    """Reads every byte and compares it with the manifest's checksums. Raises ConfigError for a file that was changed or cut."""
    folder = Path(folder)
    manifest, _ = _read_manifest(folder)
    for name, file in manifest["files"].items():
        if _sha256(folder / name) != file["sha256"]:
            raise ConfigError(f"index {folder}: {name} was changed since it was built; build it again")


def _rank(rows: npt.NDArray[np.int64], vectors: Vectors, query: Vectors, *, count: int | None = None) -> Scored:
    """The best `count` (None: all) of `rows`, which ascend and have `vectors` [len(rows), dimension]; equal scores by row."""
    columns = np.flatnonzero(query)
    if 4 * len(columns) < len(query):  # few words: most of a vector need not be read from memory
        vectors, query = vectors[:, columns], query[columns]
    scores = (vectors.astype(np.float64) @ query.astype(np.float64)).astype(np.float32)
    order = np.argsort(-scores, kind="stable")[:count]
    return rows[order], scores[order]


def _batch_failed(num_searches: int, cause: Exception) -> RetrievalError:
    error = RetrievalError(f"a batch of {num_searches} searches failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


class _Cache:
    """The results used last, by query and snapshot; for any number of threads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._results: OrderedDict[tuple[Query, str], SearchResult] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, query: Query, snapshot: str) -> SearchResult | None:
        with self._lock:
            result = self._results.get((query, snapshot))
            if result is not None:
                self._results.move_to_end((query, snapshot))
            return result

    def put(self, query: Query, snapshot: str, result: SearchResult) -> None:
        with self._lock:
            self._results[query, snapshot] = result
            if len(self._results) > self._size:
                self._results.popitem(last=False)


def _write_files(passages: Iterable[Passage], folder: Path, encoder: Encoder) -> dict[str, Any]:
    index = faiss.IndexFlatIP(encoder.dimension)
    partitions: dict[str, list[int]] = {}
    remaining = iter(passages)
    with pa.OSFile(str(folder / PASSAGES), "wb") as file, pa.ipc.new_file(file, _COLUMNS) as writer:
        while batch := list(itertools.islice(remaining, ENCODE_BATCH)):
            for row, passage in enumerate(batch, start=index.ntotal):
                _extend(partitions, passage.partition, row)
            vectors = encoder.encode_passages(batch)
            assert vectors.shape == (len(batch), encoder.dimension), f"{encoder.name} encoder made vectors of shape {vectors.shape}"
            index.add(vectors)
            writer.write_batch(pa.record_batch([list(column) for column in _columns(batch)], schema=_COLUMNS))
    if not index.ntotal:
        raise ConfigError("the corpus holds no passage; an index needs at least one")
    with (folder / VECTORS).open("wb") as file:  # through Python's file, which reports a full disk also on its last bytes
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write, 1 << 20))  # pyrefly: ignore[missing-attribute]
    manifest = {
        "format": FORMAT,
        "encoder": encoder.spec(),
        "dimension": encoder.dimension,
        "metric": "inner_product",
        "num_passages": index.ntotal,
        "partitions": partitions,
        "files": {name: {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)} for name in (PASSAGES, VECTORS)},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return manifest


def _columns(passages: Sequence[Passage]) -> Iterator[Iterator[str]]:
    for name in _COLUMNS.names:
        yield (replace_surrogates(getattr(passage, name)) for passage in passages)


def _extend(partitions: dict[str, list[int]], partition: str, row: int) -> None:
    if not partition:
        return
    rows = partitions.setdefault(partition, [row, row])
    if rows[1] != row:
        raise ConfigError(f"passages of partition {partition!r} do not follow one another; sort the corpus by partition")
    rows[1] = row + 1


def _read_manifest(folder: Path) -> tuple[dict[str, Any], str]:
    """The manifest and its hash. Raises ConfigError unless all files are there and as long as it says."""
    try:
        text = (folder / MANIFEST).read_bytes()
        manifest = json.loads(text)
    except OSError as error:
        raise ConfigError(f"retrieval.index {str(folder)!r} holds no index: {MANIFEST}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"index {folder}: {MANIFEST} is truncated or changed: {error}; build it again") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise ConfigError(f"index {folder} has format {found!r}, this version reads {FORMAT}; build it again")
    if lacking := {"encoder", "dimension", "num_passages", "partitions", "files"} - manifest.keys():
        raise ConfigError(f"index {folder}: {MANIFEST} lacks {', '.join(sorted(lacking))}; build it again")
    for name in (PASSAGES, VECTORS):
        if not (folder / name).is_file():
            raise ConfigError(f"index {folder} lacks {name}; build it again")
        size, expected = (folder / name).stat().st_size, manifest["files"].get(name, {}).get("bytes")
        if size != expected:
            raise ConfigError(f"index {folder}: {name} has {size} bytes, its manifest says {expected}; build it again")
    return manifest, hashlib.sha256(text).hexdigest()[:16]


def _open_vectors(path: Path) -> Any:
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise ConfigError(f"{path} is no faiss index: {' '.join(str(error).split())[:200]}; build it again") from error
    if not isinstance(index, faiss.IndexFlat):
        raise ConfigError(f"{path} is a faiss {type(index).__name__}, expected a flat index; build it again")
    return index


def _open_passages(path: Path) -> list[list[pa.Array]]:
    """The columns of every record batch."""
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            if not reader.schema.equals(_COLUMNS):
                raise ConfigError(f"{path} has columns {reader.schema.names}, expected {_COLUMNS.names}; build it again")
            return [reader.get_batch(i).columns for i in range(reader.num_record_batches)]
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is no Arrow file: {' '.join(str(error).split())[:200]}; build it again") from error


def _gpu_copy(index: Any) -> Any:
    """The index in float16, spread over all visible GPUs; None without one."""
    if not hasattr(faiss, "StandardGpuResources") or not faiss.get_num_gpus():
        return None
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = True
    options.shard = True
    return faiss.index_cpu_to_all_gpus(index, co=options)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
