"""Vector search: shards and kinds of index against NumPy, to the last digit where the index is exhaustive."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mempipe.retrieval import gpu_vectors
from mempipe.retrieval import vectors as module
from mempipe.retrieval.gpu_vectors import TorchCopy
from mempipe.retrieval.vectors import Shard, Shards, merge, open_shards
from mempipe.settings import ConfigError

N, D = 700, 32


def unit(count: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, D)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


VECTORS = unit(N)
VECTORS[300:340] = VECTORS[10]  # ties, across shards too
QUERIES = np.concatenate([unit(9, seed=1), VECTORS[[10, 299]]])


def index_file(
    path: Path, vectors: np.ndarray, factory: str = "Flat", metric: int = faiss.METRIC_INNER_PRODUCT
) -> Path:
    index = faiss.index_factory(D, factory, metric)
    if not index.is_trained:
        index.train(VECTORS)
    index.add(vectors)
    faiss.write_index(index, str(path))
    return path


def by_numpy(
    query: np.ndarray, count: int, rows: tuple[int, int] = (0, N), stored: np.ndarray = VECTORS
) -> tuple[list[int], list[float]]:
    scores = (stored[rows[0] : rows[1]].astype(np.float64) @ query.astype(np.float64)).astype(np.float32)
    order = np.argsort(-scores, kind="stable")[:count]
    return (order + rows[0]).tolist(), scores[order].tolist()


def as_lists(found) -> list[tuple[list[int], list[float]]]:
    return [(rows.tolist(), scores.tolist()) for rows, scores in found]


@pytest.fixture(params=[2**30, 0], ids=["scan", "faiss"])
def route(request, monkeypatch) -> None:
    monkeypatch.setattr(module, "SCAN_LIMIT", request.param)


@pytest.fixture(params=[[N], [300, 400], [1, 350, 0, 9, 340]], ids=["one", "two", "five"])
def index(request, tmp_path) -> Shards:
    bounds = np.cumsum([0, *request.param])
    files = [index_file(tmp_path / f"{i}.faiss", VECTORS[a:b]) for i, (a, b) in enumerate(itertools.pairwise(bounds))]
    return Shards([Shard(file) for file in files])


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("count", [1, 10, 41, N, N + 5])
def test_flat_search_in_any_shards_equals_numpy(index, count):
    assert as_lists(index.search(QUERIES, count)) == [by_numpy(query, count) for query in QUERIES]


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("rows", [(0, 1), (5, 25), (290, 360), (350, 700), (699, 700)])
def test_a_range_of_rows_is_searched_as_if_nothing_else_were_there(index, rows):
    assert as_lists(index.search(QUERIES, 12, rows=rows)) == [by_numpy(query, 12, rows) for query in QUERIES]


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("factory", ["SQfp16", "SQ8", "PQ8x4"])
def test_compressed_vectors_are_ranked_by_what_is_stored(tmp_path, factory):
    shard = Shard(index_file(tmp_path / "i", VECTORS, factory))
    stored = faiss.read_index(str(tmp_path / "i")).reconstruct_n(0, N)
    assert as_lists(shard.search(QUERIES, 10)) == [by_numpy(query, 10, stored=stored) for query in QUERIES]


def test_a_scan_of_a_compressed_index_decodes_a_bounded_number_of_values_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SCAN_BLOCK", 10 * D)
    shard = Shard(index_file(tmp_path / "i", np.repeat(VECTORS[:1], N, axis=0), "SQfp16"))
    decoded: list[int] = []
    decode = shard._stored

    def counting(rows: np.ndarray) -> np.ndarray:
        decoded.append(len(rows))
        return decode(rows)

    monkeypatch.setattr(shard, "_stored", counting)
    one_column = np.eye(1, D, dtype=np.float32)  # all rows tie, so that all are read
    found, _ = shard.search(one_column, 5)[0]
    assert found.tolist() == [0, 1, 2, 3, 4] and sum(decoded) >= N
    assert max(decoded) <= 5 + module.NUM_SPARE


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("factory", ["Flat", "SQfp16"])
def test_a_query_without_a_word_that_counts_returns_the_first_rows(tmp_path, factory):
    shard = Shard(index_file(tmp_path / "i", VECTORS, factory))
    nothing = np.zeros((1, D), np.float32)
    assert as_lists(shard.search(nothing, 3)) == [([0, 1, 2], [0.0, 0.0, 0.0])]
    assert as_lists(shard.search(nothing, 9, rows=(5, 7))) == [([5, 6], [0.0, 0.0])]


def test_other_kinds_answer_as_faiss_does_and_never_with_rows_that_are_not_there(tmp_path):
    shard = Shard(index_file(tmp_path / "i", VECTORS, "IVF16,Flat"), search="nprobe=1")
    found = shard.search(QUERIES, N)
    assert not shard.is_exhaustive
    for rows, scores in found:
        assert 0 < len(rows) < N and rows.min() >= 0 and len(set(rows.tolist())) == len(rows)
        assert (np.diff(scores) <= 0).all()
    wide = Shard(tmp_path / "i", search="nprobe=16").search(QUERIES[:9], 10)
    assert [rows.tolist() for rows, _ in wide] == [by_numpy(query, 10)[0] for query in QUERIES[:9]]
    with pytest.raises(ValueError, match="cannot be searched by partition"):
        shard.search(QUERIES, 3, rows=(0, 10))


def test_what_is_no_index_by_inner_product_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="ranks by distance"):
        Shard(index_file(tmp_path / "l2", VECTORS, metric=faiss.METRIC_L2))
    with pytest.raises(ConfigError, match=r"faiss.search is 'depth=3', which a faiss IndexFlat"):
        Shard(index_file(tmp_path / "flat", VECTORS), search="depth=3")
    (tmp_path / "text").write_text("no index at all")
    for name in ("text", "none"):
        with pytest.raises(ConfigError, match="is not a faiss index"):
            Shard(tmp_path / name)


class Gpus:
    """Stands in for faiss' GPU functions: remembers where each index went, and refuses what faiss refuses."""

    def __init__(self, count: int, *, refuses: type[Exception] | None = None) -> None:
        self.count, self.refuses = count, refuses
        self.copies: list[tuple[int, str]] = []
        self.resources: list[object] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Resources:
            def setTempMemory(self, size: int) -> None: ...

        class Options:
            useFloat16 = False

        monkeypatch.setattr(faiss, "StandardGpuResources", Resources, raising=False)
        monkeypatch.setattr(faiss, "GpuClonerOptions", Options, raising=False)
        monkeypatch.setattr(faiss, "get_num_gpus", lambda: self.count, raising=False)
        monkeypatch.setattr(faiss, "index_cpu_to_gpu", self.copy, raising=False)
        monkeypatch.setattr(gpu_vectors, "faiss_computes", lambda: True)

    def copy(self, resources: object, gpu: int, index: faiss.Index, options: object) -> faiss.Index:
        assert options.useFloat16 and all(resources is not other for other in self.resources)
        self.resources.append(resources)
        if self.refuses:
            raise self.refuses("no room")
        self.copies.append((gpu, type(index).__name__))
        return index


