"""The retrieval service on Ray Serve, over real sockets:
nothing lost, nothing crossed, and never an answer that is not documented.
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from ray import serve
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from mempipe.actors.handles import start_actor
from mempipe.actors.pools import RetrieverPool
from mempipe.actors.retriever import RetrieverActor
from mempipe.retrieval.build import build_index
from mempipe.retrieval.config import RetrievalConfig
from mempipe.retrieval.remote import RemoteRetriever
from mempipe.retrieval.retriever import Query, Retriever
from mempipe.serve.retrieval import app, served
from mempipe.settings import ConfigError
from mempipe.types import Passage
from tools.processes import Marked, Running, free_ports

NUM_CLIENTS = 64
NUM_ANSWERS = 3
"""That every client gets before a replica is killed, and after."""
PATIENCE_S = 300.0
WORDS = [f"word{i}" for i in range(400)]


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> str:
    rng = random.Random(0)
    folder = tmp_path_factory.mktemp("service") / "index"
    build_index(
        (
            Passage(id=f"{part}/{i}", title=f"T{i}", text=" ".join(rng.choices(WORDS, k=12)), partition=f"part{part}")
            for part in range(5)
            for i in range(200)
        ),
        folder,
    )
    return str(folder)


@pytest.fixture(scope="module")
def retriever(index) -> Retriever:
    return Retriever(index)


@pytest.fixture(scope="module")
def service(index) -> Iterator[str]:
    (port,) = free_ports(1)
    with served({"index": index, "num_replicas": 2}, host="127.0.0.1", port=port) as url:
        yield url
    assert not ray.is_initialized()


def queries_of(client: int, count: int = 6) -> list[Query]:
    rng = random.Random(client)
    return [
        Query(
            text=" ".join(rng.choices(WORDS, k=3)),
            num_passages=rng.randint(1, 8),
            partition=rng.choice(["", "part0", "part3"]),
        )
        for _ in range(count)
    ]


def test_the_command_serves_until_ctrl_c_and_leaves_nothing_behind(index, tmp_path):
    """First: it starts a cluster of its own."""
    marked, (port,) = Marked(), free_ports(1)
    command = [sys.executable, "-m", "mempipe.cli", "index", "serve", index, "max_passages=17", "--port", str(port)]
    serving = Running(command, marked=marked, cwd=tmp_path)
    try:
        serving.wait_until(lambda: "curl" in serving.stdout and serving.stdout.endswith("\n"))
        assert marked.open_to_others() == []
        first, *_, address, example = serving.stdout.splitlines()  # in between: how long it has taken
        assert f"starting the service of {index}" in first
        assert f"serving {index} at http://127.0.0.1:{port}" in address
        curl = subprocess.run(example, shell=True, capture_output=True, text=True, check=True)
        assert curl.stdout.startswith('[{"id":"')
        assert httpx.get(f"http://127.0.0.1:{port}/health").json()["max_passages"] == 17
        with (
            pytest.raises(ConfigError, match=f"--port {port}: Address already in use"),
            served({"index": index}, host="127.0.0.1", port=port),
        ):
            pass
        serving.process.send_signal(signal.SIGINT)
        ended = serving.wait()
        assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr
        assert marked.survivors() == []
    finally:
        marked.end()


def test_wrong_settings_are_refused_before_anything_starts(index, tmp_path):
    for values, sentence in (
        ({"index": str(tmp_path)}, "holds no index"),
        ({"index": index, "max_in_flight": 0}, "max_in_flight is 0"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            app(values)


def test_each_of_many_clients_gets_its_own_answers(service, retriever):
    def search(client: int) -> bool:
        remote = RemoteRetriever(service, RetrievalConfig(url=service))
        found = [remote.search([query])[0] for query in queries_of(client)]
        remote.close()
        return found == expected[client]

    expected = [retriever.search(queries_of(client)) for client in range(NUM_CLIENTS)]
    assert len({str(results) for results in expected}) == NUM_CLIENTS
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        assert all(pool.map(search, range(NUM_CLIENTS)))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        # Search-R1's trainer, MEM1's trainer and inference, MemSearcher's rollout (which adds what the model wrote),
        # its evaluation.
        ("/retrieve", {"queries": ["word1 word2", "word3"], "topk": 3, "return_scores": True}),
        ("/retrieve", {"queries": ["word1 word2"], "topk": 3, "return_scores": True}),
        ("/search", {"query": "word1 word2"}),
        ("/search", {"query": "word1 word2", "top_n": 5}),
        ("/search", {"query": "word1 word2", "top_n": 5, "return_score": True}),
        ("/batch_search", {"query": ["word1 word2", "word3"], "top_n": 5, "return_score": False}),
    ],
)
def test_what_published_clients_post_is_answered_in_the_shape_that_they_read(service, retriever, path, body):
    answer = httpx.post(service + path, json=body)
    assert answer.status_code == 200
    assert answer.headers["x-mempipe-snapshot"] == retriever.snapshot
    texts = body.get("queries") or body["query"]
    count = body.get("topk") or body.get("top_n", 10)
    found = retriever.search(
        [Query(text=text, num_passages=count) for text in ([texts] if isinstance(texts, str) else texts)]
    )
    contents = [[f'"{p.title}"\n{p.text}' for p in result.passages] for result in found]
    if path == "/retrieve":
        assert [[hit["document"]["contents"] for hit in hits] for hits in answer.json()["result"]] == contents
        assert [[hit["score"] for hit in hits] for hits in answer.json()["result"]] == [
            [p.score for p in r.passages] for r in found
        ]
    elif path == "/batch_search":
        assert [[document["contents"] for document in documents] for documents in answer.json()] == contents
    else:
        documents, *scores = answer.json() if body.get("return_score") else [answer.json()]
        assert [document["contents"] for document in documents] == contents[0]
        assert scores == [[p.score for p in found[0].passages]] * len(scores)


@pytest.fixture(scope="module")
def narrow(service, index) -> str:
    """The same index, where two requests at a time fill the only replica and each takes 200 ms."""
    serve.run(app({"index": index, "max_in_flight": 2, "batch_wait_ms": 200}), name="narrow", route_prefix="/narrow")
    return f"{service}/narrow"


def test_clients_that_ask_again_get_through_an_overload(narrow, retriever):
    def search(client: int) -> bool:
        remote = RemoteRetriever(narrow, RetrievalConfig(url=narrow))
        return remote.search(queries_of(client, 2)) == retriever.search(queries_of(client, 2))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(search, range(8)))


def test_overload_is_refused_with_503_and_nothing_else(narrow, retriever):
    def post(client: int) -> tuple[int, bool]:
        (query,) = queries_of(client, 1)
        body = {
            "queries": [query.text],
            "topk": query.num_passages,
            "return_scores": True,
            "partition": query.partition,
        }
        answer = http.post(f"{narrow}/retrieve", json=body)
        if answer.status_code == 503:
            return 503, int(answer.headers["retry-after"]) >= 1 and "in flight" in answer.json()["detail"]
        hits = answer.json()["result"][0]
        return answer.status_code, [hit["document"]["id"] for hit in hits] == [
            p.id for p in retriever.search([query])[0].passages
        ]

    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    with httpx.Client(timeout=PATIENCE_S, limits=limits) as http, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = Counter(pool.map(post, range(NUM_CLIENTS)))
    assert set(answers) == {(200, True), (503, True)}


def test_a_replica_that_is_killed_under_load_costs_no_client_its_answers(service, retriever):
    clients = range(16)
    killed = threading.Event()
    num_before: Counter[int] = Counter()

    def search(client: int) -> bool:
        remote = RemoteRetriever(service, RetrievalConfig(url=service, timeout_s=PATIENCE_S))
        right, turn, num_after = True, 0, 0
        while num_after < NUM_ANSWERS:
            queries = queries_of(1000 * client + turn, 2)
            asked_after = killed.is_set()
            right &= [r.passages for r in remote.search(queries)] == expected_of(retriever, queries)
            num_after += asked_after
            num_before[client] += 1
            turn += 1
        return right

    with ThreadPoolExecutor(len(clients)) as pool:
        searches = [pool.submit(search, client) for client in clients]
        while not all(num_before[client] >= NUM_ANSWERS for client in clients):
            assert not any(done.done() for done in searches), "a client gave up"
            time.sleep(0.01)
        actors: list[Any] = ray.util.list_named_actors(all_namespaces=True)
        replica, _ = (actor for actor in actors if actor["name"].startswith("SERVE_REPLICA::retrieval#"))
        ray.kill(ray.get_actor(replica["name"], namespace=replica["namespace"]))
        killed.set()
        assert all(done.result() for done in searches)


LOCK = threading.Lock()


def expected_of(retriever: Retriever, queries: Sequence[Query]) -> list[list[Passage]]:
    with LOCK:  # one search at a time
        return [result.passages for result in retriever.search(queries)]


async def test_the_actors_of_a_run_search_the_service_as_they_would_the_index(service, retriever):
    config = RetrievalConfig(url=service)
    actor = start_actor(RetrieverActor, {"num_cpus": 0, "max_concurrency": 100}, config)
    pool = RetrieverPool([actor], config=config)
    queries = queries_of(7, 20)
    found = await asyncio.gather(
        *(pool.search(q.text, num_passages=q.num_passages, partition=q.partition) for q in queries)
    )
    assert found == retriever.search(queries)
    assert await actor.ready.remote() == retriever.snapshot
    with pytest.raises(ValueError, match="none of the 5"):
        await pool.search("word1", num_passages=1, partition="nowhere")
    ray.kill(actor)


CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", ["/retrieve", "/search", "/batch_search"])
def test_every_answer_is_documented_whatever_is_sent(service, path, mode):
    load_all_checks()
    operation = schemathesis.openapi.from_url(f"{service}/openapi.json")[path]["POST"]
    statuses: Counter[int] = Counter()

    @seed(1)
    @settings(max_examples=30, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(mode))
    def fuzz(case: Any) -> None:
        answer = case.call(base_url=service)
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    fuzz()
    assert statuses[200 if mode is GenerationMode.POSITIVE else 422]
    assert httpx.get(f"{service}/health").status_code == 200


def test_the_example_config_names_what_exists():
    import yaml
    from ray.serve.schema import ServeDeploySchema

    config = yaml.safe_load((Path(__file__).parents[2] / "jobs/configs/retrieval_service.yaml").read_text())
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "mempipe.serve.retrieval:app"
    assert config["http_options"]["host"] == "127.0.0.1"
