"""The agent service on Ray Serve: the command by itself, then one start on a real engine and index for all other tests.

Replicas are killed and weights replaced at the end.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import mcp.client.stdio
import openai
import psutil
import pytest
import ray
from mcp import Client, StdioServerParameters
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from standins import ANSWER, completions_server

from benchmarks.upgrade import OnLocalServe, faults, other_index, upgraded
from mempipe.config import RunConfig
from mempipe.data.partitions import main_partition
from mempipe.data.qa import read_questions
from mempipe.engines.config import SamplingConfig
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.loader import parse_section
from mempipe.retrieval.retriever import BatchingRetriever, Retriever
from mempipe.rollout import make_agent
from mempipe.serve.agent import LocalService, served_agent
from mempipe.serve.config import AgentServiceConfig
from mempipe.serve.http import front
from mempipe.serve.requests.calls import ServedEngine
from mempipe.serve.served_run import resolve, weights_version
from mempipe.storage.checksums import write_checksums
from mempipe.types import Completion, Question, Trajectory
from tools.processes import ROOT, Marked, command_line, free_ports
from tools.processes import Running as RunningCommand
from tools.strangers import ATTACKS

TIMEOUT_S = 120.0
LOST_S = 10.0
"""Seconds in which a service notices that its cluster is gone; it has as many again, and more, to end."""
LONG_MESSAGES = {
    "num_samples": 16,
    "budget": {"action_tokens": 320, "memory_tokens": 8, "observation_tokens": 8, "question_tokens": 32},
}
"""Options of a request that works for seconds, at a temperature that is as good as greedy: its messages do not end."""


@dataclass
class Running:
    """The service, the questions that it is asked, and how an evaluation plays them."""

    url: str
    local: LocalService
    settings: dict[str, Any]
    run: Path
    questions: list[Question]
    evaluated: dict[str, Trajectory] = field(default_factory=dict)

    def ask(self, question: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/answer", json={"question": question, **body}, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def finished(world: RunConfig) -> Path:
    """The folder of a finished run."""
    shutil.copytree(world.model.path, world.folder / "huggingface")
    return world.folder


@contextmanager
def the_command(world: RunConfig, finished: Path, state: Path) -> Iterator[tuple[RunningCommand, str, Marked]]:
    """Gives the ready command, its address and its processes. A server elsewhere samples, so that no engine has to
    start."""
    marked, (port,) = Marked(), free_ports(1)
    with completions_server() as url:
        endpoint = [f"endpoint.url={url}", "endpoint.model=other", f"endpoint.tokenizer={world.model.path}"]
        command = [sys.executable, "-m", "mempipe.cli", "serve", str(finished), *endpoint, f"state={state}"]
        serving = RunningCommand([*command, "--port", str(port)], marked=marked, cwd=state)
        try:
            serving.wait_until(lambda: "curl" in serving.stdout)
            yield serving, f"http://127.0.0.1:{port}", marked
        finally:
            marked.end()


def test_the_command_answers_until_ctrl_c_and_leaves_nothing_behind(world, finished, tmp_path):
    """First: it starts a cluster of its own."""
    with the_command(world, finished, tmp_path) as (serving, url, marked):
        assert f"serving {finished} at {url}" in serving.stdout
        answer = httpx.post(f"{url}/v1/answer", json={"question": "who ?"}, timeout=TIMEOUT_S)
        reply = answer.json()
        assert (answer.status_code, reply["answer"].strip()) == (200, ANSWER), answer.text
        assert reply["model_version"] == "other"
        assert marked.open_to_others() == []
        serving.process.send_signal(signal.SIGHUP)
        serving.wait_until(lambda: "serving weights other" in serving.stdout)
        serving.process.send_signal(signal.SIGINT)
        ended = serving.wait()
        assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr
        assert "raylet" not in ended.stdout + ended.stderr  # what Ray says of its own end
        assert marked.survivors() == []


@pytest.mark.jobs  # two more starts of the command
@pytest.mark.parametrize(
    ("name", "reason"),
    [("raylet", "Ray's raylet on this node ended"), ("gcs_server", "the head of the Ray cluster ended")],
)
def test_a_service_whose_cluster_is_killed_says_so_within_seconds_and_leaves_nothing_behind(
    world, finished, tmp_path, name, reason
):
    with the_command(world, finished, tmp_path) as (serving, _, marked):
        (victim,) = [each for each in marked.processes() if each.name() == name]
        scratch = Path(victim.environ()["TMPDIR"])
        assert (scratch / "ray").is_dir()
        victim.kill()
        killed = time.monotonic()
        serving.wait_until(lambda: serving.stderr)
        assert time.monotonic() - killed < LOST_S
        ended = serving.wait()
        lost = (
            f"error: the Ray cluster was lost: {reason}. The service has ended; run the same command to start it again"
        )
        assert (ended.returncode, ended.stderr.strip()) == (1, lost)
        assert not scratch.exists()
        assert marked.survivors() == []
        assert time.monotonic() - killed < 3 * LOST_S


async def test_an_mcp_client_starts_the_tools_of_a_run_and_ends_them_with_itself(
    world, finished, tmp_path, monkeypatch, caplog
):
    """With the client of the SDK, which sends SIGTERM two seconds after the end of standard input. Only its SIGKILL two
    seconds later is put off: the machine may be busy."""
    monkeypatch.setattr(mcp.client.stdio, "FORCE_KILL_TIMEOUT", TIMEOUT_S)
    marked, question, other = Marked(), "who ?", "where ?"
    log = tmp_path / "stderr"
    with completions_server() as url, tempfile.TemporaryDirectory(dir="/tmp") as temporary, log.open("w") as stderr:
        endpoint = [f"endpoint.url={url}", "endpoint.model=other", f"endpoint.tokenizer={world.model.path}"]
        command = ["-m", "mempipe.cli", "mcp", str(finished), *endpoint, f"state={tmp_path}"]
        environment = {**marked.environment, "TMPDIR": temporary}
        parameters = StdioServerParameters(command=sys.executable, args=command, env=environment)
        try:
            async with Client(mcp.client.stdio.stdio_client(parameters, errlog=stderr)) as client:
                tools = {tool.name for tool in (await client.list_tools()).tools}

                async def call(tool: str, **arguments: Any) -> dict[str, Any]:
                    result = await client.call_tool(tool, arguments)
                    assert not result.is_error, result.content
                    return result.structured_content or {}

                alone = await call("ask", question=question)
                first = await call("ask", question=question, session="new")
                second = await call("ask", question=other, session=first["session"])
                found = await call("search", query=question, num_passages=2)
                document = (await call("upload_document", text="Märchen"))["document"]
                read = await call("read_document", document=document, start=1)
                assert len(marked.processes()) > 3  # Ray's
            assert tools == {"ask", "search", "upload_document", "read_document"}
            assert (alone["answer"], alone["session"]) == (ANSWER, None)
            assert second["memory"].splitlines()[-2:] == [f"{question} {ANSWER}", f"{other} {ANSWER}"]
            partition = main_partition(read_questions(world.data.validation))
            assert [each["id"].partition("/")[0] for each in found["passages"]] == 2 * [partition]
            assert (read["text"], read["next_start"]) == ("ärchen", None)
            assert marked.survivors() == []
            assert list(Path(temporary).iterdir()) == []
        finally:
            marked.end()
    assert "Failed to parse" not in caplog.text  # what the SDK says of a line that is not of the protocol
    told = log.read_text()
    assert f"serving {finished} at http://127.0.0.1:" in told
    assert not [word for word in ("Traceback", "interrupted", "raylet") if word in told]


@pytest.fixture(scope="module")
def running(world: RunConfig, finished: Path, tmp_path_factory) -> Iterator[Running]:
    settings: dict[str, Any] = {"run": str(finished), "state": str(tmp_path_factory.mktemp("state")), "timeout_s": 60.0}
    settings |= {"retriever_replicas": {"min": 2, "max": 2}, "settings": {"generation": {"timeout_s": 60.0}}}
    held_out = read_questions(world.data.validation)
    questions = [question for question in held_out if question.partition == main_partition(held_out)]
    environment = patch.dict(os.environ, RAY_metrics_report_interval_ms="1000")
    serving = served_agent(settings, host="127.0.0.1", port=free_ports(1)[0], finishes=False)  # nobody asks at the end
    with environment, serving as (url, local):
        service = Running(url, local, settings, finished, questions)
        config = resolve(parse_section(settings, AgentServiceConfig)).main
        engines = f"generator-{weights_version(str(finished / 'huggingface'))}"
        service.evaluated = asyncio.run(evaluated(config, engines, questions))
        yield service
    assert not ray.is_initialized()


async def evaluated(config: RunConfig, engines: str, questions: Sequence[Question]) -> dict[str, Trajectory]:
    """Plays the questions as an evaluation does, greedily, on the engine of the service and an index of its own."""
    tokenizer = load_tokenizer(config.model.path)
    handle = serve.get_app_handle(engines)
    engine = ServedEngine(handle, version="", stop_token_ids=sorted(tokenizer.stop_token_ids), timeout_s=60)
    index = BatchingRetriever(Retriever(config.retrieval.index), config.retrieval)

    async def generate(token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        return await engine.generate(token_ids, max_tokens=max_tokens, sampling=SamplingConfig(temperature=0.0))

    player = make_agent(config, tokenizer=tokenizer, generate=generate, search=index.search)
    ids = {"group_id": "g", "member": 0}
    played = [player.rollout(question, trajectory_id=question.id, **ids) for question in questions]
    trajectories = await asyncio.gather(*played)
    await engine.close()
    return {q.text: trajectory for q, trajectory in zip(questions, trajectories, strict=True)}


def is_right(service: Running, question: Question, reply: dict[str, Any]) -> bool:
    """Whether the answer is what the evaluation found, message by message."""
    expected = service.evaluated[question.text]
    actions = [context.action for context in expected.contexts]
    memories = [context.memory_after for context in expected.contexts]
    tokens = [len(context.token_ids) for context in expected.contexts]
    return (
        (reply["answer"], reply["end_reason"]) == (expected.answer and expected.answer.strip(), expected.end_reason)
        and [turn["action"] for turn in reply["turns"]] == actions
        and [turn["memory_after"] for turn in reply["turns"]] == memories
        and [turn["context_tokens"] for turn in reply["turns"]] == tokens
    )


def test_the_answers_are_those_of_an_evaluation_token_for_token(running):
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda q: running.ask(q.text), running.questions))  # no part of the corpus is named
    assert replies and {reply.status_code for reply in replies} == {200}
    assert all(is_right(running, q, reply.json()) for q, reply in zip(running.questions, replies, strict=True))
    version = weights_version(str(running.run / "huggingface"))
    assert {reply.json()["model_version"] for reply in replies} == {version}


def test_it_is_ready_and_says_what_it_serves(running):
    ready = httpx.get(f"{running.url}/readyz", timeout=30).json()
    version = weights_version(str(running.run / "huggingface"))
    assert (ready["status"], ready["detail"]["generator"]) == ("ok", version) and ready["detail"]["index"]
    assert "<title>mempipe</title>" in httpx.get(running.url).text


def test_one_request_id_comes_back(running):
    answer = httpx.get(f"{running.url}/healthz")
    assert len(answer.headers.get_list("x-request-id")) == 1


def test_a_request_has_one_record_in_all_logs_and_each_log_is_bounded(running):
    named = {"x-request-id": "one-record"}
    httpx.post(
        f"{running.url}/v1/answer", json={"question": running.questions[0].text}, headers=named, timeout=TIMEOUT_S
    )
    node = ray._private.worker._global_node

    def records() -> list[str]:
        logs = [file for file in Path(node.get_logs_dir_path()).rglob("*") if file.is_file()]
        read = [file.read_text(errors="replace").splitlines() for file in logs]
        return [line for lines in read for line in lines if "one-record" in line]

    until(lambda: bool(records()))  # the record is written when the answer is sent
    assert [(json.loads(line)["path"], json.loads(line)["status"]) for line in records()] == [("/v1/answer", 200)]
    assert (node.max_bytes, node.backup_count) == (16 * 2**20, 1)


@pytest.fixture
def chat(running) -> Iterator[Callable[..., Any]]:
    """Asks the first question with the official client."""
    question = running.questions[0]
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list()
        messages: Any = [{"role": "user", "content": question.text}]

        def ask(options: dict[str, Any], **arguments: Any) -> Any:
            extra = {"mempipe": options} if options else {}
            return client.chat.completions.create(model=model.id, messages=messages, extra_body=extra, **arguments)

        yield ask


def test_the_official_client_works_unchanged(running, chat):
    plain, chunks = chat({}), list(chat({}, stream=True))
    expected = (running.evaluated[running.questions[0].text].answer or "").strip()
    assert plain.choices[0].message.content == expected
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def test_a_stream_that_the_official_client_closes_frees_its_slots_of_the_engine_within_a_second(running, chat):
    engine = replica("generator")

    def under_way() -> int:
        return ray.get(engine.get_num_ongoing_requests.remote())

    whole_s, freed_s = [], []
    for _ in range(3):  # so often that not every time is one at which the machine is busy with other things
        started = time.monotonic()
        chat(LONG_MESSAGES, temperature=0.01)
        whole_s.append(time.monotonic() - started)
        stream = chat(LONG_MESSAGES, temperature=0.01, stream=True)
        next(iter(stream))
        until(lambda: under_way() > 0)
        stream.close()
        freed_s.append(until(lambda: under_way() == 0))
    assert min(freed_s) < min(1.0, min(whole_s) / 2)
    question = running.questions[0]
    assert is_right(running, question, running.ask(question.text).json())


def until(condition: Callable[[], bool]) -> float:
    """Waits until the condition holds; returns the seconds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + TIMEOUT_S
        time.sleep(0.02)
    return time.monotonic() - started


