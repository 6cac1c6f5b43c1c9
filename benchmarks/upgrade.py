"""New versions of agent, engine and index while clients ask: is anybody refused, and is an answer ever a mixture?

    python -m benchmarks.upgrade runs/quickstart [--requests 1000] [--clients 8] [--cluster]

Starts the service of a finished run on this machine. Clients ask held-out questions one after the other, in turn by
the ways of benchmarks/asking.py: plain, as a stream, three times in a session, by chained responses, twice with an
Idempotency-Key, and as an MCP tool. Meanwhile the agent gets another name, then the engine other weights, then the
index other passages. Each is deployed as SIGHUP of `mempipe serve` does it; with `--cluster` as `serve deploy` does it
on a cluster of one node (docs/serving.md), with jobs/configs/agent_service.yaml. Every reply names its agent, weights
and index. The exit code is 1 if a request was not answered, if a reply names versions that were never deployed
together, if its passages are not of its index, or if two replies of the same versions to the same question and memory
differ in a message or a memory.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from benchmarks.asking import WAYS, Asking, NotAnswered, Reply
from benchmarks.soak import held_out
from mempipe.loader import parse_section
from mempipe.retrieval.build import build_index
from mempipe.retrieval.retriever import Retriever
from mempipe.serve.agent import LocalService, served_agent
from mempipe.serve.config import AgentServiceConfig
from mempipe.serve.http import front
from mempipe.serve.served_run import resolve
from mempipe.storage.checksums import write_checksums
from mempipe.types import Passage
from tools.processes import ROOT, Marked, free_ports, run
from tools.ray_head import BIN, Head, ray_head

NOISE = 0.01
"""Noise of the other weights, in relation to each tensor's deviation."""
NEW = "new/"
"""How the ids of the other index's passages begin."""
REST_S = 2.0
"""Time before and after each upgrade."""
STATUS_EVERY_S = 1.0
CONFIG = ROOT / "jobs" / "configs" / "agent_service.yaml"


@dataclass(frozen=True)
class Versions:
    """Names what answered a request; `index` is None for a reply without searches."""

    agent: str
    weights: str
    index: str | None


