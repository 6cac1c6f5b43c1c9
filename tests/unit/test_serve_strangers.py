"""Strangers without a key: they cost no replica anything, hold no memory, and keep nobody out."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, BinaryIO

import httpx
import psutil
import pytest
from front_builders import ASKED, echo, head, served, status_of, until
from starlette.responses import PlainTextResponse

from mempipe.answers.errors import ApiError
from mempipe.serve.http import bodies, connections, probes, strangers
from mempipe.serve.http.keys import VARIABLE, new_key
from mempipe.serve.http.probes import SharedHealth
from mempipe.serve.http.strangers import keys_of_proxy
from mempipe.serve.http.turns import Turns

KEY, RECORD = new_key("ann")
BEARER = {"authorization": f"Bearer {KEY}"}
MAY_GROW = MAY_SEND = 32 * 2**20
"""Bytes of memory that a connection without limits passes within a second; sockets hold less of what is sent."""


@pytest.fixture
def address(monkeypatch, tmp_path) -> Iterator[tuple[str, int]]:
    (tmp_path / "keys").write_text(RECORD.line())
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv(strangers.VARIABLE, str(tmp_path / "keys"))
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 600.0)
    ASKED.clear()
    with served(echo) as address:
        yield address


def get(address: tuple[str, int], path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"http://{address[0]}:{address[1]}{path}", headers=headers, timeout=60)


def test_a_body_without_a_key_is_401_before_it_arrives(address):
    for path in ("/v1/answer", "/mcp"):
        with socket.create_connection(address) as connection:
            connection.sendall(head(path))
            assert status_of(connection) == 401
    assert get(address, "/v1/models", authorization=f"Bearer {new_key('ann')[0]}").status_code == 401
    assert ASKED == []
    assert get(address, "/v1/models", **BEARER).status_code == 200


def test_the_proxy_says_what_the_replicas_would_say(address):
    answer, call = get(address, "/v1/models"), get(address, "/mcp")
    assert answer.json()["error"]["code"] == "invalid_api_key" and call.json()["error"]["data"]["status"] == 401
    assert {each.headers["www-authenticate"] for each in (answer, call)} == {'Bearer realm="mempipe"'}


def test_the_proxy_reads_the_keys_of_the_variables(monkeypatch, tmp_path, caplog):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(strangers.VARIABLE, raising=False)
    assert keys_of_proxy() is None
    monkeypatch.setenv(strangers.VARIABLE, "")
    assert (ring := keys_of_proxy()) is not None and not ring.are_needed
    monkeypatch.setenv(VARIABLE, RECORD.line())
    assert (ring := keys_of_proxy()) is not None and ring.find(RECORD.id) == RECORD
    monkeypatch.setenv(strangers.VARIABLE, str(tmp_path / "none"))
    assert keys_of_proxy() is None and "leaves the API keys to the replicas" in caplog.text


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (b"0\r\n", b"".join(b"a%d: %s\r\n" % (number, b"y" * 50) for number in range(500))),  # trailers
        (b"0\r\na: ", b"y" * 30_000),  # one trailer
        (b"1;", b"x" * 30_000),  # an extension of a chunk
        (b"", b"1\r\nx\r\n" * 5000),  # more sizes than body
    ],
)
def test_what_is_sent_beside_a_body_is_limited(address, first, then):
    chunked = head(length=0, **BEARER).replace(b"content-length: 0", b"transfer-encoding: chunked")
    assert is_cut_off(address, chunked + first, then)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (b"", b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" * 500),  # requests that wait for earlier answers
        (b"", b"\r\n" * 10_000),
        (head(length=10**12), b"x" * 60_000),  # a body that was refused
        (head("/nowhere", length=10**12), b"x" * 60_000),
    ],
)
def test_what_comes_besides_a_request_is_limited(address, first, then):
    assert is_cut_off(address, first, then)


def is_cut_off(address: tuple[str, int], first: bytes, then: bytes) -> bool:
    """Whether a connection that sends `then` over and over is closed before MAY_SEND bytes, without taking memory."""
    before, sent = psutil.Process().memory_info().rss, 0
    with socket.create_connection(address) as connection:
        connection.settimeout(60)
        try:
            connection.sendall(first)
            while sent < MAY_SEND:
                connection.sendall(then)
                sent += len(then)
            return False
        except ConnectionError:
            return psutil.Process().memory_info().rss < before + MAY_GROW


@pytest.mark.parametrize("before", [b"", head("/v1/models", length=2, **BEARER) + b"ab"])
def test_a_header_of_more_than_64_kibibytes_is_refused_though_it_arrives_at_once(address, before):
    for size, is_taken in ((60_000, True), (70_000, False)):
        ASKED.clear()
        with socket.create_connection(address) as connection, suppress(ConnectionError):
            connection.sendall(before + head("/v1/answer", length=2, **BEARER, x="y" * size) + b"ab")
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        assert ("/v1/answer" in ASKED) is is_taken


BAD_REQUESTS = {
    "no method": (b"hello\r\n\r\n", 400, "the form of HTTP/1.1"),
    "a space in a name": (head("/v1/answer", length=0, **{"a b": "c"}), 400, "the form of HTTP/1.1"),
    "two lengths": (head("/v1/answer", length=0, **{"Content-Length": "1"}), 400, "the form of HTTP/1.1"),
    "two hosts": (head("/v1/answer", length=0, Host="y"), 400, "one Host header; this one has 2"),
    "a long header": (head("/v1/answer", length=0, x="y" * 70_000), 431, "more than 65536 bytes"),
    "a long header without end": (head("/v1/answer", length=0, x="y" * 70_000)[:-2], 431, "more than 65536 bytes"),
}


@pytest.mark.parametrize("before", [b"", head("/v1/models", length=2, **BEARER) + b"ab"])
@pytest.mark.parametrize(("sent", "status", "reason"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_what_is_no_request_is_refused_in_the_form_of_the_api(address, caplog, before, sent, status, reason):
    with socket.create_connection(address, timeout=60) as connection, connection.makefile("rb") as replies:
        if before:
            connection.sendall(before)
            assert read_reply(replies)[:2] == (200, b"ab")
        connection.sendall(sent)
        got, body, fields = read_reply(replies)
        assert replies.read() == b""  # the connection ends
    error = json.loads(body)["error"]
    assert (got, error["type"], fields["content-type"]) == (status, "invalid_request_error", "application/json")
    assert reason in error["message"] and fields["connection"] == "close"
    assert "/v1/answer" not in ASKED and not caplog.records  # a stranger fills no log


def test_a_refusal_is_not_taken_for_the_answer_of_an_earlier_request(address):
    """The earlier one waits for its body, and what comes in its place is no chunk."""
    chunked = head(**BEARER).replace(b"content-length: 100", b"transfer-encoding: chunked")
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(chunked + b"2\r\nab\r\n")
        until(lambda: connections.GuardedProtocol.per_address.total() == 1)
        connection.sendall(b"no chunk\r\n")
        assert status_of(connection) is None


def read_reply(replies: BinaryIO) -> tuple[int, bytes, dict[str, str]]:
    status = int(replies.readline().split()[1])
    fields = dict(line.decode().lower().strip().split(": ", 1) for line in iter(replies.readline, b"\r\n"))
    return status, replies.read(int(fields["content-length"])), fields


def test_a_whole_body_in_small_chunks_is_taken(address):
    def pieces() -> Iterator[bytes]:
        yield from (b"%0100d" % number for number in range(5000))

    url = f"http://{address[0]}:{address[1]}/v1/answer"
    assert httpx.post(url, content=pieces(), headers=BEARER, timeout=20).status_code == 200


WEB_SOCKET = {
    "connection": "upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
}


def test_an_upgrade_to_a_web_socket_is_an_ordinary_request_and_is_counted_out_again(address):
    for _ in range(5):
        assert get(address, "/v1/models", **WEB_SOCKET).status_code == 401
    assert ASKED == []
    until(lambda: connections.GuardedProtocol.per_address.total() == 0)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/realtime", "/", "/ws"])
def test_a_client_of_web_sockets_reads_which_path_to_use(address, path):
    """As `responses.connect` of the official client asks."""
    answer = get(address, path, **WEB_SOCKET, **BEARER)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "unknown_url")
    assert "POST /v1/responses" in error["message"]
    assert ASKED == []


@pytest.mark.parametrize("cut", [None, "body", "header", "name", "end"])
@pytest.mark.parametrize("name", ["Upgrade", "upgrade"])
def test_a_request_that_asks_for_http_2_keeps_its_body(address, name, cut):
    """As Java's HttpClient and `curl --http2` send it to an address without TLS."""
    body = b'{"question": "a\r\nUpgrade: b"}'
    fields = {"Host": "x", "Connection": "Upgrade, HTTP2-Settings", name: "h2c", "HTTP2-Settings": "AAMAAABkAAQAAP__"}
    fields |= {"Content-Length": str(len(body)), "Authorization": BEARER["authorization"]}
    sent = "".join(f"{key}: {value}\r\n" for key, value in fields.items())
    head = f"POST /v1/answer HTTP/1.1\r\n{sent}\r\n".encode()
    with socket.create_connection(address, timeout=60) as connection:
        whole, first = head + body, head.index(name.encode())
        at = {None: 0, "body": len(head), "header": first + len(name) + 1, "name": first + 3, "end": len(head) - 2}[cut]
        for part in (whole[:at], whole[at:]):
            connection.sendall(part)
            time.sleep(0.05)
        reply = b""
        while not reply.endswith(body):
            received = connection.recv(65536)
            assert received, reply
            reply += received
    assert reply.startswith(b"HTTP/1.1 200 ")


