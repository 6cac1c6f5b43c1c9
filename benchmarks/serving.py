"""What HTTP and Ray Serve cost: the agent service against the same agent loop run directly on an engine.

    python -m benchmarks.serving runs/quickstart [--only speed] [--rounds 3] [--seconds 20] [key=value ...]

`speed`: requests/s with p50 and p99 latency at 1, 8 and 32 clients, directly, from the service, and as streams from the
service; the ratio of the first two (aims: .9, .8, .7); and when the first event of a stream arrives (aim: 50 ms). Each
side asks the same questions of its own engine, with the same weights and settings. The sides take turns within each
round, since cores change their speed over minutes; a ratio is of one round.

`work`: the seconds and CPU-seconds of both sides for the same questions, with the same numbers of clients. Where an
answer takes half a minute, the rates of `speed` vary with the cores; CPU-seconds hardly do. They are those of all
processes of the benchmark.

`overload`: a service that works on OVERLOAD_IN_FLIGHT requests at a time gets four times the requests that it can
answer. Printed are the statuses, the p99 of the answers against that of one client alone (aim: 3), and the memory of
the agent's process before and after.

`turns`: what turn 2 and turn 20 cost an engine with a bounded memory and with a full history
(`benchmarks.turn_seconds`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import psutil
import ray

from benchmarks import turn_seconds
from benchmarks.rows import Row, record, spread
from mempipe.actors.driver import Driver
from mempipe.actors.standing import launch_rollout_actors
from mempipe.data.qa import read_questions
from mempipe.loader import parse_overrides, parse_section
from mempipe.serve.agent import served_agent
from mempipe.serve.config import AgentServiceConfig
from mempipe.serve.served_run import ServedRun, resolve
from mempipe.settings import ConfigError
from mempipe.types import Question
from tools.processes import cpu_seconds, free_ports

CLIENTS = (1, 8, 32)
OVERLOAD = 4
OVERLOAD_IN_FLIGHT = 4
PARTS = ("speed", "work", "overload", "turns")
DIRECT, SERVICE, STREAMS = "direct", "service", "streams"
Ask = Callable[[Question], Awaitable[float]]
"""Asks one question; returns the seconds until its first event, or until its answer where there are no events."""


@dataclass
class Measured:
    """Holds what a number of clients saw."""

    rate: float = 0.0
    """Answers per second."""
    latencies: list[float] = field(default_factory=list)
    first_events: list[float] = field(default_factory=list)


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
            first_event = await ask(next(upcoming))
            if not is_within:
                continue
            num_open -= 1
            took = clock() - began
            answered += min(end - began, took) / took
            measured.latencies.append(took)
            measured.first_events.append(first_event)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    measured.rate = answered / seconds
    return measured


@dataclass
class Clients:
    """Asks a service over real sockets."""

    http: httpx.AsyncClient
    reads: bool

    async def post(self, question: Question) -> httpx.Response:
        return await self.http.post("/v1/answer", json=self._body(question))

    async def ask(self, question: Question) -> float:
        began = time.perf_counter()
        answer = await self.post(question)
        answer.raise_for_status()
        return time.perf_counter() - began

    async def stream(self, question: Question) -> float:
        """Returns the seconds until the first event, after the last one."""
        began, first = time.perf_counter(), 0.0
        async with self.http.stream("POST", "/v1/answer", json=self._body(question) | {"stream": True}) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("event: ") and not first:
                    first = time.perf_counter() - began
                assert line != "event: error"
        return first

    def _body(self, question: Question) -> dict[str, Any]:
        body = {"question": question.text, "partition": question.partition}
        return body | ({"text": question.context} if question.context and self.reads else {})


@contextmanager
def service(settings: Mapping[str, Any]) -> Iterator[Callable[[], AbstractAsyncContextManager[Clients]]]:
    """Starts the service; yields a function that connects clients to it."""
    reads = resolve(parse_section(dict(settings), AgentServiceConfig)).main.agent_spec.reads
    (port,) = free_ports(1)
    with served_agent(dict(settings), host="127.0.0.1", port=port) as (url, _):

        @asynccontextmanager
        async def connect() -> AsyncIterator[Clients]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
                yield Clients(http, reads)

        yield connect


def speed(
    settings: Mapping[str, Any],
    served: ServedRun,
    questions: Sequence[Question],
    *,
    clients: Sequence[int],
    rounds: int,
    seconds: float,
) -> dict[int, list[dict[str, Measured]]]:
    """Returns what each number of clients saw in each round, by side."""

    async def run() -> dict[int, list[dict[str, Measured]]]:
        driver = Driver(actors.driver_spec(sampling=served.sampling, group_size=1))

        async def directly(question: Question) -> float:
            began = time.perf_counter()
            await driver.play(question.id, question)
            return time.perf_counter() - began

        async with connect() as connected:
            sides: dict[str, Ask] = {DIRECT: directly, SERVICE: connected.ask, STREAMS: connected.stream}
            for ask in sides.values():
                await measure(ask, questions, num_clients=min(4, max(clients)), seconds=min(seconds, 3.0))  # warm-up

            async def one_round(num_clients: int) -> dict[str, Measured]:
                return {
                    side: await measure(ask, questions, num_clients=num_clients, seconds=seconds)
                    for side, ask in sides.items()
                }

            return {number: [await one_round(number) for _ in range(rounds)] for number in clients}

    with (
        service(settings) as connect,
        launch_rollout_actors(served.main, ray.get_runtime_context().namespace) as actors,
    ):
        return asyncio.run(run())


@dataclass(frozen=True)
class Work:
    """Holds what one side spent on a number of questions."""

    seconds: float
    cpu_seconds: float
    sampled_tokens: int


def work(
    settings: Mapping[str, Any],
    served: ServedRun,
    questions: Sequence[Question],
    *,
    clients: Sequence[int],
    rounds: int,
) -> dict[int, list[dict[str, Work]]]:
    """Returns what each side spent on all questions in each round, by number of clients."""

    async def run() -> dict[int, list[dict[str, Work]]]:
        driver = Driver(actors.driver_spec(sampling=served.sampling, group_size=1))

        async def directly(question: Question) -> int:
            group = await driver.play(question.id, question)
            return sum(context.num_sampled_tokens for t in group.trajectories for context in t.contexts)

        async with connect() as connected:

            async def from_service(question: Question) -> int:
                answer = await connected.post(question)
                return answer.raise_for_status().json()["usage"]["completion_tokens"]

            sides = {DIRECT: directly, SERVICE: from_service}

            async def one_round(num_clients: int) -> dict[str, Work]:
                return {side: await spent(ask, questions, num_clients=num_clients) for side, ask in sides.items()}

            for ask in sides.values():
                await spent(ask, questions[:4], num_clients=4)  # warm-up
            return {number: [await one_round(number) for _ in range(rounds)] for number in clients}

    with (
        service(settings) as connect,
        launch_rollout_actors(served.main, ray.get_runtime_context().namespace) as actors,
    ):
        return asyncio.run(run())


async def spent(ask: Callable[[Question], Awaitable[int]], questions: Sequence[Question], *, num_clients: int) -> Work:
    """Asks every question once, `num_clients` of them at a time. `ask` returns the number of its sampled tokens."""
    upcoming = iter(questions)

    async def client() -> int:
        return sum([await ask(question) for question in upcoming])

    began, cpu = time.perf_counter(), cpu_seconds()
    tokens = await asyncio.gather(*(client() for _ in range(num_clients)))
    return Work(time.perf_counter() - began, cpu_seconds() - cpu, sum(tokens))


@dataclass
class Overloaded:
    """Holds what a service did under more requests than it can answer."""

    alone: Measured
    sustainable: Measured
    answers: list[tuple[int, float]]
    """Status and seconds of every request."""
    mebibytes: tuple[float, float]
    """Memory of the agent's process, before and after."""


