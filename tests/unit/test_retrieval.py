"""Retrieval: exact answers whatever the batch, an index that is whole or refused, and batching that loses and mixes
nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import functools
import json
import random
import resource
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mempipe.cli import main
from mempipe.data.corpus import read_corpus
from mempipe.data.qa import read_questions
from mempipe.data.scripted_agents import search_query
from mempipe.data.world import World
from mempipe.retrieval import retriever as retrieval
from mempipe.retrieval import vectors
from mempipe.retrieval.build import build_index
from mempipe.retrieval.cache import SizedCache, passage_bytes, result_bytes
from mempipe.retrieval.config import RetrievalConfig
from mempipe.retrieval.encoders import Encoder, HashingEncoder
from mempipe.retrieval.manifest import check_index, read_manifest, verify
from mempipe.retrieval.retriever import BatchingRetriever, Query, RetrievalError, RetrievalTimeout, Retriever
from mempipe.settings import ConfigError
from mempipe.storage.checksums import STAMP
from mempipe.types import Passage, SearchResult

SHARED = Path(__file__).parents[3] / "shared" / "data"
WORDS = [f"word{i}" for i in range(300)]


class DenseEncoder:
    """Every text has a vector of its own without a zero."""

    name = "dense"
    dimension = 48

    def spec(self) -> dict[str, Any]:
        return {"kind": self.name, "dimension": self.dimension}

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        return np.stack([self._vector(query) for query in queries])

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        return np.stack([self._vector(passage.text) for passage in passages])

    def _vector(self, text: str) -> np.ndarray:
        vector = np.random.default_rng(zlib.crc32(text.encode())).standard_normal(self.dimension).astype(np.float32)
        return vector / np.linalg.norm(vector)


ENCODERS: list[Encoder] = [HashingEncoder(dimension=256), DenseEncoder()]


@functools.cache
def make_passages(num_partitions: int = 7, size: int = 40) -> list[Passage]:
    rng = random.Random(0)
    return [
        Passage(id=f"{p}/{i}", title=f"title{i}", text=" ".join(rng.choices(WORDS, k=12)), partition=f"part{p}")
        for p in range(num_partitions)
        for i in range(size + p)
    ]


def make_queries(
    count: int, *, num_passages: int = 5, partitions: Sequence[str] = ("", "part0", "part3", "part6")
) -> list[Query]:
    rng = random.Random(1)
    return [
        Query(
            text=" ".join(rng.choices(WORDS, k=3)), num_passages=num_passages, partition=partitions[i % len(partitions)]
        )
        for i in range(count)
    ]


@functools.cache
def vectors_of(encoder: Encoder, passages: tuple[Passage, ...]) -> np.ndarray:
    """[N, D], encoded once for all queries of all tests."""
    return encoder.encode_passages(passages)


def by_brute_force(query: Query, passages: Sequence[Passage], encoder: Encoder) -> list[tuple[str, float]]:
    """Ids and scores, best first, equal scores in the order of the corpus."""
    rows = [p for p in passages if query.partition in ("", p.partition)]
    vectors = vectors_of(encoder, tuple(rows)).astype(np.float64)
    scores = (vectors * encoder.encode_queries([query.text])[0].astype(np.float64)).sum(1).astype(np.float32)
    order = sorted(range(len(rows)), key=lambda i: (-scores[i], i))[: query.num_passages]
    return [(rows[i].id, float(scores[i])) for i in order]


def found(result: SearchResult) -> list[tuple[str, float]]:
    return [(passage.id, passage.score) for passage in result.passages]


@pytest.fixture(scope="module", params=ENCODERS, ids=lambda encoder: encoder.name)
def encoder(request) -> Encoder:
    return request.param


@pytest.fixture(scope="module", params=[4_000_000, 100], ids=["one shard", "shards"])
def folder(request, tmp_path_factory, encoder) -> Path:
    folder = tmp_path_factory.mktemp("index") / encoder.name
    build_index(make_passages(), folder, encoder=encoder, segment_passages=50, faiss={"shard_passages": request.param})
    return folder


def test_more_gpus_than_an_actor_has_shards_are_refused(folder):
    num_shards = len(read_manifest(folder)[0].vectors.files)
    check_index(folder, num_gpus=num_shards)
    with pytest.raises(ConfigError, match=rf"retrieval\.num_gpus is {num_shards + 1}, but an actor holds {num_shards}"):
        check_index(folder, num_gpus=num_shards + 1)
    if num_shards > 1:
        with pytest.raises(ConfigError, match=r"retrieval\.num_gpus is 2, but an actor holds 1 shards"):
            check_index(folder, shard_actors=num_shards, num_gpus=2)


@pytest.fixture
def retriever(folder, encoder) -> Retriever:
    return Retriever(folder, encoder=encoder)


@pytest.fixture(params=[2**30, 0], ids=["scan", "faiss"])
def route(request, monkeypatch) -> None:
    """Every row scored, or candidates from faiss."""
    monkeypatch.setattr(vectors, "SCAN_LIMIT", request.param)


@pytest.fixture
def small(tmp_path) -> Path:
    """A hashing index of three passages."""
    build_index([Passage(id=str(i), title=f"t{i}", text=f"text {i}") for i in range(3)], tmp_path / "small")
    return tmp_path / "small"


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("num_passages", [1, 5, 10])
def test_search_equals_brute_force_to_the_last_digit(retriever, encoder, num_passages):
    queries = make_queries(64, num_passages=num_passages)
    for query, result in zip(queries, retriever.search(queries), strict=True):
        assert found(result) == by_brute_force(query, make_passages(), encoder)


@pytest.mark.usefixtures("route")
def test_an_answer_does_not_depend_on_the_batch(folder, encoder):
    queries = make_queries(100)
    together = Retriever(folder, encoder=encoder).search(queries)
    alone = Retriever(folder, encoder=encoder)
    assert [alone.search([query])[0] for query in queries] == together


@pytest.mark.usefixtures("route")
def test_a_search_of_a_partition_returns_nothing_of_another(retriever):
    queries = make_queries(40, num_passages=60, partitions=[f"part{i}" for i in range(7)])
    for query, result in zip(queries, retriever.search(queries), strict=True):
        size = 40 + int(query.partition[-1])
        assert {passage.partition for passage in result.passages} == {query.partition}
        assert len({passage.id for passage in result.passages}) == len(result.passages) == size


@pytest.mark.usefixtures("route")
def test_more_passages_than_there_are_returns_all_of_them_once(retriever):
    (result,) = retriever.search([Query(text="word1", num_passages=10_000)])
    assert sorted(passage.id for passage in result.passages) == sorted(passage.id for passage in make_passages())


def test_passages_come_back_as_they_were_indexed(retriever):
    passages = {passage.id: passage for passage in make_passages()}
    for passage in retriever.search([Query(text="word1 word2", num_passages=300)])[0].passages:
        assert dataclasses.replace(passage, score=0.0) == passages[passage.id]


@pytest.mark.usefixtures("route")
def test_equal_passages_keep_the_order_of_the_corpus(tmp_path):
    build_index([Passage(id=str(i), title="", text="the same words") for i in range(50)], tmp_path / "i")
    (result,) = Retriever(tmp_path / "i").search([Query(text="same", num_passages=5)])
    assert [passage.id for passage in result.passages] == ["0", "1", "2", "3", "4"]
    assert len({passage.score for passage in result.passages}) == 1


def test_passages_of_many_segments_are_found_by_row(tmp_path):
    build_index(make_passages(), tmp_path / "i", segment_passages=7)
    retriever = Retriever(tmp_path / "i")
    assert [retriever._passages[i] for i in range(retriever.num_passages)] == make_passages()


def test_impossible_queries_are_refused(retriever):
    with pytest.raises(ValueError, match="partition 'nowhere' is none of the index's 7"):
        retriever.search([Query(text="word1", num_passages=1, partition="nowhere")])
    with pytest.raises(ValueError, match="num_passages is 0"):
        retriever.search([Query(text="word1", num_passages=0)])


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \t\n",
        "the of",
        "\ud800",
        "a\udfffb",
        "東京 Ünïcödé \u0301",
        "\x00",
        "ﬁ" * 10,
        "x" * 100_000,
        "word1 " * 20_000,
    ],
)
def test_any_string_is_a_query(text, small):
    (result,) = Retriever(small).search([Query(text=text, num_passages=2)])
    assert len(result.passages) == 2 and all(np.isfinite(passage.score) for passage in result.passages)


@settings(max_examples=50)
@given(st.lists(st.text(st.characters()), min_size=1, max_size=4))
def test_hashed_vectors_have_length_one_or_zero(texts):
    lengths = np.linalg.norm(HashingEncoder(dimension=64).encode_queries(texts), axis=1)
    assert np.all(np.isclose(lengths, 1, atol=1e-6) | (lengths == 0))


def test_case_accents_and_stop_words_do_not_count():
    queries = HashingEncoder().encode_queries(["Who was Alû?", "alu", "ALU", "x"])
    assert (queries[0] == queries[1]).all() and (queries[1] == queries[2]).all() and (queries[3] != queries[2]).any()


def test_weights_of_words_are_those_documented():
    passage = Passage(id="1", title="Nile", text="The nile and the nile flow")
    vector = HashingEncoder(dimension=2**16, title_weight=3.0).encode_passages([passage])[0]
    weights = np.array([1 + np.log(2) + 3, 1.0])  # nile, flow
    assert sorted(np.abs(vector[vector != 0])) == pytest.approx(sorted(weights / np.linalg.norm(weights)), rel=1e-6)


# --- the index folder


def test_the_same_passages_give_the_same_bytes_and_snapshot(tmp_path):
    for name in ("a", "b"):
        build_index(make_passages(), tmp_path / name)
    for file in ("passages/00000000.arrow", "vectors/00000.faiss", "manifest.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    build_index(make_passages()[1:], tmp_path / "c")
    a, b, c = (Retriever(tmp_path / name).snapshot for name in "abc")
    assert a == b != c


def test_the_manifest_says_what_is_in_the_folder(folder, encoder):
    manifest, _ = read_manifest(folder)
    assert manifest.vectors is not None
    assert manifest.vectors.encoder == encoder.spec() and manifest.vectors.dimension == encoder.dimension
    assert manifest.passages.count == len(make_passages()) == 7 * 40 + 21
    assert manifest.passages.partitions["part0"] == (0, 40) and manifest.passages.partitions["part2"] == (81, 123)
    assert sorted(manifest.files) == sorted(
        str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name not in ("manifest.json", STAMP)
    )
    verify(folder)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def failing() -> Iterator[Passage]:
        yield from make_passages()
        raise ConfigError("corpus.jsonl, line 9: not JSON")

    with pytest.raises(ConfigError, match="line 9"):
        build_index(failing(), tmp_path / "i")
    with pytest.raises(ConfigError, match="holds no passage"):
        build_index([], tmp_path / "i")
    mixed = [Passage(id=str(i), title="", text="x", partition=p) for i, p in enumerate("aba")]
    with pytest.raises(ConfigError, match="partition 'a' do not follow one another"):
        build_index(mixed, tmp_path / "i")
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("limit", [20_000, 200_000], ids=["passages", "vectors"])
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, limit):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # the kernel refuses longer files
    try:
        with pytest.raises(OSError) as caught:
            build_index(make_passages(), tmp_path / "i")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert left_in(tmp_path) == []


def test_a_folder_that_holds_something_is_not_replaced(small, tmp_path):
    with pytest.raises(ConfigError, match="exists; remove it or choose another"):
        build_index(make_passages(), small)
    assert Retriever(small).num_passages == 3
    (tmp_path / "empty").mkdir()
    build_index(make_passages(), tmp_path / "empty")
    assert Retriever(tmp_path / "empty").num_passages == len(make_passages())


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Retriever(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["passages/00000000.arrow", "vectors/00000.faiss"])
def test_missing_truncated_and_changed_files_are_refused(small, name):
    file = small / name
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert f"{name} has {len(content) - 1} bytes, its manifest says {len(content)}; build it again" in refusal(small)
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    assert f"{name} was changed since it was built; build it again" in refusal(small)
    file.write_bytes(bytes(len(content)))
    assert f"{name} was changed since it was built; build it again" in refusal(small)
    file.unlink()
    assert f"lacks {name}; build it again" in refusal(small)


def change_manifest(folder: Path, part: str = "", **changes: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("checksum", None)  # a manifest of an older version has none
    (manifest[part] if part else manifest).update(changes)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_manifests_that_do_not_fit_are_refused(small, tmp_path):
    assert "holds no index: manifest.json: No such file" in refusal(tmp_path / "none")
    change_manifest(small, "passages", count=4)
    assert "holds 3 passages, its manifest says 4" in refusal(small)
    change_manifest(small, "passages", count=3)
    change_manifest(small, "vectors", dimension=512)
    assert "its vectors have 1024 dimensions, manifest.json says 512" in refusal(small)
    change_manifest(small, vectors=None)
    assert "names neither vectors nor a lexical index" in refusal(small)
    change_manifest(small, format=0)
    assert "has format 0, this version reads 2" in refusal(small)
    (small / "manifest.json").write_text('{"format": 2}')
    assert "passages: Field required, files: Field required" in refusal(small)
    (small / "manifest.json").write_text('{"format": 1')
    assert "manifest.json is truncated or changed" in refusal(small)


def test_another_encoder_than_the_one_that_built_the_index_is_refused(small):
    assert "title_weight is 5.0, the index was built with 2.0" in refusal(
        small, encoder=HashingEncoder(title_weight=5.0)
    )
    change_manifest(small, "vectors", encoder={"kind": "word2vec"})
    assert "'word2vec'" in refusal(small)
    change_manifest(small, "vectors", encoder={"kind": "hashing", "dimension": 1024, "shape": "round"})
    assert "shape" in refusal(small)


def test_an_index_that_names_no_rules_of_words_is_searched_by_the_first(tmp_path):
    passages = [Passage(id=str(i), title="", text=text) for i, text in enumerate(("राम राजा थे", "रोम"))]
    old = HashingEncoder(word_rules=1)
    build_index(passages, tmp_path / "old", encoder=old)
    change_manifest(tmp_path / "old", "vectors", encoder={"kind": "hashing", "dimension": 1024, "title_weight": 2.0})
    encoder = Retriever(tmp_path / "old")._encoder
    assert encoder is not None and encoder.spec() == old.spec() != HashingEncoder().spec()
    assert (encoder.encode_queries(["रोम"]) == old.encode_passages(passages[1:])).all()


def test_a_mode_for_which_the_index_has_nothing_is_refused(small, tmp_path):
    assert "retrieval.mode is 'fusion', but index" in refusal(small, mode="fusion")
    assert Retriever(small, mode="dense").snapshot == Retriever(small).snapshot
    build_index(make_passages(), tmp_path / "both", lexical=True)
    modes = {mode: Retriever(tmp_path / "both", mode=mode) for mode in ("auto", "fusion", "dense", "lexical")}
    assert modes["auto"].snapshot == modes["fusion"].snapshot
    assert len({retriever.snapshot for retriever in modes.values()}) == 3


# --- words, and both


def test_a_search_by_words_of_a_partition_returns_nothing_of_another(tmp_path):
    build_index(make_passages(), tmp_path / "i", lexical=True)
    queries = make_queries(20, num_passages=60, partitions=["part0", "part3", "part6"])
    for mode in ("lexical", "fusion"):
        for query, result in zip(queries, Retriever(tmp_path / "i", mode=mode).search(queries), strict=True):
            assert {passage.partition for passage in result.passages} == {query.partition}


def test_fusion_ranks_by_the_places_in_both_rankings(tmp_path):
    build_index(make_passages(), tmp_path / "i", lexical=True)
    query = Query(text="word1 word2 word3", num_passages=5, partition="part3")
    rankings = []
    for mode in ("dense", "lexical"):
        (result,) = Retriever(tmp_path / "i", mode=mode).search([dataclasses.replace(query, num_passages=100)])
        rankings.append([passage.id for passage in result.passages])
    scores: dict[str, float] = {}
    for ranking in rankings:
        for place, identity in enumerate(ranking, start=1):
            scores[identity] = scores.get(identity, 0.0) + 1 / (60 + place)
    (result,) = Retriever(tmp_path / "i").search([query])
    rows = {passage.id: row for row, passage in enumerate(make_passages())}
    assert [p.id for p in result.passages] == sorted(scores, key=lambda identity: (-scores[identity], rows[identity]))[
        :5
    ]
    assert [p.score for p in result.passages] == pytest.approx([scores[p.id] for p in result.passages], rel=1e-6)


def test_a_search_by_words_returns_passages_that_share_one(tmp_path):
    build_index(make_passages(), tmp_path / "i", lexical=True)
    retriever = Retriever(tmp_path / "i", mode="lexical")
    (result,) = retriever.search([Query(text="word7", num_passages=1000)])
    assert sorted(p.id for p in result.passages) == sorted(p.id for p in make_passages() if "word7" in p.text.split())
    assert retriever.search([Query(text="nothing of it", num_passages=3)])[0].passages == []


# --- the cache


class CountingEncoder(HashingEncoder):
    num_queries = 0

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        self.num_queries += len(queries)
        return super().encode_queries(queries)


def test_a_search_is_made_once_for_equal_queries_and_kept(small, monkeypatch):
    encoder = CountingEncoder()
    one, two, three = (Query(text=f"text {i}", num_passages=1) for i in range(3))
    sizes = [result_bytes(result) for result in Retriever(small, encoder=CountingEncoder()).search([one, two, three])]
    monkeypatch.setattr(retrieval, "CACHED_RESULT_BYTES", sum(sizes) - 1)
    retriever = Retriever(small, encoder=encoder)
    first = retriever.search([one, one, two])
    assert encoder.num_queries == 2 and first[0] is first[1]
    assert retriever.search([one]) == first[:1] and retriever.cached(one) is first[0]
    assert encoder.num_queries == 2
    retriever.search([three])  # pushes out `two`, which was used least recently
    assert retriever.cached(two) is None and retriever.cached(one) is first[0]
    more = dataclasses.replace(one, num_passages=2)
    assert len(retriever.search([more])[0].passages) == 2 and encoder.num_queries == 4


def test_caches_keep_to_a_number_of_bytes_however_long_the_passages_are():
    cache = SizedCache[int, Passage](10_000, size_of=passage_bytes)
    for i in range(100):
        cache.put(i, Passage(id=str(i), title="", text="a" * 2000))
    kept = [i for i in range(100) if cache.get(i) is not None]
    assert kept == [97, 98, 99] and cache.num_bytes <= 10_000
    cache.put(99, Passage(id="99", title="", text="short"))  # instead of the old value
    assert cache.num_bytes == sum(passage_bytes(cache.get(i)) for i in kept)
    for i in (5, 99):  # more than there is room for takes the place of no other
        cache.put(i, Passage(id=str(i), title="", text="a" * 20_000))
        assert cache.get(i) is None
    assert [i for i in range(100) if cache.get(i) is not None] == [97, 98]
    assert cache.num_bytes == sum(passage_bytes(cache.get(i)) for i in (97, 98))


# --- batching


def batching(retriever: Any, **changes: Any) -> BatchingRetriever:
    return BatchingRetriever(retriever, RetrievalConfig(**changes))


async def test_concurrent_searches_share_batches_and_none_is_lost_or_crossed(retriever, encoder):
    front = batching(retriever, batch_wait_ms=5)
    queries = [dataclasses.replace(query, num_passages=1 + i % 4) for i, query in enumerate(make_queries(300))]

    async def one(i: int, query: Query) -> SearchResult:
        await asyncio.sleep(0.001 * (i % 10))
        return await front.search(query.text, num_passages=query.num_passages, partition=query.partition)

    results = await asyncio.gather(*(one(i, query) for i, query in enumerate(queries)))
    assert front.num_batches <= 60
    for query, result in zip(queries, results, strict=True):
        assert (
            found(result) == by_brute_force(query, make_passages(), encoder) and result.snapshot == retriever.snapshot
        )


async def test_a_front_for_one_search_at_a_time_answers_all_that_come_together(retriever, encoder):
    front = BatchingRetriever(retriever, RetrievalConfig(batch_wait_ms=5), max_batch=1)
    queries = make_queries(6)
    results = await asyncio.gather(*(front.search(q.text, num_passages=q.num_passages) for q in queries))
    assert front.num_batches == len({(q.text, q.num_passages) for q in queries})
    assert [found(result) for result in results] == [
        by_brute_force(dataclasses.replace(q, partition=""), make_passages(), encoder) for q in queries
    ]


class BlockedRetriever:
    """Answers with the query's text, once `release` is set; the text "boom" fails."""

    snapshot = "s"

    def __init__(self) -> None:
        self.release = threading.Event()
        self.batches: list[list[str]] = []

    def check(self, query: Query) -> None:
        if query.partition == "nowhere":
            raise ValueError("partition 'nowhere'")

    def cached(self, query: Query) -> None:
        return None

    def search(self, queries: Sequence[Query]) -> list[SearchResult]:
        self.batches.append([query.text for query in queries])
        self.release.wait(10)
        if any(query.text == "boom" for query in queries):
            raise OSError("the disk is gone")
        return [SearchResult(passages=[Passage(id=query.text, title="", text="")], snapshot="s") for query in queries]