NUMBERS: list[tuple[str, dict[str, str]]] = [
    ("requests_total", {"path": "/v1/answer", "status": "200"}),
    ("request_seconds_count", {"path": "/v1/answer"}),
    ("answers_total", {"agent": "memsearcher"}),
    ("turns_total", {"agent": "memsearcher"}),
    ("tokens_total", {"agent": "memsearcher", "kind": "read"}),
    ("tokens_total", {"agent": "memsearcher", "kind": "sampled"}),
    ("stage_seconds_count", {"stage": "generate"}),
    ("stage_seconds_count", {"stage": "search"}),
    ("memory_share_count", {"agent": "memsearcher"}),
    ("prompt_tokens_total", {"cached": "no"}),
    ("prompt_tokens_total", {"cached": "yes"}),
    ("refused_total", {"cause": "large_body"}),
]


def test_prometheus_finds_the_numbers_at_the_metrics_port_of_ray(running):
    """After a moment: Ray sends them to the port from time to time."""
    six = itertools.islice(itertools.cycle(running.questions), 6)
    longer_than_a_block_of_the_cache = " ".join(question.text for question in six)
    for _ in range(2):
        assert running.ask(longer_than_a_block_of_the_cache, budget={"question_tokens": 64}).status_code == 200
    assert status_of_a_body_without_end(running.url) == 413
    (node,) = ray.nodes()
    url = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"

    def missing() -> list[tuple[str, dict[str, str]]]:
        """Returns the numbers that no sample above 0 has."""
        families = text_string_to_metric_families(httpx.get(url, trust_env=False).text)
        samples = [sample for family in families for sample in family.samples if sample.value > 0]
        return [
            (name, labels)
            for name, labels in NUMBERS
            if not any(s.name == f"ray_mempipe_{name}" and labels.items() <= s.labels.items() for s in samples)
        ]

    until(lambda: not missing())


