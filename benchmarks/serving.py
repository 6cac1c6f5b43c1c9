"""What HTTP and Ray Serve cost: the agent service against the same agent loop run directly on an engine.

    python -m benchmarks.serving runs/quickstart [--seconds 20] [key=value ...]

One run prints requests/s with p50 and p99 latency at 1, 8 and 32 clients for both, their ratio (aims: .9, .8, .7), when
the first event of a streamed answer arrives (aim: 50 ms), and the seconds of each turn. Then it lets a service that
works on OVERLOAD_IN_FLIGHT requests at a time have four times the requests that it can answer, and prints what is shed,
the p99 of what is answered against that of one client alone (aim: 3), and the memory of the agent's process before and
after. At the end it prints what a turn costs the engine at turn 2 and turn 20 with a bounded memory and with a full
history (`benchmarks.turn_seconds` says how). All engines have the same weights and settings and never work at the same
time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import httpx
import numpy as np
import psutil
import ray

from benchmarks import turn_seconds
from mempipe.actors.cluster import connected
from mempipe.actors.driver import Driver
from mempipe.actors.standing import launch_rollout_actors
from mempipe.data.qa import read_questions
from mempipe.loader import parse_overrides, parse_section
from mempipe.serve.agent import served_agent
from mempipe.serve.config import AgentServiceConfig
from mempipe.serve.served_run import ServedRun, resolve
from mempipe.settings import ConfigError
from mempipe.types import Question
from tools.processes import free_ports

CLIENTS = (1, 8, 32)
OVERLOAD = 4
OVERLOAD_IN_FLIGHT = 4
T = TypeVar("T")
Ask = Callable[[Question], Awaitable[list[float]]]
"""Asks one question; gives the seconds of its turns, or of its first event."""


@dataclass
class Measured:
    """Holds what a number of clients saw."""

    rate: float = 0.0
    """Answers per second."""
    latencies: list[float] = field(default_factory=list)
    by_turn: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def milliseconds(self, percentile: float) -> float:
        return 1000 * float(np.percentile(self.latencies, percentile))


async def measure(ask: Ask, questions: Sequence[Question], *, num_clients: int, seconds: float) -> Measured:
    """Clients that each ask one question after the other, for `seconds`.

    Answers may take a large part of that time. So clients ask on until all that was asked in it is answered, which
    keeps the load the same, and an answer counts for the part of its time that lies within. (Without both, answers of
    17 s in 40 s gave a rate that also told how many clients ended together.)
    """
    measured, upcoming, clock = Measured(), itertools.cycle(questions), time.perf_counter
    end, num_open = clock() + seconds, 0
    answered = 0.0

    async def client() -> None:
        nonlocal answered, num_open
        while (began := clock()) < end or num_open:
            is_within = began < end
            num_open += is_within
            turns = await ask(next(upcoming))
            if not is_within:
                continue
            num_open -= 1
            took = clock() - began
            answered += min(end - began, took) / took
            measured.latencies.append(took)
            for number, value in enumerate(turns, start=1):
                measured.by_turn[number].append(value)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    measured.rate = answered / seconds
    return measured


async def measure_all(ask: Ask, questions: Sequence[Question], *, seconds: float) -> dict[int, Measured]:
    """Measures every number of clients, after a warm-up."""
    await measure(ask, questions, num_clients=4, seconds=min(seconds, 3.0))
    return {n: await measure(ask, questions, num_clients=n, seconds=seconds) for n in CLIENTS}


def directly(served: ServedRun, questions: Sequence[Question], *, seconds: float) -> dict[int, Measured]:
    """Measures the driver of training and evaluation on engine and retriever actors."""
    with (
        connected("", name="serving-benchmark") as namespace,
        launch_rollout_actors(served.main, namespace) as engines,
    ):

        async def run() -> dict[int, Measured]:
            driver = Driver(engines.driver_spec(sampling=served.sampling, group_size=1))

            async def ask(question: Question) -> list[float]:
                (trajectory,) = (await driver.play(question.id, question)).trajectories
                return [context.generate_seconds + context.search_seconds for context in trajectory.contexts]

            return await measure_all(ask, questions, seconds=seconds)

        return asyncio.run(run())


@dataclass
class Clients:
    """Asks a service over real sockets."""

    http: httpx.AsyncClient
    reads: bool

    async def post(self, question: Question) -> httpx.Response:
        return await self.http.post("/v1/answer", json=self._body(question))

    async def ask(self, question: Question) -> list[float]:
        answer = await self.post(question)
        answer.raise_for_status()
        return [turn["generate_seconds"] + turn["search_seconds"] for turn in answer.json()["turns"]]

    async def stream(self, question: Question) -> list[float]:
        """Returns the seconds until the first event, after the last one."""
        began, first = time.perf_counter(), 0.0
        async with self.http.stream("POST", "/v1/answer", json=self._body(question) | {"stream": True}) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("event: ") and not first:
                    first = time.perf_counter() - began
                assert line != "event: error"
        return [first]

    def _body(self, question: Question) -> dict[str, Any]:
        body = {"question": question.text, "partition": question.partition}
        return body | ({"text": question.context} if question.context and self.reads else {})


def with_service(settings: dict[str, Any], work: Callable[[Clients], Awaitable[T]]) -> T:
    """Starts the service, and returns what `work` makes of it."""
    reads = resolve(parse_section(settings, AgentServiceConfig)).main.agent_spec.reads
    (port,) = free_ports(1)
    with served_agent(settings, host="127.0.0.1", port=port) as (url, _):

        async def run() -> T:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
                return await work(Clients(http, reads))

        return asyncio.run(run())


@dataclass
class Overloaded:
    """Holds what a service did under more requests than it can answer."""

    alone: Measured
    sustainable: Measured
    answers: list[tuple[int, float]]
    """Status and seconds of every request."""
    mebibytes: tuple[float, float]
    """Memory of the agent's process, before and after."""


