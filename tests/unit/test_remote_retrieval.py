"""The client of a retrieval service, over real sockets:
it answers as the index itself would, or raises; no fault becomes a passage.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from mempipe.api.roles import _retriever
from mempipe.checks.run import ask_network, check_run
from mempipe.faults import ServiceFault, ServiceTimeout
from mempipe.loader import load_config, parse_config
from mempipe.retrieval.build import build_index
from mempipe.retrieval.config import RetrievalConfig, ServiceConfig
from mempipe.retrieval.remote import RemoteRetriever
from mempipe.retrieval.retriever import BatchingRetriever, Query, Retriever
from mempipe.serve.replicas.retriever_replica import RetrieverReplica
from mempipe.serve.retrieval_app import RetrievalService, make_app
from mempipe.settings import ConfigError
from mempipe.types import Passage

CONFIG = Path(__file__).parents[2] / "jobs" / "configs" / "memsearcher_qwen2.5-3b.yaml"
PASSAGES = [
    Passage(id=f"{part}/{i}", title=f'T"{i}', text=f"word{i} word{i % 7} of {part}\nsecond line", partition=part)
    for part in ("north", "south")
    for i in range(30)
]
QUERIES = [
    Query(text=f"word{i} word{i % 7}", num_passages=1 + i % 4, partition=("", "north", "south")[i % 3])
    for i in range(40)
]


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("remote") / "index"
    build_index(PASSAGES, folder)
    return str(folder)


@pytest.fixture(scope="module")
def retriever(index) -> Retriever:
    return Retriever(index)


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address of a server of the ASGI application `app`."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


class Faulty:
    """The service, with something else in place of the first answers of /retrieve."""

    def __init__(self, retriever: Retriever, *, foreign: bool = False, no_health: int = 404, **limits: Any) -> None:
        self._app = make_app(RetrievalService(retriever, ServiceConfig(index="unused", **limits)))
        self._foreign = foreign
        self._no_health = no_health
        self.faults: list[Callable[[Any], Any]] = []
        self.requests: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/retrieve":
            if self._foreign:  # Search-R1's server has one route only
                await respond(self._no_health, b'{"detail":"Not Found"}')(send)
            else:
                await self._app(scope, receive, send)
            return
        message = await receive()
        self.requests.append(json.loads(message["body"]))
        if self.faults:
            await self.faults.pop(0)(send)
            return
        unread = [message]

        async def replay() -> Any:
            return unread.pop() if unread else await receive()

        async def without_header(message: Any) -> None:
            if self._foreign and message["type"] == "http.response.start":
                message = message | {"headers": [(k, v) for k, v in message["headers"] if k != b"x-mempipe-snapshot"]}
            await send(message)

        await self._app(scope, replay, without_header)


def respond(
    status: int, body: bytes, *, headers: dict[str, str] | None = None, delay_s: float = 0.0
) -> Callable[[Any], Any]:
    async def fault(send: Any) -> None:
        await asyncio.sleep(delay_s)
        pairs = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": body})

    return fault


async def drip(send: Any) -> None:
    """An answer that comes in pieces, each soon enough, and has no end."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(100):
        await send({"type": "http.response.body", "body": b" ", "more_body": True})
        await asyncio.sleep(0.02)


def answer_of(result: Any) -> Callable[[Any], Any]:
    return respond(200, json.dumps({"result": result}).encode())


def hit(contents: Any = '"T"\ntext', score: Any = 0.5, identity: Any = "1") -> dict[str, Any]:
    return {"document": {"id": identity, "contents": contents}, "score": score}


@pytest.fixture(scope="module")
def running(retriever) -> Iterator[tuple[Faulty, str]]:
    faulty = Faulty(retriever)
    with serving(faulty) as url:
        yield faulty, url


@pytest.fixture
def service(running) -> tuple[Faulty, str]:
    running[0].faults, running[0].requests = [], []
    return running


