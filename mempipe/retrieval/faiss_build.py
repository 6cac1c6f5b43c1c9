"""The faiss side of an index build: an empty index of the configured kind, its training, and an exact search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from mempipe.retrieval.config import FaissConfig
from mempipe.retrieval.encoders import Vectors
from mempipe.retrieval.gpu_vectors import faiss_computes, num_visible_gpus
from mempipe.retrieval.vectors import Scored, merge, set_search_parameters
from mempipe.settings import ConfigError

BLOCK = 65_536  # vectors handled at once


def make_index(config: FaissConfig, dimension: int) -> Any:
    """Returns an empty, untrained index by inner product.

    Raises ConfigError when faiss does not know the factory or the search parameters, or makes an index by distance.
    """
    with faiss_faults(config):
        index = faiss.index_factory(dimension, config.factory, faiss.METRIC_INNER_PRODUCT)
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ConfigError(
            f"faiss.factory is {config.factory!r}, which faiss makes for distances only; expected a kind that ranks by "
            "inner product, such as Flat, SQfp16 or IVF4096,Flat"
        )
    if config.search:
        set_search_parameters(index, config.search)
    return index


def train_index(index: Any, sample: Vectors) -> None:
    """Trains the index, with the centroids on GPUs where faiss can use some."""
    lists = faiss.try_extract_index_ivf(index) if num_visible_gpus() else None
    if lists is not None and faiss_computes():
        lists.clustering_index = faiss.index_cpu_to_all_gpus(faiss.IndexFlatIP(index.d))
    index.train(sample)


@contextmanager
def adding_threads(factory: str, graph_threads: int) -> Iterator[None]:
    """Sets the threads that add vectors. A graph depends on who adds first, so only one thread builds the same graph
    twice; other kinds take all cores.
    """
    before = faiss.omp_get_max_threads()
    if "HNSW" in factory or "NSG" in factory:
        faiss.omp_set_num_threads(graph_threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


@contextmanager
def faiss_faults(config: FaissConfig) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"faiss.factory is {config.factory!r}, refused by faiss: {reason[:300]}") from error


def write_faiss(index: Any, file: Path) -> None:
    with file.open("wb") as opened:  # through Python's file, which reports a full disk also on its last bytes
        faiss.write_index(index, faiss.PyCallbackIOWriter(opened.write, 1 << 20))  # pyrefly: ignore[missing-attribute]


def blocks_of(vectors: Vectors) -> Iterator[Vectors]:
    for first in range(0, len(vectors), BLOCK):
        yield np.ascontiguousarray(vectors[first : first + BLOCK])


def exact_nearest(queries: Vectors, blocks: Iterable[Vectors], count: int) -> list[Scored]:
    """Returns the rows of the `count` largest inner products for every query, and these, by comparing all."""
    best: list[Scored] = [(np.empty(0, np.int64), np.empty(0, np.float32))] * len(queries)
    first = 0
    for block in blocks:
        scores = queries @ block.T
        kept = min(count, len(block))
        rows = np.argpartition(-scores, kept - 1, axis=1)[:, :kept]
        for i, candidates in enumerate(rows):
            best[i] = merge([best[i], (candidates + first, scores[i, candidates])], count)
        first += len(block)
    return best
