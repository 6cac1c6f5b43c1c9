"""The ordered mode seeds every request of an attempt, the same when the attempt is played again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from agent_builders import Library, ScriptedEngine, build_question, build_tokenizer

from mempipe.actors.pools import GeneratorPool
from mempipe.engines.config import GenerationConfig, SamplingConfig
from mempipe.loader import parse_config
from mempipe.request_seeds import RequestSeeds
from mempipe.rollout import make_rollout
from mempipe.types import Completion

SEARCH = 'look</think><tool_call>{"name": "wikipedia_search", "arguments": {"query": "q"}}</tool_call>'
SCRIPT = [SEARCH, "so</think><memory>m</memory>", "so</think>\\boxed{Paris}"]
ORDERED = {"ordered": True, "algorithm": {"max_off_policy_steps": 0}}


def seeds(seed: int = 1, group_id: str = "0/q", member: int = 0) -> RequestSeeds:
    return RequestSeeds(seed, group_id=group_id, member=member)


def test_an_attempt_that_is_played_again_has_the_same_seeds_and_any_other_has_others():
    attempts = [seeds(), seeds(seed=2), seeds(group_id="1/q"), seeds(member=1), seeds(1, "0/q:1")]
    drawn = [[attempt.next(prompt) for prompt in ([1, 2], [1, 2], [12])] for attempt in attempts]
    again = seeds()
    assert [again.next(prompt) for prompt in ([1, 2], [1, 2], [12])] == drawn[0]
    assert len({seed for attempt in drawn for seed in attempt}) == 15
    assert all(0 <= seed < 2**63 for attempt in drawn for seed in attempt)


def test_requests_under_way_at_the_same_time_have_their_seeds_in_whatever_order_they_come():
    one, other = seeds(), seeds()
    by_prompt = {"first": one.next([1]), "second": one.next([2]), "again": one.next([2])}
    assert {"second": other.next([2]), "first": other.next([1]), "again": other.next([2])} == by_prompt


class Engine(ScriptedEngine):
    """Notes the seeds that it is asked with."""

    def __init__(self) -> None:
        super().__init__(build_tokenizer(), SCRIPT)
        self.seeds: list[int | None] = []

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int | None = None) -> Completion:
        self.seeds.append(seed)
        return await self(token_ids, max_tokens=max_tokens)


async def played(settings: dict[str, Any], *, member: int = 0) -> list[int | None]:
    """The seeds of an attempt's requests."""
    engine, config = Engine(), parse_config(settings)
    rollout = make_rollout(config, tokenizer=build_tokenizer(), generate=engine.generate, search=Library())
    await rollout(build_question(), trajectory_id=f"g/{member}", group_id="g", member=member)
    assert len(engine.seeds) == len(SCRIPT)
    return engine.seeds


async def test_the_ordered_mode_seeds_every_request_by_run_group_member_and_call():
    first, again, sibling, other_run = [
        await played(ORDERED),
        await played(ORDERED),
        await played(ORDERED, member=1),
        await played({**ORDERED, "seed": 2}),
    ]
    assert first == again
    assert None not in first and len({*first, *sibling, *other_run}) == 3 * len(SCRIPT)


async def test_without_the_ordered_mode_no_request_is_seeded():
    assert await played({}) == [None] * len(SCRIPT)


@pytest.mark.parametrize("seed", [None, 7])
async def test_the_pool_hands_the_seed_to_the_engine(seed):
    asked: list[Any] = []

    class Line:
        async def ask(self, *arguments: Any) -> None:
            asked.append(arguments)

    replicas: list[Any] = [None]
    pool = GeneratorPool(replicas, config=GenerationConfig(), sampling=SamplingConfig(), stop_token_ids=[3])
    pool._lines = [Line()]  # type: ignore[list-item]
    await asyncio.wait_for(pool.generate([1], max_tokens=2, seed=seed), timeout=60)
    assert asked == [("generate", [1], 2, SamplingConfig(), [3], seed)]
