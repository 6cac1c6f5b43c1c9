"""Jobs on two Ray nodes that share files and nothing else: do they end as on one node, and what crosses the wire?

    python -m benchmarks.two_nodes [--delay-ms 10] [--loss 0.01] [--jobs index train evaluate serve] [--cut JOB SECONDS]

Both nodes run on this machine, each in a network namespace of its own, which needs root. Their only link is a relay in
this process: it delays every packet, drops a share of them and counts bytes. Each node has its own object store, so
objects travel over the link. Ray places roles on either node by chance.

The jobs are submitted as users do it (`mempipe submit`, `serve deploy`): an index of generated passages, the
quickstart in short with two learner ranks and two engines, an evaluation of it, and its service, which answers 32
questions. `--cut` interrupts the link for so long, after the second step of `train` or the fourth answer of `serve`.
Prints the bytes of each job, and of each step of the training, from the first node (the head) to the second and back,
and how many replies of the service were 503 and how long the slowest took. The exit code is 1 if a job fails.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import json
import os
import random
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import yaml

from benchmarks.upgrade import OnCluster
from mempipe.data.qa import read_questions
from mempipe.environment import EVERY_PROCESS
from mempipe.serve.http import front
from mempipe.tracking.tracker import read_metrics
from tools.processes import Marked, Running
from tools.ray_head import BIN, Head

NAMES = tuple(f"mp-{os.getpid()}-{node}" for node in range(2))
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT, DASHBOARD = 6379, 8265  # a namespace has all ports of its own
MTU = 9000
TUN, NO_HEADER, SET_NAME = 0x0001, 0x1000, 0x400454CA
SAMPLE_EVERY_S = 0.2
BIGGEST = 2**16
JOBS = ["index", "train", "evaluate", "serve"]
TRAINING = [
    "num_steps=6",
    "warm_start.num_clean_trajectories=100",
    "warm_start.num_noisy_trajectories=20",
    "world.num_validation_questions=32",
    "generation.num_replicas=2",
    "checkpoint.every_steps=1",
    "tracking.enabled=false",
]
OWN_FOLDERS = 'mkdir "$0/other" && mount --bind "$0/other" "$0/ray" && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
"""Gives a node its own temporary folder of Ray and its own shared memory."""
NUM_ASKED = 32
ASK = """
import sys
import time
import httpx
url, body, count = sys.argv[1:]
for _ in range(int(count)):
    answer = httpx.post(url, content=body, headers={"content-type": "application/json"}, timeout=300)
    print(answer.status_code, answer.elapsed.total_seconds(), flush=True)
    time.sleep(float(answer.headers.get("retry-after", 0)))
