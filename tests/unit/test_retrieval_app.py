"""The retrieval service without Ray:
the answers that the published clients expect, and a documented refusal for everything else.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from mempipe.data.corpus import split_contents
from mempipe.loader import parse_section
from mempipe.retrieval.build import build_index
from mempipe.retrieval.config import ServiceConfig
from mempipe.retrieval.retriever import Query, RetrievalError, Retriever
from mempipe.serve.retrieval_app import MAX_FAILURES, RetrievalService, make_app
from mempipe.settings import ConfigError
from mempipe.types import Passage, SearchResult

PASSAGES = [
    Passage(
        id=f"{country}-{i}",
        title=f'{city} "{i}"',
        text=f"{city} is the capital of {country}.\nline {i}",
        partition=country,
    )
    for country, city in (("Peru", "Lima"), ("Norway", "Oslo"), ("Ghana", "Accra"))
    for i in range(4)
]
LIMITS = {
    "num_passages": 2,
    "max_passages": 5,
    "max_query_chars": 40,
    "max_queries": 3,
    "max_body_bytes": 2000,
    "max_in_flight": 2,
}


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("service") / "index"
    build_index(PASSAGES, folder)
    return str(folder)


@pytest.fixture
def retriever(index) -> Retriever:
    return Retriever(index)


def client_of(retriever: Any, **changes: Any) -> httpx.AsyncClient:
    config = ServiceConfig(index="unused", **(LIMITS | changes))
    transport = httpx.ASGITransport(app=make_app(RetrievalService(retriever, config)))
    return httpx.AsyncClient(transport=transport, base_url="http://service")


@pytest.fixture
async def client(retriever) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(retriever) as client:
        yield client


def expected(retriever: Retriever, text: str, num_passages: int, partition: str = "") -> list[Passage]:
    (result,) = retriever.search([Query(text=text, num_passages=num_passages, partition=partition)])
    assert result.passages
    return result.passages


def documents(passages: Sequence[Passage]) -> list[dict[str, str]]:
    return [{"id": p.id, "contents": f'"{p.title}"\n{p.text}', "partition": p.partition} for p in passages]


class Blocked:
    """A retriever whose searches wait for `released`, or fail with `failure`."""

    snapshot, num_passages, partitions = "s", 1, ["p"]

    def __init__(self, failure: Exception | None = None) -> None:
        self.released = threading.Event()
        self.failure = failure
        self.num_asked = 0

    def check(self, query: Query) -> None:
        self.num_asked += 1

    def cached(self, query: Query) -> None:
        return None

    def search(self, queries: Sequence[Query]) -> list[SearchResult]:
        if self.failure is not None:
            raise self.failure
        assert self.released.wait(60)
        return [SearchResult(passages=[Passage(id="0", title="t", text=query.text)], snapshot="s") for query in queries]


async def test_retrieve_answers_search_r1_and_mem1_clients(client, retriever):
    answer = await client.post(
        "/retrieve", json={"queries": ["capital of Peru", "Oslo"], "topk": 3, "return_scores": True}
    )
    assert answer.status_code == 200
    assert answer.headers["x-mempipe-snapshot"] == retriever.snapshot
    found = answer.json()["result"]
    assert [len(of_query) for of_query in found] == [3, 3]
    for text, of_query in zip(["capital of Peru", "Oslo"], found, strict=True):
        passages = expected(retriever, text, 3)
        assert [hit["document"] for hit in of_query] == documents(passages)
        assert [hit["score"] for hit in of_query] == [p.score for p in passages]
    # What both clients make of a hit: the title is the first line, the text the others.
    first = found[1][0]["document"]["contents"].split("\n")
    assert first[0].startswith('"Oslo') and "\n".join(first[1:]).startswith("Oslo is the capital of Norway.\nline")


@pytest.mark.parametrize("num_queries", [1, 2, 3])
async def test_retrieve_without_scores_answers_documents_for_any_number_of_queries(client, retriever, num_queries):
    queries = ["Lima", "Oslo", "Accra"][:num_queries]
    answer = await client.post("/retrieve", json={"queries": queries, "topk": 1, "return_scores": False})
    assert answer.json() == {"result": [documents(expected(retriever, text, 1)) for text in queries]}


async def test_an_empty_search_of_a_batch_does_not_take_the_others_answers(client, retriever):
    answer = await client.post("/retrieve", json={"queries": ["", "Oslo"], "topk": 1, "return_scores": True})
    assert answer.status_code == 200
    assert answer.json()["result"][1][0]["document"] == documents(expected(retriever, "Oslo", 1))[0]
    assert (await client.post("/retrieve", json={"queries": []})).json() == {"result": []}


async def test_search_and_batch_search_answer_memsearcher_clients(client, retriever):
    two, one = expected(retriever, "Oslo", 2), expected(retriever, "Lima", 1)
    assert (await client.post("/search", json={"query": "Oslo"})).json() == documents(two)  # the client adds no top_n
    scored = await client.post("/search", json={"query": "Lima", "top_n": 1, "return_score": True})
    assert scored.json() == [documents(one), [one[0].score]]
    batch = await client.post("/batch_search", json={"query": ["Oslo", "Lima"], "top_n": 1})
    assert batch.json() == [documents(two[:1]), documents(one)]
    batch = await client.post("/batch_search", json={"query": ["Oslo", "Lima"], "top_n": 1, "return_score": True})
    assert batch.json() == [[documents(two[:1]), documents(one)], [[two[0].score], [one[0].score]]]


async def test_contents_give_title_and_text_back(client):
    (document,) = (await client.post("/search", json={"query": "Lima", "top_n": 1})).json()
    (passage,) = [p for p in PASSAGES if p.id == document["id"]]
    assert split_contents(document["contents"]) == (passage.title, passage.text)


async def test_a_partition_is_searched_alone(client, retriever):
    answer = await client.post("/search", json={"query": "capital of Peru", "top_n": 5, "partition": "Norway"})
    assert answer.json() == documents(expected(retriever, "capital of Peru", 5, "Norway"))
    assert {document["partition"] for document in answer.json()} == {"Norway"}


async def test_health_says_what_is_served_and_how_much_may_be_asked(client, retriever):
    assert (await client.get("/health")).json() == {
        "status": "ok",
        "snapshot": retriever.snapshot,
        "num_passages": 12,
        "max_passages": 5,
        "max_query_chars": 40,
        "max_queries": 3,
    }
    assert (await client.get("/partitions")).json() == ["Peru", "Norway", "Ghana"]


NESTED = b'{"query": ' + b"[" * 900 + b"]" * 900 + b"}"
REFUSED = [
    ("/search", b'{"query": ""}', 400, "a query is empty"),
    ("/search", b'{"query": " \\n"}', 400, "a query is empty"),
    ("/batch_search", b'{"query": ["Oslo", ""]}', 400, "a query is empty"),
    ("/search", b"{}", 422, "query is missing"),
    ("/search", b"", 422, "the body is missing"),
    ("/search", b"[]", 422, "the body is []"),
    ("/search", b'{"query": 5}', 422, "query is 5: Input should be a valid string"),
    ("/search", b'{"query": "Oslo", "top_n": 0}', 422, "top_n is 0: Input should be greater than or equal to 1"),
    ("/search", b'{"query": "Oslo", "top_n": 6}', 422, "top_n is 6: Input should be less than or equal to 5"),
    ("/search", b'{"query": "Oslo", "top_n": "3"}', 422, "top_n is '3': Input should be a valid integer"),
    ("/search", b'{"query": "Oslo", "top_n": true}', 422, "top_n is True: Input should be a valid integer"),
    ("/search", b'{"query": "Oslo", "top_n": NaN}', 422, "top_n is nan"),
    ("/search", b'{"query": "Oslo", "top_n": 1' + b"0" * 400 + b"}", 422, "top_n is 1000"),
    ("/search", b'{"query": "Oslo", "return_score": 1}', 422, "return_score is 1"),
    ("/search", b'{"query": "Oslo", "partition": "Chile"}', 422, "partition 'Chile' is none of the index's 3"),
    ("/search", b'{"query": "' + b"x" * 41 + b'"}', 422, "at most 40 characters"),
    ("/search", b'{"query": "\\ud800"}', 422, "query is '\\ud800'"),
    ("/search", b'{"query": "Oslo", "partition": "\\ud800"}', 422, "partition '\\ud800' is none"),
    ("/search", NESTED, 422, "query is [[[["),
    ("/search", b"{nonsense", 422, "the body is not JSON"),
    ("/search", b"\xff\xfe\x00", 400, "the body is not JSON in UTF-8"),
    ("/search", b'{"query": "Oslo", "top_n": 1' + b"0" * 1900 + b"}", 422, "top_n"),
    ("/search", b'{"query": "' + b"x" * 2000 + b'"}', 413, "the body has more than 2000 bytes"),
    ("/retrieve", b'{"queries": ["a", "b", "c", "d"]}', 422, "queries is"),
    ("/retrieve", b'{"queries": "Oslo"}', 422, "queries is 'Oslo': Input should be a valid list"),
    ("/retrieve", b'{"queries": ["Oslo", null]}', 422, "queries.1 is None: Input should be a valid string"),
    ("/retrieve", b'{"queries": ["Oslo"], "topk": 1.5}', 422, "topk is 1.5"),
]


@pytest.mark.parametrize(("path", "body", "status", "sentence"), REFUSED, ids=range(len(REFUSED)))
async def test_a_wrong_request_is_refused_with_a_sentence_that_names_the_field(client, path, body, status, sentence):
    answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, sentence in answer.json()["detail"]) == (status, True), answer.text
    assert len(answer.text) < 500


@pytest.mark.parametrize("text", ["\0", "a\0b", "\ufffd\u202e", "🦙" * 40, "' OR 1=1 --", "%s%n{}"])
async def test_odd_texts_are_searched_like_others(client, text):
    assert (await client.post("/search", json={"query": text})).status_code == 200


async def test_null_means_the_default_and_unknown_fields_are_ignored(client):
    answer = await client.post("/retrieve", json={"queries": ["Oslo"], "topk": None, "temperature": 1})
    assert len(answer.json()["result"][0]) == LIMITS["num_passages"]


async def test_other_routes_and_methods_are_refused(client):
    assert (await client.get("/")).status_code == 404
    assert (await client.get("/docs")).status_code == 404
    assert (await client.get("/search")).status_code == 405


async def test_requests_beyond_the_limit_are_turned_away_at_once_and_those_under_way_are_answered():
    retriever = Blocked()
    async with client_of(retriever) as client:
        under_way = [asyncio.create_task(client.post("/search", json={"query": text})) for text in "ab"]
        while retriever.num_asked < 2:
            await asyncio.sleep(0.001)
        refused = await client.post("/search", json={"query": "c"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "2 requests are in flight" in refused.json()["detail"]
        assert (await client.get("/health")).status_code == 200
        retriever.released.set()
        assert [(await task).json()[0]["contents"] for task in under_way] == ['"t"\na', '"t"\nb']
        assert (await client.post("/search", json={"query": "c"})).status_code == 200


async def test_a_search_that_takes_too_long_is_503_and_no_sign_of_ill_health():
    retriever = Blocked()
    async with client_of(retriever, timeout_s=0.05) as client:
        for _ in range(MAX_FAILURES):
            answer = await client.post("/search", json={"query": "a"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "0.05 s" in answer.json()["detail"]
        assert (await client.get("/health")).status_code == 200
        retriever.released.set()


async def test_searches_that_fail_one_after_the_other_make_the_service_unhealthy_until_one_succeeds():
    retriever = Blocked(OSError("the disk is gone"))
    retriever.released.set()
    async with client_of(retriever) as client:
        for i in range(MAX_FAILURES):
            assert (await client.get("/health")).status_code == 200
            answer = await client.post("/retrieve", json={"queries": [f"{i}"]})
            assert answer.status_code == 503 and "the disk is gone" in answer.json()["detail"]
        assert (await client.get("/health")).status_code == 503
        retriever.failure = None
        assert (await client.post("/search", json={"query": "a"})).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_the_limits_and_every_status_stand_in_the_schema(client):
    schema = (await client.get("/openapi.json")).json()
    retrieve = schema["components"]["schemas"]["Retrieve"]["properties"]
    assert retrieve["queries"] == {
        "items": {"type": "string", "maxLength": 40},
        "type": "array",
        "maxItems": 3,
        "title": "Queries",
    }
    assert {"type": "integer", "maximum": 5, "minimum": 1} in retrieve["topk"]["anyOf"]
    for path in ("/retrieve", "/search", "/batch_search"):
        responses = schema["paths"][path]["post"]["responses"]
        assert set(responses) == {"200", "400", "408", "413", "415", "422", "503"}
        assert all(responses[status]["content"]["application/json"]["schema"] for status in responses)


def test_settings_that_cannot_work_are_refused(index):
    assert parse_section({"index": index, "num_replicas": "2"}, ServiceConfig).num_replicas == 2
    for values, sentence in (
        ({}, "index is empty"),
        ({"index": index, "num_replicas": 0}, "num_replicas is 0"),
        ({"index": index, "shard_actors": 2}, "shard_actors is 2"),
        ({"index": index, "max_in_fligth": 3}, "max_in_fligth is not a setting"),
        ({"index": index, "num_passages": 200}, "num_passages is 200"),
        ({"index": index, "url": "http://other"}, "searches one of them"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            parse_section(values, ServiceConfig)


async def test_a_failure_is_told_by_its_kind():
    # type: ignore[arg-type]
    service = RetrievalService(Blocked(OSError("broken")), ServiceConfig(index="unused", **LIMITS))
    with pytest.raises(RetrievalError, match="broken"):
        await service.search(["a"], num_passages=1, partition="")
