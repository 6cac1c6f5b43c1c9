"""A trajectory becomes one training sample per context."""

from __future__ import annotations

import dataclasses

from mempipe.rl.samples import to_samples
from mempipe.types import Context, EndReason, Trajectory


def context(index: int, loss_mask: list[int], **changes) -> Context:
    size = len(loss_mask)
    values = {
        "index": index,
        "token_ids": [10 * index + i for i in range(size)],
        "loss_mask": loss_mask,
        "logprobs": [-0.5 * bit for bit in loss_mask],
        "policy_versions": [4 if bit else -1 for bit in loss_mask],
        "num_prompt_tokens": 1,
        "num_question_tokens": 0,
        "num_memory_tokens": 0,
    }
    return Context(**values | changes)


TRAJECTORY = Trajectory(
    id="q/1",
    group_id="q",
    member=1,
    contexts=[context(0, [0, 1, 0, 1]), context(1, [0, 0, 1])],
    end_reason=EndReason.ANSWERED,
    answer="x",
    advantage=-0.75,
)


def test_every_context_is_one_sample_with_its_own_tokens():
    samples = to_samples(TRAJECTORY)
    assert [s.context_index for s in samples] == [0, 1]
    for sample, source in zip(samples, TRAJECTORY.contexts, strict=True):
        assert sample.token_ids == source.token_ids and sample.loss_mask == source.loss_mask
        assert sample.logprobs == source.logprobs and sample.policy_versions == source.policy_versions
        assert (sample.trajectory_id, sample.group_id, sample.ref_logprobs) == ("q/1", "q", [])


def test_contexts_inherit_the_whole_advantage_and_the_size_of_their_trajectory():
    for sample in to_samples(TRAJECTORY):
        assert (sample.advantage, sample.trajectory_tokens) == (-0.75, 3)


def test_a_context_with_its_own_advantage_keeps_it_even_when_it_is_zero():
    contexts = [dataclasses.replace(TRAJECTORY.contexts[0], advantage=0.0), TRAJECTORY.contexts[1]]
    samples = to_samples(dataclasses.replace(TRAJECTORY, contexts=contexts))
    assert [s.advantage for s in samples] == [0.0, -0.75]


def test_a_trajectory_without_contexts_trains_nothing():
    assert to_samples(dataclasses.replace(TRAJECTORY, contexts=[])) == []