def overload(settings: Mapping[str, Any], questions: Sequence[Question], *, seconds: float) -> Overloaded:
    """Sends requests at OVERLOAD times the rate that the service sustains, whatever becomes of them."""

    async def run() -> Overloaded:
        async with connect() as clients:

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

    with service(settings) as connect:
        return asyncio.run(run())


def agent_mebibytes() -> float:
    """Returns the memory of the agent replicas of this machine."""
    found = [process for process in psutil.process_iter(["cmdline"]) if is_agent(process.info["cmdline"] or [])]
    return sum(process.memory_info().rss for process in found) / 2**20


def is_agent(command: Sequence[str]) -> bool:
    return bool(command) and command[0].startswith("ray::ServeReplica:agent:agent")


def report_speed(found: Mapping[int, Sequence[Mapping[str, Measured]]]) -> None:
    """Prints the table, and records its rows."""
    heads = [f"{side}, requests/s | p50, p99" for side in (DIRECT, SERVICE)]
    print("| clients |", " | ".join([*heads, "service / direct", "first event of a stream, p50, p99"]), "|")
    print("|---|---|---|---|---|---|---|")
    for number, rounds in found.items():
        rates = {side: [each[side].rate for each in rounds] for side in (DIRECT, SERVICE)}
        row = Row(
            name=f"service, {number} {'client' if number == 1 else 'clients'}",
            unit="requests/s",
            values=rates[SERVICE],
            peer="the same agent without HTTP",
            peer_is_own=True,
            of_peer=rates[DIRECT],
        )
        record(row)
        cells = [str(number)]
        for side in (DIRECT, SERVICE):
            cells += [f"{median(rates[side]):.2f}", _percentiles(each[side].latencies for each in rounds)]
        ratios = row.ratios(row.of_peer)
        cells += [spread(ratios)]
        cells += [_percentiles(each[STREAMS].first_events for each in rounds)]
        print("|", " | ".join(cells), "|")


