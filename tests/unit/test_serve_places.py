"""The queue for the places of a service: fair to keys, bounded, and left by those who hang up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from mempipe.serve.http.gate import Gate
from mempipe.serve.http.places import Places
from mempipe.serve.http.waits import wished_wait


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


async def test_the_last_free_place_is_for_an_owner_who_has_none():
    several = True
    places = Places(3, max_waiting=5, are_several=lambda: several)
    assert [await places.take("ann") for _ in range(3)] == [True, True, False]
    waiting = asyncio.create_task(places.take("ann", wait_s=10))
    await settle()
    assert await places.take("bob")
    assert not await places.take("bob")
    places.give_back("bob")
    await settle()
    assert not waiting.done()  # it would be ann's third
    places.give_back("ann")
    assert await waiting and places.num_taken == 2
    several = False
    assert await places.take("ann") and places.num_taken == 3
    alone = Places(1, max_waiting=0, are_several=lambda: True)
    assert await alone.take("ann") and not await alone.take("bob")


async def test_no_owner_can_fill_the_queue_for_the_others():
    places, refused = Places(1, max_waiting=4), list[str]()

    async def ask(owner: str, name: str) -> None:
        if not await places.take(owner, wait_s=10):
            refused.append(name)

    async def asked(owner: str, number: int) -> asyncio.Task[None]:
        task = asyncio.create_task(ask(owner, f"{owner} {number}"))
        await settle()
        return task

    assert await places.take("ann")
    tasks = [await asked("ann", i) for i in range(6)]
    assert refused == ["ann 4", "ann 5"]
    tasks += [await asked("bob", i) for i in range(3)]
    assert refused == ["ann 4", "ann 5", "ann 3", "ann 2", "bob 2"]
    tasks.append(await asked("carl", 0))
    assert places.num_waiting == 4 and len(refused) == 6
    for owner in ("ann", "ann", "bob", "carl"):
        places.give_back(owner)
        await settle()
    await asyncio.gather(*tasks)
    assert len(refused) == 6 and places.num_waiting == 0


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


def held(**limits: Any) -> tuple[Any, asyncio.Event, list[str]]:
    """Returns a gate, the event on which its application answers, and the owners that were answered."""
    go_on, answered = asyncio.Event(), list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await go_on.wait()
        answered.append(scope["state"]["owner"])
        await PlainTextResponse("ok")(scope, receive, send)

    limits = {"max_in_flight": 1, "max_waiting": 10, "max_wait_s": 5.0} | limits
    return Gate(app, max_body_bytes=10, **limits), go_on, answered


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        (["wait=3"], 3.0),
        (["respond-async", 'wait="7"'], 7.0),
        (["a=1; wait = 5"], 5.0),
        (["nowait=3"], None),
        ([], None),
    ],
)
def test_the_wish_to_wait_is_read_in_every_form_of_its_header(lines, seconds):
    headers = [(b"prefer", line.encode()) for line in lines]
    assert wished_wait({"type": "http", "headers": headers}) == seconds


async def test_the_gate_lets_those_wait_that_ask_for_it():
    gate, go_on, answered = held()
    first = Client(gate, "ann")
    await settle()
    refused, waiting = Client(gate, "ann"), Client(gate, "ann", "respond-async, wait=100")
    gone, late = Client(gate, "carl", "wait=3"), Client(gate, "dora", "WAIT=0")
    await settle()
    gone.hang_up()
    await gone.task
    assert (refused.status, late.status, waiting.status) == (503, 503, 0)
    go_on.set()
    await asyncio.gather(first.task, waiting.task)
    assert (first.status, waiting.status, gone.status, answered) == (200, 200, 0, ["ann", "ann"])
    assert gate._places.num_taken == 0
    short, go_on, _ = held(max_wait_s=0.1)
    holder, waiter = Client(short, "ann"), Client(short, "bob", "wait=60")
    await waiter.task
    assert waiter.status == 503
    holder.hang_up()
    await holder.task


async def test_without_asking_for_it_those_wait_who_have_fewer_than_another():
    gate, go_on, answered = held(max_in_flight=2)
    anns = [Client(gate, "ann") for _ in range(4)]
    await settle()
    bobs = [Client(gate, "bob") for _ in range(2)]
    await settle()
    assert [each.status for each in anns + bobs] == [0, 0, 503, 503, 0, 0]
    anns[0].hang_up()
    await settle()
    late = [Client(gate, "ann"), Client(gate, "bob"), Client(gate, "carl")]  # ann and bob have one each
    await settle()
    assert [each.status for each in late] == [503, 503, 0]
    go_on.set()
    await asyncio.gather(*(each.task for each in (*anns, *bobs, *late)))
    assert sorted(answered) == ["ann", "bob", "bob", "carl"]
    short, _, _ = held(max_wait_s=0.05)
    holder, waiter = Client(short, "ann"), Client(short, "bob")
    await waiter.task
    assert waiter.status == 503
    holder.hang_up()
    await holder.task