def status_of_a_body_without_end(url: str) -> int:
    """Returns the status of a request whose header announces a body of a terabyte."""
    address = httpx.URL(url)
    with closing(http.client.HTTPConnection(address.host, address.port, timeout=TIMEOUT_S)) as connection:
        connection.putrequest("POST", "/v1/answer")
        connection.putheader("content-length", str(10**12))
        connection.endheaders()
        return connection.getresponse().status


def test_a_session_outlives_its_replica(running):
    session = httpx.post(f"{running.url}/v1/sessions", timeout=30).json()["id"]
    assert running.ask(running.questions[0].text, session=session).status_code == 200
    before = httpx.get(f"{running.url}/v1/sessions/{session}").json()
    kill("agent")
    until_ready(running)
    assert httpx.get(f"{running.url}/v1/sessions/{session}").json() == before
    assert before["num_questions"] == 1 and running.questions[0].text in before["memory"]


def kill(deployment: str) -> None:
    """Ends one replica of the deployment, as a lost node would. No request that follows can reach it."""
    actor = replica(deployment)
    process = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    ray.kill(actor)
    until(lambda: not psutil.pid_exists(process))


def replica(deployment: str) -> Any:
    """Returns the actor of one replica."""
    actors: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    found = next(
        actor for actor in actors if actor["name"].startswith("SERVE_REPLICA::") and f"#{deployment}#" in actor["name"]
    )
    return ray.get_actor(found["name"], namespace=found["namespace"])


