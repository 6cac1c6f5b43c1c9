"""Plays all attempts at one question and scores them as one group. This module connects agents and rewards."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import inspect
import json
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from anyio.from_thread import start_blocking_portal

from mempipe.agents.protocol import GenerateFn, SearchFn, Tokenizer
from mempipe.agents.registry import BUILT_IN
from mempipe.agents.rendering import Renderer
from mempipe.agents.turn import Agent
from mempipe.config import RunConfig
from mempipe.request_seeds import RequestSeeds, SeededGenerateFn
from mempipe.rl.advantages import with_advantages
from mempipe.rl.config import AlgorithmConfig, RewardConfig
from mempipe.rl.rewards import information_gain, memory_cost, overlong_penalty, recall_match, recall_reward, score
from mempipe.rl.turn_rewards import BUILT_IN as TURN_REWARDS
from mempipe.rl.turn_rewards import TurnValues, weighted
from mempipe.settings import ConfigError
from mempipe.types import Completion, Group, Measure, Question, SearchResult, Trajectory, from_row, to_row
from mempipe.user_code import load_user_object, user_code

T = TypeVar("T")

Control = Literal["no_memory", "no_search"]
"""The component that a control run removes, to measure the model without it."""
PROBE = Question(id="probe", text="?", golden_answers=["?"], context="?")


def make_renderer(config: RunConfig, *, tokenizer: Tokenizer) -> Renderer[Any]:
    """Makes the configured agent's renderer: its prompts in the model's chat template.

    Raises ConfigError when they and the budget do not fit the context, and UserCodeError for an error in a user-defined
    agent.
    """
    spec = config.agent_spec
    with agent_code(config, "its renderer cannot be made", passing=(ConfigError,)):
        return spec.renderer(config.agent, config.budget, limits=config.retrieval, tokenizer=tokenizer)


@contextmanager
def agent_code(config: RunConfig, what: str, *, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns errors of a user-defined agent into a `UserCodeError`; those of a built-in agent are ours and stay.

    `passing` are exceptions that reach the caller unchanged.
    """
    if config.agent.name in BUILT_IN:
        yield
        return
    with user_code(f"agent.name {config.agent.name}: {what}", passing=passing):
        yield


def make_agent(
    config: RunConfig, *, tokenizer: Tokenizer, generate: GenerateFn, search: SearchFn, control: Control | None = None
) -> Agent[Any]:
    """Makes the configured agent, bound to an engine and a retriever; with `control` without one of its means."""
    renderer = make_renderer(config, tokenizer=tokenizer)
    return _bound(config, renderer, generate=generate, search=search, control=control)


def _bound(
    config: RunConfig, renderer: Renderer[Any], *, generate: GenerateFn, search: SearchFn, control: Control | None
) -> Agent[Any]:
    if control == "no_search":
        search = find_nothing
    forgets = {"forgets": True} if control == "no_memory" else {}  # a user-defined agent need not know of it
    return config.agent_spec.agent(renderer, generate=generate, search=search, **forgets)


def prompt_hash(config: RunConfig, *, tokenizer: Tokenizer) -> str:
    """Returns the hash of the first prompt's ids for a fixed question: it covers prompt set, chat template, tool and
    tokenizer. It is "" for an agent that ends without a prompt."""
    token_ids = first_prompt(config, PROBE, tokenizer=tokenizer)
    return hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()[:16] if token_ids else ""