"""
"""Prints status and seconds of every reply, and waits as long as a refusal asks for. It runs on the first node, since
nothing else reaches the service."""
CUT_AFTER_STEPS, CUT_AFTER_ANSWERS = 2, 4


@dataclass
class Relay:
    """Carries packets between two TUN devices."""

    delay_s: float
    loss: float
    num_bytes: list[int] = field(default_factory=lambda: [0, 0])
    """From the first node to the second, and back."""
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self, devices: Sequence[int]) -> None:
        due: list[tuple[float, int, int, bytes]] = []
        chance, number, next_sample = random.Random(0), 0, 0.0
        while not self._over.is_set():
            now = time.monotonic()
            if now >= next_sample:
                self.samples.append((time.time(), self.num_bytes[0], self.num_bytes[1]))
                next_sample = now + SAMPLE_EVERY_S
            wait = min(due[0][0] - now if due else SAMPLE_EVERY_S, SAMPLE_EVERY_S)
            for device in select.select(devices, [], [], max(wait, 0))[0]:
                packet, way = os.read(device, BIGGEST), devices.index(device)
                self.num_bytes[way] += len(packet)
                if chance.random() >= self.loss:
                    number += 1
                    heapq.heappush(due, (time.monotonic() + self.delay_s, number, 1 - way, packet))
            while due and due[0][0] <= time.monotonic():
                _, _, way, packet = heapq.heappop(due)
                os.write(devices[way], packet)

    def cut(self, seconds: float) -> None:
        """Drops every packet for so long."""
        loss, self.loss = self.loss, 1.0
        time.sleep(seconds)
        self.loss = loss

    def end(self) -> None:
        self._over.set()

    def until(self, when: float) -> tuple[int, int]:
        """Returns the bytes of both directions until that time."""
        there, back = next(((there, back) for at, there, back in self.samples if at >= when), self.num_bytes)
        return there, back


def missing() -> str:
    """Returns what this machine lacks for two namespaces and a link between them; "" if it has all."""
    lacks = {
        "root": os.geteuid() != 0,
        "/dev/net/tun": not Path("/dev/net/tun").exists(),
        "the command ip": shutil.which("ip") is None,
    }
    return ", ".join(name for name, is_missing in lacks.items() if is_missing)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def linked(relay: Relay) -> Iterator[None]:
    """Makes both namespaces and joins them by the relay; removes them at the end."""
    with ExitStack() as stack:
        devices = []
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            device = os.open("/dev/net/tun", os.O_RDWR)
            stack.callback(os.close, device)
            fcntl.ioctl(device, SET_NAME, struct.pack("16sH", name.encode(), TUN | NO_HEADER))
            ip("link", "set", name, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", name, "mtu", str(MTU), "up")
            devices.append(device)
        thread = threading.Thread(target=relay.run, args=(devices,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            relay.end()
            thread.join()


def inside(node: int, *command: str) -> list[str]:
    """Returns the command that runs another one in the network of a node."""
    return ["nsenter", f"--net=/run/netns/{NAMES[node]}", *command]


@contextmanager
def two_nodes(folder: Path) -> Iterator[Head]:
    """Starts Ray in both namespaces, with one CPU each."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()}
    # Ray takes one of its best two nodes by chance; by default it puts roles without CPUs on the node that asks.
    chance = {"RAY_scheduler_top_k_absolute": "2"}
    path = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", front.VARIABLE: front.PATH}
    marked = Marked({**path, **EVERY_PROCESS, **token, **chance})
    head = ["--head", f"--port={PORT}", f"--temp-dir={folder / 'ray'}"]
    head += [f"--dashboard-host={ADDRESSES[0]}", f"--dashboard-port={DASHBOARD}"]
    nodes = []
    try:
        for node, joins in enumerate((head, [f"--address={ADDRESSES[0]}:{PORT}"])):
            command = [str(BIN / "ray"), "start", "--block", *joins, f"--node-ip-address={ADDRESSES[node]}"]
            command += ["--num-cpus=1", f"--object-store-memory={256 * 2**20}"]
            if node:
                command = ["unshare", "--mount", "sh", "-c", OWN_FOLDERS, str(folder), *command]
            nodes.append(Running(inside(node, *command), marked=marked, cwd=folder))
            nodes[-1].wait_until(lambda: "Ray runtime started" in nodes[-1].stdout, every_s=0.2)
        yield Head(marked=marked, dashboard=f"http://{ADDRESSES[0]}:{DASHBOARD}")
    finally:
        for node in nodes:
            node.kill()
        marked.end()


class Jobs:
    """The jobs of a user of the cluster; all files are in `folder`. Each raises RuntimeError if it fails."""

    def __init__(self, head: Head, relay: Relay, folder: Path, *, cut: Mapping[str, float]) -> None:
        """`cut` has the seconds for which the link is interrupted, by the name of the job."""
        self._head, self._relay, self._folder, self._cut = head, relay, folder, cut
        self._run = folder / "runs" / "two-nodes"
        self._shipped = folder / "shipped"
        self._shipped.mkdir()
        self.replies: list[tuple[int, float]] = []
        """Status and seconds of each."""

    def index(self) -> None:
        """Builds an index of vectors and words."""
        chance = random.Random(0)
        words = [f"word{number}" for number in range(2000)]
        rows = ({"id": str(i), "contents": f'"{i}"\n{" ".join(chance.choices(words, k=60))}'} for i in range(20_000))
        corpus = self._folder / "corpus.jsonl"
        corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
        values = {"corpus": [str(corpus)], "encoder": {"kind": "hashing", "dimension": 256}, "lexical": True}
        self._end(self._submitted(self._written("index.yaml", values), f"output={self._folder / 'index'}"))

    def train(self) -> None:
        """Trains for a few steps on two ranks and two engines."""
        training = self._submitted("quickstart", *TRAINING, f"name={self._run.name}", f"output={self._run.parent}")
        if "train" in self._cut:
            training.wait_until(lambda: len(self._steps()) >= CUT_AFTER_STEPS)
            self._relay.cut(self._cut["train"])
        self._end(training)

    def evaluate(self) -> None:
        """Evaluates what was trained."""
        questions = {"name": "held-out", "file": str(self._held_out), "num_questions": 32}
        runs = [{"name": "trained", "config": str(self._run)}]
        values = {"name": "table", "runs": runs, "benchmarks": [questions], "tracking": {"enabled": False}}
        self._end(self._submitted(self._written("suite.yaml", values), f"output={self._folder}"))

    def serve(self) -> None:
        """Deploys what was trained, and asks it."""
        settings = {"run": str(self._run), "state": str(self._folder / "service")}
        service = Service(self._head, settings, file=self._folder / "service.yaml", port=8000)
        service.deploy()
        example = read_questions(self._held_out)[0]
        body = json.dumps({"question": example.text, "partition": example.partition})
        asking = self._started(sys.executable, "-c", ASK, f"{service.url}/v1/answer", body, str(NUM_ASKED))
        if "serve" in self._cut:
            asking.wait_until(lambda: asking.stdout.count("\n") >= CUT_AFTER_ANSWERS)
            self._relay.cut(self._cut["serve"])
        replies = map(str.split, self._end(asking).splitlines())
        self.replies = [(int(status), float(seconds)) for status, seconds in replies]
        if self.replies[-1][0] != 200 or {status for status, _ in self.replies} - {200, 503}:
            raise RuntimeError(f"replies with status and seconds: {self.replies}")

    def seconds_and_bytes(self) -> Iterator[tuple[int, float, int, int]]:
        """Yields the number of each step after the first, its seconds, and the bytes there and back."""
        for before, row in pairwise(self._steps()):
            there, back = (b - a for a, b in zip(*map(self._relay.until, (before["time"], row["time"])), strict=True))
            yield int(row["step"]), row["seconds/step"], there, back

    @property
    def _held_out(self) -> Path:
        return self._run / "world" / "validation.parquet"

    def _steps(self) -> list[dict[str, float]]:
        file = self._run / "metrics.jsonl"
        return [row for row in read_metrics(file) if "reward" in row] if file.exists() else []

    def _submitted(self, *words: str) -> Running:
        command = [sys.executable, "-m", "mempipe.cli", "submit", *words]
        return self._started(*command, f"--address={self._head.dashboard}")

    def _started(self, *command: str) -> Running:
        """Returns a command at work on the first node, in the folder that `mempipe submit` ships."""
        return Running(inside(0, *command), marked=self._head.marked, cwd=self._shipped, writes=self._folder)

    @staticmethod
    def _end(running: Running) -> str:
        """Returns what a command has written when it has ended."""
        ended = running.wait()
        if ended.returncode:
            raise RuntimeError(f"it ended with {ended.returncode}\n{ended.stdout}{ended.stderr}")
        return ended.stdout

    def _written(self, name: str, values: object) -> str:
        (self._folder / name).write_text(yaml.safe_dump(values))
        return str(self._folder / name)