@contextmanager
def client_of(url: str, **changes: Any) -> Iterator[RemoteRetriever]:
    client = RemoteRetriever(url, RetrievalConfig(url=url, **changes))
    try:
        yield client
    finally:
        client.close()


def test_answers_are_those_of_the_index(service, retriever):
    with client_of(service[1]) as client:
        assert client.search(QUERIES) == retriever.search(QUERIES)
        assert client.snapshot == retriever.snapshot


def test_equal_queries_travel_once_and_known_answers_not_at_all(service, retriever):
    faulty, url = service
    with client_of(url) as client:
        query = Query(text="word1", num_passages=2)
        assert client.cached(query) is None
        first = client.search([query, query, Query(text="word2", num_passages=2)])
        assert [request["queries"] for request in faulty.requests] == [["word1", "word2"]]
        assert client.cached(query) == first[0] == first[1]
        assert client.search([query]) == first[:1] and len(faulty.requests) == 1


def test_queries_travel_in_batches_of_what_the_service_allows(retriever):
    faulty = Faulty(retriever, max_queries=4)
    queries = [Query(text=f"word{i}", num_passages=1) for i in range(10)]
    with serving(faulty) as url, client_of(url) as client:
        assert client.search(queries) == retriever.search(queries)
        assert [len(request["queries"]) for request in faulty.requests] == [4, 4, 2]


async def test_a_batching_front_works_over_it(service, retriever):
    with client_of(service[1]) as client:
        front = BatchingRetriever(client, RetrievalConfig(batch_wait_ms=5))
        found = await asyncio.gather(
            *(front.search(q.text, num_passages=q.num_passages, partition=q.partition) for q in QUERIES)
        )
        assert found == retriever.search(QUERIES)
        assert front.num_batches == 1
        front.close()


@pytest.mark.parametrize(
    "faults",
    [
        [respond(503, b"busy", headers={"retry-after": "0"})] * 2,
        [respond(500, b"the replica died")],
        [respond(502, b""), respond(504, b""), respond(429, b"")],
        [respond(503, b"", headers={"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT"})],
        [respond(503, b"", headers={"retry-after": "\u00b2"})],
    ],
    ids=["503 twice", "500", "502, 504, 429", "a date", "no number"],
)
def test_a_passing_fault_is_sat_out(service, retriever, faults):
    faulty, url = service
    with client_of(url) as client:
        faulty.faults = list(faults)
        assert client.search(QUERIES[:1]) == retriever.search(QUERIES[:1])
        assert len(faulty.requests) == len(faults) + 1


@pytest.mark.parametrize("fault", [respond(200, b"", delay_s=2), drip], ids=["late", "dripping"])
def test_an_attempt_that_hangs_leaves_time_for_another(service, retriever, fault):
    faulty, url = service
    with client_of(url, timeout_s=1.8) as client:
        faulty.faults = [fault]
        assert client.search(QUERIES[:1]) == retriever.search(QUERIES[:1])


def test_closing_ends_a_search_that_is_under_way(service):
    faulty, url = service
    client = RemoteRetriever(url, RetrievalConfig(url=url))
    faulty.faults = [respond(503, b"", headers={"retry-after": "1"})] * 10
    with ThreadPoolExecutor(1) as thread:
        search = thread.submit(client.search, QUERIES[:1])
        while not faulty.requests:
            time.sleep(0.01)
        client.close()
        with pytest.raises(ServiceFault, match="was closed during a search"):
            search.result(timeout=60)
    time.sleep(1.5)  # longer than the pause that the service asked for
    assert len(faulty.requests) == 1
    client.close()


def test_after_the_deadline_it_gives_up(service):
    faulty, url = service
    with client_of(url, timeout_s=2) as client:  # in which it must be answered once
        faulty.faults = [respond(503, b"no room")] * 100
        started = time.monotonic()
        with pytest.raises(ServiceTimeout, match=r"retrieval\.timeout_s 2 s .*: status 503: no room"):
            client.search(QUERIES[:1])
        assert time.monotonic() - started < 20  # a hundred refusals would take minutes