def first_prompt(config: RunConfig, question: Question, *, tokenizer: Tokenizer) -> list[int]:
    """Returns the ids that the agent would send to the engine first for the question; [] for an agent that ends without
    a prompt. Its searches find nothing.

    The agent begins in a separate thread, since the caller's may have a running event loop (a notebook's has one).
    """

    async def generate(token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        raise _Seen(list(token_ids))

    agent = make_agent(config, tokenizer=tokenizer, generate=generate, search=find_nothing)
    rollout = partial(agent.rollout, question, trajectory_id="probe", group_id="probe", member=0)
    try:
        with (
            agent_code(config, f"question {question.id} cannot be begun", passing=(_Seen,)),
            start_blocking_portal(name="first-prompt") as portal,
        ):
            portal.call(rollout)
    except _Seen as seen:
        return seen.token_ids
    return []


class _Seen(Exception):
    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids


async def find_nothing(query: str, *, num_passages: int, partition: str) -> SearchResult:
    """Searches nothing: for agents that only read, and for those without their search."""
    return SearchResult(passages=[], snapshot="none")


def make_rollout(
    config: RunConfig,
    *,
    tokenizer: Tokenizer,
    generate: SeededGenerateFn,
    search: SearchFn,
    control: Control | None = None,
    training: bool = False,
) -> RolloutFn:
    """Makes the agent's `rollout` for a run: with `ordered` every request has its own seed (`RequestSeeds`).

    In training with budget.memory_choices every group draws one of them, by its id and the run's seed, so that a group
    that is played again has the same. Raises as `make_renderer` does. `rollout` raises TypeError with the field's place
    for a record of a user-defined agent that holds a value of another type.
    """
    variants = budget_variants(config) if training else [config]
    players = [(variant, make_renderer(variant, tokenizer=tokenizer)) for variant in variants]

    async def rollout(question: Question, *, trajectory_id: str, group_id: str, member: int) -> Trajectory:
        variant, renderer = drawn_variant(players, config, group_id)
        asked: GenerateFn = generate
        if config.ordered:
            asked = RequestSeeds(config.seed, group_id=group_id, member=member).given_to(generate)
        agent = _bound(variant, renderer, generate=asked, search=search, control=control)
        played = await agent.rollout(question, trajectory_id=trajectory_id, group_id=group_id, member=member)
        return played if config.agent.name in BUILT_IN else from_row(Trajectory, to_row(played))

    return rollout


def make_gold_logprobs(config: RunConfig, *, tokenizer: Tokenizer, score: ScoreFn) -> GoldLogprobsFn:
    """Returns a function that scores log p(golden answer | question, memory) under the policy in training, with the
    memory limit that its group has drawn. Raises as `make_renderer` does.
    """
    renderers = [make_renderer(variant, tokenizer=tokenizer) for variant in budget_variants(config)]

    async def gold_logprobs(question: Question, memory: str, *, group_id: str) -> list[float]:
        probe = drawn_variant(renderers, config, group_id).answer_probe(question, memory)
        return (await score([*probe.prompt, *probe.answer]))[len(probe.prompt) - 1 :]

    return gold_logprobs


def budget_variants(config: RunConfig) -> list[RunConfig]:
    """Returns the config under each limit of budget.memory_choices; only the config itself where there are none."""
    choices = getattr(config.budget, "memory_choices", [])
    limits = [config.budget.model_copy(update={"memory_tokens": tokens}) for tokens in choices] or [config.budget]
    return [config.model_copy(update={"budget": limit}) for limit in limits]


def drawn_variant(made: Sequence[T], config: RunConfig, group_id: str) -> T:
    """Returns, of the objects made for each of `budget_variants`, the one that the group draws by its id and the run's
    seed."""
    return random.Random(f"{config.seed}:{group_id}:memory").choice(made)


class ScoreFn(Protocol):
    """Log-probs of `token_ids[1:]`, each given all ids before it."""

    async def __call__(self, token_ids: Sequence[int]) -> list[float]: ...


class GoldLogprobsFn(Protocol):
    """Log-probs of the tokens of the question's first golden answer, after question and memory of an attempt of the
    group; "" is the memory of an attempt's start.
    """

    async def __call__(self, question: Question, memory: str, *, group_id: str) -> list[float]: ...


class RolloutFn(Protocol):
    """One attempt at a question; every agent has this signature once tokenizer, engine and retriever are bound."""

    async def __call__(self, question: Question, *, trajectory_id: str, group_id: str, member: int) -> Trajectory: ...


async def run_group(
    question: Question,
    rollout: RolloutFn,
    *,
    group_id: str,
    group_size: int,
    reward: RewardConfig,
    advantage: AlgorithmConfig,
    gold_logprobs: GoldLogprobsFn | None = None,
) -> Group:
    """Plays `group_size` attempts at `question` concurrently; returns them with rewards and advantages (multi-context
    GRPO, arXiv 2511.02805). With `gold_logprobs` the information gain of their last memories is part of the reward.

    Raises the error of the first failing attempt, after the others were cancelled: a group is never incomplete.
    """
    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as tasks:
            attempts = [
                tasks.create_task(
                    rollout(question, trajectory_id=f"{group_id}/{member}", group_id=group_id, member=member)
                )
                for member in range(group_size)
            ]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    trajectories = [attempt.result() for attempt in attempts]
    gains = [None] * group_size if gold_logprobs is None else await _gains(trajectories, question, gold_logprobs)
    scored = [await _scored(t, question, reward, gain) for t, gain in zip(trajectories, gains, strict=True)]
    return Group(
        id=group_id,
        question=question,
        trajectories=with_advantages(scored, advantage),
        seconds=time.perf_counter() - started,
    )


async def _scored(trajectory: Trajectory, question: Question, config: RewardConfig, gain: float | None) -> Trajectory:
    scores = score(
        trajectory.answer,
        question.golden_answers,
        end_reason=trajectory.end_reason,
        config=config,
        objectives=question.objectives,
        message=trajectory.contexts[-1].action if trajectory.contexts else "",
    )
    trajectory = dataclasses.replace(trajectory, reward=scores.reward, em=scores.em, f1=scores.f1)
    if config.function:
        trajectory = await _scored_by_user(trajectory, question, config.function)
    if trajectory.recalls:
        trajectory = _with_recalls(trajectory, config)
    longest = max(
        (context.num_sampled_tokens + context.num_dropped_tokens for context in trajectory.contexts), default=0
    )
    lengths = [c.num_new_memory_tokens for c in trajectory.contexts if c.num_new_memory_tokens]
    lost = overlong_penalty(longest, config) + memory_cost(lengths, config)
    trajectory = dataclasses.replace(trajectory, reward=trajectory.reward - lost)
    if gain is not None:
        trajectory = _with_gain(trajectory, gain, config)
    return await _with_turn_rewards(trajectory, question, config) if config.per_turn else trajectory


async def _gains(
    trajectories: Sequence[Trajectory], question: Question, gold_logprobs: GoldLogprobsFn
) -> list[float | None]:
    """Returns the information gain of every attempt's last memory; None where the question has no golden answer.

    Siblings are compared with the same log-probs without a memory, and equal memories are scored once.
    """
    if not question.golden_answers:
        return [None] * len(trajectories)
    memories = [trajectory.last_memory for trajectory in trajectories]
    asked = list(dict.fromkeys(["", *memories]))
    group_id = trajectories[0].group_id
    found = await asyncio.gather(*(gold_logprobs(question, memory, group_id=group_id) for memory in asked))
    scores = dict(zip(asked, found, strict=True))
    return [information_gain(scores[memory], scores[""]) for memory in memories]


def _with_gain(trajectory: Trajectory, gain: float, config: RewardConfig) -> Trajectory:
    return dataclasses.replace(
        trajectory,
        reward=trajectory.reward + config.information_weight * gain,
        measures=[*trajectory.measures, Measure(name="information_gain", value=gain)],
    )


def _with_recalls(trajectory: Trajectory, config: RewardConfig) -> Trajectory:
    """Returns the trajectory with its recall samples scored and their mean in its reward (MemTrain Eq. 1 and 2)."""
    recalls = [
        dataclasses.replace(recall, score=recall_match(recall.answer, recall.target, config))
        for recall in trajectory.recalls
    ]
    scores = [recall.score for recall in recalls]
    return dataclasses.replace(
        trajectory,
        recalls=recalls,
        reward=recall_reward(trajectory.reward, scores, weight=config.recall_weight),
        measures=[*trajectory.measures, Measure(name="recall", value=sum(scores) / len(scores))],
    )


async def _with_turn_rewards(trajectory: Trajectory, question: Question, config: RewardConfig) -> Trajectory:
    """Returns the trajectory with what each of its turns earned. Raises UserCodeError when a user-defined function
    fails, or does not return a finite number or None for every context."""
    values = {name: await _turn_values(name, trajectory, question) for name in config.per_turn}
    turns = zip(trajectory.contexts, weighted(values, config.per_turn), strict=True)
    contexts = [dataclasses.replace(context, turn_rewards=earned) for context, earned in turns]
    return dataclasses.replace(trajectory, contexts=contexts)


async def _turn_values(name: str, trajectory: Trajectory, question: Question) -> TurnValues:
    if name in TURN_REWARDS:
        return TURN_REWARDS[name](trajectory, question)
    function = load_user_object(name, setting="reward.per_turn")
    with user_code(f"reward.per_turn {name} failed for trajectory {trajectory.id} of question {question.id}"):
        result = function(trajectory, question)
        values = list(await result if inspect.isawaitable(result) else result)
        if len(values) != len(trajectory.contexts):
            raise ValueError(f"it returned {len(values)} values for {len(trajectory.contexts)} contexts")
        numbers = [None if value is None else float(value) for value in values]
        if wrong := [number for number in numbers if number is not None and not math.isfinite(number)]:
            raise ValueError(f"it returned {wrong[0]}; expected finite numbers, or None for a turn without one")
        return numbers


async def _scored_by_user(trajectory: Trajectory, question: Question, path: str) -> Trajectory:
    """Returns the trajectory with the reward and the measures that a user-defined function gives it.

    Raises UserCodeError when the function fails or does not return a reward: neither becomes a reward of 0.
    """
    function = load_user_object(path, setting="reward.function")
    with user_code(f"reward.function {path} failed for trajectory {trajectory.id} of question {question.id}"):
        result = function(trajectory, question)
        scores = await result if inspect.isawaitable(result) else result
        values = dict(scores) if isinstance(scores, Mapping) else {"reward": scores}
        if "reward" not in values:
            raise ValueError(f"it returned {sorted(values)}; a mapping needs 'reward'")
        numbers = {name: float(value) for name, value in values.items()}
        if wrong := [f"{name} {value}" for name, value in numbers.items() if not math.isfinite(value)]:
            raise ValueError(f"it returned {', '.join(wrong)}; expected finite numbers")
    measures = [Measure(name=name, value=value) for name, value in numbers.items() if name != "reward"]
    return dataclasses.replace(trajectory, reward=numbers["reward"], measures=measures)