def until_ready(running: Running) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            if httpx.get(f"{running.url}/readyz", timeout=30).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.2)


@contextmanager
def clients(
    running: Running, number: int, check: Callable[[Question, httpx.Response], Any], *, pause_s: float = 0.0
) -> Iterator[Counter[Any]]:
    """Clients that ask one question after the other until the block ends; counts what `check` says of each answer."""
    stop, seen = threading.Event(), Counter[Any]()

    def client(first: int) -> None:
        for turn in itertools.count(first):
            if stop.is_set():
                return
            question = running.questions[turn % len(running.questions)]
            answer = running.ask(question.text)
            seen[check(question, answer)] += 1
            time.sleep(0.2 if answer.status_code == 503 else pause_s)

    with ThreadPoolExecutor(number) as pool:
        working = [pool.submit(client, first) for first in range(number)]
        try:
            yield seen
        finally:
            stop.set()
        for each in working:
            each.result(timeout=TIMEOUT_S)


def test_strangers_keep_no_client_from_its_answer(running):
    """All attacks at once, small ones; `python -m benchmarks.strangers` makes large ones."""
    address, before = running.url.removeprefix("http://").split(":"), proxy_mebibytes()
    limits = ["--at-once", "20", "--seconds", "6"]
    commands = [[sys.executable, "-m", "tools.strangers", attack, *address, *limits] for attack in ATTACKS]
    with ExitStack() as stack:
        attacks = [
            stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
            for command in commands
        ]
        asked = 0
        while any(attack.poll() is None for attack in attacks) or asked < 2:
            question = running.questions[asked % len(running.questions)]
            assert is_right(running, question, running.ask(question.text).json())
            assert httpx.get(f"{running.url}/readyz", timeout=30).status_code == 200
            asked += 1
        ended = {name: json.loads(attack.communicate()[0]) for name, attack in zip(ATTACKS, attacks, strict=True)}
    assert all(ended.values())
    assert set(ended["slow-body"]) <= {"403", "open", "unconnected"}  # at once, without the body
    assert ended["slow-body"]["403"] >= 1
    assert "200" not in ended["trailers"] and "200" not in ended["huge-header"]
    assert before > 0 and proxy_mebibytes() < before + 64