def test_a_refusal_is_told_at_once(service):
    faulty, url = service
    with client_of(url) as client:
        faulty.faults = [respond(422, b'{"detail":"topk is 7"}')]
        with pytest.raises(ServiceFault, match=r"answered status 422: .*topk is 7"):
            client.search(QUERIES[:1])
        faulty.faults = [respond(307, b"", headers={"location": "http://elsewhere.invalid/"})]
        with pytest.raises(ServiceFault, match="answered status 307"):
            client.search(QUERIES[:1])
        assert len(faulty.requests) == 2


GARBAGE = {
    "html": respond(200, b"<html>"),
    "empty": respond(200, b""),
    "not an object": respond(200, b"[]"),
    "no result": respond(200, b"{}"),
    "null": respond(200, b"null"),
    "nested": respond(200, b"[" * 100_000),
    "too few results": answer_of([]),
    "too many results": answer_of([[hit()], [hit()]]),
    "an object of the right length": answer_of({"a": [hit()]}),
    "too many passages": answer_of([[hit(), hit()]]),
    "no score": answer_of([[{"document": {"id": "1", "contents": "c"}}]]),
    "documents without scores": answer_of([[{"id": "1", "contents": "c"}]]),
    "a score of text": answer_of([[hit(score="0.5")]]),
    "a score of true": answer_of([[hit(score=True)]]),
    "nan": answer_of([[hit(score=float("nan"))]]),
    "infinite": answer_of([[hit(score=float("inf"))]]),
    "contents of numbers": answer_of([[hit(contents=5)]]),
    "no contents": answer_of([[{"document": {"id": "1"}, "score": 1}]]),
    "no id": answer_of([[hit(identity=None)]]),
    "a text for a hit": answer_of([["hit"]]),
    "a list for a document": answer_of([[{"document": [], "score": 1}]]),
    "a text for hits": answer_of(["x"]),
}


@pytest.mark.parametrize("fault", GARBAGE.values(), ids=GARBAGE.keys())
def test_what_is_no_answer_never_becomes_passages(service, fault):
    faulty, url = service
    query = Query(text="word3", num_passages=1)
    with client_of(url) as client:
        faulty.faults = [fault]
        with pytest.raises(ServiceFault, match="invalid answer") as caught:
            client.search([query])
        assert len(str(caught.value)) <= 500
        assert client.cached(query) is None
        assert client.search([query])[0].passages[0].id.endswith("/3")


def test_lone_surrogates_become_replacement_characters_both_ways(service):
    faulty, url = service
    with client_of(url) as client:
        faulty.faults = [answer_of([[hit(contents="T\ud800\ntext\udfff")]])]
        (result,) = client.search([Query(text="a\ud800b", num_passages=1)])
        assert faulty.requests[-1]["queries"] == ["a\ufffdb"]
        assert (result.passages[0].title, result.passages[0].text) == ("T\ufffd", "text\ufffd")


def test_a_connection_that_breaks_is_opened_again(service, retriever):
    """A proxy in between resets the first connections while the answer is awaited."""
    _, url = service
    port = int(url.rpartition(":")[2])
    with resetting_proxy(port, num_resets=2) as (address, connections), client_of(address) as client:
        assert client.search(QUERIES[:1]) == retriever.search(QUERIES[:1])
        assert len(connections) == 3


@contextmanager
def resetting_proxy(port: int, *, num_resets: int) -> Iterator[tuple[str, list[int]]]:
    """Passes connections on to `port`, after it has reset the first ones upon their first bytes."""
    connections: list[int] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(len(connections))
        first = await reader.read(65536)
        if len(connections) <= num_resets:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return
        behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", port)
        behind_writer.write(first)
        await asyncio.gather(_pass_on(reader, behind_writer), _pass_on(behind_reader, writer))

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(connected, "127.0.0.1", 0), loop).result()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