def _percentiles(rounds: Iterable[Sequence[float]]) -> str:
    """Returns p50 and p99 of all rounds together, in milliseconds."""
    p50, p99 = 1000 * np.percentile([seconds for each in rounds for seconds in each], [50, 99])
    return f"{p50:.0f}, {p99:.0f} ms"


def report_work(found: Mapping[int, Sequence[Mapping[str, Work]]]) -> None:
    print("\n| clients | side | sampled tokens | seconds | CPU-s | CPU-s of direct / service |")
    print("|---|---|---|---|---|---|")
    for number, rounds in found.items():
        ratios = [each[DIRECT].cpu_seconds / each[SERVICE].cpu_seconds for each in rounds]
        for side in (DIRECT, SERVICE):
            ones = [each[side] for each in rounds]
            cells = [str(number), side, f"{median(one.sampled_tokens for one in ones):.0f}"]
            cells += [f"{median(one.seconds for one in ones):.1f}", f"{median(one.cpu_seconds for one in ones):.1f}"]
            if side == SERVICE:
                cells += [f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"]
            print("|", " | ".join(cells), "|")


def report_overload(found: Overloaded) -> None:
    statuses = Counter(status for status, _ in found.answers)
    accepted = [seconds for status, seconds in found.answers if status == 200]
    p99_ms, alone_ms = (1000 * float(np.percentile(each, 99)) for each in (accepted, found.alone.latencies))
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
    parser.add_argument("--seconds", type=float, default=20.0, help="per side, round and number of clients")
    parser.add_argument("--rounds", type=int, default=3, help="of `speed` and `work`")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, metavar="N", help="of `speed` and `work`")
    arguments = parser.parse_args(argv)
    settings = {"run": arguments.run, "max_in_flight": 2 * max(arguments.clients)} | parse_overrides(arguments.settings)
    served = resolve(parse_section(settings, AgentServiceConfig))
    file = arguments.questions or served.main.data.validation or f"{arguments.run}/world/validation.parquet"
    if not Path(file).exists():
        raise ConfigError(f"--questions is {file!r}, which does not exist")
    questions = read_questions(file)[: arguments.num_questions]
    if "speed" in arguments.only:
        load = {"clients": arguments.clients, "rounds": arguments.rounds, "seconds": arguments.seconds}
        report_speed(speed(settings, served, questions, **load))
    if "work" in arguments.only:
        report_work(work(settings, served, questions, clients=arguments.clients, rounds=arguments.rounds))
    if "overload" in arguments.only:
        limited = settings | {"max_in_flight": OVERLOAD_IN_FLIGHT}
        report_overload(overload(limited, questions, seconds=arguments.seconds))
    if "turns" in arguments.only:
        turn_seconds.report(turn_seconds.measure(served.main.model, served.main.generation))


if __name__ == "__main__":
    main()