@pytest.mark.parametrize("factory", ["Flat", "SQfp16"])
def test_every_shard_lies_on_one_gpu_of_those_that_are_seen(tmp_path, monkeypatch, factory):
    gpus = Gpus(2)
    gpus.install(monkeypatch)
    monkeypatch.setattr(module, "SCAN_LIMIT", 0)
    files = [index_file(tmp_path / str(i), VECTORS[100 * i : 100 * (i + 1)], factory) for i in range(5)]
    opened = open_shards(files)
    kind = {"Flat": "IndexFlatIP", "SQfp16": "IndexScalarQuantizer"}[factory]
    assert gpus.copies == [(i % 2, kind) for i in range(5)]
    plain = Shards([Shard(file) for file in files])
    assert len(gpus.copies) == 5  # a shard of its own is on no GPU
    assert as_lists(opened.search(QUERIES, 7)) == as_lists(plain.search(QUERIES, 7))


def test_without_a_gpu_in_sight_nothing_is_copied(tmp_path, monkeypatch):
    gpus = Gpus(0)
    gpus.install(monkeypatch)
    open_shards([index_file(tmp_path / "a", VECTORS)])
    assert not gpus.resources


def test_a_shard_that_no_gpu_can_hold_stays_on_the_cpu_and_says_so(tmp_path, monkeypatch, caplog):
    gpus = Gpus(1, refuses=RuntimeError)
    gpus.install(monkeypatch)
    opened = open_shards([index_file(tmp_path / "a", VECTORS)])
    assert "IndexFlatIP stays on the CPU" in caplog.text
    assert as_lists(opened.search(QUERIES[:1], 3)) == [by_numpy(QUERIES[0], 3)]


