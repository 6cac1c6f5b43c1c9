"""A service under load for hours: what grows, and whether an answer is ever wrong.

    python -m benchmarks.soak runs/quickstart [--hours 2] [--clients 8] [--kill-every 60]

Starts `mempipe serve` for a finished run. Each client asks held-out questions, holds conversations, uploads documents
and hangs up in the middle of streams, in a random order. Every `--kill-every` seconds one replica is killed: agent,
engine and retriever in turn. Each answer is compared with that of the run's own evaluation after training, memory by
memory.

The first table counts what the clients got. The second compares the last quarter of the time with the second one (the
first warms up): memory, descriptors, threads, shared memory, log files and latency. The exit code is 1 if an answer was
wrong, if a request hung, if something grew by more than GROWTH, or if a log became longer than its rotation allows. The
service rotates its logs at LOG_FILE_MIB here, so that minutes suffice to reach it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import httpx
import numpy as np
import psutil

from mempipe.data.trajectories import read_trajectories
from mempipe.settings import ConfigError
from mempipe.stop import signals_interrupt
from mempipe.types import Trajectory
from tools.processes import Marked, Running, command_line, free_ports

GROWTH = 1.1
"""How much of a measure the last quarter may hold for each unit of the second one."""
NOISE = 10.0
"""A growth of fewer MiB, descriptors or threads is none."""
LOG_FILE_MIB = 0.25
ROTATED = {"RAY_ROTATION_MAX_BYTES": str(int(LOG_FILE_MIB * 2**20)), "RAY_ROTATION_BACKUP_COUNT": "1"}
LONGEST_LOG = "longest log with its renamed part, MiB"
LOG_LIMIT_MIB = 2.2 * LOG_FILE_MIB
"""A file and the renamed one before it; the last record may exceed the file's size."""
MAY_GROW = {"log files, MiB", LONGEST_LOG}
"""Each killed replica leaves its logs, so all of them together are reported and not judged; each has its limit."""
REPLICAS = ("agent", "generator", "retriever")
SAMPLE_EVERY_S = 5.0
HUNG_AFTER_S = 120.0
MIX = {"answer": 5, "conversation": 2, "document": 1, "hang-up": 2}
"""What a client does next, by weights."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A held-out question, and what the run's evaluation found."""

    question: str
    partition: str
    expected: Trajectory

    def is_right(self, reply: Mapping[str, object]) -> bool:
        """Returns whether the reply of /v1/answer has the same answer, searches and memories."""
        turns = reply["turns"]
        assert isinstance(turns, list)
        memories = [context.memory_after for context in self.expected.contexts]
        return reply["answer"] == (self.expected.answer and self.expected.answer.strip()) and memories == [
            turn["memory_after"] for turn in turns
        ]