async def ask(front: BatchingRetriever, text: str, partition: str = "") -> str:
    return (await front.search(text, num_passages=1, partition=partition)).passages[0].id


async def until_a_batch_is_searched(inner: BlockedRetriever) -> None:
    while not inner.batches:
        await asyncio.sleep(0.001)


async def test_a_search_past_its_deadline_raises_and_is_not_made_later():
    inner = BlockedRetriever()
    front = batching(inner, timeout_s=1, batch_wait_ms=0)
    first = asyncio.create_task(ask(front, "first"))
    await until_a_batch_is_searched(inner)
    second = asyncio.create_task(ask(front, "second"))  # waits behind the blocked batch
    for task in (first, second):
        with pytest.raises(RetrievalTimeout, match=r"within retrieval.timeout_s 1 s"):
            await task
    inner.release.set()
    assert await ask(front, "third") == "third"
    assert inner.batches == [["first"], ["third"]]


async def test_a_failed_batch_reaches_every_caller_as_a_typed_error_and_the_next_one_works():
    inner = BlockedRetriever()
    inner.release.set()
    front = batching(inner)
    results = await asyncio.gather(*(ask(front, text) for text in ("a", "boom", "b")), return_exceptions=True)
    assert [type(result) for result in results] == [RetrievalError] * 3
    assert "a batch of 3 searches failed: OSError: the disk is gone" in str(results[0])
    assert isinstance(results[0].__cause__, OSError)
    assert await ask(front, "c") == "c"


