"""Finds the nearest passages by inner product in faiss indexes of any kind, in one or several memory-mapped shards.

A search of an exhaustive index (Flat, SQ, PQ: every vector is compared) is exact, whatever the batch: faiss proposes
candidates, and their score is the inner product with the stored vector in float64, rounded to float32; equal scores are
ordered by row. So shards answer as one index. Other indexes (IVF, HNSW, transforms) answer as faiss does.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import faiss
import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from mempipe.retrieval.encoders import Vectors
from mempipe.retrieval.fusion import Scored
from mempipe.retrieval.gpu_vectors import gpu_copy, num_visible_gpus
from mempipe.settings import ConfigError

Rows = tuple[int, int]
"""The rows from the first up to, not including, the second."""

SCAN_LIMIT = 2**14
"""Numbers (of all rows together) that are read at most to score a query against every row; where there are more, faiss
proposes candidates.
"""
SCAN_BLOCK = 2**20  # numbers at once, when all rows must be scored after all
NUM_SPARE = 16
"""Candidates beyond those asked for: faiss rounds scores in another way, which may reorder nearly equal ones."""


def search_thread(num_threads: int) -> ThreadPoolExecutor:
    """Returns an executor of one thread whose searches and encoders use `num_threads` CPU threads; 0: all cores that
    this process may use, by its affinity and the limit of its container.

    OpenMP counts per calling thread, and Ray's actors start with one, so the thread that does the work sets the number.
    """
    return ThreadPoolExecutor(
        max_workers=1, thread_name_prefix="search", initializer=_set_num_threads, initargs=(num_threads,)
    )


def _set_num_threads(count: int) -> None:
    if not count:
        from joblib import cpu_count  # os.cpu_count tells the cores of the machine

        count = cpu_count()
    threadpool_limits(count)  # faiss' own OpenMP threads and those of its BLAS
    if torch := sys.modules.get("torch"):  # only an encoder that is a model brings it in
        torch.set_num_threads(count)


class VectorIndex(Protocol):
    """The interface of vectors to a retriever, in this process or elsewhere."""

    num_vectors: int
    dimension: int

    def search(self, vectors: Vectors, count: int, *, rows: Rows | None = None) -> list[Scored]:
        """Returns the best `count` of `rows` (None: all) for each of `vectors` [n, dimension]; fewer where there are
        fewer.
        """
        ...


class Shard:
    """One faiss index file, memory-mapped; its rows count from 0."""

    def __init__(self, path: str | Path, *, search: str = "", gpu: int | None = None) -> None:
        """Opens the file. `search` are faiss search parameters, e.g. "nprobe=64".

        `gpu` gets a copy in float16 that proposes the candidates; None: faiss proposes them on CPUs. Raises ConfigError
        when faiss cannot read the file or does not know the parameters.
        """
        self._index = read_index(Path(path))
        if search:
            set_search_parameters(self._index, search)
        self.num_vectors, self.dimension = int(self._index.ntotal), int(self._index.d)
        self.is_exhaustive = isinstance(self._index, faiss.IndexFlatCodes)
        self._gpu_index = None if gpu is None else gpu_copy(self._index, gpu)
        self._plain: Vectors | None = None  # a view of the memory-mapped file, [num_vectors, dimension]
        if isinstance(self._index, faiss.IndexFlat):
            self._plain = faiss.rev_swig_ptr(self._index.get_xb(), self.num_vectors * self.dimension).reshape(
                -1, self.dimension
            )

    def search(self, vectors: Vectors, count: int, *, rows: Rows | None = None) -> list[Scored]:
        first, last = rows or (0, self.num_vectors)
        count = min(count, last - first)
        if count <= 0:
            return [(np.empty(0, np.int64), np.empty(0, np.float32))] * len(vectors)
        if not self.is_exhaustive:
            return self._as_faiss_says(vectors, count, (first, last))
        best: list[Scored | None] = [None] * len(vectors)
        for i, vector in enumerate(vectors):
            if not vector.any():  # a query of stop words: every score is 0, and the first rows are due
                best[i] = np.arange(first, first + count), np.zeros(count, np.float32)
            elif (last - first) * self._read_columns(vector) <= SCAN_LIMIT:
                best[i] = self._scan(vector, count, (first, last))
        rest = [i for i, found in enumerate(best) if found is None]
        if rest:
            for i, candidates in zip(
                rest, self._candidates(vectors[rest], count + NUM_SPARE, (first, last))[0], strict=True
            ):
                candidates = np.sort(candidates[candidates >= 0])  # faiss fills up with -1
                found, scores = _rank(candidates, self._stored(candidates), vectors[i])
                # if the k-th score ties with the last candidate, rows outside the candidates may tie as well; ties go
                # to the lowest row, so score all rows
                tied = len(found) >= count and len(found) < last - first and scores[count - 1] == scores[-1]
                best[i] = self._scan(vectors[i], count, (first, last)) if tied else (found[:count], scores[:count])
        return [found for found in best if found is not None]

    def _as_faiss_says(self, vectors: Vectors, count: int, rows: Rows) -> list[Scored]:
        answers = []
        for found, scores in zip(*self._candidates(vectors, count, rows), strict=True):
            known = found >= 0
            order = np.lexsort((found[known], -scores[known]))
            answers.append((found[known][order], scores[known][order].astype(np.float32)))
        return answers

    def _candidates(
        self, vectors: Vectors, depth: int, rows: Rows
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Returns rows and scores [n, depth] of faiss, on the shard's GPU when all rows are searched."""
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        depth = min(depth, rows[1] - rows[0])
        if rows == (0, self.num_vectors):
            scores, found = (self._gpu_index or self._index).search(vectors, depth)
        elif self.is_exhaustive:
            selector: Any = {"sel": faiss.IDSelectorRange(*rows)}
            scores, found = self._index.search(vectors, depth, params=faiss.SearchParameters(**selector))
        else:
            raise ValueError(f"a faiss {type(self._index).__name__} cannot be searched by partition")
        return found, scores

    def _scan(self, vector: Vectors, count: int, rows: Rows) -> Scored:
        """Returns the best rows by scoring every one, block by block."""
        size = max(SCAN_BLOCK // self._read_columns(vector), 1)
        blocks = [np.arange(first, min(first + size, rows[1])) for first in range(*rows, size)]
        return merge([_rank(block, self._stored(block), vector, count=count) for block in blocks], count)

    def _read_columns(self, vector: Vectors) -> int:
        """Returns how many numbers of a row are read to score a query that is not all zeros: those where it is not 0,
        but all where a row must be decoded.
        """
        return self.dimension if self._plain is None else int(np.count_nonzero(vector))

    def _stored(self, rows: npt.NDArray[np.int64]) -> Vectors:
        """Returns the stored vectors of ascending `rows`, decoded if the index compresses."""
        if self._plain is None:
            return self._index.reconstruct_batch(rows)
        consecutive = len(rows) and rows[-1] - rows[0] + 1 == len(rows)
        return self._plain[rows[0] : rows[-1] + 1] if consecutive else self._plain[rows]


class Shards:
    """Searches several shards as one index: shard i holds the rows after those of shard i - 1."""

    def __init__(self, shards: Sequence[VectorIndex], *, num_threads: int = 1) -> None:
        """`num_threads` shards are searched at the same time: more than one where they are elsewhere, since faiss
        itself takes all cores.
        """
        self._shards = list(shards)
        self._threads = (
            ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="shards") if num_threads > 1 else None
        )
        self._first_rows = list(itertools.accumulate((shard.num_vectors for shard in shards), initial=0))
        self.num_vectors = self._first_rows[-1]
        self.dimension = shards[0].dimension

    def search(self, vectors: Vectors, count: int, *, rows: Rows | None = None) -> list[Scored]:
        asked: list[tuple[VectorIndex, int, Rows | None]] = []
        for shard, offset in zip(self._shards, self._first_rows, strict=False):
            first, last = (
                (max(rows[0] - offset, 0), min(rows[1] - offset, shard.num_vectors)) if rows else (0, shard.num_vectors)
            )
            if first < last:
                asked.append((shard, offset, None if (first, last) == (0, shard.num_vectors) else (first, last)))
        run = self._threads.map if self._threads else map
        parts = list(run(lambda part: _moved(part[0].search(vectors, count, rows=part[2]), part[1]), asked))
        return [merge(of_one, count) for of_one in zip(*parts, strict=True)]