async def overload(clients: Clients, questions: Sequence[Question], *, seconds: float) -> Overloaded:
    """Sends requests at OVERLOAD times the rate that the service sustains, whatever becomes of them."""

    async def one(number: int, rate: float) -> tuple[int, float]:
        await asyncio.sleep(number / rate)
        began = time.perf_counter()
        answer = await clients.post(questions[number % len(questions)])
        return answer.status_code, time.perf_counter() - began

    await measure(clients.ask, questions, num_clients=1, seconds=min(seconds, 3.0))  # warm-up
    alone = await measure(clients.ask, questions, num_clients=1, seconds=seconds)
    sustainable = await measure(clients.ask, questions, num_clients=OVERLOAD_IN_FLIGHT, seconds=seconds)
    rate, before = OVERLOAD * sustainable.rate, agent_mebibytes()
    answers = await asyncio.gather(*(one(number, rate) for number in range(int(rate * seconds))))
    return Overloaded(alone, sustainable, answers, (before, agent_mebibytes()))


def agent_mebibytes() -> float:
    """Returns the memory of the agent replicas of this machine."""
    found = [process for process in psutil.process_iter(["cmdline"]) if is_agent(process.info["cmdline"] or [])]
    return sum(process.memory_info().rss for process in found) / 2**20


def is_agent(command: Sequence[str]) -> bool:
    return bool(command) and command[0].startswith("ray::ServeReplica:agent:agent")


def report(direct: dict[int, Measured], served: dict[int, Measured], streamed: dict[int, Measured]) -> None:
    """Prints the tables."""
    heads = ["clients", "direct, requests/s", "p50, p99 ms", "service, requests/s", "p50, p99 ms", "service / direct"]
    print("|", " | ".join([*heads, "first event of a stream, p50, p99 ms"]), "|")
    print("|---|---|---|---|---|---|---|")
    for n in CLIENTS:
        a, b = direct[n], served[n]
        times = [f"{each.milliseconds(50):.0f}, {each.milliseconds(99):.0f}" for each in (a, b)]
        first = ", ".join(f"{1000 * float(np.percentile(streamed[n].by_turn[1], each)):.0f}" for each in (50, 99))
        ratio = f"{b.rate / a.rate:.2f}"
        print(f"| {n} | {a.rate:.2f} | {times[0]} | {b.rate:.2f} | {times[1]} | {ratio} | {first} |")
    print("\n| turn | direct, seconds | service, seconds |\n|---|---|---|")
    for turn in sorted(direct[1].by_turn.keys() & served[1].by_turn.keys()):
        print(f"| {turn} | {fmean(direct[1].by_turn[turn]):.3f} | {fmean(served[1].by_turn[turn]):.3f} |")


def report_overload(found: Overloaded) -> None:
    statuses = Counter(status for status, _ in found.answers)
    accepted = [seconds for status, seconds in found.answers if status == 200]
    p99_ms, alone_ms = 1000 * float(np.percentile(accepted, 99)), found.alone.milliseconds(99)
    print(f"\n{OVERLOAD} times the sustainable {found.sustainable.rate:.2f} requests/s: statuses {dict(statuses)}")
    print(f"p99 of the answered {p99_ms:.0f} ms, {p99_ms / alone_ms:.2f} times that of one client ({alone_ms:.0f} ms)")
    before, after = found.mebibytes
    print(f"memory of the agent {before:.0f} MiB before, {after:.0f} MiB after")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", help="the folder of a finished run")
    parser.add_argument("settings", nargs="*", help="key=value of the service (mempipe/serve/config.py)")
    parser.add_argument("--questions", default="", help="a question file (default: the run's data.validation)")
    parser.add_argument("--num-questions", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=20.0, help="per number of clients")
    arguments = parser.parse_args(argv)
    settings = {"run": arguments.run, "max_in_flight": 2 * max(CLIENTS)} | parse_overrides(arguments.settings)
    served = resolve(parse_section(settings, AgentServiceConfig))
    file = arguments.questions or served.main.data.validation or f"{arguments.run}/world/validation.parquet"
    if not Path(file).exists():
        raise ConfigError(f"--questions is {file!r}, which does not exist")
    questions = read_questions(file)[: arguments.num_questions]
    direct = directly(served, questions, seconds=arguments.seconds)
    assert not ray.is_initialized()
    seconds = arguments.seconds

    async def both(clients: Clients) -> tuple[dict[int, Measured], dict[int, Measured]]:
        served = await measure_all(clients.ask, questions, seconds=seconds)
        return served, await measure_all(clients.stream, questions, seconds=seconds)

    report(direct, *with_service(settings, both))
    limited = settings | {"max_in_flight": OVERLOAD_IN_FLIGHT}
    report_overload(with_service(limited, lambda each: overload(each, questions, seconds=seconds)))
    turn_seconds.report(turn_seconds.measure(served.main.model, served.main.generation))


if __name__ == "__main__":
    main()