async def test_one_callers_mistake_or_cancellation_does_not_touch_the_others():
    inner = BlockedRetriever()
    inner.release.set()
    front = batching(inner, batch_wait_ms=20)
    tasks = [asyncio.create_task(ask(front, str(i), "nowhere" if i == 1 else "")) for i in range(4)]
    await asyncio.sleep(0)  # all have asked, and the loop has not looked at its clock since
    tasks[2].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[0] == "0" and results[3] == "3"
    assert isinstance(results[1], ValueError) and isinstance(results[2], asyncio.CancelledError)
    assert inner.batches == [["0", "3"]]


async def test_what_arrives_during_a_batch_makes_the_next_one():
    inner = BlockedRetriever()
    front = batching(inner, batch_wait_ms=0)
    tasks = [asyncio.create_task(ask(front, "0"))]
    await until_a_batch_is_searched(inner)
    tasks += [asyncio.create_task(ask(front, str(i))) for i in range(1, 5)]
    await asyncio.sleep(0)  # all have asked
    inner.release.set()
    assert await asyncio.gather(*tasks) == ["0", "1", "2", "3", "4"]
    assert inner.batches == [["0"], ["1", "2", "3", "4"]]


def test_a_front_outlives_an_event_loop_that_was_torn_down():
    inner = BlockedRetriever()
    front = batching(inner, timeout_s=5)

    async def abandoned() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(front, "first"), 0.05)

    async def later() -> str:
        inner.release.set()
        return await ask(front, "second")

    asyncio.run(abandoned())
    assert asyncio.run(later()) == "second"