def test_a_service_that_is_not_there_is_told_after_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    with pytest.raises(
        ServiceTimeout, match=r"/health gave no answer within retrieval\.timeout_s 0\.5 s .*: ConnectError"
    ):
        RemoteRetriever(f"http://127.0.0.1:{port}", RetrievalConfig(url="http://unused", timeout_s=0.5))


def test_search_r1s_own_server_is_served_without_partitions_and_snapshots(retriever):
    faulty = Faulty(retriever, foreign=True)
    with serving(faulty) as url, client_of(url) as client:
        assert client.snapshot == "unknown"
        query = Query(text="word5", num_passages=2)
        (found,), (expected,) = client.search([query]), retriever.search([query])
        assert found.passages == expected.passages and found.snapshot == "unknown"
        assert faulty.requests[-1] == {"queries": ["word5"], "topk": 2, "return_scores": True}
        with pytest.raises(ValueError, match="knows no partitions"):
            client.check(Query(text="word5", num_passages=2, partition="north"))


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_server_that_has_no_health_is_asked_for_a_search(retriever, status):
    """501 is what Python's own `http.server` answers for a method that it does not serve."""
    with serving(Faulty(retriever, foreign=True, no_health=status)) as url, client_of(url) as client:
        assert client.search([Query(text="word5", num_passages=1)])[0].passages


def test_a_process_ends_that_did_not_close_its_client(retriever):
    code = (
        "import sys; from mempipe.retrieval.config import RetrievalConfig; "
        "from mempipe.retrieval.remote import RemoteRetriever; "
        "kept = RemoteRetriever(sys.argv[1], RetrievalConfig(url=sys.argv[1])); print(kept.snapshot)"
    )
    with serving(Faulty(retriever)) as url:
        done = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, retriever.snapshot, "")


async def test_an_agent_that_is_closed_leaves_no_client_of_a_service(service):
    config = load_config(CONFIG, ["retrieval.index=''", f"retrieval.url={service[1]}"])

    def clients() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "retrieval-client"]

    before = clients()
    async with _retriever(config) as search:
        assert (await search("word5", num_passages=1, partition="")).passages
        assert len(clients()) == len(before) + 1
    assert clients() == before


def test_a_server_without_searches_is_refused_at_once():
    """It is the setting that is wrong: a run does not start again for it."""
    with (
        serving(respond_to_all(404, b'{"detail":"Not Found"}')) as url,
        pytest.raises(ConfigError, match=r"retrieval\.url: a first search failed: .*/retrieve answered status 404"),
    ):
        RemoteRetriever(url, RetrievalConfig(url=url))


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ([{"doc": {}, "score": 1.0}], "a passage is {'doc': {}, 'score': 1.0}; expected {\"document\": {\"id\", "),
        ([{"document": {"text": "t"}, "score": 1.0}], "a document is {'text': 't'}; expected {\"document\": {\"id\", "),
    ],
)
def test_a_server_of_ones_own_with_other_fields_is_told_which_it_needs(found, sentence):
    with (
        serving(respond_to_all(200, json.dumps({"result": [found]}).encode())) as url,
        pytest.raises(ConfigError, match=re.escape(sentence)),
    ):
        RemoteRetriever(url, RetrievalConfig(url=url))


def test_a_run_that_asks_for_more_than_the_service_allows_is_refused_before_it_starts(retriever):
    with serving(Faulty(retriever, max_passages=20, max_query_chars=500)) as url:
        with pytest.raises(ConfigError, match=r"retrieval\.max_passages is 21, but the service at .* allows 20"):
            RemoteRetriever(url, RetrievalConfig(url=url, max_passages=21))
        with pytest.raises(ConfigError, match=r"retrieval\.max_query_chars is 1000, but .* allows 500"):
            RemoteRetriever(url, RetrievalConfig(url=url))


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        (Query(text="a", num_passages=0), "at least 1"),
        (Query(text="a", num_passages=101), "beyond max_"),
        (Query(text="a" * 5000, num_passages=1), "beyond max_"),
        (Query(text="a", num_passages=1, partition="east"), "none of the 2"),
    ],
)
def test_a_wrong_query_is_caught_before_it_travels(service, query, sentence):
    faulty, url = service
    with client_of(url) as client:
        for call in (client.check, lambda query: client.search([query])):
            with pytest.raises(ValueError, match=sentence):
                call(query)
        assert not faulty.requests


