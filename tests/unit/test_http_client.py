"""The HTTP client core over real sockets: what is repeated, for how long, how often, and what ends it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from email.utils import formatdate
from functools import partial

import pytest
from faulty_server import Answer, drips, faulty, hangs, resets, says

from mempipe import http_client
from mempipe.faults import InfrastructureFault, ServiceFault, ServiceTimeout
from mempipe.http_client import HttpClient, RetryPolicy, retry_after_s

SOON_S = 20.0
"""Long before what would be waited for otherwise, and longer than a busy machine needs."""


@asynccontextmanager
async def served(
    answers: Sequence[Answer],
    *,
    timeout_s: float = 10.0,
    num_attempts: int = 20,
    max_concurrency: int = 1,
    key: str = "",
) -> AsyncIterator[tuple[HttpClient, list[dict]]]:
    """A client of a server that gives `answers`, and what the server is asked."""
    async with faulty(answers) as (url, asked):
        policy = RetryPolicy(timeout_s=timeout_s, setting="some.timeout_s", num_attempts=num_attempts)
        client = HttpClient(url, policy, max_answer_bytes=1000, max_concurrency=max_concurrency, key=key)
        try:
            yield client, asked
        finally:
            await client.close()


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "retry_pauses", lambda: itertools.repeat(0.0))


async def test_an_answer_is_given_with_its_headers():
    async with served([says({"a": 1})]) as (client, asked):
        answer = await client.request("POST", "x", {"b": 2})
        assert answer.json() == {"a": 1} and "content-length" in answer.headers
        assert asked[0]["b"] == 2 and asked[0]["head"].startswith("POST /v1/x ")


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
async def test_a_status_that_may_pass_is_asked_again(status, no_pauses):
    async with served([says({}, status=status), says({})]) as (client, asked):
        await client.request("GET", "x")
        assert len(asked) == 2


@pytest.mark.parametrize("status", [204, 302, 400, 401, 403, 404, 422, 501, 505])
async def test_another_status_is_a_fault_at_once(status):
    async with served([says({"error": "why"}, status=status)]) as (client, asked):
        with pytest.raises(ServiceFault, match=f"/v1/x answered status {status}") as caught:
            await client.request("GET", "x")
        assert not isinstance(caught.value, ServiceTimeout) and isinstance(caught.value, InfrastructureFault)
        assert len(asked) == 1


@pytest.mark.parametrize("fault", [resets, says({}, length=10**6)], ids=["reset", "lying length"])
async def test_a_broken_connection_is_opened_again(fault, no_pauses):
    async with served([fault, fault, says({"a": 1})]) as (client, asked):
        assert (await client.request("GET", "x")).json() == {"a": 1}
        assert len(asked) == 3


async def test_the_number_of_attempts_ends_a_call(no_pauses):
    async with served([says({"error": "busy"}, status=503)], num_attempts=4) as (client, asked):
        with pytest.raises(ServiceTimeout, match=r"4 attempts; attempt 4: status 503: .*busy"):
            await client.request("GET", "x")
        assert len(asked) == 4


@pytest.mark.parametrize("answer", [hangs, drips, says({}, status=503)], ids=["hangs", "drips", "503"])
async def test_the_deadline_ends_a_call(answer):
    async with served([answer], timeout_s=0.9) as (client, _):
        started = time.monotonic()
        with pytest.raises(ServiceTimeout, match=r"no answer within some\.timeout_s 0\.9 s"):
            await client.request("GET", "x")
        assert time.monotonic() - started < SOON_S


async def test_an_attempt_that_hangs_leaves_time_for_another():
    async with served([hangs, says({"a": 1})], timeout_s=5) as (client, asked):
        assert (await client.request("GET", "x")).json() == {"a": 1} and len(asked) == 2


async def test_a_deadline_that_calls_share_is_kept_to():
    async with served([hangs], timeout_s=60) as (client, _):
        started = time.monotonic()
        with pytest.raises(ServiceTimeout):
            await client.request("GET", "x", deadline=started + 0.3)
        assert time.monotonic() - started < SOON_S


@pytest.mark.parametrize("value", ["60", formatdate(time.time() + 3600, usegmt=True)], ids=["seconds", "a date"])
async def test_retry_after_beyond_the_deadline_ends_the_call_at_once(value):
    async with served([says({}, status=429, headers={"Retry-After": value})], timeout_s=50) as (client, asked):
        started = time.monotonic()
        with pytest.raises(ServiceTimeout, match="status 429"):
            await client.request("GET", "x")
        assert time.monotonic() - started < SOON_S and len(asked) == 1


async def test_retry_after_is_waited_for(no_pauses):
    async with served([says({}, status=503, headers={"Retry-After": "0.5"}), says({})]) as (client, asked):
        started = time.monotonic()
        await client.request("GET", "x")
        assert time.monotonic() - started >= 0.5 and len(asked) == 2


@pytest.mark.parametrize("value", ["", "soon", "\u00b2", "-5", "nan", "inf", "1e999", "Fri, 31 Dec 1999 23:59:59 GMT"])
def test_a_retry_after_that_asks_for_nothing_is_zero(value):
    assert retry_after_s({"retry-after": value}) == 0


def test_a_retry_after_is_seconds_or_a_date():
    assert retry_after_s({"retry-after": "2"}) == 2
    assert retry_after_s({"retry-after": formatdate(time.time() + 100, usegmt=True)}) == pytest.approx(100, abs=2)


def test_milliseconds_are_preferred_where_they_are_a_number():
    assert retry_after_s({"retry-after": "2", "retry-after-ms": "1250"}) == 1.25
    assert retry_after_s({"retry-after-ms": "inf"}) == retry_after_s({}) == 0
    for wrong in ("soon", "", "inf", "nan"):
        assert retry_after_s({"retry-after": "2", "retry-after-ms": wrong}) == 2
    later = formatdate(time.time() + 100, usegmt=True)
    assert retry_after_s({"retry-after": later, "retry-after-ms": "soon"}) == pytest.approx(100, abs=2)


@pytest.mark.parametrize("answer", [hangs, says({}, status=503)], ids=["while it is asked", "between two attempts"])
async def test_a_cancelled_call_asks_no_more(answer):
    async with served([answer]) as (client, asked):
        call = asyncio.create_task(client.request("GET", "x"))
        while not asked:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        num_asked = len(asked)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0.6)  # longer than the first pause
        assert len(asked) == num_asked


async def test_a_place_is_free_while_another_call_pauses(monkeypatch):
    pauses, is_over = asyncio.Event(), asyncio.Event()

    async def pause(seconds: float) -> None:
        pauses.set()
        await is_over.wait()

    async with served([says({}, status=503), says({"a": 1})]) as (client, asked):
        monkeypatch.setattr(http_client, "AsyncRetrying", partial(http_client.AsyncRetrying, sleep=pause))
        first = asyncio.create_task(client.request("GET", "first"))
        await pauses.wait()
        await client.request("GET", "second")
        assert not first.done()
        is_over.set()
        await first
        assert [each["head"].split()[1] for each in asked] == ["/v1/first", "/v1/second", "/v1/first"]


async def test_no_more_calls_than_allowed_are_with_the_service():
    under_way, most = 0, 0

    async def counts(request: dict, writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.05)
        under_way -= 1
        await says({})(request, writer)

    async with served([counts], max_concurrency=3) as (client, asked):
        await asyncio.gather(*(client.request("GET", "x") for _ in range(12)))
        assert most == 3 and len(asked) == 12


async def test_an_answer_without_end_is_not_read_to_its_end():
    async with served([says(b" " * 2000)]) as (client, asked):
        with pytest.raises(ServiceFault, match="more than 1000 bytes"):
            await client.request("GET", "x")
        assert len(asked) == 1


async def test_the_key_is_sent_and_never_shown():
    async with served([says({"error": "no such key: sk-secret"}, status=401)], key="sk-secret") as (client, asked):
        with pytest.raises(ServiceFault) as caught:
            await client.request("GET", "x")
        assert "authorization: bearer sk-secret" in asked[0]["head"].lower()
        assert "***" in str(caught.value) and "sk-secret" not in str(caught.value)


async def test_closing_closes_the_connections():
    ended = asyncio.Event()

    async def keeps(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await reader.read()  # until the client closes its side
        ended.set()
        writer.close()

    async with await asyncio.start_server(keeps, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = HttpClient(url, RetryPolicy(timeout_s=5, setting="s"), max_answer_bytes=1000)
        await client.request("GET", "x")
        assert not ended.is_set()
        await client.close()
        await asyncio.wait_for(ended.wait(), 60)