async def test_known_answers_do_not_wait_for_a_batch(retriever):
    front = batching(retriever, batch_wait_ms=1)
    first = await front.search("word1", num_passages=2)
    assert await front.search("word1", num_passages=2) is first
    assert front.num_batches == 1


# --- does it find anything?


def rank(retriever: Retriever, queries: Sequence[Query], wanted: Sequence[str]) -> list[int]:
    """The place, from 1, of each wanted passage among those found; 99 when it is not among them."""
    places = []
    for result, identity in zip(retriever.search(queries), wanted, strict=True):
        ids = [passage.id for passage in result.passages]
        places.append(ids.index(identity) + 1 if identity in ids else 99)
    return places


def test_the_passage_about_an_entity_is_among_the_first_two_in_every_world(tmp_path):
    worlds = [World(seed) for seed in range(5)]
    build_index((dataclasses.replace(p, partition=w.id) for w in worlds for p in w.passages), tmp_path / "i")
    facts = [
        (world, passage.id, fact)
        for world in worlds
        for passage in world.passages
        for fact in world.facts_about(passage.title)
    ]
    queries = [
        Query(text=search_query(relation, entity), num_passages=2, partition=w.id)
        for w, _, (entity, relation, _) in facts
    ]
    places = rank(Retriever(tmp_path / "i"), queries, [identity for _, identity, _ in facts])
    assert set(places) <= {1, 2} and places.count(1) / len(places) > 0.97


