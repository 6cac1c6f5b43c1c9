"""BatchedClient and BatchedServer, joined without Ray:
an object whose `exchange.remote` is the desk's coroutine stands where the actor handle would.
"""

import asyncio

import pytest
from ray.exceptions import RayActorError, RayTaskError

from mempipe.actors.batched_calls import BatchedClient, BatchedServer
from mempipe.faults import InfrastructureFault


class Wire:
    """The handle. Counts exchanges and notes how many requests each brought; `is_dead` lets them fail as Ray does."""

    def __init__(self, function):
        self.desk = BatchedServer(function)
        self.brought = []
        self.is_dead = asyncio.Event()
        self.exchange = self

    async def remote(self, name, requests):
        self.brought.append(len(requests))
        exchange = asyncio.ensure_future(self.desk.exchange(name, requests))
        death = asyncio.ensure_future(self.is_dead.wait())
        await asyncio.wait({exchange, death}, return_when=asyncio.FIRST_COMPLETED)
        if self.is_dead.is_set():
            raise RayActorError
        if isinstance(error := exchange.exception(), Exception):
            raise RayTaskError("exchange", str(error), error).as_instanceof_cause()
        return exchange.result()


async def slow_double(number, seconds=0.0):
    await asyncio.sleep(seconds)
    if number < 0:
        raise ValueError(f"{number} is negative")
    return 2 * number


async def opened(number, gate):
    """Doubles a number when the gate is open."""
    await gate.wait()
    return 2 * number


async def settled(wire, line):
    """All exchanges have ended, and neither end remembers anything."""
    while line._exchanges:
        await asyncio.sleep(0.001)
    assert not line._waiting and not line._outbox and not wire.desk._callers


def test_everyone_gets_the_own_answer_whatever_the_order_in_which_they_finish():
    async def main():
        wire = Wire(slow_double)
        line = BatchedClient(wire)
        assert await asyncio.gather(*(line.ask(i, 0.02 - i / 1000) for i in range(20))) == [2 * i for i in range(20)]
        await settled(wire, line)

    asyncio.run(main())


def test_requests_of_one_turn_of_the_loop_travel_in_one_exchange():
    async def main():
        wire = Wire(slow_double)
        await asyncio.gather(*(BatchedClient.ask(line, i) for line in [BatchedClient(wire)] for i in range(50)))
        assert wire.brought == [50]

    asyncio.run(main())


def test_a_short_request_does_not_wait_for_a_long_one_of_the_same_exchange():
    async def main():
        wire = Wire(opened)
        line = BatchedClient(wire)
        closed, open_ = asyncio.Event(), asyncio.Event()
        open_.set()
        long = asyncio.ensure_future(line.ask(1, closed))
        assert await line.ask(2, open_) == 4
        assert not long.done()
        assert await line.ask(3, open_) == 6  # a later exchange does not wait for it either
        assert not long.done()
        closed.set()
        assert await long == 2
        await settled(wire, line)

    asyncio.run(main())


def test_what_a_request_raises_is_raised_for_its_caller_alone():
    async def main():
        wire = Wire(slow_double)
        line = BatchedClient(wire)
        good, bad = await asyncio.gather(line.ask(1), line.ask(-1), return_exceptions=True)
        assert good == 2
        with pytest.raises(ValueError, match="-1 is negative"):
            raise bad
        assert "slow_double" in bad.__notes__[0]  # where it was raised
        await settled(wire, line)

    asyncio.run(main())


def test_callers_do_not_get_each_others_answers():
    async def main():
        wire = Wire(slow_double)
        first, second = BatchedClient(wire), BatchedClient(wire)
        answers = await asyncio.gather(*(line.ask(i, i / 1000) for i in range(10) for line in (first, second)))
        assert answers == [2 * i for i in range(10) for _ in range(2)]
        await settled(wire, first)
        await settled(wire, second)

    asyncio.run(main())


def test_a_request_that_was_given_up_disturbs_nobody():
    async def main():
        wire = Wire(slow_double)
        line = BatchedClient(wire)
        other = asyncio.ensure_future(line.ask(2, 0.1))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await line.ask(1, 0.05)
        assert await other == 4
        await settled(wire, line)

    asyncio.run(main())


def test_a_dead_actor_fails_every_request_and_one_that_is_back_answers_again():
    async def main():
        wire = Wire(slow_double)
        line = BatchedClient(wire)
        lost = [asyncio.ensure_future(line.ask(i, 10.0)) for i in range(3)]
        await asyncio.sleep(0.01)
        lost.append(asyncio.ensure_future(line.ask(3, 10.0)))  # of another exchange
        await asyncio.sleep(0.01)
        wire.is_dead.set()
        for failure in await asyncio.gather(*lost, return_exceptions=True):
            assert isinstance(failure, RayActorError)
        wire.is_dead.clear()
        wire.desk = BatchedServer(slow_double)  # a new process
        assert await line.ask(4) == 8
        await settled(wire, line)

    asyncio.run(main())


def test_requests_that_died_between_two_exchanges_fail_instead_of_waiting_for_ever():
    async def main():
        first, second = asyncio.Event(), asyncio.Event()
        wire = Wire(opened)
        line = BatchedClient(wire)
        answered = asyncio.ensure_future(line.ask(1, first))
        lost = asyncio.ensure_future(line.ask(2, second))
        while not wire.desk.num_under_way:
            await asyncio.sleep(0)
        wire.desk = BatchedServer(opened)  # the next exchange reaches a new process
        first.set()
        assert await answered == 2
        with pytest.raises(InfrastructureFault, match="does not have the requests"):
            await lost
        second.set()
        assert await line.ask(3, second) == 6
        await settled(wire, line)

    asyncio.run(main())