async def test_a_burst_is_answered_or_refused_at_once(running):
    """More requests than Serve lets wait: it passed a queue on at four a second for each replica."""
    address = running.url.removeprefix("http://").split(":")
    body = json.dumps({"question": running.questions[0].text})
    headers = "host: 127.0.0.1", "connection: close", "content-type: application/json", f"content-length: {len(body)}"
    request = "\r\n".join(["POST /v1/answer HTTP/1.1", *headers, "", body]).encode()

    async def post() -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]

    async with asyncio.timeout(30):
        answers = await asyncio.gather(*(post() for _ in range(400)))
    refused = [json.loads(body) for status, body in answers if status == 503]
    assert {status for status, _ in answers} == {200, 503}
    messages = Counter(re.sub("[0-9]+", "N", each["error"]["message"]) for each in refused)
    assert set(messages) == {
        "N requests are in flight, so that this one has no place now",
        "no replica has a place for this request now",
    }


def proxies() -> list[psutil.Process]:
    """The processes of Serve's proxy."""
    return processes_named("ProxyActor")


def processes_named(actor: str) -> list[psutil.Process]:
    """The processes of the actors of a class, which are descendants of this process."""
    descendants = psutil.Process().children(recursive=True)
    return [process for process in descendants if command_line(process).startswith(f"ray::{actor}")]