@dataclass
class Soak:
    """Holds what was seen."""

    http: httpx.AsyncClient
    questions: Sequence[Asked]
    until: float
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    latencies: list[tuple[float, float]] = field(default_factory=list)
    """When an answer came, and after how many seconds."""
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    num_kills: Counter[str] = field(default_factory=Counter)

    async def client(self, seed: int) -> None:
        """Does one thing after the other until the time is over."""
        draw = random.Random(seed)
        doing: dict[str, Callable[[Asked], Awaitable[str]]] = {
            "answer": self.answer,
            "conversation": self.conversation,
            "document": self.document,
            "hang-up": self.hang_up,
        }
        while time.time() < self.until:
            (what,) = draw.choices(list(MIX), weights=list(MIX.values()))
            try:
                outcome = await asyncio.wait_for(doing[what](draw.choice(self.questions)), HUNG_AFTER_S)
            except TimeoutError:
                outcome = "hung"
            except httpx.HTTPStatusError as error:
                outcome = str(error.response.status_code)
                if error.response.status_code in (429, 503):
                    await asyncio.sleep(float(error.response.headers["retry-after"]))
            except httpx.TransportError as error:
                outcome = type(error).__name__
            self.outcomes[what, outcome] += 1

    async def answer(self, asked: Asked) -> str:
        began = time.time()
        reply = await self._sent("POST", "/v1/answer", {"question": asked.question, "partition": asked.partition})
        self.latencies.append((time.time(), time.time() - began))
        return "right" if asked.is_right(reply) else "wrong"

    async def conversation(self, asked: Asked) -> str:
        """Asks the question in a new session. It starts from no memory, so the answer is that of the evaluation."""
        session = (await self._sent("POST", "/v1/sessions"))["id"]
        try:
            body = {"question": asked.question, "partition": asked.partition, "session": session}
            is_right = asked.is_right(await self._sent("POST", "/v1/answer", body))
            kept = await self._sent("GET", f"/v1/sessions/{session}")
        finally:
            with suppress(httpx.HTTPStatusError):
                await self._sent("DELETE", f"/v1/sessions/{session}")
        return "right" if is_right and kept["num_questions"] == 1 else "wrong"

    async def document(self, asked: Asked) -> str:
        """Uploads a text in four pieces, reads its size, and deletes it."""
        document = (await self._sent("POST", "/v1/documents"))["id"]
        piece = (asked.question * 200).encode()
        for number in range(4):
            answer = await self.http.post(
                f"/v1/documents/{document}/pieces", params={"start": number * len(piece)}, content=piece
            )
            answer.raise_for_status()
        size = (await self._sent("GET", f"/v1/documents/{document}"))["num_bytes"]
        await self._sent("DELETE", f"/v1/documents/{document}")
        return "right" if size == 4 * len(piece) else "wrong"

    async def hang_up(self, asked: Asked) -> str:
        """Closes a stream after its first event."""
        body = {"question": asked.question, "partition": asked.partition, "stream": True}
        async with self.http.stream("POST", "/v1/answer", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line:
                    return "right"
        return "wrong"

    async def _sent(self, method: str, path: str, body: object = None) -> dict[str, object]:
        answer = await self.http.request(method, path, json=body)
        answer.raise_for_status()
        return answer.json()

    async def sampled(self, marked: Marked) -> None:
        """Measures the service's processes every few seconds."""
        while time.time() < self.until:
            self.samples.append((time.time(), await asyncio.to_thread(measure, marked)))
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def killed(self, marked: Marked, *, every_s: float) -> None:
        """Kills one replica at a time, as a machine without memory does."""
        for number in range(sys.maxsize):
            await asyncio.sleep(every_s)
            if time.time() > self.until - every_s:
                return
            name = REPLICAS[number % len(REPLICAS)]
            for process in marked.processes():
                if re.search(rf"ServeReplica:[\w-]+:{name}\b", command_line(process)):
                    process.send_signal(signal.SIGKILL)
                    self.num_kills[name] += 1
                    break


def measure(marked: Marked) -> dict[str, float]:
    """Returns what the service's processes hold together."""
    total, folders = defaultdict[str, float](float), set[Path]()
    for process in marked.processes():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total["memory, MiB"] += process.memory_full_info().uss / 2**20
            total["descriptors"] += process.num_fds()
            total["threads"] += process.num_threads()
            if found := re.search(r"--log_dir=(\S+)", command_line(process)):
                folders.add(Path(found[1]))
    logs = log_sizes(file for folder in folders for file in folder.rglob("*"))
    return {
        **total,
        "shared memory, MiB": psutil.disk_usage("/dev/shm").used / 2**20,
        "log files, MiB": logs.total() / 2**20,
        LONGEST_LOG: max(logs.values(), default=0) / 2**20,
    }


def log_sizes(files: Iterable[Path]) -> Counter[str]:
    """Returns the bytes of each log, with those of its renamed part (`NAME.1`)."""
    sizes = Counter[str]()
    for file in files:
        with suppress(FileNotFoundError):  # renamed meanwhile
            if file.is_file():
                sizes[file.name.removesuffix(".1")] += file.stat().st_size
    return sizes


def held_out(run: Path) -> list[Asked]:
    """Returns the held-out questions with the attempts of the evaluation after training. Raises ConfigError."""
    file = run / "evaluation" / "after.parquet"
    if not file.exists():
        raise ConfigError(f"{file} does not exist; the soak compares answers with the evaluation of a finished run")
    return [
        Asked(question=group.question.text, partition=group.question.partition, expected=group.trajectories[0])
        for group in read_trajectories(file)
    ]


def quarters(seen: Sequence[tuple[float, float]], *, began: float, until: float) -> tuple[list[float], list[float]]:
    """Returns the values of the second and of the last quarter of the time."""
    quarter = (until - began) / 4
    second = [value for when, value in seen if quarter <= when - began < 2 * quarter]
    return second, [value for when, value in seen if when - began >= 3 * quarter]


def report(soak: Soak, *, began: float) -> Iterator[str]:
    """Yields the lines of both tables, then one line for each fault."""
    yield "| request | outcome | number |\n|---|---|---|"
    for (what, outcome), number in sorted(soak.outcomes.items()):
        yield f"| {what} | {outcome} | {number:,} |"
    yield f"\nkilled: {json.dumps(soak.num_kills)}\n"
    yield "| measure | second quarter | last quarter | ratio |\n|---|---|---|---|"
    grown: list[str] = []
    for name in soak.samples[0][1]:
        series = [(when, values[name]) for when, values in soak.samples]
        second, last = map(fmean, quarters(series, began=began, until=soak.until))
        yield f"| {name} | {second:,.1f} | {last:,.1f} | {last / max(second, 1e-9):.3f} |"
        if last > max(GROWTH * second, second + NOISE) and name not in MAY_GROW:
            grown.append(name)
    for percentile in (50, 99):
        second, last = (
            1000 * float(np.percentile(values, percentile))
            for values in quarters(soak.latencies, began=began, until=soak.until)
        )
        yield f"| p{percentile} of an answer, ms | {second:,.0f} | {last:,.0f} | {last / second:.3f} |"
    yield ""
    for (what, outcome), number in soak.outcomes.items():
        if outcome in ("wrong", "hung"):
            yield f"fault: {what}: {number:,} {outcome}"
    yield from (f"fault: {name} grew by more than {GROWTH - 1:.0%}" for name in grown)
    if (longest := max(values[LONGEST_LOG] for _, values in soak.samples)) > LOG_LIMIT_MIB:
        yield f"fault: a log held {longest:.2f} MiB; rotation at {LOG_FILE_MIB} MiB allows {LOG_LIMIT_MIB:.2f} MiB"


async def soaked(url: str, questions: Sequence[Asked], marked: Marked, asked: argparse.Namespace) -> Soak:
    """Runs clients, measurements and kills side by side until the time is over."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=HUNG_AFTER_S, limits=limits) as http:
        soak = Soak(http, questions, until=time.time() + 3600 * asked.hours)
        async with asyncio.TaskGroup() as side_by_side:
            for number in range(asked.clients):
                side_by_side.create_task(soak.client(number))
            side_by_side.create_task(soak.sampled(marked))
            if asked.kill_every:
                side_by_side.create_task(soak.killed(marked, every_s=asked.kill_every))
    return soak


def main(argv: Sequence[str] | None = None) -> int:
    """Prints both tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kill-every", type=float, default=60.0, metavar="SECONDS", help="0: nothing is killed")
    asked = parser.parse_args(argv)
    questions, marked = held_out(asked.run), Marked(ROTATED)
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as state:
        command = [sys.executable, "-m", "mempipe.cli", "serve", str(asked.run.absolute()), "--port", str(port)]
        serving = Running([*command, f"state={state}"], marked=marked, cwd=Path(state))
        try:
            with signals_interrupt():  # a benchmark that is ended by SIGTERM leaves no service behind
                serving.wait_until(lambda: "until Ctrl-C" in serving.stdout)
                began = time.time()
                soak = asyncio.run(soaked(f"http://127.0.0.1:{port}", questions, marked, asked))
                serving.end()
                left = marked.survivors()
        finally:
            marked.end()
    lines = [*report(soak, began=began), *(f"fault: still there after the end: {line}" for line in left)]
    print("\n".join(lines))
    return int(any(line.startswith("fault") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
