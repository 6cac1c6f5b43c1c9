"""Group statistics: how much better an attempt was than its siblings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mempipe.types import Group


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
        mean, std = 0.0, 1.0
    elif min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    else:
        mean = math.fsum(rewards) / len(rewards)
        std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (std + eps) if normalize_std else reward - mean for reward in rewards]


def has_signal(group: Group) -> bool:
    """Tells whether any two attempts were rewarded differently; otherwise every advantage is zero (DAPO's filter, arXiv
    2503.14476).
    """
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
