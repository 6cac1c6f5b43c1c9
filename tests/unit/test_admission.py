"""Promise 6: staleness is bounded, however long a straggler takes."""

import asyncio
import random

import pytest

from mempipe.actors.admission import Admission


async def granted(admission: Admission, keys: dict[int, str]) -> list[str]:
    """Those of `keys` (by position) that get a ticket without waiting."""
    tickets = {key: asyncio.create_task(admission.ticket(key, position)) for position, key in keys.items()}
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    got = [key for key, task in tickets.items() if task.done()]
    for task in tickets.values():
        task.cancel()
    return got


@pytest.mark.parametrize(("lag", "allowed"), [(0, 4), (1, 8), (2, 12)])
async def test_as_many_groups_start_as_the_steps_ahead_hold(lag, allowed):
    admission = Admission(groups_per_step=4, max_off_policy_steps=lag)
    positions = list(range(20))
    random.Random(lag).shuffle(positions)
    got = await granted(admission, {i: f"g{i}" for i in positions})
    assert sorted(got) == sorted(f"g{i}" for i in range(allowed))  # the first ones, whoever asks first


async def test_a_ticket_is_given_once_per_group():
    admission = Admission(groups_per_step=1, max_off_policy_steps=0)
    assert await admission.ticket("a", 0) == 0
    assert await admission.ticket("a", 0) == 0  # the driver was restarted
    assert await granted(admission, {1: "b"}) == []
    await admission.consume(["a"], policy_version=1)
    assert await admission.ticket("b", 1) == 1


async def test_a_group_that_was_consumed_is_not_opened_again():
    """A driver that died between the two asks again; a step would wait for that group for ever."""
    admission = Admission(groups_per_step=1, max_off_policy_steps=0)
    await admission.ticket("a", 0)
    await admission.consume(["a"], policy_version=1)
    assert await admission.ticket("a", 0) == 0
    await admission.ticket("b", 1)
    assert await admission.choose(["b"]) == ["b"]


async def test_a_dropped_group_is_replaced_within_the_same_version():
    admission = Admission(groups_per_step=1, max_off_policy_steps=0)
    await admission.ticket("a", 0)
    await admission.consume(["a"], policy_version=0)
    assert await admission.ticket("b", 1) == 0


async def test_waiting_groups_start_when_others_are_consumed():
    admission = Admission(groups_per_step=2, max_off_policy_steps=0)
    await asyncio.gather(admission.ticket("a", 0), admission.ticket("b", 1))
    waiting = asyncio.create_task(admission.ticket("c", 2))
    await asyncio.sleep(0)
    assert not waiting.done()
    await admission.consume(["a", "b"], policy_version=1)
    assert await waiting == 1


async def test_consuming_without_a_ticket_is_an_error():
    with pytest.raises(AssertionError, match="without a ticket"):
        await Admission(groups_per_step=1, max_off_policy_steps=0).consume(["a"], policy_version=1)


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
async def test_promise_6_staleness_is_bounded(lag, seed):
    """Groups finish in random order and some are dropped; no step trains a group older than `lag`,
    and none gets stuck."""
    rng = random.Random(seed)
    size = 5
    admission = Admission(groups_per_step=size, max_off_policy_steps=lag)
    started: dict[str, int] = {}
    finished: set[str] = set()
    num_granted = 0
    for version in range(30):
        while (step := await admission.choose(sorted(finished))) is None:
            key = f"g{num_granted}"
            task = asyncio.create_task(admission.ticket(key, num_granted))
            await asyncio.sleep(0)
            if task.done():
                num_granted += 1
                started[key] = task.result()
                assert len(started) <= size * (lag + 1)
                if rng.random() < 0.8:
                    continue
            task.cancel()
            key = rng.choice(sorted(started.keys() - finished))
            if rng.random() < 0.1:
                await admission.consume([key], policy_version=version)
                del started[key]
            else:
                finished.add(key)
        assert len(step) == size
        assert all(version - started[key] <= lag for key in step)
        for key in step:
            del started[key]
        finished -= set(step)
        await admission.consume(step, policy_version=version + 1)


async def test_a_step_waits_for_a_straggler_only_when_it_must():
    admission = Admission(groups_per_step=1, max_off_policy_steps=1)
    await admission.ticket("slow", 0)
    await admission.ticket("fast", 1)
    assert await admission.choose(["fast"]) == ["fast"]
    await admission.consume(["fast"], policy_version=1)
    await admission.ticket("next", 2)
    assert await admission.choose(["next"]) is None
    assert await admission.choose(["next", "slow"]) == ["slow"]
