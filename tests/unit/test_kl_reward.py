"""The KL to the reference model in the reward."""

from __future__ import annotations

import dataclasses
import math

import pytest

from mempipe.config import RunConfig
from mempipe.loader import parse_config
from mempipe.rl.advantages import group_advantages
from mempipe.rl.kl_reward import with_kl_in_reward
from mempipe.settings import ConfigError
from mempipe.types import TrainingSample


def sample(trajectory: str, context: int, logprobs: list[float], refs: list[float], advantage: float) -> TrainingSample:
    return TrainingSample(
        trajectory_id=trajectory,
        group_id="g",
        context_index=context,
        token_ids=[5] * (len(logprobs) + 1),
        loss_mask=[0] + [1] * len(logprobs),
        logprobs=[0.0, *logprobs],
        policy_versions=[-1] + [0] * len(logprobs),
        advantage=advantage,
        trajectory_tokens=3,
        ref_logprobs=[-7.0, *refs],  # of an injected token: it does not count
    )


REWARDS = {"a": 1.0, "b": 0.0}


@pytest.mark.parametrize("normalize_std", [True, False])
def test_advantages_are_those_of_the_reward_less_the_kl_of_all_contexts(normalize_std):
    before = group_advantages(list(REWARDS.values()), normalize_std=normalize_std)
    samples = [
        sample("a", 0, [-1.0, -2.0], [-1.5, -2.5], before[0]),  # KL 1
        sample("a", 1, [-1.0], [-4.0], before[0]),  # KL 3
        sample("b", 0, [-1.0], [-0.5], before[1]),  # KL -0.5
    ]
    moved = with_kl_in_reward(samples, REWARDS, coef=0.1, normalize_std=normalize_std)
    a, b = 1.0 - 0.1 * 4, 0.0 + 0.1 * 0.5
    scale = math.sqrt(2) * (a - b) / 2 + 1e-6 if normalize_std else 1.0
    half = (a - b) / 2 / scale
    assert [each.advantage for each in moved] == pytest.approx([half, half, -half])
    assert [dataclasses.replace(each, advantage=0.0) for each in moved] == [
        dataclasses.replace(each, advantage=0.0) for each in samples
    ]


def test_a_sample_without_reference_is_refused():
    bare = dataclasses.replace(sample("a", 0, [-1.0], [-1.0], 0.0), ref_logprobs=[])
    with pytest.raises(ValueError, match=r"context 0 of trajectory a has no ref_logprobs"):
        with_kl_in_reward([bare], REWARDS, coef=0.1, normalize_std=False)


def test_kl_in_the_reward_needs_a_reference_and_none_inside_the_learner():
    assert parse_config({"algorithm": {"kl_coef": 0, "kl_reward_coef": 0.001}}).algorithm.uses_reference
    assert not parse_config({"algorithm": {"kl_coef": 0}}).algorithm.uses_reference
    assert RunConfig().algorithm.uses_reference
    with pytest.raises(ConfigError, match=r"algorithm.kl_reward_coef is 0.001 and model.lora_rank 8"):
        parse_config({"algorithm": {"kl_reward_coef": 0.001}, "model": {"lora_rank": 8}})