class Service(OnCluster):
    """A service on the cluster, which only the network of its first node reaches."""

    def command(self, *arguments: str) -> list[str]:
        return inside(0, *super().command(*arguments))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay-ms", type=float, default=10.0, help="of every packet, in either direction")
    parser.add_argument("--loss", type=float, default=0.01, help="share of packets that are dropped")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS)
    parser.add_argument("--cut", nargs=2, metavar=("JOB", "SECONDS"), help="interrupt the link: train or serve")
    parser.add_argument("--folder", type=Path, help="an empty one with a short absolute path, for sockets")
    arguments = parser.parse_args(argv)
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        if any(arguments.folder.iterdir()):
            parser.error(f"--folder: {arguments.folder} is not empty; its files would be taken for those of this run")
    if lacks := missing():
        parser.error(f"two network namespaces need what this machine lacks: {lacks}")
    cut = {}
    if arguments.cut:
        job, seconds = arguments.cut
        if job not in ("train", "serve") or not seconds.isdecimal():
            parser.error(f"--cut is {job} {seconds}; it takes train or serve, and whole seconds")
        cut[job] = float(seconds)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the namespaces are removed then, too
    relay = Relay(delay_s=arguments.delay_ms / 1000, loss=arguments.loss)
    with ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-", dir="/tmp")))
        stack.enter_context(linked(relay))
        jobs = Jobs(stack.enter_context(two_nodes(folder)), relay, folder, cut=cut)
        print("| job | seconds | MB to the second node | MB back |\n|---|---|---|---|", flush=True)
        for name in arguments.jobs:
            started, before = time.monotonic(), list(relay.num_bytes)
            try:
                getattr(jobs, name)()
            except RuntimeError as error:
                print(f"{name}: {error}")
                return 1
            there, back = (b - a for a, b in zip(before, relay.num_bytes, strict=True))
            seconds = time.monotonic() - started
            print(f"| {name} | {seconds:.0f} | {there / 1e6:.1f} | {back / 1e6:.1f} |", flush=True)
        if jobs.replies:
            refused = sum(status == 503 for status, _ in jobs.replies)
            slowest = max(seconds for _, seconds in jobs.replies)
            print(f"\nof {len(jobs.replies)} replies {refused} were 503; the slowest took {slowest:.1f} s")
        if "train" in arguments.jobs:
            print("\n| step | seconds | MB to the second node | MB back |\n|---|---|---|---|")
            for step, seconds, there, back in jobs.seconds_and_bytes():
                print(f"| {step} | {seconds:.1f} | {there / 1e6:.2f} | {back / 1e6:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
