"""Group statistics: how much better an attempt was than the others of its group."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from mempipe.rl.config import AlgorithmConfig
from mempipe.types import Context, Group, Trajectory


def group_advantages(rewards: Sequence[float], *, normalize_std: bool, eps: float = 1e-6) -> list[float]:
    """Returns (R - mean) / (std + eps) with the standard deviation of n - 1 (GRPO), or R - mean (Dr. GRPO, arXiv
    2503.20783).

    A group of one has nothing to compare with: its mean counts as 0 and its deviation as 1, as in MemSearcher, MemAgent
    and Search-R1 (plain REINFORCE). This happens to a lone recall sample, not to a group of `algorithm.group_size`,
    which is at least 2. Equal rewards give exact zeros. Raises ValueError for an empty group or a reward that is not
    finite.
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


def compared(
    scores: Sequence[float | None], peers: Sequence[Hashable], *, normalize_std: bool, lone: bool = True
) -> list[float]:
    """Returns the `group_advantages` of every score among those with the same key in `peers`; 0 for None.

    This is the one rule for contexts that are scored separately: recall samples are compared within an attempt or a
    question, turns with the same turn of the other attempts. With `lone` the only score of a key keeps its
    value, since `group_advantages` compares it with 0; without, it gives 0.
    """
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, (score, key) in enumerate(zip(scores, peers, strict=True)):
        if score is not None:
            places[key].append(place)
    advantages = [0.0] * len(scores)
    for those in places.values():
        if lone or len(those) > 1:
            own = group_advantages([scores[place] or 0.0 for place in those], normalize_std=normalize_std)
            for place, advantage in zip(those, own, strict=True):
                advantages[place] = advantage
    return advantages


def with_advantages(trajectories: Sequence[Trajectory], config: AlgorithmConfig) -> list[Trajectory]:
    """Returns the trajectories of one group with their advantages, computed from the rewards of the group; with
    `advantage: rejection` 1 where the answer is right, else 0.

    A recall sample has its own instead, among those that `config.recall_group` compares (MemTrain Eq. 3, arXiv
    2606.03197). A turn that earned something adds its own: what it earned less the mean of the same turn of the other
    attempts and its own, in the unit of the reward. It is not divided by the deviation, so that a weight keeps its
    meaning, and a turn that no other attempt reached adds nothing.
    """
    normalize_std = config.advantage == "grpo"
    recalls = [(place, recall.score) for place, trajectory in enumerate(trajectories) for recall in trajectory.recalls]
    if config.advantage == "rejection":
        rewards = [float(trajectory.em == 1) for trajectory in trajectories]
        of_recalls = iter([float(score == 1) for _, score in recalls])
    else:
        rewards = group_advantages([t.reward for t in trajectories], normalize_std=normalize_std)
        of_recalls = iter(
            compared(
                [score for _, score in recalls],
                [place if config.recall_group == "rollout" else 0 for place, _ in recalls],
                normalize_std=normalize_std,
            )
        )
    contexts = [context for trajectory in trajectories for context in trajectory.contexts]
    of_turns = iter(
        compared(
            [context.turn_reward for context in contexts],
            [context.index for context in contexts],
            normalize_std=False,
            lone=False,
        )
    )
    return [
        replace(
            trajectory,
            advantage=advantage,
            contexts=[_with_turn(context, advantage, next(of_turns)) for context in trajectory.contexts],
            recalls=[
                replace(recall, context=replace(recall.context, advantage=next(of_recalls)))
                for recall in trajectory.recalls
            ],
        )
        for trajectory, advantage in zip(trajectories, rewards, strict=True)
    ]


def _with_turn(context: Context, of_attempt: float, of_turn: float) -> Context:
    return replace(context, advantage=of_attempt + of_turn) if context.turn_rewards else context


def has_signal(group: Group, *, by: Literal["answer", "reward"] = "answer") -> bool:
    """Returns whether any two attempts were rewarded differently; otherwise every advantage is zero (DAPO's filter,
    arXiv 2503.14476). An advantage of a single turn is a signal as well.

    With recall samples the end-to-end answer alone decides, right or wrong (MemTrain), or, `by` the reward, whether any
    advantage of an attempt or of a recall is not zero.
    """
    if any(
        context.advantage not in (None, trajectory.advantage)
        for trajectory in group.trajectories
        for context in trajectory.contexts
    ):
        return True
    recalls = [recall for trajectory in group.trajectories for recall in trajectory.recalls]
    if recalls and by == "answer":
        return len({trajectory.em for trajectory in group.trajectories}) > 1
    if any(recall.context.advantage for recall in recalls):
        return True
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
