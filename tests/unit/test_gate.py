"""The gate before the routes: what it lets in, what it turns away, and what it ends."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import numpy as np
import pytest
from simulated_time import simulated
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from mempipe.serve.http import gate as gates
from mempipe.serve.http.gate import Gate


class Work:
    """An application that echoes the length of the body once it is told to, and counts what it does."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.num_begun = self.num_cancelled = self.num_ended = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_begun += 1
        try:
            body = (await receive()).get("body", b"") if scope["method"] == "POST" else b""
            if scope["path"] == "/stream":
                await StreamingResponse(self._pieces())(scope, receive, send)
                return
            if scope["path"] != "/now":
                await self.go_on.wait()
            await JSONResponse(len(body))(scope, receive, send)
            await asyncio.sleep(0)
            self.num_ended += 1
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield b"first"
        await self.go_on.wait()
        yield b"last"


def client_of(app: Any, **limits: Any) -> httpx.AsyncClient:
    gate = Gate(app, **{"max_body_bytes": 100, "max_in_flight": 2, **limits})
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=gate), base_url="http://service")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_body_passes_whole_up_to_its_limit():
    async with client_of(Work()) as client:
        assert (await client.post("/now", content=b"x" * 100)).json() == 100
        refused = await client.post("/now", content=b"x" * 101)
    assert (refused.status_code, "more than 100 bytes" in refused.json()["detail"]) == (413, True)


@pytest.mark.parametrize(
    ("encoding", "status"), [("gzip", 415), ("Deflate", 415), ("x" * 9999, 415), ("identity", 200), ("", 200)]
)
async def test_a_compressed_body_is_refused_by_the_name_of_its_encoding(encoding, status):
    async with client_of(Work()) as client:
        reply = await client.post("/now", content=b"x", headers={"content-encoding": encoding})
    assert reply.status_code == status
    assert status == 200 or (encoding[:40].lower() in reply.text and len(reply.text) < 200)


def test_a_body_that_does_not_arrive_is_refused(monkeypatch):
    monkeypatch.setattr(gates, "BODY_TIMEOUT_S", 0.05)

    async def slow() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.sleep(5)

    async def send() -> httpx.Response:
        async with client_of(Work()) as client:
            return await client.post("/now", content=slow())

    refused = simulated(send())
    assert (refused.status_code, "0.05 s" in refused.json()["detail"]) == (408, True)


async def test_requests_beyond_the_limit_are_refused_and_get_in_once_there_is_room():
    work = Work()
    async with client_of(work) as client:
        under_way = [asyncio.create_task(client.post("/", content=b"a")) for _ in range(2)]
        await until(lambda: work.num_begun == 2)
        refused = await client.post("/")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "2 requests are in flight" in refused.json()["detail"]
        assert (await client.get("/now")).status_code == 200
        work.go_on.set()
        assert [(await task).json() for task in under_way] == [1, 1]
        assert (await client.post("/", content=b"abc")).json() == 3
    assert (work.num_ended, work.num_cancelled) == (4, 0)


def test_an_answer_that_takes_too_long_is_refused_and_its_work_ends():
    async def ask_twice() -> int:
        work = Work()
        async with client_of(work, timeout_s=0.05, max_in_flight=1) as client:
            for _ in range(2):  # the second finds the place free
                refused = await client.post("/")
                assert (refused.status_code, "no answer within 0.05 s" in refused.json()["detail"]) == (503, True)
        return work.num_cancelled

    assert simulated(ask_twice()) == 2


async def test_the_refusal_has_the_format_of_the_service():
    def refuse(status: int, reason: str, retry_after_s: int) -> JSONResponse:
        return JSONResponse({"error": reason}, status)

    async with client_of(Work(), max_body_bytes=1, refuse=refuse) as client:
        assert "error" in (await client.post("/now", content=b"xx")).json()


class Connection:
    """One request by hand, since httpx's transport hangs up only after a whole answer."""

    def __init__(self, gate: Gate, path: str) -> None:
        self.events: asyncio.Queue[Message] = asyncio.Queue()
        self.events.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        self.sent: list[Message] = []
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "asgi": {"spec_version": "2.4"}}
        self.request = asyncio.create_task(gate(scope, self.events.get, self._send))

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    async def ended(self) -> None:
        async with asyncio.timeout(60):
            await self.request


