"""Group statistics, worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempipe.rl.advantages import check_group, group_advantages, has_signal
from mempipe.types import EndReason, Group, Question, Trajectory

REWARDS = st.lists(st.floats(0, 1), min_size=2, max_size=16)


def group(*rewards: float) -> Group:
    trajectories = [
        Trajectory(
            id=f"q/{i}", group_id="q", member=i, contexts=[], end_reason=EndReason.ANSWERED, answer="x", reward=reward
        )
        for i, reward in enumerate(rewards)
    ]
    return Group(id="q", question=Question(id="q", text="?", golden_answers=["x"]), trajectories=trajectories)


def test_deviation_counts_one_degree_of_freedom_less():
    # mean 2, deviations -2 0 2, variance 8 / 2
    assert group_advantages([0, 2, 4], normalize_std=True) == [-2 / (2 + 1e-6), 0.0, 2 / (2 + 1e-6)]


def test_without_normalisation_only_the_mean_is_taken_away():
    assert group_advantages([1, 0, 0, 0], normalize_std=False) == [0.75, -0.25, -0.25, -0.25]


def test_a_single_attempt_keeps_its_reward():
    assert group_advantages([0.7], normalize_std=False) == [0.7]
    assert group_advantages([0.7], normalize_std=True) == [0.7 / (1 + 1e-6)]


@given(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=8), st.booleans())
def test_advantages_are_exact_however_close_the_rewards_are(rewards, normalize_std):
    rewards = [*rewards, rewards[0] + 1e-7]
    exact = list(map(Fraction, rewards))
    deviations = [reward - sum(exact) / len(exact) for reward in exact]
    std = math.sqrt(sum(deviation**2 for deviation in deviations) / (len(exact) - 1))
    advantages = group_advantages(rewards, normalize_std=normalize_std)
    assert advantages == pytest.approx(
        [float(deviation) / (std + 1e-6 if normalize_std else 1.0) for deviation in deviations], rel=1e-12, abs=0
    )


def test_a_reward_too_large_to_be_squared_has_an_advantage():
    assert group_advantages([1e200, 0.0], normalize_std=True) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1.0])
@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_equal_rewards_give_exact_zeros(reward, size):
    assert group_advantages([reward] * size, normalize_std=True) == [0.0] * size


@pytest.mark.parametrize("rewards", [[], [1.0, math.nan], [math.inf, 0.0]])
def test_empty_groups_and_rewards_that_are_no_numbers_are_refused(rewards):
    with pytest.raises(ValueError, match="finite ones only"):
        group_advantages(rewards, normalize_std=True)


@given(REWARDS)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards):
    for normalize_std in (True, False):
        advantages = group_advantages(rewards, normalize_std=normalize_std)
        assert sum(advantages) == pytest.approx(0, abs=1e-9)
        by_reward = [advantage for _, advantage in sorted(zip(rewards, advantages, strict=True))]
        assert by_reward == sorted(advantages)


@given(REWARDS, st.randoms())
def test_promise_4_order_of_siblings_does_not_change_an_advantage(rewards, random):
    order = random.sample(range(len(rewards)), len(rewards))
    straight = group_advantages(rewards, normalize_std=True)
    assert [straight[i] for i in order] == group_advantages([rewards[i] for i in order], normalize_std=True)


def test_a_group_has_signal_when_any_reward_differs():
    assert has_signal(group(0.1, 0.1, 0.2)) and not has_signal(group(0.1, 0.1)) and not has_signal(group(1.0))


def test_promise_4_a_group_must_hold_exactly_its_members():
    check_group(group(0, 1), group_size=2)
    with pytest.raises(ValueError, match=r"group q has 2 trajectories, but algorithm.group_size is 3"):
        check_group(group(0, 1), group_size=3)


def test_promise_4_a_group_must_hold_one_question():
    mixed = group(0, 1)
    mixed.trajectories[1] = dataclasses.replace(mixed.trajectories[1], group_id="r")
    with pytest.raises(ValueError, match=r"group q .* holds trajectories of group r"):
        check_group(mixed, group_size=2)


@pytest.mark.parametrize("change", [{"id": "q/0"}, {"member": 0}])
def test_promise_4_no_attempt_counts_twice(change):
    twice = group(0, 1)
    twice.trajectories[1] = dataclasses.replace(twice.trajectories[1], **change)
    with pytest.raises(ValueError, match="holds a trajectory twice"):
        check_group(twice, group_size=2)