def test_a_passage_about_an_entity_comes_before_those_that_mention_it(tmp_path):
    rng = random.Random(0)
    heads, tails = "An Bel Cor Dan El Fre Gor Hel Ir Jon", "na vik ta mo ris ka li der us en"
    names = [head + tail for head in heads.split() for tail in tails.split()]
    values = {
        name: dict(zip(("spouse", "friend", "teacher"), rng.sample([n for n in names if n != name], 3), strict=True))
        for name in names
    }
    texts = {
        name: f"{name} is a person . " + " ".join(f"The {r} is {v} ." for r, v in facts.items())
        for name, facts in values.items()
    }
    build_index([Passage(id=name, title=name, text=texts[name]) for name in names], tmp_path / "i")
    wanted = [(name, relation) for name in names for relation in values[name]]
    queries = [Query(text=f"{name} {relation}", num_passages=3) for name, relation in wanted]
    places = rank(Retriever(tmp_path / "i"), queries, [name for name, _ in wanted])
    assert sum(place <= 2 for place in places) / len(places) > 0.99


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="the shared real text is not here")
def test_hashing_finds_two_thirds_of_the_passages_that_real_questions_need(tmp_path):
    build_index(read_corpus(SHARED / "wiki_mini.jsonl"), tmp_path / "i")
    questions = read_questions(SHARED / "hotpotqa_100.jsonl")
    rows = [json.loads(line) for line in (SHARED / "hotpotqa_100.jsonl").read_text().splitlines()]
    results = Retriever(tmp_path / "i").search([Query(text=question.text, num_passages=5) for question in questions])
    recalls = []
    for row, result in zip(rows, results, strict=True):
        needed = set(row["metadata"]["supporting_facts"]["title"])
        recalls.append(len(needed & {passage.title for passage in result.passages}) / len(needed))
    assert sum(recalls) / len(recalls) > 0.65  # measured: 0.675


def test_a_folder_is_searched_by_command(small, capsys):
    assert main(["index", "search", str(small), "t2", "--num-passages", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["score"] > 0.3 and {**row, "score": 0} == {
        "id": "2",
        "title": "t2",
        "text": "text 2",
        "partition": "",
        "score": 0,
    }
    assert main(["index", "search", str(small), "t2", "--partition", "x"]) == 2
    assert "partition 'x' is none of the index's 0" in capsys.readouterr().err