def test_another_snapshot_is_recorded_and_told_once(service, retriever, caplog):
    faulty, url = service
    queries = [Query(text=f"word{i}", num_passages=1) for i in range(4)]
    body = json.dumps({"result": [[hit()]]}).encode()
    with client_of(url) as client:
        client.search(queries[:1])
        for query, snapshot in zip(queries[1:3], ("newer", "newest"), strict=True):
            faulty.faults = [respond(200, body, headers={"x-mempipe-snapshot": snapshot})]
            (result,) = client.search([query])
            assert result.snapshot == client.snapshot == snapshot
            assert client.cached(queries[0]) is None
        assert [record.getMessage() for record in caplog.records if "serves snapshot" in record.getMessage()] == [
            f"{url} serves snapshot newer now, it was {retriever.snapshot} before; every search records its own"
        ]


async def test_a_replica_says_what_its_service_serves_now_and_that_it_has_ended(retriever, monkeypatch):
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr("mempipe.serve.replicas.retriever_replica.ASK_S", 1.0)
    with serving(Faulty(retriever)) as url:
        replica = RetrieverReplica(RetrievalConfig(url=url))
        assert await replica.snapshot() == retriever.snapshot
        monkeypatch.setattr(retriever, "snapshot", "newer")
        assert await replica.snapshot() == "newer"
    with pytest.raises(ServiceTimeout):
        await replica.snapshot()
    assert replica._remote is not None
    replica._remote.close()
    with serving(Faulty(retriever, foreign=True)) as url, client_of(url) as client:
        pass
    assert client.ready(timeout_s=1.0) == "unknown"  # it may answer one request at a time, so nobody asks it


@pytest.mark.parametrize(
    "url", ["service:8000", "ftp://service", "http://", "http://service:port", "http://service:99999", "http://[1"]
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match=rf"retrieval\.url is '{re.escape(url)}'; an address is of the form"):
        RetrievalConfig(url=url)


def test_doctor_asks_the_service_what_it_serves(service, retriever):
    def finding(url: str) -> str:
        config = load_config(CONFIG, ["retrieval.index=''", f"retrieval.url={url}", "world={}"])
        (found,) = [finding for finding in ask_network(config) if url in finding.text]
        return f"{found.level}: {found.text}"

    assert finding(service[1]) == f"ok: retrieval.url: {service[1]}, snapshot {retriever.snapshot}, 60 passages"
    assert finding("http://127.0.0.1:1").startswith("note: retrieval.url http://127.0.0.1:1 cannot be reached")
    with serving(respond_to_all(404, b"{}")) as url:
        assert "is not a mempipe service" in finding(url)


def respond_to_all(status: int, body: bytes) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await respond(status, body)(send)

    return app


def test_a_run_searches_an_index_or_a_service_and_its_own_world_only_by_index(tmp_path):
    def problems(**values: Any) -> str:
        config = parse_config({"output": str(tmp_path), **values})
        return "\n".join(finding.text for finding in check_run(config) if finding.fatal)

    service = {"url": "http://service:8000"}
    assert "retrieval" not in problems(retrieval=service)
    assert "retrieval.index is empty; agent.name 'memsearcher' needs it, or retrieval.url" in problems()
    assert "retrieval.url is 'http://service:8000'; a run with a `world`" in problems(retrieval=service, world={})
    with pytest.raises(ConfigError, match="a run searches one of them"):
        parse_config({"retrieval": {"url": "http://service:8000", "index": "i"}})
