"""Direct calls between replicas, over real sockets: results and errors, leases, faults, cancelled calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import uvloop
from leases import Deployment

from mempipe.direct import client as client_module
from mempipe.direct import server as server_module
from mempipe.direct.client import ConnectionEnded, DirectClient
from mempipe.direct.frames import Frames
from mempipe.direct.messages import GenerateCall, SearchCall
from mempipe.direct.server import Address, DirectServer
from mempipe.faults import InfrastructureFault
from mempipe.types import Completion, Passage, SearchResult

COMPLETION = Completion(token_ids=[5, 2], logprobs=[-0.1234567890123456, 0.0], finish_reason="stop", policy_version=3)


def ask(text: str = "who ?", number: int = 2) -> SearchCall:
    return SearchCall(text, number, "all")


def retriever(function: Callable[[SearchCall], Any]) -> DirectServer:
    async def search(call: SearchCall) -> Any:
        found = function(call)
        return await found if asyncio.iscoroutine(found) else found

    return DirectServer(search, SearchCall, host="127.0.0.1")


def echo(call: SearchCall) -> SearchResult:
    return SearchResult(passages=[Passage(id="1", title="Rome", text=call.query, score=0.1)], snapshot=call.partition)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_arguments_and_results_arrive_as_they_are():
    taken: list[GenerateCall] = []

    async def generate(call: GenerateCall) -> Completion:
        taken.append(call)
        return COMPLETION

    call = GenerateCall([1, 151_643], 5, {"temperature": 0.7, "top_p": 1.0, "top_k": -1}, [2], None)
    client = DirectClient(Deployment(DirectServer(generate, GenerateCall, host="127.0.0.1")), Completion)
    assert await client.call(call) == COMPLETION and taken == [call]
    searches = DirectClient(Deployment(retriever(echo)), SearchResult)
    assert await searches.call(ask("Zoë\n\0😀" * 100_000)) == echo(ask("Zoë\n\0😀" * 100_000))


def test_it_works_in_the_event_loop_that_serve_uses():
    async def both() -> SearchResult:
        return await DirectClient(Deployment(retriever(echo)), SearchResult).call(ask())

    assert uvloop.run(both()) == echo(ask())


async def test_calls_after_each_other_share_a_lease_and_calls_at_once_have_one_each():
    inside, most = 0, 0

    async def count(call: SearchCall) -> SearchResult:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await until(lambda: most >= at_once)
        inside -= 1
        return echo(call)

    deployment, at_once = Deployment(retriever(count)), 1
    client = DirectClient(deployment, SearchResult)
    for _ in range(3):
        await client.call(ask())
    assert deployment.num_leases == 1
    at_once = 8  # each is answered when all have come
    found = await asyncio.gather(*(client.call(ask(str(number))) for number in range(8)))
    assert [each.passages[0].text for each in found] == [str(number) for number in range(8)]
    await asyncio.gather(*(client.call(ask()) for _ in range(8)))
    assert (deployment.num_leases, most) == (8, 8)


async def test_a_call_that_gets_no_lease_takes_the_connection_that_another_gives_back():
    deployment = Deployment(retriever(echo), limit=2)
    client = DirectClient(deployment, SearchResult)
    async with asyncio.timeout(60):
        await asyncio.gather(*(client.call(ask()) for _ in range(50)))
    assert deployment.num_leases <= 2


async def test_unused_and_old_connections_end_and_their_leases_with_them(monkeypatch):
    monkeypatch.setattr(client_module, "IDLE_S", 0.05)
    deployment = Deployment(retriever(echo))
    client = DirectClient(deployment, SearchResult)
    await asyncio.gather(*(client.call(ask()) for _ in range(3)))
    assert deployment.num_leases == 3
    await until(lambda: deployment.num_open == 0)
    monkeypatch.setattr(client_module, "IDLE_S", 60)
    monkeypatch.setattr(client_module, "MAX_AGE_S", 0.05)
    await client.call(ask())
    await asyncio.sleep(0.1)
    await client.call(ask())  # a call on an old connection is its last
    await until(lambda: deployment.num_open == 0)


async def test_errors_of_the_arguments_of_the_replica_and_of_its_parts_are_told_apart(caplog):
    async def raise_it(call: SearchCall) -> SearchResult:
        raise {"invalid": ValueError("partition 'x'"), "fault": InfrastructureFault("gone"), "bug": KeyError("k")}[
            call.query
        ]

    deployment = Deployment(retriever(raise_it))
    client = DirectClient(deployment, SearchResult)
    with pytest.raises(ValueError, match=r"^partition 'x'$"):
        await client.call(ask("invalid"))
    with pytest.raises(InfrastructureFault, match=r"^gone$"):
        await client.call(ask("fault"))
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match=r"^KeyError: 'k'$"):
        await client.call(ask("bug"))
    assert "raise_it" in caplog.text  # the replica's log has the trace
    assert deployment.num_leases == 1  # an error is an answer


async def test_a_cancelled_call_ends_at_the_replica():
    seen: list[str] = []

    async def slow(call: SearchCall) -> SearchResult:
        seen.append("began")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        return echo(call)

    deployment = Deployment(retriever(slow))
    task = asyncio.create_task(DirectClient(deployment, SearchResult).call(ask()))
    await until(lambda: seen == ["began"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: seen == ["began", "cancelled"] and deployment.num_open == 0)


async def test_a_call_that_is_cancelled_while_it_waits_for_a_lease_cancels_that():
    full = Deployment(retriever(echo), limit=0)
    task = asyncio.create_task(DirectClient(full, SearchResult).call(ask()))
    await until(lambda: len(full.leases) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: full.leases[0].cancelled)


async def test_a_connection_that_ends_during_a_call_is_a_fault_and_the_next_call_finds_another_replica():
    loop = asyncio.get_running_loop()
    connected: list[asyncio.BaseTransport] = []

    class Dying(Stranger):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            connected.append(transport)
            super().connection_made(transport)

        def received(self, message: bytes) -> None:
            super().received(message)
            if len(self.messages) == 2:  # the key and the call
                self.close()

    server = await loop.create_server(Dying, "127.0.0.1", 0)

    class Replaced(Deployment):
        async def _stream(self) -> AsyncIterator[Address]:
            if connected:
                async for address in super()._stream():
                    yield address
            else:
                yield "127.0.0.1", server.sockets[0].getsockname()[1], "key"
                await asyncio.sleep(60)

    client = DirectClient(Replaced(retriever(echo)), SearchResult)
    with pytest.raises(ConnectionEnded):
        await client.call(ask())
    assert await client.call(ask()) == echo(ask())
    server.close()


async def test_a_lease_that_ends_with_its_replica_ends_the_call():
    """Ray knows that a machine is gone when its connections do not yet."""
    deployment = Deployment(retriever(lambda call: asyncio.sleep(60)))

    class Dying(Deployment):
        async def _stream(self) -> AsyncIterator[Address]:
            async for address in deployment._stream():
                yield address
                await asyncio.sleep(0.05)
                raise RuntimeError("the actor died")

    with pytest.raises(ConnectionEnded):
        await DirectClient(Dying(), SearchResult).call(ask())


async def test_what_serve_raises_reaches_the_call_and_the_next_one_is_tried_anew():
    deployment = Deployment(retriever(echo))
    deployment.refusals = [RuntimeError("no replica")]
    client = DirectClient(deployment, SearchResult)
    with pytest.raises(RuntimeError, match="no replica"):
        await client.call(ask())
    assert await client.call(ask()) == echo(ask())


async def test_an_address_where_nobody_listens_is_a_fault_and_the_lease_ends():
    class Gone(Deployment):
        async def _stream(self) -> AsyncIterator[Address]:
            yield "127.0.0.1", 1, "key"

    with pytest.raises(ConnectionEnded, match=r"no connection to the replica at 127\.0\.0\.1:1: "):
        await DirectClient(gone := Gone(), SearchResult).call(ask())
    assert gone.leases[0].cancelled


async def test_a_client_that_closes_gives_its_leases_back():
    deployment = Deployment(retriever(echo))
    client = DirectClient(deployment, SearchResult)
    await asyncio.gather(*(client.call(ask()) for _ in range(3)))
    assert deployment.num_open == 3
    await client.close()
    assert deployment.num_open == 0
    assert await client.call(ask()) == echo(ask())


class Stranger(Frames):
    """Connects without Serve."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.get_running_loop().create_future()
        self.messages: list[bytes] = []

    def received(self, message: bytes) -> None:
        self.messages.append(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


@pytest.mark.parametrize(
    "sent", [b"\0\0\0\x40" + b"0" * 64, b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x02\xff\xff", b""]
)
async def test_without_the_key_of_a_lease_a_connection_ends_and_nothing_is_called(sent, monkeypatch):
    monkeypatch.setattr(server_module, "CONNECT_S", 0.2)
    called: list[SearchCall] = []
    server = retriever(called.append)
    lease = server.lease()
    host, port, _ = await anext(lease)
    _, stranger = await asyncio.get_running_loop().create_connection(Stranger, host, port)
    stranger._transport.write(sent + b"\0\0\0\x03abc")
    async with asyncio.timeout(60):
        await stranger.ended
    assert (called, stranger.messages) == ([], [])
    await lease.aclose()


async def test_a_key_opens_one_connection():
    server = retriever(echo)
    lease = server.lease()
    host, port, key = await anext(lease)
    loop = asyncio.get_running_loop()
    _, first = await loop.create_connection(Stranger, host, port)
    first.send(key.encode())
    first.send(msgspec.msgpack.encode(ask()))
    await until(lambda: bool(first.messages))
    _, second = await loop.create_connection(Stranger, host, port)
    second.send(key.encode())
    async with asyncio.timeout(60):
        await second.ended
    first.close()
    assert [each async for each in lease] == []  # the lease ends with its connection


async def test_a_lease_that_nobody_uses_ends(monkeypatch):
    monkeypatch.setattr(server_module, "CONNECT_S", 0.05)
    async with asyncio.timeout(60):
        assert len([address async for address in retriever(echo).lease()]) == 1


async def test_a_message_may_come_in_pieces_and_several_at_once():
    frames = Stranger()
    frames._transport = type("Open", (), {"is_closing": lambda self: False})()
    whole = b"".join(len(each).to_bytes(4) + each for each in (b"one", b"", b"three"))
    for at in range(len(whole)):
        frames.data_received(whole[at : at + 1])
    frames.data_received(whole)
    assert frames.messages == [b"one", b"", b"three"] * 2
