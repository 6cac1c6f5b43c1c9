"""What stands before the service: slow, large and endless requests cost it nothing, and others are answered."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import httpx
import pytest
from front_builders import ASKED, echo, head, served, status_of, until
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse

from mempipe.serve.http import bodies, connections, front, refusals, strangers
from mempipe.serve.http.deadline import in_time
from mempipe.serve.http.gate import Gate


@pytest.fixture
def address(monkeypatch) -> Iterator[tuple[str, int]]:
    ASKED.clear()
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 60.0)
    monkeypatch.setattr(bodies, "TIMEOUT_S", 0.5)
    with served(echo) as address:
        yield address


def post(address: tuple[str, int], body: bytes = b"hello", path: str = "/v1/answer") -> httpx.Response:
    return httpx.post(f"http://{address[0]}:{address[1]}{path}", content=body, timeout=60)


def test_a_whole_body_is_passed_on(address, monkeypatch):
    monkeypatch.setattr(bodies, "TIMEOUT_S", 60.0)
    assert post(address).text == "hello"
    assert post(address, b"x" * 2**20).status_code == 200

    def pieces() -> Iterator[bytes]:
        yield from (b"a", b"b", b"c")

    assert httpx.post(f"http://{address[0]}:{address[1]}/v1/answer", content=pieces()).text == "abc"


def test_a_slow_body_is_408_and_never_takes_a_place(address):
    with socket.create_connection(address) as connection:
        connection.sendall(head() + b"x")
        assert status_of(connection) == 408
    assert ASKED == []


def test_a_body_that_is_slower_than_the_least_rate_is_408(address, monkeypatch):
    monkeypatch.setattr(bodies, "LEAST_RATE", 1000)
    with socket.create_connection(address) as connection:
        started = time.monotonic()
        connection.sendall(head(length=10_000) + b"x" * 300)  # which buys 0.3 seconds
        assert status_of(connection) == 408
        assert time.monotonic() - started > 0.6


def test_a_body_that_is_too_large_is_413_before_it_is_read(address):
    with socket.create_connection(address) as connection:
        connection.sendall(head(length=2**20 + 1))
        assert status_of(connection) == 413
    with socket.create_connection(address) as connection:
        connection.sendall(head(length=0).replace(b"content-length: 0", b"transfer-encoding: chunked"))
        connection.sendall(b"%x\r\n" % (2**20 + 1) + b"x" * (2**20 + 1) + b"\r\n")
        assert status_of(connection) == 413
    assert ASKED == []


def test_slow_bodies_of_one_address_are_limited_and_others_are_answered(address, monkeypatch):
    monkeypatch.setattr(bodies, "TIMEOUT_S", 600.0)
    monkeypatch.setattr(bodies, "MAX_PER_ADDRESS", 3)
    reading = []

    async def read_body(*arguments: Any, **settings: Any) -> bytes:
        reading.append(arguments)
        return await read(*arguments, **settings)

    read = bodies.read_body
    monkeypatch.setattr(bodies, "read_body", read_body)
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(address)) for _ in range(4)]
        for connection in slow[:3]:
            connection.sendall(head() + b"x")
        until(lambda: len(reading) == 3)
        slow[3].sendall(head() + b"x")
        assert status_of(slow[3]) == 429
        assert post(address, b"", "/healthz").status_code == 200
    until(lambda: post(address).status_code == 200)  # those that hung up count no more


def test_five_hundred_slow_sockets_leave_the_others_alone(address, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_PER_ADDRESS", 500)
    monkeypatch.setattr(bodies, "MAX_BODIES", 500)
    monkeypatch.setattr(bodies, "TIMEOUT_S", 600.0)
    with ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(socket.create_connection(address)).sendall(head() + b"x")
        assert httpx.get(f"http://{address[0]}:{address[1]}/healthz", timeout=60).status_code == 200
    assert ASKED == ["/healthz"]


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\nx: "])
def test_a_header_that_does_not_come_closes_the_connection(address, sent, monkeypatch):
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.5)
    with socket.create_connection(address) as connection:
        connection.sendall(sent)
        started = time.monotonic()
        assert status_of(connection) is None
        assert time.monotonic() - started < 30
    assert ASKED == []


def test_a_second_header_has_its_deadline_too(address, monkeypatch):
    with socket.create_connection(address) as connection:
        connection.sendall(head(length=2) + b"ab")
        assert status_of(connection) == 200
        monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.5)
        connection.sendall(b"GET / HT")
        assert status_of(connection) is None


def test_a_connection_lasts_when_a_body_comes_after_its_refusal(address, monkeypatch):
    monkeypatch.setattr(connections, "MAX_UNREAD_BYTES", 2**21)
    with socket.create_connection(address) as connection:
        connection.sendall(head(length=2**20 + 1))
        assert status_of(connection) == 413
        monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 1.0)
        connection.sendall(b"x" * 2**20)
        connection.sendall(b"x")
        time.sleep(1.5)  # longer than a header may take
        connection.sendall(head(length=2) + b"ab")
        assert status_of(connection) == 200


def test_a_body_that_comes_after_its_refusal_has_a_deadline(address, monkeypatch):
    with socket.create_connection(address) as connection:
        connection.sendall(head(length=2**20 + 1))
        assert status_of(connection) == 413
        monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.5)
        connection.sendall(b"x")
        assert status_of(connection) is None


def test_a_header_without_end_closes_the_connection(address):
    with socket.create_connection(address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n")
        with pytest.raises(OSError):
            for _ in range(10_000):
                connection.sendall(b"x: " + b"y" * 1000 + b"\r\n")
                time.sleep(0.001)


def test_an_address_has_so_many_connections(address, monkeypatch):
    monkeypatch.setattr(connections, "MAX_PER_ADDRESS", 3)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(address))
        until(lambda: connections.GuardedProtocol.per_address.total() >= 3)
        assert status_of(stack.enter_context(socket.create_connection(address))) is None
    until(lambda: connections.GuardedProtocol.per_address.total() == 0)
    assert post(address).status_code == 200
    assert connections.GuardedProtocol.per_address.total() <= 1


async def hanging(scope: Any, receive: Any, send: Any) -> None:
    """Answers as Serve does where a replica cannot be reached: when it is cancelled, with 499."""
    if scope["path"].endswith("/begun"):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    await PlainTextResponse("cancelled", 499)(scope, receive, send)


def test_a_request_whose_replica_cannot_be_reached_is_given_up(monkeypatch):
    monkeypatch.setenv(front.TIMEOUT_VARIABLE, "0.2")
    monkeypatch.setattr(strangers, "TIMEOUT_S", 0.2)
    with served(hanging) as address:
        for path in ("/v1/answer", "/", "/healthz"):
            answer = post(address, path=path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["message"] == "no answer within 0.2 s"
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            post(address, path="/v1/begun")


async def streaming(scope: Any, receive: Any, send: Any) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"data: 1\n\n", b"", b"data: [DONE]\n\n"):
            yield piece

    await StreamingResponse(pieces())(scope, receive, send)


@pytest.mark.parametrize(("app", "body"), [(streaming, b"data: 1\n\ndata: [DONE]\n\n"), (echo, b"ab")])
def test_a_client_of_http_1_0_reads_a_stream_without_chunks_until_the_connection_ends(app, body):
    with served(app) as address, socket.create_connection(address, timeout=60) as connection:
        connection.sendall(head(length=2).replace(b"HTTP/1.1", b"HTTP/1.0") + b"ab")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    header, _, received = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in header and b"connection: close" in header
    assert received == body


async def full(scope: Any, receive: Any, send: Any) -> None:
    """Answers as Serve does where more than `max_queued_requests` wait; /v1/models answers as a replica does."""
    if scope["path"] == "/v1/models":
        await JSONResponse({"own": 1}, 503, {"retry-after": "7"})(scope, receive, send)
    else:
        await PlainTextResponse("dropped due to backpressure", 503)(scope, receive, send)


def test_what_serve_has_no_place_for_is_said_in_the_form_of_the_api():
    with served(full) as address:
        answer = post(address)
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            503,
            "no replica has a place for this request now",
        )
        called = post(address, path="/mcp").json()
        assert called["error"]["data"] == {"status": 503, "retry_after_s": ANY}
        told = {int(post(address).headers["retry-after"]) for _ in range(20)}
        assert len(told) > 1 and all(1 <= seconds <= 10 for seconds in told)
        own = post(address, path="/v1/models")
        assert (own.json(), own.headers["retry-after"]) == ({"own": 1}, "7")
        for path in ("/", "/-/healthz"):  # another application's, and the proxy's own
            assert httpx.get(f"http://{address[0]}:{address[1]}{path}").text == "dropped due to backpressure"


async def test_a_timeout_of_the_application_is_not_the_end_of_the_time():
    async def timing_out(scope: Any, receive: Any, send: Any) -> None:
        raise TimeoutError("of the application")

    with pytest.raises(TimeoutError, match="of the application"):
        await in_time(timing_out, {}, None, None, timeout_s=60.0, cause="late_replica")  # type: ignore[arg-type]


def test_a_client_does_not_change_the_limits_of_serve():
    headers: list[Any] = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        headers.extend(scope["headers"])
        await PlainTextResponse()(scope, receive, send)

    with served(note) as address:
        sent = {"x-request-timeout-seconds": "0", "x-request-disconnect-disabled": "?1", "x-request-id": "a"}
        sent |= {"x-session-id": "Jos\xe9", "serve_multiplexed_model_id": "b"}
        encoded = [(name, value.encode("latin-1")) for name, value in sent.items()]
        httpx.get(f"http://{address[0]}:{address[1]}/v1/models", headers=encoded)
    assert (b"x-request-id", b"a") in headers and not {name.decode() for name, _ in headers} & {*sent} - {
        "x-request-id"
    }


def test_what_is_refused_is_counted_by_its_cause(address, monkeypatch):
    counts = Counter[str]()
    counted = SimpleNamespace(inc=lambda number, tags: counts.update({tags["cause"]: number}))
    monkeypatch.setattr(refusals, "_metric", counted)
    for sent, status in ((head() + b"x", 408), (head(length=2**20 + 1), 413)):
        with socket.create_connection(address) as connection:
            connection.sendall(sent)
            assert status_of(connection) == status
    for sent, status in ((b"hello\r\n\r\n", 400), (head(x="y" * 70_000), 431)):
        with socket.create_connection(address) as connection:
            connection.sendall(sent)
            assert status_of(connection) == status
    monkeypatch.setattr(bodies, "MAX_PER_ADDRESS", 0)
    assert post(address).status_code == 429
    monkeypatch.setattr(strangers, "MAX_PER_ADDRESS", 0)
    assert post(address, b"", "/healthz").status_code == 429
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.1)
    with socket.create_connection(address) as connection:
        assert status_of(connection) is None
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 60.0)
    monkeypatch.setattr(connections, "MAX_PER_ADDRESS", 0)
    with socket.create_connection(address) as connection:
        assert status_of(connection) is None
    causes = (
        "malformed",
        "long_header",
        "slow_body",
        "large_body",
        "bodies_of_address",
        "requests_of_address",
        "slow_header",
    )
    assert counts == dict.fromkeys([*causes, "connections_of_address"], 1)


async def test_a_body_that_no_route_reads_is_not_waited_for():
    async def hangs() -> Any:
        raise AssertionError("nothing is read")

    statuses: list[int] = []

    async def note(message: Any) -> None:
        statuses.append(message.get("status", 0))

    gate = Gate(echo, max_body_bytes=10, max_in_flight=1, takes_bodies="/v1/")
    await gate({"type": "http", "method": "POST", "path": "/", "headers": []}, hangs, note)
    assert statuses[0] == 200
