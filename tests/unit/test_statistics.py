"""Intervals against published and hand-worked values, and their defining properties."""

import math

import numpy as np
import pytest
import scipy

from mempipe.evaluation.statistics import (
    Interval,
    Scores,
    bootstrap_average,
    bootstrap_gap,
    bootstrap_interval,
    clustered_mean,
    difference_interval,
    mcnemar_test,
    mean_interval,
    t_interval,
    trainings_needed,
    wilson_interval,
)


def paired_bootstrap(before: list[float], after: list[float], **options: int) -> Interval:
    return bootstrap_interval([b - a for a, b in zip(before, after, strict=True)], **options)


def scores_of(values: list[float], *, prefix: str = "") -> Scores:
    return [(f"{prefix}{i}", value) for i, value in enumerate(values)]


def test_wilson_interval_of_81_in_263():
    """Newcombe (1998), table I, method 3."""
    interval = wilson_interval(81, 263)
    assert (round(interval.low, 4), round(interval.high, 4)) == (0.2553, 0.3662)
    assert interval.value == 81 / 263


def test_wilson_interval_at_the_ends_has_its_closed_form():
    z2 = 1.959963984540054**2
    none, all_right = wilson_interval(0, 29), wilson_interval(29, 29)
    assert none.low == 0.0 and math.isclose(none.high, z2 / (29 + z2), rel_tol=1e-12)
    assert all_right.high == 1.0 and math.isclose(all_right.low, 29 / (29 + z2), rel_tol=1e-12)


def test_wilson_interval_narrows_with_questions_and_widens_with_confidence():
    def width(interval: Interval) -> float:
        return interval.high - interval.low

    assert width(wilson_interval(50, 100)) > width(wilson_interval(500, 1000))
    assert width(wilson_interval(50, 100, confidence=0.99)) > width(wilson_interval(50, 100))


@pytest.mark.parametrize(("right", "questions"), [(-1, 5), (6, 5), (0, 0)])
def test_impossible_counts_are_refused(right, questions):
    with pytest.raises(ValueError, match="right"):
        wilson_interval(right, questions)


def test_bootstrap_of_equal_scores_has_no_width():
    assert bootstrap_interval([0.25] * 7) == Interval(value=0.25, low=0.25, high=0.25)


def test_bootstrap_is_reproducible_and_depends_on_the_seed():
    scores = np.random.default_rng(3).random(50).tolist()
    assert bootstrap_interval(scores, seed=1) == bootstrap_interval(scores, seed=1)
    assert bootstrap_interval(scores, seed=1) != bootstrap_interval(scores, seed=2)


def test_bootstrap_agrees_with_the_normal_interval_for_many_questions():
    scores = np.random.default_rng(0).random(2000)
    interval = bootstrap_interval(scores.tolist(), seed=5, num_resamples=4000)
    half = 1.96 * scores.std() / math.sqrt(scores.size)
    assert math.isclose(interval.low, scores.mean() - half, abs_tol=0.05 * half)
    assert math.isclose(interval.high, scores.mean() + half, abs_tol=0.05 * half)


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(11)
    intervals = [bootstrap_interval(generator.random(60).tolist(), seed=i, num_resamples=400) for i in range(200)]
    covered = sum(interval.low <= 0.5 <= interval.high for interval in intervals)
    assert 178 <= covered <= 198  # 95 % of 200, three standard deviations of a binomial and a little bootstrap bias


def test_pairing_removes_what_the_questions_share():
    easy = np.random.default_rng(2).random(100)
    difference = paired_bootstrap(easy.tolist(), (easy + 0.1).tolist())
    assert math.isclose(difference.low, 0.1) and math.isclose(difference.high, 0.1)


def test_paired_intervals_cover_a_known_difference_and_a_tie_names_no_winner():
    """Right and wrong answers to the same 80 questions; the second run gains 15 points, or nothing."""
    for gain, seed in ((0.15, 21), (0.0, 22)):
        generator = np.random.default_rng(seed)
        covered, significant = 0, 0
        for repeat in range(200):
            easiness = generator.random(80) * 0.7
            before = (generator.random(80) < easiness).astype(float).tolist()
            after = (generator.random(80) < easiness + gain).astype(float).tolist()
            interval = paired_bootstrap(before, after, seed=repeat, num_resamples=400)
            covered += interval.low <= gain <= interval.high
            significant += mcnemar_test([b == 1 for b in before], [a == 1 for a in after]).p_value < 0.05
        assert 178 <= covered <= 199, gain  # 95 % of 200 within three standard deviations
        assert gain or significant <= 19  # 5 % of 200 and three standard deviations


