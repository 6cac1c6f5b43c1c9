"""A service among strangers: what a client with a key notices of those without one.

    python -m benchmarks.strangers runs/quickstart [--seconds 20] [--only slow-body] [key=value ...]

Starts `mempipe serve` with a key. One client asks a held-out question again and again, each time by a new connection:
first alone, then during each attack of `tools/strangers.py`. The table has its median, the ratio to the median alone,
how the strangers' connections ended, and the memory of the proxy. The exit code is 1 if the client got anything but
answers, if a ratio is above LIMIT, or if an attack made the memory grow by more than MAY_GROW_MIB. The strangers have
the lowest priority, so that their own work slows nobody down; they need a core for themselves all the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx

from benchmarks.soak import Asked, held_out
from mempipe.serve.http.keys import new_key
from tools.processes import ROOT, Marked, Running, command_line, free_ports

LIMIT = 1.5
MAY_GROW_MIB = 64.0
PAUSE_S = 0.02
ATTACKS: dict[str, Sequence[str]] = {
    "slow-header": ["--at-once", "500"],
    "slow-body": ["--at-once", "500"],
    "left-open": ["--at-once", "10000", "--addresses", "1000"],
    "kept-alive": ["--at-once", "500", "--addresses", "10"],
    "random-bytes": ["--at-once", "50"],
    "huge-header": ["--at-once", "20"],
    "trailers": ["--at-once", "20"],
    "pipelined": ["--at-once", "20"],
    "web-socket": ["--at-once", "50"],
    "request": ["--at-once", "100", "--addresses", "20", "--number", "100000"],
}
"""What each attack of tools.strangers is told beside its time."""


@dataclass
class Seen:
    """Holds what the client with a key got."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        return 1000 * median(self.seconds) if self.seconds else float("inf")


@dataclass(frozen=True)
class Client:
    """A client with a key."""

    url: str
    key: str
    asked: Asked

    def watch(self, attack: subprocess.Popen[str] | None, *, seconds: float) -> Seen:
        """Asks until the attack is over, or for so many seconds."""
        seen, until = Seen(), time.monotonic() + seconds
        while time.monotonic() < until if attack is None else attack.poll() is None:
            began = time.monotonic()
            seen.outcomes[self.ask()] += 1
            seen.seconds.append(time.monotonic() - began)
            time.sleep(PAUSE_S)
        return seen

    def ask(self) -> str:
        body = {"question": self.asked.question, "partition": self.asked.partition}
        headers = {"authorization": f"Bearer {self.key}"}
        try:
            reply = httpx.post(f"{self.url}/v1/answer", json=body, headers=headers, timeout=60)
        except httpx.TransportError as error:
            return type(error).__name__
        if reply.status_code != 200:
            return str(reply.status_code)
        return "right" if self.asked.is_right(reply.json()) else "wrong"


def proxy_mebibytes(marked: Marked) -> float:
    """Returns the memory of Serve's proxy."""
    proxies = [process for process in marked.processes() if "ray::ProxyActor" in command_line(process)]
    return sum(process.memory_full_info().uss for process in proxies) / 2**20


def measured(client: Client, marked: Marked, names: Sequence[str], *, seconds: float) -> list[str]:
    """Prints the table; returns the faults."""
    faults: list[str] = []
    host, port = client.url.removeprefix("http://").split(":")
    client.watch(None, seconds=min(seconds, 5.0))  # warm-up
    print("| strangers | ended | answers | others | median, ms | ratio | proxy, MiB |\n|---|---|---|---|---|---|---|")
    alone, before = client.watch(None, seconds=seconds), proxy_mebibytes(marked)
    for name in ["", *names]:
        seen, ended = alone, "{}"
        if name:
            command = [sys.executable, "-m", "tools.strangers", name, host, port, "--seconds", str(seconds)]
            with subprocess.Popen([*command, *ATTACKS[name]], cwd=ROOT, stdout=subprocess.PIPE, text=True) as attack:
                seen = client.watch(attack, seconds=seconds)
                assert attack.stdout is not None
                ended = attack.stdout.read().strip()
        outcomes, memory = seen.outcomes.copy(), proxy_mebibytes(marked)
        right, ratio = outcomes.pop("right", 0), seen.milliseconds / alone.milliseconds
        cells = [name or "none", ended, f"{right:,}", json.dumps(outcomes)]
        print("|", " | ".join([*cells, f"{seen.milliseconds:,.1f}", f"{ratio:.2f}", f"{memory:,.0f}"]), "|", flush=True)
        if outcomes or not right:
            faults.append(f"{name}: the client got {dict(outcomes) or 'nothing'}")
        if ratio > LIMIT:
            faults.append(f"{name}: an answer took {ratio:.2f} times as long")
        if memory > before + MAY_GROW_MIB:
            faults.append(f"{name}: the proxy grew from {before:,.0f} to {memory:,.0f} MiB")
        before = memory
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and the faults; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("settings", nargs="*", help="key=value of the service (mempipe/serve/config.py)")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each attack at most")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    asked = parser.parse_args(argv)
    (question, *_), marked, (port,) = held_out(asked.run), Marked(), free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        key, record = new_key("client")
        keys = Path(folder) / "keys"
        keys.write_text(record.line())
        limits = [f"keys={keys}", f"state={folder}", "requests_per_minute=100000"]
        command = [sys.executable, "-m", "mempipe.cli", "serve", str(asked.run.absolute()), "--port", str(port)]
        serving = Running([*command, *limits, *asked.settings], marked=marked, cwd=Path(folder))
        try:
            serving.wait_until(lambda: "until Ctrl-C" in serving.stdout)
            client = Client(f"http://127.0.0.1:{port}", key, question)
            faults = measured(client, marked, asked.only, seconds=asked.seconds)
            serving.end()
        finally:
            marked.end()
    print("\n".join(f"fault: {fault}" for fault in faults))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
