"""Describes trajectories by flat numbers that a step or an evaluation logs: rewards, ends, turns, tokens, staleness."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from math import fsum
from statistics import fmean, pstdev

import numpy as np

from mempipe.evaluation.memory_quality import memory_quality
from mempipe.types import Context, EndReason, Group, Trajectory


def rollout_metrics(
    groups: Sequence[Group],
    *,
    policy_version: int | None = None,
    memory_budget: int | None = None,
    growing: bool = False,
) -> dict[str, float]:
    """Returns the numbers that describe the trajectories of one step, or of one evaluation.

    Means over trajectories: reward, em, f1, format_rate (share that answered), turns, searches, `end_reason/…`
    (shares), `measure/…` (MemTrain's recall, and what a user-defined reward measures), `turn_reward/…` (what the turns
    earned, times their weights), advantage_mean. Mean over the trajectories whose F1 is 0: unanswered_reward, what an
    attempt earned, its turns included, without a word of the answer. Spread over trajectories: reward_std,
    advantage_std. Means over turns: context_tokens_per_turn and full_history_tokens_per_turn (prompt tokens). Over
    groups: zero_variance_groups (share whose rewards are all equal), retries (sum). Over sampled tokens, those of
    recall samples among them: sampled_tokens (sum); with `policy_version` (the learner's current one) staleness_mean
    and staleness_max in versions. And the rates of `memory_quality`.

    With `growing` every message in a context is a turn (`prompt_tokens_by_turn`). Such an agent has no memory, and its
    history is the full one.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories:
        return {}
    contexts = [context for trajectory in trajectories for context in trajectory.contexts]
    trained = [context for trajectory in trajectories for context in trajectory.all_contexts]
    advantages = [trajectory.advantage for trajectory in trajectories]
    ends = Counter(trajectory.end_reason for trajectory in trajectories)
    tokens = [prompt_tokens_by_turn(trajectory, growing=growing) for trajectory in trajectories]
    metrics = {
        "reward": fmean(t.reward for t in trajectories),
        "reward_std": pstdev(t.reward for t in trajectories),
        "em": fmean(t.em for t in trajectories),
        "f1": fmean(t.f1 for t in trajectories),
        "format_rate": ends[EndReason.ANSWERED] / len(trajectories),
        "turns": sum(map(len, tokens)) / len(trajectories),
        "searches": sum(len(context.searches) for context in contexts) / len(trajectories),
        "advantage_mean": fmean(advantages),
        "advantage_std": pstdev(advantages),
        "zero_variance_groups": fmean(len({t.reward for t in group.trajectories}) <= 1 for group in groups),
        "retries": float(sum(group.num_retries for group in groups)),
        "sampled_tokens": float(sum(context.num_sampled_tokens for context in trained)),
    }
    named: dict[str, list[float]] = defaultdict(list)
    for measure in chain.from_iterable(t.measures for t in trajectories):
        named[f"measure/{measure.name}"].append(measure.value)
    metrics |= {name: fmean(values) for name, values in named.items()}
    metrics |= _turn_rewards(trajectories)
    if unanswered := [trajectory.earned for trajectory in trajectories if trajectory.f1 == 0]:
        metrics["unanswered_reward"] = fmean(unanswered)
    metrics |= {f"end_reason/{reason}": ends[reason] / len(trajectories) for reason in EndReason}
    if contexts:
        metrics["context_tokens_per_turn"] = fmean(chain.from_iterable(tokens))
    if trained and policy_version is not None:
        metrics |= _staleness(trained, policy_version)
    if growing:
        return metrics
    if contexts:
        metrics["full_history_tokens_per_turn"] = fmean(chain.from_iterable(map(full_history_tokens, trajectories)))
    return metrics | memory_quality(groups, memory_budget=memory_budget)


def _turn_rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the turn rewards of an attempt, summed over its turns, by name, as a mean over the attempts."""
    sums: dict[str, list[float]] = defaultdict(list)
    for measure in (m for trajectory in trajectories for context in trajectory.contexts for m in context.turn_rewards):
        sums[f"turn_reward/{measure.name}"].append(measure.value)
    return {name: fsum(values) / len(trajectories) for name, values in sums.items()}


def prompt_tokens_by_turn(trajectory: Trajectory, *, growing: bool) -> list[int]:
    """Returns the tokens before the first sampled one of each context, or before each message of a growing context."""
    if not growing:
        return [context.num_prompt_tokens for context in trajectory.contexts]
    return [start for context in trajectory.contexts for start, _ in messages(context)]


def context_tokens_by_turn(trajectory: Trajectory, *, growing: bool) -> list[int]:
    """Returns the tokens that the context holds when a turn ends, read and written. A growing context has a turn for
    every message.

    Agents are compared by this number, since some read passages before a turn's first sampled token and others after
    it.
    """
    if not growing:
        return [context.num_tokens for context in trajectory.contexts]
    return [end for context in trajectory.contexts for _, end in messages(context)]


def num_turns(trajectory: Trajectory, *, growing: bool) -> int:
    """Returns how often the agent acted: its contexts, or the messages of a growing context."""
    return len(context_tokens_by_turn(trajectory, growing=growing))


def full_history_tokens(trajectory: Trajectory) -> list[int]:
    """Returns the prompt tokens that a full-history agent (ReAct) would have carried at each turn of this trajectory.

    They are template and question as in the first turn, plus the action and the passages of every earlier turn. Compare
    them with `num_prompt_tokens` of the same turns: template, question and bounded memory.
    """
    return [tokens for _, tokens in growing_history(trajectory.contexts)]


def growing_history(contexts: Iterable[Context]) -> Iterator[tuple[Context, int]]:
    """Yields each context with its `full_history_tokens`. One context is read for one that is yielded."""
    tokens: int | None = None
    for context in contexts:
        if tokens is None:
            tokens = context.num_prompt_tokens - context.num_memory_tokens
        yield context, tokens
        tokens += _num_action_tokens(context) + context.num_observation_tokens


def full_history_context_tokens(trajectory: Trajectory) -> list[int]:
    """Returns `context_tokens_by_turn` with the whole history in the memory's place: the tokens of each context, minus
    its prompt, plus `full_history_tokens` of its turn.
    """
    prompts = full_history_tokens(trajectory)
    return [
        context.num_tokens - context.num_prompt_tokens + prompt
        for context, prompt in zip(trajectory.contexts, prompts, strict=True)
    ]


def messages(context: Context) -> Iterator[tuple[int, int]]:
    """Yields where every sampled message starts and ends."""
    place = 0
    for sampled, run in groupby(context.loss_mask):
        start, place = place, place + len(list(run))
        if sampled:
            yield start, place


def _num_action_tokens(context: Context) -> int:
    """Returns the length of the first run of sampled tokens: the action message."""
    sampled = context.loss_mask[context.num_prompt_tokens :]
    return sampled.index(0) if 0 in sampled else len(sampled)


def _staleness(contexts: Sequence[Context], policy_version: int) -> dict[str, float]:
    versions, counts = np.unique(np.concatenate([context.policy_versions for context in contexts]), return_counts=True)
    lags, counts = policy_version - versions[versions >= 0], counts[versions >= 0]
    if not len(lags):
        return {}
    return {"staleness_mean": int(lags @ counts) / int(counts.sum()), "staleness_max": float(lags.max())}