def _moved(answers: Sequence[Scored], offset: int) -> list[Scored]:
    return [(rows + offset, scores) for rows, scores in answers]


def open_shards(files: Sequence[Path], *, search: str = "") -> VectorIndex:
    """Opens the shards' files in this process and spreads them over the GPUs that it sees."""
    num_gpus = num_visible_gpus()
    shards = [Shard(file, search=search, gpu=i % num_gpus if num_gpus else None) for i, file in enumerate(files)]
    return shards[0] if len(shards) == 1 else Shards(shards, num_threads=max(num_gpus, 1))


def merge(parts: Sequence[Scored], count: int) -> Scored:
    """Returns the best `count` of answers about different rows; equal scores by row."""
    if len(parts) == 1:
        return parts[0][0][:count], parts[0][1][:count]
    rows, scores = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((rows, -scores))[:count]
    return rows[order], scores[order]


def read_index(path: Path) -> Any:
    """Returns the memory-mapped faiss index by inner product. Raises ConfigError for anything else."""
    try:
        with path.open("rb") as file:
            is_inverted = file.read(2) == b"Iw"
        # Inverted lists are mapped by another mechanism than everything else, and faiss refuses both at once.
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP if is_inverted else faiss.IO_FLAG_MMAP_IFC)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"{path} is not a faiss index: {' '.join(str(error).split())[:200]}; build it again"
        ) from error
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ConfigError(f"{path} ranks by distance (metric {index.metric_type}); expected an index by inner product")
    return index


def set_search_parameters(index: Any, search: str) -> None:
    """Sets e.g. "nprobe=64" or "efSearch=128". Raises ConfigError for what the index does not know."""
    try:
        faiss.ParameterSpace().set_index_parameters(index, search)
    except (RuntimeError, AttributeError) as error:
        kind = type(index).__name__
        raise ConfigError(
            f"faiss.search is {search!r}, which a faiss {kind} does not know: expected e.g. 'nprobe=64'"
        ) from error


def _rank(rows: npt.NDArray[np.int64], vectors: Vectors, query: Vectors, *, count: int | None = None) -> Scored:
    """Returns the best `count` (None: all) of ascending `rows` with `vectors` [len(rows), dimension]; equal scores by
    row.
    """
    columns = np.flatnonzero(query)
    if 4 * len(columns) < len(query):  # few words: most of a vector need not be read from memory
        vectors, query = vectors[:, columns], query[columns]
    scores = (vectors.astype(np.float64) @ query.astype(np.float64)).astype(np.float32)
    order = np.argsort(-scores, kind="stable")[:count]
    return rows[order], scores[order]
