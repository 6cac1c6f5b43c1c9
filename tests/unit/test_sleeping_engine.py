"""An engine that shares its GPU with the learner: asleep while that works, weights first, its cache at the end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mempipe.actors import launch
from mempipe.actors.launch import Roles
from mempipe.engines.config import GenerationConfig, ModelConfig
from mempipe.engines.engine_faults import WeightTransferFailed
from mempipe.engines.engine_load import EngineLoad
from mempipe.engines.generator import Generator
from mempipe.engines.proof import HeldWeights, Proof
from mempipe.engines.weights import WeightHandle
from mempipe.loader import parse_config


class Engine:
    """Writes down what it is told, as vLLM's engines are told it."""

    death = ""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def sleep(self, *, level: int) -> None:
        self.told.append(f"sleep {level}")

    async def wake_up(self, *, tags: list[str]) -> None:
        self.told += [f"wake {tag}" for tag in tags]

    async def collective_rpc(self, method: str, **arguments: Any) -> list[Any]:
        self.told.append(method)
        return [None]

    async def set_weight_version(self, version: str) -> None:
        self.told.append(f"version {version}")

    async def reset_prefix_cache(self, *, running: bool) -> bool:
        return True


def sleeping() -> tuple[Generator, Engine]:
    generator, engine = Generator(ModelConfig(), GenerationConfig(), max_model_len=8, device="cpu"), Engine()
    generator._engine: Any = engine
    return generator, engine


async def test_the_cache_comes_back_by_a_call_of_its_own_and_completions_wait_for_it():
    generator, engine = sleeping()
    await generator.sleep()
    await generator.sleep()
    waiting = asyncio.create_task(generator._open.wait())
    await generator.load_weights(WeightHandle(version=1), 1)
    await asyncio.sleep(0)
    assert "wake kv_cache" not in engine.told, "the learner's copy is still on the GPU"
    assert engine.told.index("sleep 2") < engine.told.index("wake weights") < engine.told.index("update_weights")
    assert not waiting.done()
    await generator.wake()
    await generator.wake()
    await asyncio.wait_for(waiting, 60)
    assert (engine.told[-1], engine.told.count("wake kv_cache"), engine.told.count("sleep 2")) == (
        "wake kv_cache",
        1,
        1,
    )


async def test_an_engine_without_weights_does_not_wake():
    generator, _ = sleeping()
    await generator.wake()  # it is awake
    await generator.sleep()
    with pytest.raises(WeightTransferFailed, match="load_weights comes before wake"):
        await generator.wake()


async def test_weights_that_come_twice_wake_their_memory_once():
    generator, engine = sleeping()
    await generator.sleep()
    for version in (1, 1):
        await generator.load_weights(WeightHandle(version=version), version)
    assert engine.told.count("wake weights") == 1


def roles_of(events: list[str], *, sleeps: bool) -> Roles:
    def told(name: str, answer: Any = None) -> Any:
        def remote(*_: Any) -> Any:
            events.append(f"engine {name}")
            return answer

        return SimpleNamespace(remote=remote)

    proof = Proof(held=HeldWeights(version=3, checksums={"w": 1}, packed_modules={}), scores=[[-1.0]])
    engine = SimpleNamespace(
        sleep=told("sleep"),
        wake=told("wake"),
        prove=told("prove", proof),
        take_load=told("load", EngineLoad()),
        __ray_call__=SimpleNamespace(remote=lambda *_: 1.0),
    )
    learners = SimpleNamespace(
        step=lambda *_, **__: events.append("learn") or [],
        release_memory=lambda: events.append("release"),
        send_weights=lambda *_: events.append("send"),
        num_served_bytes=lambda: 1,
        checksums=lambda: {"w": 1},
        score=lambda canary: [[-1.0]],
        ranks=[],
    )
    made: Any = Roles(
        config=parse_config({}),
        plan=SimpleNamespace(transfer="ipc", sleeps=sleeps, bundles=[{}]),  # pyrefly: ignore[bad-argument-type]
        namespace="",
        generators={"generator-0": engine},
        retrievers={},
        store=SimpleNamespace(
            hold_engines=SimpleNamespace(remote=lambda held: events.append("hold" if held else "let go"))
        ),
        learners=learners,  # pyrefly: ignore[bad-argument-type]
        references=None,
        canary=[[1, 2]],
    )
    return made


def test_a_step_takes_the_memory_of_a_gpu_in_turns(monkeypatch):
    monkeypatch.setattr(launch.ray, "get", lambda answer, **_: answer)
    events: list[str] = []
    roles = roles_of(events, sleeps=True)
    roles.learn([])
    assert events == ["hold", "engine sleep", "learn", "release"]
    events.clear()
    roles.sync(3)
    assert events[:5] == ["hold", "engine sleep", "send", "release", "let go"]
    assert events[5:] == ["engine wake", "engine prove", "engine load", "release"]


def test_an_engine_with_room_for_itself_is_not_put_to_sleep(monkeypatch):
    monkeypatch.setattr(launch.ray, "get", lambda answer, **_: answer)
    events: list[str] = []
    roles = roles_of(events, sleeps=False)
    roles.learn([])
    roles.sync(3)
    assert not {"engine sleep", "engine wake", "hold"} & {*events} and events.count("release") == 3
