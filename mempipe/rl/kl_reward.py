"""The KL to the reference model as a part of the reward instead of the loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mempipe.rl.advantages import group_advantages
from mempipe.types import TrainingSample


def with_kl_in_reward(
    samples: Sequence[TrainingSample], rewards: Mapping[str, float], *, coef: float, normalize_std: bool
) -> list[TrainingSample]:
    """Returns the samples of one group with the advantages of R - coef * KL instead of R.

    `rewards` are the R of the group's trajectories, by id. KL is the sum of logprob - ref_logprob over the sampled
    tokens of all contexts of a trajectory: an unbiased estimate, negative at times. Raises ValueError for a sample
    without `ref_logprobs`.
    """
    kl: defaultdict[str, float] = defaultdict(float)
    for sample in samples:
        if len(sample.ref_logprobs) != len(sample.token_ids):
            raise ValueError(
                f"context {sample.context_index} of trajectory {sample.trajectory_id} has no ref_logprobs, which "
                "algorithm.kl_reward_coef needs"
            )
        columns = zip(sample.logprobs, sample.ref_logprobs, sample.loss_mask, strict=True)
        kl[sample.trajectory_id] += sum(logprob - ref for logprob, ref, mask in columns if mask)
    before = group_advantages(list(rewards.values()), normalize_std=normalize_std)
    after = group_advantages(
        [reward - coef * kl[trajectory] for trajectory, reward in rewards.items()], normalize_std=normalize_std
    )
    # A context may have its own advantage; it moves by as much as its trajectory's.
    moved = {name: new - old for name, new, old in zip(rewards, after, before, strict=True)}
    return [replace(sample, advantage=sample.advantage + moved[sample.trajectory_id]) for sample in samples]
