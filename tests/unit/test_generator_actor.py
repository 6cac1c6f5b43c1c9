"""An engine's actor that Ray has started again: whoever asks first has the engine loaded."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
import torch
from ray.exceptions import ActorDiedError

from mempipe.actors import generator
from mempipe.actors.pools import GeneratorPool
from mempipe.engines.config import GenerationConfig, ModelConfig, SamplingConfig
from mempipe.engines.engine_faults import EngineDead
from mempipe.engines.proof import HeldWeights, Proof, StaleWeights
from mempipe.engines.weights import model_handle, pack_weights, read_weights


class Engine:
    """Refuses to work before it is started, as the real one does."""

    policy_version = 0
    started = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.loaded: list[int] = []
        self.scored: set[tuple[int, ...]] = set()

    async def start(self) -> None:
        """Loads a model once, as the real one does."""
        self.starts = getattr(self, "starts", 0) + (not self.started)
        self.started = True

    async def load_weights(self, weights: Any, policy_version: int) -> None:
        assert self.started, "not started"
        self.loaded.append(policy_version)

    async def score(self, token_ids: Any) -> list[float]:
        assert self.started, "not started"
        self.scored.add(tuple(token_ids))
        return [-float(token) for token in token_ids[1:]]

    async def score_from_cache(self, token_ids: Any) -> list[float]:
        """The end of a sequence, unless the whole sequence is in the cache already."""
        return [] if tuple(token_ids) in self.scored else (await self.score(token_ids))[-1:]

    async def held_weights(self) -> HeldWeights:
        return HeldWeights(version=7, checksums={"w": 1}, packed_modules={})


class Store:
    """Has no weights yet."""

    held = False

    def __init__(self) -> None:
        self.newest = self
        self.are_held = SimpleNamespace(remote=self._are_held)

    async def remote(self) -> None:
        return None

    async def _are_held(self) -> bool:
        return self.held


@pytest.fixture
def actor(monkeypatch) -> generator.GeneratorActor:
    monkeypatch.setattr(generator, "Generator", Engine)
    monkeypatch.setattr(generator, "find_actor", lambda name: Store())
    return generator.GeneratorActor(
        model=ModelConfig(), config=GenerationConfig(), context_tokens=8, seed=0, store="s", transfer="mempipe_shm"
    )


async def test_a_sync_starts_an_engine_that_nobody_has_asked_for_completions_yet(actor):
    await actor.load_weights(np.zeros(1, np.uint8), 3)
    engine: Any = actor._engine
    assert engine.loaded == [3]


async def test_an_engine_shows_its_weights_and_scores_canaries_whole_and_from_its_cache(actor):
    assert await actor.prove([[5, 6, 7], [8, 9]]) == Proof(
        held=HeldWeights(version=7, checksums={"w": 1}, packed_modules={}),
        scores=[[-6.0, -7.0], [-9.0]],
        scores_from_cache=[[-7.0], [-9.0]],
    )


async def test_an_engine_whose_store_was_lost_while_it_started_takes_the_weights_at_the_next_call(actor):
    class Lost:
        async def remote(self) -> None:
            raise ActorDiedError()

    there = actor._store.newest
    actor._store.newest = Lost()
    with pytest.raises(ActorDiedError):
        await actor.ready()
    actor._store.newest = there
    assert await actor.ready() == 0
    engine: Any = actor._engine
    assert engine.starts == 1


class KeptWeights:
    """The newest weights in a store, as Ray gives a reference to them."""

    async def remote(self) -> tuple[list[Any], int]:
        reference: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        reference.set_result("weights")
        return [reference], 4


async def test_an_engine_that_dies_while_it_takes_the_newest_weights_ends_its_actor(actor, monkeypatch):
    """Ray starts both again; otherwise every further call would find the dead engine."""
    ended = asyncio.Event()
    monkeypatch.setattr(generator, "WATCH_EVERY_S", 0.0)
    monkeypatch.setattr(generator.os, "_exit", lambda code: ended.set())
    engine: Any = actor._engine
    dead = EngineDead("its process ended")
    engine.load_weights, engine.check_alive = AsyncMock(side_effect=dead), Mock(side_effect=dead)
    actor._store.newest = KeptWeights()
    with pytest.raises(EngineDead):
        await actor.ready()
    await asyncio.wait_for(ended.wait(), timeout=60)


async def test_an_engine_that_starts_again_while_the_learner_has_the_gpu_is_loaded_when_it_is_woken(actor, monkeypatch):
    monkeypatch.setattr(generator, "WATCH_EVERY_S", 0.0)
    engine: Any = actor._engine
    store: Any = actor._store
    engine.wake, engine.check_alive, actor._sleeps = _nothing, lambda: None, True
    store.held, store.newest = True, KeptWeights()
    asked = asyncio.create_task(actor.score([1, 2]))
    await actor.sleep()
    await actor.load_weights(np.zeros(1, np.uint8), 4)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not engine.started and not asked.done()
    store.held = False
    await actor.wake()
    assert engine.loaded == [4] and await asked == [-2.0]
    assert engine.starts == 1


async def test_an_engine_that_starts_again_while_trajectories_are_played_is_loaded_at_once(actor):
    actor._sleeps = True
    assert await actor.score([1, 2]) == [-2.0]


async def _nothing() -> None: ...


async def test_so_does_a_score(actor):
    assert await actor.score([1, 2]) == [-2.0]


async def test_scores_are_asked_for_through_the_pool_like_completions(actor):
    class Handle:
        """Calls the actor's method without Ray."""

        class exchange:
            remote = actor.exchange

    pool = GeneratorPool([Handle()], config=GenerationConfig(), sampling=SamplingConfig(), stop_token_ids=[])
    assert await asyncio.gather(pool.score([1, 2, 3]), pool.score([4, 5])) == [[-2.0, -3.0], [-5.0]]