def test_one_question_has_an_estimate_and_no_bounds():
    unbounded = {"low": -math.inf, "high": math.inf}
    assert bootstrap_interval([0.5]) == Interval(value=0.5, **unbounded)
    assert paired_bootstrap([0.0], [1.0]) == Interval(value=1.0, **unbounded)
    alone, several = [("a", 1.0)], scores_of([float(i % 2) for i in range(40)])
    assert bootstrap_average([alone, several]) == Interval(value=0.75, **unbounded)
    assert bootstrap_average([[("a", 1.0), ("a", 0.0)]]) == Interval(value=0.5, **unbounded)
    assert bootstrap_average([several, several]).is_bounded
    assert t_interval([0.5]) == Interval(value=0.5, **unbounded)
    assert difference_interval(clustered_mean([alone]), confidence=0.95) == Interval(value=1.0, **unbounded)


def test_a_question_asked_at_eight_lengths_is_one_question():
    """All lengths answer alike, so the interval is that of 128 questions, and not of 1,024."""
    one = np.random.default_rng(4).choice([0.0, 1.0], 128).tolist()
    lengths = [scores_of(one) for _ in range(8)]
    alone, together = (bootstrap_average(sets, seed=1) for sets in (lengths[:1], lengths))
    apart = bootstrap_average([scores_of(one, prefix=f"{n}/") for n in range(8)], seed=1)
    assert together.low == pytest.approx(alone.low, abs=0.01) and together.high == pytest.approx(alone.high, abs=0.01)
    assert apart.high - apart.low < 0.5 * (together.high - together.low)


def test_sets_of_other_questions_are_drawn_apart():
    """Two sets whose means are far apart: their distance is no spread of the questions."""
    sets = [scores_of([1.0] * 50, prefix="a"), scores_of([0.0] * 50, prefix="b")]
    interval = bootstrap_average(sets, num_resamples=200)
    assert interval.low == interval.value == interval.high == 0.5


def test_the_interval_of_an_average_ends_where_scores_end():
    """Clusters are drawn, so a resample may have fewer of the set's questions than the set, none of them wrong."""
    right = [scores_of([1.0] * 32, prefix=prefix) for prefix in "ab"]
    nearly = scores_of([0.0] + [1.0] * 31, prefix="c")
    average = bootstrap_average([*right, nearly])
    assert average.high == 1.0 and 0.9 < average.low < average.value < 1.0
    wrong = [[(cluster, 1 - score) for cluster, score in scores] for scores in (*right, nearly)]
    assert bootstrap_average(wrong).low == 0.0
    assert bootstrap_gap(right, wrong).high == 1.0 and bootstrap_gap(wrong, right).low == -1.0
    several = bootstrap_average([[("a", 1.0)] * 9 + [("b", 0.0), ("c", 1.0)]])
    assert several.high == 1.0 and several.value == pytest.approx(10 / 11)


def test_an_average_of_sets_that_are_all_right_is_no_certainty():
    three, many = ([(f"{number}/{i}", 1.0) for i in range(number)] for number in (3, 1000))
    assert mean_interval([three]) == wilson_interval(3, 3)
    assert mean_interval([three, three]) == wilson_interval(3, 3)  # the same questions
    assert mean_interval([three, many]) == wilson_interval(12, 12)  # half of the weight is that of three questions
    assert mean_interval([[(cluster, 0.0) for cluster, _ in three]]) == wilson_interval(0, 3)
    mixed = [*three, ("wrong", 0.0)]
    assert mean_interval([mixed, many]) == bootstrap_average([mixed, many])


@pytest.mark.parametrize("deviation", [0.0, 0.01, 0.02, 0.11, 0.5])
def test_the_trainings_needed_are_the_fewest_that_would_do(deviation):
    def reach(number: int) -> float:
        return sum(scipy.stats.t.ppf(share, number - 1) for share in (0.975, 0.8)) * deviation / math.sqrt(number)

    number = trainings_needed(deviation, 0.02, confidence=0.95, power=0.8)
    assert reach(number) <= 0.02 and (number == 2 or reach(number - 1) > 0.02)
    assert deviation < 0.5 or number > 4900


def test_the_gap_between_sets_of_other_questions_has_the_variance_of_both():
    first, second = (np.random.default_rng(seed).choice([0.0, 1.0], n).tolist() for seed, n in ((1, 200), (2, 100)))
    gap = bootstrap_gap([scores_of(first, prefix="a")], [scores_of(second, prefix="b")], num_resamples=4000)
    assert gap.value == pytest.approx(np.mean(first) - np.mean(second))
    width = 2 * 1.96 * (np.var(first) / 200 + np.var(second) / 100) ** 0.5
    assert gap.high - gap.low == pytest.approx(width, rel=0.08)
    same = bootstrap_gap([scores_of(first)], [scores_of(first)])
    assert same.low == pytest.approx(0) and same.high == pytest.approx(0)  # the same questions cancel
    assert not bootstrap_gap([scores_of(first)], [[("alone", 1.0)]]).is_bounded


