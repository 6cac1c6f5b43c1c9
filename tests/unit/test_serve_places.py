"""The queue for the places of a service: fair to keys, bounded, and left by those who hang up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from mempipe.serve.http.gate import Gate
from mempipe.serve.http.places import Places


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_without_a_wish_to_wait_a_full_service_refuses_at_once():
    places = Places(1, max_waiting=5)
    assert await places.take("ann")
    assert not await places.take("bob")
    places.give_back("ann")
    assert await places.take("bob")


async def test_one_question_of_a_key_passes_by_the_many_of_another():
    places, order = Places(2, max_waiting=100), list[str]()

    async def ask(owner: str, name: str) -> None:
        assert await places.take(owner, wait_s=10)
        order.append(name)

    assert await places.take("ann") and await places.take("ann")
    tasks = [asyncio.create_task(ask("ann", f"ann {i}")) for i in range(4)]
    await settle()
    tasks += [asyncio.create_task(ask("bob", f"bob {i}")) for i in range(2)]
    await settle()
    for owner in ("ann", "ann", "bob", "bob", "ann", "ann"):
        places.give_back(owner)
        await settle()
    assert order == ["bob 0", "ann 0", "bob 1", "ann 1", "ann 2", "ann 3"]
    await asyncio.gather(*tasks)
    assert (places.num_taken, places.num_waiting) == (2, 0)


async def test_a_wait_ends_and_the_queue_is_bounded():
    places = Places(1, max_waiting=1)
    assert await places.take("ann")
    waiting = asyncio.create_task(places.take("bob", wait_s=0.2))
    await settle()
    assert not await places.take("carl", wait_s=10)  # the queue is full
    assert not await waiting
    assert places.num_waiting == 0
    places.give_back("ann")
    assert await places.take("carl")


@pytest.mark.parametrize("given", [False, True])
async def test_who_hangs_up_leaves_the_queue_and_gives_back_what_it_was_given(given):
    places = Places(1, max_waiting=5)
    assert await places.take("ann")
    waiting = asyncio.create_task(places.take("bob", wait_s=10))
    await settle()
    if given:
        places.give_back("ann")  # bob has the place, and does not know it yet
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (places.num_taken, places.num_waiting) == (0 if given else 1, 0)


class Client:
    """A request that its client may give up."""

    def __init__(self, gate: Gate, owner: str, prefer: str = "") -> None:
        self.status = 0
        self._gone = asyncio.Event()
        self._unread = True
        headers = [(b"prefer", prefer.encode())] if prefer else []
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "state": {"owner": owner}}
        self.task = asyncio.create_task(gate(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._unread:
            self._unread = False
            return {"type": "http.request", "body": b""}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.status = message.get("status", self.status)

    def hang_up(self) -> None:
        self._gone.set()


async def test_the_gate_lets_those_wait_that_ask_for_it():
    go_on, answered = asyncio.Event(), list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await go_on.wait()
        answered.append(scope["state"]["owner"])
        await PlainTextResponse("ok")(scope, receive, send)

    gate: Any = Gate(app, max_body_bytes=10, max_in_flight=1, max_waiting=10, max_wait_s=5.0)
    first = Client(gate, "ann")
    await settle()
    refused, waiting = Client(gate, "bob"), Client(gate, "bob", "respond-async, wait=100")
    gone, late = Client(gate, "carl", "wait=3"), Client(gate, "dora", "WAIT=0")
    await settle()
    gone.hang_up()
    await gone.task
    assert (refused.status, late.status, waiting.status) == (503, 503, 0)
    go_on.set()
    await asyncio.gather(first.task, waiting.task)
    assert (first.status, waiting.status, gone.status, answered) == (200, 200, 0, ["ann", "bob"])
    assert gate._places.num_taken == 0
    short: Any = Gate(app, max_body_bytes=10, max_in_flight=1, max_waiting=10, max_wait_s=0.1)
    go_on.clear()
    holder, waiter = Client(short, "ann"), Client(short, "bob", "wait=60")
    await waiter.task
    assert waiter.status == 503
    holder.hang_up()
    await holder.task
