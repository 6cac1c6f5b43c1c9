"""Turns a scored trajectory into training samples, one per context."""

from __future__ import annotations

from mempipe.types import TrainingSample, Trajectory


def to_samples(trajectory: Trajectory) -> list[TrainingSample]:
    """Returns one sample per context, in order, then one per recall sample, each with the trajectory's advantage unless
    the context has its own.

    The advantage is not divided by the number of contexts (multi-context GRPO, arXiv 2511.02805): every sampled token
    of the trajectory gets the same one.
    """
    contexts = trajectory.all_contexts
    trajectory_tokens = sum(context.num_sampled_tokens for context in contexts)
    return [
        TrainingSample(
            trajectory_id=trajectory.id,
            group_id=trajectory.group_id,
            context_index=context.index,
            token_ids=context.token_ids,
            loss_mask=context.loss_mask,
            logprobs=context.logprobs,
            policy_versions=context.policy_versions,
            advantage=trajectory.advantage if context.advantage is None else context.advantage,
            trajectory_tokens=trajectory_tokens,
            ref_logprobs=context.ref_logprobs,
        )
        for context in contexts
    ]
