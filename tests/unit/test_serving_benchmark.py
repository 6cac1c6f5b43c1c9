"""The clients of the serving benchmark."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from simulated_time import simulated

from benchmarks import serving
from mempipe.types import Question

QUESTIONS = [Question(id=str(i), text="?", golden_answers=["x"]) for i in range(3)]


async def measured(latencies: list[float], *, num_clients: int, seconds: float) -> tuple[serving.Measured, int]:
    """What the clients of a service saw that takes so long for its answers, and how many it was asked at most."""
    upcoming, num_open, most = itertools.cycle(latencies), 0, 0

    async def ask(question: Question) -> float:
        nonlocal num_open, most
        num_open += 1
        most = max(most, num_open)
        await asyncio.sleep(next(upcoming))
        num_open -= 1
        return 0.5

    return await serving.measure(ask, QUESTIONS, num_clients=num_clients, seconds=seconds), most


@pytest.mark.parametrize("seconds", [40.0, 45.0, 68.0])
def test_the_rate_is_that_of_a_steady_load_however_long_answers_take(monkeypatch, seconds):
    async def run() -> tuple[serving.Measured, int]:
        monkeypatch.setattr(serving.time, "perf_counter", asyncio.get_running_loop().time)
        return await measured([17.0], num_clients=32, seconds=seconds)

    seen, most = simulated(run())
    assert seen.rate == pytest.approx(32 / 17) and most == 32
    assert set(seen.latencies) == {17.0} and seen.first_events == [0.5] * len(seen.latencies)


def test_clients_out_of_step_count_as_much_as_those_in_step(monkeypatch):
    async def run() -> tuple[serving.Measured, int]:
        monkeypatch.setattr(serving.time, "perf_counter", asyncio.get_running_loop().time)
        return await measured([8.0, 26.0, 17.0], num_clients=32, seconds=1000.0)

    seen, _ = simulated(run())
    assert seen.rate == pytest.approx(32 / 17, rel=0.02)


def test_every_question_is_asked_once_with_so_many_clients(monkeypatch):
    asked, num_open, most = [], 0, 0

    async def ask(question: Question) -> int:
        nonlocal num_open, most
        asked.append(question.id)
        num_open += 1
        most = max(most, num_open)
        await asyncio.sleep(float(question.id))
        num_open -= 1
        return 10

    async def run() -> serving.Work:
        monkeypatch.setattr(serving.time, "perf_counter", asyncio.get_running_loop().time)
        return await serving.spent(ask, QUESTIONS, num_clients=2)

    spent = simulated(run())
    assert (asked, most) == (["0", "1", "2"], 2)
    assert (spent.sampled_tokens, spent.seconds) == (30, 2.0)  # the second and the third side by side
    assert spent.cpu_seconds >= 0
