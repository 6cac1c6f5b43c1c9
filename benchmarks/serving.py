"""What HTTP and Ray Serve cost: the agent service against the same agent loop run directly on an engine.

    python -m benchmarks.serving runs/quickstart [--seconds 20] [key=value ...]

One run prints requests/s with p50 and p99 latency at 1, 8 and 32 clients for both, their ratio (aim: 0.85), and the
seconds per turn, so that a bounded memory can be compared with a full history by running it for a ReAct run as well.
The engine of the direct loop and that of the service are of the same settings, and never work at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import socket
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import numpy as np
import ray

from mempipe.actors.driver import Driver
from mempipe.actors.launch import connected, launch_rollout_actors
from mempipe.data.qa import read_questions
from mempipe.loader import parse_overrides, parse_section
from mempipe.serve.agent import served_agent
from mempipe.serve.config import AgentServiceConfig
from mempipe.serve.served_run import ServedRun, resolve
from mempipe.settings import ConfigError
from mempipe.types import Question

CLIENTS = (1, 8, 32)
Ask = Callable[[Question], Awaitable[list[float]]]
"""Asks one question; gives the seconds of its turns."""


@dataclass
class Measured:
    """Holds what a number of clients saw."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    by_turn: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    def milliseconds(self, percentile: float) -> float:
        return 1000 * float(np.percentile(self.latencies, percentile))


async def measure(ask: Ask, questions: Sequence[Question], *, num_clients: int, seconds: float) -> Measured:
    """Clients that each ask one question after the other, for `seconds`."""
    measured, upcoming = Measured(), itertools.cycle(questions)
    started = time.perf_counter()

    async def client() -> None:
        while time.perf_counter() - started < seconds:
            began = time.perf_counter()
            turns = await ask(next(upcoming))
            measured.latencies.append(time.perf_counter() - began)
            for number, value in enumerate(turns, start=1):
                measured.by_turn[number].append(value)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    measured.seconds = time.perf_counter() - started
    return measured


async def measure_all(ask: Ask, questions: Sequence[Question], *, seconds: float) -> dict[int, Measured]:
    """For every number of clients, after a warm-up."""
    await measure(ask, questions, num_clients=4, seconds=min(seconds, 3.0))
    return {n: await measure(ask, questions, num_clients=n, seconds=seconds) for n in CLIENTS}


def directly(served: ServedRun, questions: Sequence[Question], *, seconds: float) -> dict[int, Measured]:
    """The driver of training and evaluation on engine and retriever actors."""
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


def over_http(settings: dict[str, Any], questions: Sequence[Question], *, seconds: float) -> dict[int, Measured]:
    """The service, asked over real sockets."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    with served_agent(settings, host="127.0.0.1", port=port) as (url, _):

        async def run() -> dict[int, Measured]:
            limits = httpx.Limits(max_connections=max(CLIENTS))
            async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

                async def ask(question: Question) -> list[float]:
                    body = {"question": question.text, "partition": question.partition}
                    body |= {"text": question.context} if question.context and reads else {}
                    answer = await client.post("/v1/answer", json=body)
                    answer.raise_for_status()
                    return [turn["generate_seconds"] + turn["search_seconds"] for turn in answer.json()["turns"]]

                return await measure_all(ask, questions, seconds=seconds)

        reads = resolve(parse_section(settings, AgentServiceConfig)).main.agent_spec.reads
        return asyncio.run(run())


def report(direct: dict[int, Measured], served: dict[int, Measured]) -> None:
    """The tables, on the terminal."""
    print("| clients | direct, requests/s | p50, p99 ms | service, requests/s | p50, p99 ms | service / direct |")
    print("|---|---|---|---|---|---|")
    for n in CLIENTS:
        a, b = direct[n], served[n]
        times = [f"{each.milliseconds(50):.0f}, {each.milliseconds(99):.0f}" for each in (a, b)]
        print(f"| {n} | {a.rate:.2f} | {times[0]} | {b.rate:.2f} | {times[1]} | {b.rate / a.rate:.2f} |")
    print("\n| turn | direct, seconds | service, seconds |\n|---|---|---|")
    for turn in sorted(direct[1].by_turn.keys() & served[1].by_turn.keys()):
        print(f"| {turn} | {fmean(direct[1].by_turn[turn]):.3f} | {fmean(served[1].by_turn[turn]):.3f} |")


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
    report(direct, over_http(settings, questions, seconds=arguments.seconds))


if __name__ == "__main__":
    main()