def test_lines_that_end_without_a_carriage_return_are_refused_at_once(address):
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\nHost: x\n\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_a_second_request_whose_header_comes_byte_by_byte_is_answered(address):
    head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: {BEARER['authorization']}\r\n\r\n".encode()
    with socket.create_connection(address, timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for request in ([head], [head[i : i + 1] for i in range(len(head))], [head[:20], head[20:] + head]):
            for part in request:
                connection.sendall(part)
                time.sleep(0.001)
        reply = b""
        while reply.count(b"HTTP/1.1 200 ") < 4:
            received = connection.recv(65536)
            assert received, reply
            reply += received


def test_a_client_that_asks_before_it_sends_its_body_gets_an_answer(address):
    """As curl does with a body of more than a mebibyte."""
    body = b'{"question": "a"}'
    fields = f"Host: x\r\nAuthorization: {BEARER['authorization']}\r\nContent-Length: {len(body)}\r\n"
    head = f"POST /v1/answer HTTP/1.1\r\n{fields}Expect: 100-continue\r\n\r\n".encode()
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(head[:40])
        time.sleep(0.05)
        connection.sendall(head[40:])
        assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_connections_that_wait_keep_nobody_out(address, monkeypatch):
    """From many addresses, more than there may be connections."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 20)
    with ExitStack() as stack:
        first = stack.enter_context(socket.create_connection(address, source_address=("127.0.0.2", 0)))
        for number in range(60):
            source = (f"127.0.1.{number + 1}", 0)
            stack.enter_context(socket.create_connection(address, source_address=source))
        assert get(address, "/v1/models", **BEARER).status_code == 200
        assert status_of(first) is None
        assert connections.GuardedProtocol.per_address.total() <= 20


def test_an_answered_connection_that_stays_makes_room_too(address, monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 5)
    with ExitStack() as stack:
        for number in range(5):
            source = (f"127.0.1.{number + 1}", 0)
            kept = stack.enter_context(socket.create_connection(address, source_address=source))
            kept.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            assert status_of(kept) == 200
        assert get(address, "/v1/models", **BEARER).status_code == 200


def test_there_are_descriptors_left_for_other_things_than_connections(monkeypatch):
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (1024, 4096))
    assert connections.max_connections() == 768


def test_a_client_that_does_not_read_is_let_go(monkeypatch):
    monkeypatch.setattr(connections, "STALL_TIMEOUT_S", 0.3)
    is_asked = threading.Event()

    async def page(scope: Any, receive: Any, send: Any) -> None:
        is_asked.set()
        await PlainTextResponse(b"x" * 2**24)(scope, receive, send)

    with served(page) as address, socket.create_connection(address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert is_asked.wait(60)
        until(lambda: connections.GuardedProtocol.per_address.total() == 0)


async def asked_together(number: int, path: str, *, addresses: int = 1) -> list[int]:
    """The statuses of as many requests without a key at the same time, whose replica answers when all are refused or
    wait."""
    waiting, go_on = 0, asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal waiting
        waiting += 1
        await go_on.wait()
        await PlainTextResponse("ok")(scope, receive, send)

    guard = strangers.Strangers(app)

    async def ask(of: int) -> int:
        transport = httpx.ASGITransport(app=guard, client=(f"10.0.0.{of % addresses}", 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.get(path)).status_code

    asking = [asyncio.create_task(ask(of)) for of in range(number)]
    while waiting + sum(task.done() for task in asking) < number:
        await asyncio.sleep(0.01)
    go_on.set()
    return await asyncio.gather(*asking)


@pytest.mark.parametrize("path", ["/", "/docs", "/nowhere", "/-/nowhere"])
async def test_an_address_has_so_many_requests_without_a_key(monkeypatch, path):
    monkeypatch.setattr(strangers, "MAX_PER_ADDRESS", 3)
    assert sorted(await asked_together(5, path)) == [200, 200, 200, 429, 429]


async def test_all_addresses_have_so_many_requests_without_a_key(monkeypatch):
    monkeypatch.setattr(strangers, "MAX_WAITING", 3)
    assert sorted(await asked_together(5, "/", addresses=5)) == [200, 200, 200, 503, 503]


async def test_probes_are_answered_while_pages_take_all_places(monkeypatch):
    monkeypatch.setattr(strangers, "MAX_WAITING", 2)
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/":
            await go_on.wait()
        await PlainTextResponse("ok")(scope, receive, send)

    transport = httpx.ASGITransport(app=strangers.Strangers(app), client=("10.0.0.1", 5000))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        pages = [asyncio.create_task(client.get("/")) for _ in range(4)]
        await asyncio.wait(pages, return_when=asyncio.FIRST_COMPLETED)
        assert (await client.get("/readyz")).status_code == 200
        go_on.set()
        assert sorted(page.status_code for page in await asyncio.gather(*pages)) == [200, 200, 503, 503]
        assert (await client.get("/")).status_code == 200  # the places are free again


async def test_a_page_that_does_not_come_is_503(monkeypatch):
    monkeypatch.setattr(strangers, "TIMEOUT_S", 0.1)

    async def hangs(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    transport = httpx.ASGITransport(app=strangers.Strangers(hangs), client=("10.0.0.1", 5000))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        replies = await asyncio.gather(*(client.get(path) for path in ("/", "/readyz", "/readyz")))
        assert [reply.status_code for reply in replies] == [503] * 3


def test_a_flood_of_probes_reaches_a_replica_once_a_second(address, monkeypatch):
    """From many addresses, each of which sends as many on one connection as may wait there."""
    monkeypatch.setattr(probes, "SHARED_FOR_S", 60.0)
    with ExitStack() as stack:
        asking = []
        for number in range(20):
            source = (f"127.0.1.{number + 1}", 0)
            asking.append(stack.enter_context(socket.create_connection(address, source_address=source)))
            asking[-1].sendall(b"GET /readyz HTTP/1.1\r\nhost: x\r\n\r\n" * 10)
        for connection in asking:
            received = b""
            while received.count(b"HTTP/1.1 200") < 10:
                received += (more := connection.recv(2**16))
                assert more
    assert get(address, "/readyz").status_code == 200
    assert ASKED == ["/readyz"]


async def test_an_application_that_listens_for_hang_ups_answers_probes():
    """Serve's proxy reads all messages of the client until it hangs up."""

    async def listens(scope: Any, receive: Any, send: Any) -> None:
        async def until_hang_up() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        listening = asyncio.create_task(until_hang_up())
        await asyncio.sleep(0.01)
        await PlainTextResponse("ok")(scope, receive, send)
        assert not listening.done()
        listening.cancel()

    transport = httpx.ASGITransport(app=strangers.Strangers(listens), client=("10.0.0.1", 5000))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        assert (await client.get("/healthz")).text == "ok"


async def test_pages_reach_a_replica_at_a_limited_rate(monkeypatch):
    monkeypatch.setattr(strangers, "PAGES_AT_ONCE", 2)
    monkeypatch.setattr(strangers, "PAGES_PER_SECOND", 20.0)
    asked: list[float] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(time.monotonic())
        await PlainTextResponse("ok")(scope, receive, send)

    transport = httpx.ASGITransport(app=strangers.Strangers(app), client=("10.0.0.1", 5000))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        started = time.monotonic()  # two may go on at once; when they are asked is up to the machine
        replies = await asyncio.gather(*(client.get("/nowhere") for _ in range(6)))
    assert [reply.status_code for reply in replies] == [200] * 6
    assert asked[5] - started >= 4 / 20 - 0.01


async def test_addresses_take_turns():
    turns, order = Turns(200.0, burst=1), []

    async def go(address: str) -> None:
        await turns.take(address)
        order.append(address)

    going = [asyncio.create_task(go("many")) for _ in range(50)]
    await asyncio.sleep(0)
    going += [asyncio.create_task(go(address)) for address in ("one", "two")]
    await asyncio.wait(going[-2:])
    assert set(order[:6]) == {"many", "one", "two"}, "the first went on at once"
    for task in going[:-3]:
        task.cancel()
    await asyncio.gather(*going, return_exceptions=True)
    assert order.count("many") < 10
    await asyncio.wait_for(turns.take("one"), 60)  # those who left do not use up turns


async def test_many_looks_at_the_health_cost_one(monkeypatch):
    looked = 0

    async def look() -> dict[str, Any]:
        nonlocal looked
        looked += 1
        await asyncio.sleep(0.01)
        if looked == 1:
            raise ApiError(503, "not ready")
        return {"generator": looked}

    health = SharedHealth(look)
    found = await asyncio.gather(*(health() for _ in range(50)), return_exceptions=True)
    assert looked == 1 and {str(each) for each in found} == {"not ready"}
    monkeypatch.setattr(probes, "SHARED_FOR_S", 0.0)
    health = SharedHealth(look)
    assert [await health(), await health()] == [{"generator": 2}, {"generator": 3}]


def test_requests_are_told_apart_behind_a_prefix_too(monkeypatch, tmp_path):
    (tmp_path / "keys").write_text(RECORD.line())
    monkeypatch.setenv(strangers.VARIABLE, str(tmp_path / "keys"))
    monkeypatch.setenv(bodies.VARIABLE, "10")
    with served(echo, root_path="/agent") as address:
        assert get(address, "/v1/models").status_code == 401
        assert get(address, "/v1/models", **BEARER).status_code == 200
        url = f"http://{address[0]}:{address[1]}/v1/answer"
        assert httpx.post(url, content=b"x" * 11, headers=BEARER, timeout=60).status_code == 413
