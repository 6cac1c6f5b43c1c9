"""The process of an engine is killed in every phase: its actor notices within seconds and starts again, and the call
that was under way is answered.

Actor and front-end are real ones, on a real cluster; the engine's process is an idle one, which answers as vLLM does:
not at all once it is dead.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from mempipe.actors.cluster import connected
from mempipe.actors.generator import GeneratorActor
from mempipe.actors.handles import Handle, start_actor
from mempipe.actors.launch import RESTARTABLE, ask_all
from mempipe.actors.weight_store import WeightStore
from mempipe.engines.config import GenerationConfig, ModelConfig
from mempipe.engines.generator import Generator
from mempipe.engines.weights import WeightHandle

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module

NOTICED_S = 10.0
ANSWERED_S = 120.0
"""A new process, on a busy machine."""


class Engine:
    """Answers for a process, as long as that lives, but for the one call that is to hang."""

    vocab_size = 8

    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        self.died = asyncio.ensure_future(asyncio.to_thread(self.process.wait))
        self.hangs_at = ""
        self.hangs = False

    @property
    def death(self) -> str:
        return "its process ended" if self.died.done() else ""

    async def does(self, what: str) -> None:
        if what == self.hangs_at:
            self.hangs = True
            await asyncio.Future()

    async def collective_rpc(self, method: str, **arguments: Any) -> list[Any]:
        await self.does(method)
        return [{"w": 1} if method == "weight_checksums" else {}]

    async def complete(self, *_: Any) -> Any:
        await self.does("sample")
        return SimpleNamespace()

    async def reset_prefix_cache(self, *, running: bool) -> bool:
        return True

    async def set_weight_version(self, version: str) -> None:
        pass

    async def pause(self) -> None:
        await self.does("pause")

    async def resume(self) -> None:
        pass

    async def sleep(self, *, level: int) -> None:
        await self.does("sleep")

    async def wake_up(self, *, tags: list[str]) -> None:
        await self.does(f"wake {tags[0]}")


class EngineActor(GeneratorActor):
    """A real one whose vLLM is `Engine`."""

    def __init__(self) -> None:
        module: Any = sys.modules[Generator.__module__]
        module._own_device = lambda: "cpu"  # without torch the process starts sooner
        super().__init__(
            model=ModelConfig(),
            config=GenerationConfig(updates_in_flight=True),
            context_tokens=8,
            seed=0,
            store="weights",
            transfer="mempipe_shm",
            sleeps=True,
        )
        generator: Any = self._engine

        async def start() -> None:
            generator._engine = Engine()

        async def score(token_ids: Any) -> list[float]:
            await generator._run(token_ids, None)
            return []

        generator.start, generator.score = start, score

    async def hang_at(self, what: str) -> None:
        self._engine._engine.hangs_at = what

    async def hangs(self) -> bool:
        return self._engine._engine.hangs

    async def pids(self) -> tuple[int, int]:
        """Those of the actor and of its engine."""
        await self._awake()
        return os.getpid(), self._engine._engine.process.pid


@pytest.fixture(scope="module")
def engine() -> Iterator[Handle]:
    with connected("", name="kills"):
        store = start_actor(WeightStore, {"name": "weights", "num_cpus": 0})
        engine = start_actor(EngineActor, RESTARTABLE | {"num_cpus": 0})
        ray.get(store.put.remote([ray.put(WeightHandle(version=3))], 3))
        yield engine
        ray.kill(engine)
        ray.kill(store)


def answer_of(engine: Handle, call: str, *arguments: Any, begun: Any = None) -> Any:
    """What a run gets from the engine."""
    return ask_all(
        {"generator-0": engine},
        lambda engine: getattr(engine, call).remote(*arguments),
        phase=call,
        timeout_s=ANSWERED_S,
        begun=None if begun is None else {"generator-0": begun},
    )["generator-0"]


LOAD = ("load_weights", WeightHandle(version=3), 3)
PHASES = {
    "idle": ([], "", ("ready",)),
    "sampling": ([], "sample", ("score", [1, 2])),
    "pausing": ([], "pause", LOAD),
    "receiving": ([], "update_weights", LOAD),
    "being checked": ([], "weight_checksums", ("prove", [])),
    "going to sleep": ([], "sleep", ("sleep",)),
    "asleep": ([("sleep",)], "", ("ready",)),
    "waking its weights": ([("sleep",)], "wake weights", LOAD),
    "waking its cache": ([("sleep",), LOAD], "wake kv_cache", ("wake",)),
}


@pytest.mark.parametrize("phase", PHASES)
def test_promise_8_an_engine_that_is_killed_is_noticed_and_replaced(engine, phase):
    before, hangs_at, call = PHASES[phase]
    answer_of(engine, "ready")
    for earlier in before:
        answer_of(engine, *earlier)
    own, process = answer_of(engine, "pids")
    ray.get(engine.hang_at.remote(hangs_at))
    begun = getattr(engine, call[0]).remote(*call[1:]) if hangs_at else None
    deadline = time.monotonic() + ANSWERED_S
    while begun is not None and not ray.get(engine.hangs.remote()) and time.monotonic() < deadline:
        time.sleep(0.02)
    actor = psutil.Process(own)
    psutil.Process(process).kill()
    assert psutil.wait_procs([actor], timeout=NOTICED_S)[1] == []
    answer = answer_of(engine, *call, begun=begun)
    assert answer_of(engine, "pids")[0] != own
    assert answer_of(engine, "ready") == 3
    assert call[0] != "prove" or answer.held.version == 3


def test_promise_8_an_engine_whose_actor_is_killed_is_replaced_with_the_newest_weights(engine):
    own, _ = answer_of(engine, "pids")
    psutil.Process(own).kill()
    assert answer_of(engine, "ready") == 3 and answer_of(engine, "pids")[0] != own