def test_a_few_shared_questions_join_two_sets_without_making_them_one():
    generator = np.random.default_rng(8)
    first, second = (generator.choice([0.0, 1.0], 400).tolist() for _ in range(2))
    shared = [("shared", 1.0)]
    alone = bootstrap_average([scores_of(first, prefix="a"), scores_of(second, prefix="b")], seed=2)
    joined = bootstrap_average([[*scores_of(first, prefix="a"), *shared], [*scores_of(second), *shared]], seed=2)
    assert joined.high - joined.low == pytest.approx(alone.high - alone.low, rel=0.1)


def test_clustered_intervals_cover_as_often_as_they_say():
    generator, covered = np.random.default_rng(5), 0
    for repeat in range(200):
        ability = generator.random(40)
        sets = [scores_of((generator.random(40) < ability).astype(float).tolist()) for _ in range(4)]
        interval = bootstrap_average(sets, seed=repeat, num_resamples=400)
        covered += interval.low <= 0.5 <= interval.high
    assert 178 <= covered <= 199


def test_the_interval_over_trainings_is_students():
    """Three trainings: two degrees of freedom, whose quantile is 4.3027."""
    interval = t_interval([-0.011, -0.094, 0.021])
    half = 4.302653 * np.std([-0.011, -0.094, 0.021], ddof=1) / math.sqrt(3)
    assert (interval.low, interval.high) == pytest.approx((interval.value - half, interval.value + half))


def test_the_interval_of_a_difference_without_any_change_is_wilsons():
    interval = difference_interval(clustered_mean([scores_of([0.0] * 29)]), confidence=0.95)
    wilson = wilson_interval(0, 29)
    assert (interval.low, interval.high) == pytest.approx((-wilson.high, wilson.high))


def test_the_interval_of_pure_losses_reaches_as_far_as_wilsons():
    losses = [-1.0] * 3 + [0.0] * 97
    interval, wilson = (
        difference_interval(clustered_mean([scores_of(losses)]), confidence=0.95),
        wilson_interval(3, 100),
    )
    assert interval.low == pytest.approx(-wilson.high)
    assert interval.high > -wilson.low  # the other end reaches further


def test_the_interval_of_many_different_differences_solves_its_equation():
    values = np.random.default_rng(6).uniform(-1, 1, 500)
    interval = difference_interval(clustered_mean([scores_of(values.tolist())]), confidence=0.95)
    factor, variance = 1.964729**2 / 500, values.var(ddof=1)
    for end, mean in ((interval.low, values.mean()), (-interval.high, -values.mean())):
        distance = mean - end
        seen = distance / 2 + 2 * min(mean, 0) * distance - distance**2
        assert distance**2 == pytest.approx(factor * (variance + seen), 1e-5)
    half = 1.964729 * values.std(ddof=1) / math.sqrt(500)
    assert interval.high - interval.low == pytest.approx(2 * half, rel=0.05)  # Student's, and a little more


def test_eight_lengths_of_a_question_make_no_interval_narrower():
    one = np.random.default_rng(7).choice([-1.0, 0.0, 0.0, 1.0], 128).tolist()
    alone, lengths = (difference_interval(clustered_mean([scores_of(one)] * n), confidence=0.95) for n in (1, 8))
    assert (lengths.low, lengths.high) == pytest.approx((alone.low, alone.high))


def test_pairs_must_be_of_the_same_questions():
    with pytest.raises(ValueError, match="2 before and 1 after"):
        mcnemar_test([False, True], [True])


@pytest.mark.parametrize("scores", [[], [math.nan], [1.0, math.inf]])
def test_scores_must_be_finite_and_present(scores):
    with pytest.raises(ValueError, match="finite"):
        bootstrap_interval(scores)


def test_mcnemar_counts_gained_and_lost_questions():
    before = [True, True, False, False, False, False, False]
    after = [True, False, True, True, True, True, False]
    result = mcnemar_test(before, after)
    assert (result.gained, result.lost) == (4, 1)
    assert result.p_value == 2 * (1 + 5) / 2**5


def test_mcnemar_without_a_change_says_nothing():
    assert mcnemar_test([True, False], [True, False]).p_value == 1.0
    assert mcnemar_test([True, False], [False, True]).p_value == 1.0


def test_mcnemar_of_many_one_sided_changes_is_decisive():
    assert mcnemar_test([False] * 2000, [True] * 2000).p_value < 1e-300