def test_a_faiss_that_cannot_compute_on_its_gpus_is_found_out_in_another_process(monkeypatch, caplog):
    """As the wheels for GPUs do on an H100, for which they hold no code; the faiss of this test knows no GPU at all."""
    gpu_vectors.faiss_computes.cache_clear()
    assert not gpu_vectors.faiss_computes()
    assert "faiss cannot use this machine's GPUs: NameError" in caplog.text
    monkeypatch.setattr(gpu_vectors, "PROBE", "import os; os.abort()")
    gpu_vectors.faiss_computes.cache_clear()
    assert not gpu_vectors.faiss_computes()
    assert "its process ended with -6" in caplog.text
    monkeypatch.setattr(gpu_vectors, "PROBE", "import faiss")
    gpu_vectors.faiss_computes.cache_clear()
    assert gpu_vectors.faiss_computes()
    gpu_vectors.faiss_computes.cache_clear()


@pytest.mark.parametrize("factory", ["Flat", "SQfp16", "SQ8"])
@pytest.mark.parametrize("temporary", [2**28, 8 * 11 * 40])
def test_where_faiss_has_no_code_for_a_gpu_torch_proposes_the_same_rows(tmp_path, monkeypatch, factory, temporary):
    """On torch's CPU device, in one block and in many."""
    Gpus(1).install(monkeypatch)
    monkeypatch.setattr(gpu_vectors, "faiss_computes", lambda: False)
    monkeypatch.setattr(gpu_vectors, "TorchCopy", lambda index, device: TorchCopy(index, "cpu"))
    monkeypatch.setattr(gpu_vectors, "GPU_SCRATCH_BYTES", temporary)
    monkeypatch.setattr(gpu_vectors, "BLOCK", 64)
    monkeypatch.setattr(module, "SCAN_LIMIT", 0)
    file = index_file(tmp_path / "i", VECTORS, factory)
    opened, plain = open_shards([file]), Shard(file)
    assert isinstance(opened._gpu_index, TorchCopy)
    assert as_lists(opened.search(QUERIES, 7)) == as_lists(plain.search(QUERIES, 7))
    scores, rows = opened._gpu_index.search(QUERIES[:2], N)
    assert sorted(rows[0].tolist()) == list(range(N)) and (np.diff(scores) <= 0).all()


def test_an_index_that_torch_cannot_search_stays_on_the_cpu_and_says_so(tmp_path, monkeypatch, caplog):
    Gpus(1).install(monkeypatch)
    monkeypatch.setattr(gpu_vectors, "faiss_computes", lambda: False)
    opened = open_shards([index_file(tmp_path / "a", VECTORS, "IVF16,Flat")], search="nprobe=16")
    assert "IndexIVFFlat stays on the CPU instead of GPU 0: faiss cannot use it" in caplog.text
    assert [rows.tolist() for rows, _ in opened.search(QUERIES[:1], 3)] == [by_numpy(QUERIES[0], 3)[0]]


@settings(max_examples=100)
@given(st.lists(st.integers(-2, 2), min_size=1, max_size=30), st.data())
def test_merging_parts_is_ranking_the_whole(scores, data):
    owner = data.draw(st.lists(st.integers(0, 2), min_size=len(scores), max_size=len(scores)))
    count = data.draw(st.integers(1, len(scores) + 2))
    parts = []
    for part in range(3):
        rows = np.array([row for row, whose in enumerate(owner) if whose == part], dtype=np.int64)
        values = np.array(scores, dtype=np.float32)[rows]
        order = np.lexsort((rows, -values))
        parts.append((rows[order], values[order]))
    rows, values = merge(parts, count)
    expected = sorted(range(len(scores)), key=lambda row: (-scores[row], row))[:count]
    assert rows.tolist() == expected and values.tolist() == [scores[row] for row in expected]


THREADS_OF_A_SEARCH = """
import os
import faiss
from mempipe.retrieval.vectors import search_thread
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
with search_thread(0) as one, search_thread(3) as three:
    print(one.submit(faiss.omp_get_max_threads).result(), three.submit(faiss.omp_get_max_threads).result())
"""


def test_a_search_takes_the_cores_that_the_process_may_use_and_not_those_of_the_machine():
    """A job of a cluster or a container has some of them."""
    command = [sys.executable, "-c", THREADS_OF_A_SEARCH]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["1", "3"]
