"""Real engines that serve one agent after the other answer as engines that were started for each."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
import ray

from mempipe.actors.launch import RolloutActors
from mempipe.actors.pools import GeneratorPool
from mempipe.actors.standing import StandingActors
from mempipe.config import RunConfig
from mempipe.engines.config import SamplingConfig
from mempipe.engines.tiny import build_model, build_tokenizer
from mempipe.types import Completion

PROMPT = [5 + i % 50 for i in range(300)]
"""Whole blocks of a prefix cache."""


def sampled(actors: RolloutActors) -> list[Completion]:
    """What the engine answers to the same prompt twice, by the likeliest token and by drawing."""

    async def ask() -> list[Completion]:
        config, found = actors.config.generation, []
        for temperature in (0.0, 1.0):
            sampling = SamplingConfig(temperature=temperature)
            pool = GeneratorPool([*actors.generators.values()], config=config, sampling=sampling, stop_token_ids=[])
            found += [await pool.generate(PROMPT, max_tokens=12) for _ in range(2)]
        return found

    return asyncio.run(ask())


def handles(actors: RolloutActors) -> list[Any]:
    return [*actors.generators.values(), *actors.retrievers.values()]


@pytest.fixture
def other(world: RunConfig, tmp_path) -> RunConfig:
    """An agent with other weights, a shorter context and another seed."""
    build_tokenizer(tmp_path)
    build_model(tmp_path, seed=2)
    return world.model_copy(
        update={
            "model": world.model.model_copy(update={"path": str(tmp_path)}),
            "budget": world.budget.model_copy(update={"context_tokens": world.budget.context_tokens - 32}),
            "seed": world.seed + 1,
        }
    )


def test_an_engine_that_others_used_answers_as_one_that_was_started_for_the_agent(cluster, world, other):
    with StandingActors(cluster) as standing:
        standing.expect([other, world])
        with standing.serving(other) as actors:
            of_other, before = sampled(actors), handles(actors)
            (engine,) = actors.generators.values()
            loaded = set(ray.get(engine.__ray_call__.remote(lambda _: [*sys.modules])))
            assert "vllm" in loaded and not loaded & {"sklearn", "scipy", "peft"}
        with standing.serving(world) as actors:  # whose context is longer, and was known
            of_world = sampled(actors)
            assert handles(actors) == before and ray.get(actors.store.newest.remote())
        with pytest.raises(RuntimeError, match="of the agent"), standing.serving(other) as actors:
            assert handles(actors) == before and sampled(actors) == of_other  # loaded again, and as it was
            raise RuntimeError("a fault of the agent")
        with standing.serving(world) as actors:
            assert not {*handles(actors)} & {*before} and sampled(actors) == of_world  # by a new engine
    greedy, again, *drawn = of_world
    assert greedy.num_cached_tokens == 0 < again.num_cached_tokens and greedy.token_ids == again.token_ids
    assert of_world != of_other and drawn[0].token_ids != drawn[1].token_ids
