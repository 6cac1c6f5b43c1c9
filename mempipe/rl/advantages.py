"""Group statistics: how much better an attempt was than the others of its group."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from mempipe.rl.config import AlgorithmConfig
from mempipe.types import Group, Trajectory


def group_advantages(rewards: Sequence[float], *, normalize_std: bool, eps: float = 1e-6) -> list[float]:
    """Returns (R - mean) / (std + eps) with the standard deviation of n - 1 (GRPO), or R - mean (Dr. GRPO, arXiv
    2503.20783).

    A group of one has nothing to compare with: its mean counts as 0 and its deviation as 1, as MemSearcher, MemAgent
    and Search-R1 do, so that `group_size` 1 is plain REINFORCE. Equal rewards give exact zeros. Raises ValueError for
    an empty group or a reward that is not finite.
    """
    if not rewards or not all(map(math.isfinite, rewards)):
        raise ValueError(f"a group needs at least one reward and finite ones only, got {list(rewards)}")
    if len(rewards) == 1:
        deviations, std = [float(rewards[0])], 1.0
    else:
        # A rounded mean would cost the deviations of nearly equal rewards as many digits as the rewards share.
        exact = [Fraction(float(reward)) for reward in rewards]
        mean = sum(exact, Fraction(0)) / len(exact)
        deviations = [float(reward - mean) for reward in exact]
        std = math.hypot(*deviations) / math.sqrt(len(rewards) - 1)
    return [deviation / (std + eps) if normalize_std else deviation for deviation in deviations]


def with_advantages(trajectories: Sequence[Trajectory], config: AlgorithmConfig) -> list[Trajectory]:
    """Returns the trajectories of one group with their advantages: computed from the rewards of the group, and from the
    recall scores that `config.recall_group` compares (MemTrain Eq. 3, arXiv 2606.03197).
    """
    statistics = functools.partial(group_advantages, normalize_std=config.advantage == "grpo")
    of_recalls = [[recall.score for recall in trajectory.recalls] for trajectory in trajectories]
    if config.recall_group == "rollout":
        own = [statistics(scores) if scores else [] for scores in of_recalls]
    else:
        pooled = list(itertools.chain.from_iterable(of_recalls))
        rest = iter(statistics(pooled) if pooled else [])
        own = [list(itertools.islice(rest, len(scores))) for scores in of_recalls]
    return [
        replace(
            trajectory,
            advantage=advantage,
            recalls=[
                replace(recall, context=replace(recall.context, advantage=of_its_own))
                for recall, of_its_own in zip(trajectory.recalls, advantages, strict=True)
            ],
        )
        for trajectory, advantage, advantages in zip(
            trajectories, statistics([t.reward for t in trajectories]), own, strict=True
        )
    ]


def has_signal(group: Group) -> bool:
    """Returns whether any two attempts were rewarded differently; otherwise every advantage is zero (DAPO's filter,
    arXiv 2503.14476). With recall samples the end-to-end answer alone decides, right or wrong (MemTrain).
    """
    if any(trajectory.recalls for trajectory in group.trajectories):
        return len({trajectory.em for trajectory in group.trajectories}) > 1
    return len({trajectory.reward for trajectory in group.trajectories}) > 1


def check_group(group: Group, *, group_size: int) -> None:
    """Raises ValueError unless the group holds exactly `group_size` different attempts at its one question."""
    if len(group.trajectories) != group_size:
        raise ValueError(
            f"group {group.id} has {len(group.trajectories)} trajectories, but algorithm.group_size is {group_size}"
        )
    if strangers := {t.group_id for t in group.trajectories} - {group.id}:
        raise ValueError(
            f"group {group.id} (question {group.question.id}) holds trajectories of group "
            f"{', '.join(sorted(strangers))}"
        )
    for field in ("id", "member"):
        if len({getattr(t, field) for t in group.trajectories}) != group_size:
            raise ValueError(
                f"group {group.id} holds a trajectory twice: {field} {[getattr(t, field) for t in group.trajectories]}"
            )