def proxy_mebibytes() -> float:
    """The memory of Serve's proxy."""
    return sum(process.memory_full_info().uss for process in proxies()) / 2**20


def test_a_proxy_that_died_is_replaced_after_three_checks_of_two_seconds(running):
    (proxy,) = proxies()
    (controller,) = processes_named("ServeController")
    assert (front.CHECK_EVERY_S, controller.environ()[front.CHECK_VARIABLE]) == (2.0, "2.0")
    proxy.kill()
    died = time.monotonic()
    until(lambda: bool(proxies()))
    assert time.monotonic() - died < 20  # three checks of ten seconds, Serve's default, take longer
    until_ready(running)
    question = running.questions[0]
    assert is_right(running, question, running.ask(question.text).json())


@pytest.mark.jobs
def test_replicas_that_are_killed_under_load_cost_no_client_a_wrong_answer(running):
    def check(question: Question, answer: httpx.Response) -> tuple[int, bool]:
        if answer.status_code == 200:
            return 200, is_right(running, question, answer.json())
        return answer.status_code, int(answer.headers.get("retry-after", 0)) >= 1

    with clients(running, 32, check) as seen:
        for deployment in ("retriever", "generator", "agent"):
            time.sleep(2)
            kill(deployment)
        time.sleep(2)
    assert set(seen) <= {(200, True), (503, True)} and seen[200, True] >= 32
    until_ready(running)
    question = running.questions[0]
    assert is_right(running, question, running.ask(question.text).json())


def test_new_weights_take_over_without_a_failed_request(running):
    """Afterwards other weights are served."""
    from mempipe.engines.tiny import build_model

    until_ready(running)
    old = weights_version(str(running.run / "huggingface"))
    build_model(running.run / "huggingface", seed=99)
    write_checksums(running.run / "huggingface")  # as an export does
    new = weights_version(str(running.run / "huggingface"))
    assert old != new

    def check(question: Question, answer: httpx.Response) -> tuple[int, str, bool]:
        version = answer.json().get("model_version")
        return answer.status_code, version, version == new or is_right(running, question, answer.json())

    with clients(running, 4, check, pause_s=0.2) as seen:  # an engine starts beside them, on the same cores
        until(lambda: bool(seen))
        assert running.local.reload() == new
        until(lambda: new in [version for _, version, _ in list(seen)])
    assert set(seen) == {(200, old, True), (200, new, True)}
    assert running.ask("who ?").json()["model_version"] == new
    assert running.local.reload() == new  # nothing to do


def test_an_upgrade_of_agent_and_index_refuses_nobody_and_mixes_nothing(running, world, tmp_path, monkeypatch):
    """Last: afterwards another index is served. `python -m benchmarks.upgrade` makes one after the other, with many
    requests."""
    monkeypatch.setattr("benchmarks.upgrade.REST_S", 0.0)
    until_ready(running)
    partition = running.questions[0].partition
    index = other_index(world.retrieval.index, {partition}, to=tmp_path / "index")
    of_run = {**running.settings["settings"], "retrieval": {"index": index}}
    service = OnLocalServe(running.local, running.settings)
    upgrades = [lambda: service.change(name="another", settings=of_run)]
    questions = [(question.text, partition) for question in running.questions]
    seen = upgraded(running.url, upgrades, questions, num_requests=30, num_clients=2)
    assert faults(seen, num_upgrades=len(upgrades)) == []
    assert seen.statuses["200"] >= 30
    assert {versions.agent for versions in seen.replies} == {"another", running.run.name}
    assert running.ask("who ?", partition=partition).json()["model"] == "another"