@pytest.mark.parametrize("path", ["/", "/stream"])
async def test_work_ends_when_the_client_hangs_up(path):
    work = Work()
    gate = Gate(work, max_body_bytes=100, max_in_flight=1)
    connection = Connection(gate, path)
    await until(lambda: work.num_begun == 1 and len(connection.sent) == (2 if path == "/stream" else 0))
    connection.events.put_nowait({"type": "http.disconnect"})
    await connection.ended()
    assert work.num_cancelled == 1
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=gate), base_url="http://service") as client:
        assert (await client.post("/now")).status_code == 200  # its place is free


def test_a_stream_that_takes_too_long_ends_and_nobody_can_take_it_for_whole():
    async def listen() -> tuple[int, list[bool | None]]:
        work = Work()
        connection = Connection(Gate(work, max_body_bytes=100, max_in_flight=1, timeout_s=0.05), "/stream")
        await connection.ended()
        return work.num_cancelled, [message.get("more_body") for message in connection.sent]

    assert simulated(listen()) == (1, [None, True])


async def test_an_error_of_the_application_passes_through():
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError

    async with client_of(broken) as client:
        with pytest.raises(ZeroDivisionError):
            await client.post("/")


SERVICE_S = 0.1
NUM_SLOTS = 4


async def engine(
    scope: Scope, receive: Receive, send: Send, *, slots: asyncio.Semaphore, seconds: float = SERVICE_S
) -> None:
    """Works NUM_SLOTS requests at a time, and lets the others wait, as an engine does."""
    async with slots:
        await asyncio.sleep(seconds)
    await JSONResponse("done")(scope, receive, send)


async def load(rate: float, *, max_in_flight: int) -> list[tuple[int, float]]:
    """Status and seconds of the requests of ten seconds that arrive at `rate` per second, whatever becomes of them."""
    slots, clock = asyncio.Semaphore(NUM_SLOTS), asyncio.get_running_loop().time

    async def request(client: httpx.AsyncClient, number: int) -> tuple[int, float]:
        await asyncio.sleep(number / rate)
        began = clock()
        return (await client.post("/")).status_code, clock() - began

    async with client_of(functools.partial(engine, slots=slots), max_in_flight=max_in_flight) as client:
        return await asyncio.gather(*(request(client, number) for number in range(int(10 * rate))))


def p99(answers: list[tuple[int, float]]) -> float:
    """Returns the 99th percentile of the seconds of answered requests."""
    return float(np.percentile([seconds for status, seconds in answers if status == 200], 99))


@pytest.mark.slow
def test_at_four_times_the_sustainable_rate_load_is_shed_and_what_is_let_in_stays_fast():
    """At most twice as many requests are let in as the engine works on, so none waits for more than one other."""
    sustainable = NUM_SLOTS / SERVICE_S
    alone = simulated(load(1.0, max_in_flight=2 * NUM_SLOTS))
    assert {status for status, _ in alone} == {200} and p99(alone) == pytest.approx(SERVICE_S)
    overloaded = simulated(load(4 * sustainable, max_in_flight=2 * NUM_SLOTS))
    shed = [seconds for status, seconds in overloaded if status == 503]
    assert {status for status, _ in overloaded} == {200, 503} and max(shed) < SERVICE_S / 10
    assert len(shed) / len(overloaded) == pytest.approx(3 / 4, abs=0.02)  # the engine is never idle
    assert p99(overloaded) <= 3 * p99(alone)
    queued = simulated(load(4 * sustainable, max_in_flight=10_000))
    assert p99(queued) > 100 * p99(alone)


async def crowd(num_clients: int, *, header: str, retries: int, seconds: float) -> list[int]:
    """The last status that each client got, of those who all ask at once and come again when `header` tells them to."""
    slots = asyncio.Semaphore(NUM_SLOTS)

    async def ask(client: httpx.AsyncClient) -> int:
        for left in reversed(range(retries + 1)):
            answer = await client.post("/")
            if answer.status_code != 503 or not left:
                break
            await asyncio.sleep(int(answer.headers[header]) / (1000 if header.endswith("ms") else 1))
        return answer.status_code

    app = functools.partial(engine, slots=slots, seconds=seconds)
    async with client_of(app, max_in_flight=NUM_SLOTS) as client:
        return await asyncio.gather(*(ask(client) for _ in range(num_clients)))


@pytest.mark.parametrize("header, seconds", [("retry-after-ms", 0.1), ("retry-after-ms", 1.0), ("retry-after", 1.0)])
def test_a_crowd_that_comes_again_when_it_is_told_to_is_answered_whole(header, seconds):
    """If each is told to come again after a second, 20 to 36 of the 100 clients are answered in nine attempts."""
    assert simulated(crowd(100, header=header, retries=8, seconds=seconds)) == [200] * 100