@dataclass
class Seen:
    """Holds what the clients got."""

    statuses: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    """How often the clients asked in each way, and were answered."""
    replies: Counter[Versions] = field(default_factory=Counter)
    mixed: list[str] = field(default_factory=list)
    _messages: dict[tuple[Versions, str, str, str], list[Any]] = field(default_factory=dict)
    _indexes: dict[bool, str | None] = field(default_factory=dict)
    _memories: dict[tuple[str, str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    """Memories after a question that began without one, by weights, question and partition."""
    _told: list[tuple[tuple[str, str, str], str]] = field(default_factory=list)

    def note(self, reply: dict[str, Any], *, partition: str, start: str = "") -> None:
        """Compares a reply with the other ones of the same versions. Several partitions may have the same question;
        `start` is the memory that the agent started from.
        """
        versions, question = Versions(reply["model"], reply["model_version"], reply["index"]), reply["question"]
        self.replies[versions] += 1
        messages = [[turn["action"], turn["memory_after"]] for turn in reply["turns"]]
        if self._messages.setdefault((versions, question, partition, start), messages) != messages:
            self.mixed.append(f"two replies of {versions} to {question!r} differ")
        searches = [search for turn in reply["turns"] for search in turn["searches"]]
        are_new = {passage["id"].startswith(NEW) for search in searches for passage in search["passages"]}
        if len(are_new) > 1 or any(self._indexes.setdefault(new, versions.index) != versions.index for new in are_new):
            self.mixed.append(f"a reply of {versions} has passages of another index")
        if not start:
            self._memories[versions.weights, question, partition].add(reply["memory"])

    def note_tool(self, result: dict[str, Any], *, question: str, partition: str) -> None:
        """Notes what the tool `ask` returned: the memory, and the weights without agent and index."""
        self._told.append(((result["model_version"], question, partition), result["memory"]))

    def contradicted(self) -> list[str]:
        """Returns a sentence for each result of the tool that no reply of the same weights to the question equals."""
        return [
            f"the tool and replies of {weights} to {question!r} differ"
            for (weights, question, partition), memory in self._told
            if memory not in self._memories.get((weights, question, partition), {memory})
        ]


def other_weights(folder: str, *, to: Path) -> str:
    """Writes a copy of the weights with a little noise."""
    shutil.copytree(folder, to)
    torch.manual_seed(1)
    for file in to.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.numel() > 1:
                tensors[name] = tensor + NOISE * tensor.float().std().to(tensor.dtype) * torch.randn_like(tensor)
        save_file(tensors, file, metadata={"format": "pt"})
    write_checksums(to)
    return str(to)


def other_index(folder: str, partitions: set[str], *, to: Path) -> str:
    """Builds an index of the same passages under other ids."""
    index = Retriever(folder)

    def passages() -> Iterator[Passage]:
        for row in range(index.num_passages):
            passage = index.passage(row)
            if passage.partition in partitions:
                yield Passage(id=NEW + passage.id, title=passage.title, text=passage.text, partition=passage.partition)

    build_index(passages(), to)
    return str(to)


def upgraded(
    url: str,
    upgrades: Sequence[Callable[[], object]],
    questions: Sequence[tuple[str, str]],
    *,
    num_requests: int,
    num_clients: int,
) -> Seen:
    """Calls one upgrade after the other while clients ask; ends after both. `questions` are texts and partitions.

    Before and after each upgrade the clients ask in every way.
    """
    seen, over, lock, numbers = Seen(), threading.Event(), threading.Lock(), itertools.count()

    def client() -> None:
        while (number := next(numbers)) < num_requests or not over.is_set():
            text, partition = questions[number // len(WAYS) % len(questions)]
            asking, way, replies, status = Asking(url, text, partition), WAYS[number % len(WAYS)], list[Reply](), "200"
            try:
                replies += way(asking)
            except NotAnswered as error:
                status = f"{way.__name__}: {error}"
            with lock:
                seen.statuses[status] += 1
                seen.ways[way.__name__] += status == "200"
                seen.mixed += asking.broken
                for reply in replies:
                    seen.note(reply.body, partition=partition, start=reply.start)
                for result in asking.told:
                    seen.note_tool(result, question=text, partition=partition)

    def rest() -> None:
        time.sleep(REST_S)
        # Those that may have begun before, and one of each way.
        enough = seen.statuses.total() + num_clients + len(WAYS)
        while seen.statuses.total() < enough and not any(each.done() for each in working):
            time.sleep(0.01)

    with ThreadPoolExecutor(num_clients) as pool:
        working = [pool.submit(client) for _ in range(num_clients)]
        try:
            for upgrade in upgrades:
                rest()
                upgrade()
                rest()
        finally:
            over.set()
        for each in working:
            each.result()
    return seen


def faults(seen: Seen, *, num_upgrades: int) -> list[str]:
    """Returns a sentence for each thing that must not happen."""
    found = [f"{number} requests ended with {status}" for status, number in seen.statuses.items() if status != "200"]
    found += sorted({*seen.mixed, *seen.contradicted()})
    together = {versions for versions in seen.replies if versions.index is not None}
    if len(together) > num_upgrades + 1:
        found.append(f"{len(together)} combinations of versions answered; {num_upgrades + 1} were deployed")
    return found


class OnLocalServe:
    """The service as `mempipe serve` runs it."""

    def __init__(self, local: LocalService, settings: dict[str, Any]) -> None:
        self._local, self._settings = local, settings

    def change(self, **changes: Any) -> None:
        """Deploys the service with changed settings."""
        self._settings |= changes
        self._local.deploy(resolve(parse_section(self._settings, AgentServiceConfig)))

    def weights(self, folder: str) -> None:
        """Deploys other weights."""
        self.change(checkpoint=folder)


class OnCluster:
    """The service as `serve deploy jobs/configs/agent_service.yaml` runs it on a cluster."""

    def __init__(self, head: Head, settings: dict[str, Any], *, file: Path, port: int) -> None:
        """`settings` are those of the service; they replace the ones of the shipped config, which goes to `file`."""
        self._head, self._file = head, file
        self._config = yaml.safe_load(CONFIG.read_text())
        self._config["http_options"]["port"] = port
        for application in self._config["applications"]:
            application["args"] = settings
        self.url = f"http://127.0.0.1:{port}"

    def deploy(self) -> None:
        """Deploys the config as it is now; waits until all applications run. Raises RuntimeError if one fails."""
        self._file.write_text(yaml.safe_dump(self._config))
        self._serve("deploy", str(self._file))
        wanted = {application["name"] for application in self._config["applications"]}
        while True:
            states = yaml.safe_load(self._serve("status"))["applications"]
            running = {name for name, state in states.items() if state["status"] == "RUNNING"}
            failed = [state["message"] for state in states.values() if "FAILED" in state["status"]]
            if failed:
                raise RuntimeError("\n".join(failed))
            if running == wanted == set(states):
                return
            time.sleep(STATUS_EVERY_S)

    def change(self, **changes: Any) -> None:
        """Deploys the agents with changed settings."""
        agents = self._agents()
        agents["args"] = agents["args"] | changes
        self.deploy()

    def weights(self, folder: str) -> None:
        """Deploys other weights: engines next to the old ones, then the agents turn to them, then the old ones go."""
        old, *others = self._config["applications"]
        new = copy.deepcopy(old) | {"name": "generator-new"}
        new["args"]["checkpoint"] = folder
        self._config["applications"] = [old, new, *others]
        self.deploy()
        (agent,) = self._agents()["deployments"]
        agent["user_config"] = {"generator": new["name"]}
        self.deploy()
        time.sleep(REST_S)
        self._config["applications"].remove(old)
        self.deploy()

    def _agents(self) -> dict[str, Any]:
        return self._config["applications"][-1]

    def command(self, *arguments: str) -> list[str]:
        """Returns the command line of Ray Serve with these arguments."""
        return [str(BIN / "serve"), *arguments]

    def _serve(self, *arguments: str) -> str:
        marked = Marked({**self._head.marked.environment, "RAY_DASHBOARD_ADDRESS": self._head.dashboard})
        done = run(self.command(*arguments), marked=marked, cwd=ROOT)
        if done.returncode:
            raise RuntimeError(f"serve {arguments[0]} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout


@contextmanager
def on_local_serve(settings: dict[str, Any]) -> Iterator[tuple[str, OnLocalServe]]:
    with served_agent(settings, host="127.0.0.1", port=free_ports(1)[0]) as (url, local):
        yield url, OnLocalServe(local, settings)


@contextmanager
def on_cluster(settings: dict[str, Any]) -> Iterator[tuple[str, OnCluster]]:
    """Yields the service on a cluster that asks for a token."""
    environment = {front.VARIABLE: front.PATH, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()}
    with ray_head(environment, installed=True) as head:
        (port,) = free_ports(1)
        service = OnCluster(head, settings, file=Path(settings["state"]) / "service.yaml", port=port)
        service.deploy()
        yield service.url, service


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what answered and the faults; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--cluster", action="store_true", help="`serve deploy` on a cluster of one node")
    asked = parser.parse_args(argv)
    questions = [(each.question, each.partition) for each in held_out(asked.run)]
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"run": str(asked.run.absolute()), "state": folder}
        main_config = resolve(parse_section(settings, AgentServiceConfig)).main
        weights = other_weights(main_config.model.path, to=Path(folder) / "weights")
        index = other_index(
            main_config.retrieval.index, {partition for _, partition in questions}, to=Path(folder) / "index"
        )
        with (on_cluster if asked.cluster else on_local_serve)(settings) as (url, service):
            upgrades: list[Callable[[], object]] = [
                lambda: service.change(name="another"),
                lambda: service.weights(weights),
                lambda: service.change(settings={"retrieval": {"index": index}}),
            ]
            seen = upgraded(url, upgrades, questions, num_requests=asked.requests, num_clients=asked.clients)
    print("| agent | weights | index | answers |\n|---|---|---|---|")
    for versions, number in seen.replies.items():
        print(f"| {versions.agent} | {versions.weights} | {(versions.index or 'none')[:12]} | {number:,} |")
    print("asked and answered:", ", ".join(f"{way} {number:,}" for way, number in seen.ways.items()))
    found = faults(seen, num_upgrades=len(upgrades))
    print("\n".join(f"fault: {each}" for each in found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