async def test_an_engine_that_does_not_hold_the_weights_of_the_next_agent_says_so(actor, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(pack_weights({"w": torch.ones(3)}).data)
    handle = model_handle(str(tmp_path))
    with pytest.raises(StaleWeights, match=f"the engine serves weights of version 7, {tmp_path} sent 0"):
        await actor.begin(handle, 1)
    actor._engine.held_weights = held = AsyncMock()
    held.return_value = HeldWeights(version=0, checksums={"w": 1}, packed_modules={})
    with pytest.raises(StaleWeights, match=f"does not hold {tmp_path}'s weights .* 1 of 1 checksums differ"):
        await actor.begin(handle, 1)
    (tmp_path / "model.safetensors").write_bytes(pack_weights({"w": torch.zeros(3)}).data)
    with pytest.raises(ValueError, match="was changed or damaged since"):
        await actor.begin(handle, 1)


def test_of_a_models_files_those_are_read_that_transformers_reads(tmp_path):
    """Mistral puts the same weights under other names next to them."""
    for name in ("model-1", "model-2", "consolidated"):
        (tmp_path / f"{name}.safetensors").write_bytes(pack_weights({name: torch.ones(3)}).data)
    index = tmp_path / "model.safetensors.index.json"
    for places, expected in (
        (None, {"model-1", "model-2", "consolidated"}),
        ({"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}, {"model-1", "model-2"}),
    ):
        if places is not None:
            index.write_text(json.dumps({"weight_map": places}))
        handle = model_handle(str(tmp_path))
        assert handle is not None
        assert read_weights(str(tmp_path), checksum=handle.update_info["checksum"]).keys() == expected
    index.unlink()
    (tmp_path / "model.safetensors").write_bytes(pack_weights({"whole": torch.ones(3)}).data)
    handle = model_handle(str(tmp_path))
    assert handle is not None
    assert read_weights(str(tmp_path), checksum=handle.update_info["checksum"]).keys() == {"whole"}
