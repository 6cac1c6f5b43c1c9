"""Intervals and tests for scores over questions: how far a difference can be trusted. `scipy.stats` computes them.

The unit is the question, never the attempt: attempts at one question are not independent, so give one score per
question (the mean over its attempts). A question that is asked several times (at several lengths, in several sets) is
one cluster, and what belongs to a cluster is drawn together. Trainings are another unit: an interval over questions
says what these trainings reach on other questions, and `t_interval` says what other trainings would reach.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

import numpy as np
import scipy

_BEYOND = 0.5  # of a distance to the estimate: whole answers beyond the changes that were seen
_NO_WIDTH = 1e-9  # of an interval; what rounding leaves
_RESAMPLES_AT_ONCE = 256  # many questions must not need num_resamples x questions of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and the ends of its confidence interval. They are infinite where it rests on one question, which says
    nothing of how much questions differ.
    """

    value: float
    low: float
    high: float

    @property
    def is_bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    def as_json(self) -> dict[str, float | None]:
        """Returns the numbers by name; None for an infinite one, which JSON does not have."""
        return {name: number if math.isfinite(number) else None for name, number in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTest:
    """McNemar's test of two runs on the same questions: `gained` counts the questions that only the second run answers
    rightly, `lost` those that only the first does.
    """

    gained: int
    lost: int
    p_value: float


Scores = Sequence[tuple[Hashable, float]]
"""Every question's cluster and score."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ClusteredMean:
    """The unweighted mean over sets of their mean scores, taken apart by clusters of questions.

    A cluster counts by its deviations from the means of the sets, so that sets of different difficulty do not pass for
    a spread of the questions. `spread` [clusters] adds up to 0 and `weights` [clusters] to 1.
    """

    value: float
    spread: np.ndarray
    """Contribution of each cluster to the mean: its scores, minus the means of their sets, by their weights."""
    weights: np.ndarray
    """The share of each cluster in the mean."""
    is_bounded: bool
    """Every set has two clusters at least; one says nothing of how much questions differ."""

    @property
    def num_clusters(self) -> int:
        return len(self.weights)

    @cached_property
    def variance(self) -> float:
        """Returns the estimated variance of `value`."""
        return float(self.num_clusters / (self.num_clusters - 1) * (self.spread**2).sum())

    @property
    def effective_questions(self) -> float:
        """Returns the number of independent questions of equal weight that would tell as much."""
        return float(1 / (self.weights**2).sum())


def clustered_mean(sets: Sequence[Scores], shares: Sequence[float] | None = None) -> ClusteredMean:
    """Returns the mean of the sets; no set may be empty. `shares` are the weights of the sets (None: all the same); a
    contrast between sets has positive and negative ones."""
    shares = [1 / len(sets)] * len(sets) if shares is None else shares
    means = [float(_scores([score for _, score in scores]).mean()) for scores in sets]
    spread: dict[Hashable, float] = defaultdict(float)
    weights: dict[Hashable, float] = defaultdict(float)
    for scores, mean, of_set in zip(sets, means, shares, strict=True):
        share = of_set / len(scores)
        for cluster, score in scores:
            spread[cluster] += share * (score - mean)
            weights[cluster] += share
    return ClusteredMean(
        value=math.fsum(share * mean for share, mean in zip(shares, means, strict=True)),
        spread=np.asarray([*spread.values()]),
        weights=np.asarray([*weights.values()]),
        is_bounded=all(len({cluster for cluster, _ in scores}) > 1 for scores in sets),
    )


def wilson_interval(num_right: int, num_questions: int, *, confidence: float = 0.95) -> Interval:
    """Returns Wilson's score interval of a proportion, which stays within [0, 1] and has a width at 0 and 1 too.

    Raises ValueError unless 0 <= num_right <= num_questions and num_questions >= 1.
    """
    if not 0 <= num_right <= num_questions or num_questions < 1:
        raise ValueError(
            f"{num_right} right of {num_questions} questions; expected 0 <= right <= questions and at least one "
            "question"
        )
    interval = scipy.stats.binomtest(num_right, num_questions).proportion_ci(confidence, method="wilson")
    return Interval(value=num_right / num_questions, low=float(interval.low), high=float(interval.high))


def bootstrap_interval(
    scores: Sequence[float], *, seed: int = 0, num_resamples: int = 2000, confidence: float = 0.95
) -> Interval:
    """Returns the percentile interval of the mean; questions are drawn with replacement. The same seed gives the same
    interval, and one question an unbounded one.
    """
    return _bootstrap(_scores(scores), seed=seed, num_resamples=num_resamples, confidence=confidence)


def bootstrap_average(
    sets: Sequence[Scores], *, seed: int = 0, num_resamples: int = 2000, confidence: float = 0.95
) -> Interval:
    """Returns the percentile interval of the unweighted mean over sets of their means. Clusters are drawn with
    replacement, each with all of its questions in all sets.

    It is unbounded where a set is a single cluster.
    """
    options = {"seed": seed, "num_resamples": num_resamples, "confidence": confidence}
    if len(sets) == 1 and len({cluster for cluster, _ in sets[0]}) == len(sets[0]):
        return bootstrap_interval([score for _, score in sets[0]], **options)
    return _clustered_bootstrap(sets, [1 / len(sets)] * len(sets), **options)


def mean_interval(
    sets: Sequence[Scores], *, seed: int = 0, num_resamples: int = 2000, confidence: float = 0.95
) -> Interval:
    """Returns the interval of the mean over sets of scores from 0 to 1: Wilson's where all answers are right or all are
    wrong, since all resamples are then the same, else `bootstrap_average`."""
    values = {score for scores in sets for _, score in scores}
    if values in ({0.0}, {1.0}):
        number = round(clustered_mean(sets).effective_questions)
        return wilson_interval(number * int(1.0 in values), number, confidence=confidence)
    return bootstrap_average(sets, seed=seed, num_resamples=num_resamples, confidence=confidence)


def paired_interval(
    sets: Sequence[Scores], *, seed: int = 0, num_resamples: int = 2000, confidence: float = 0.95
) -> Interval:
    """Returns the interval of the mean over sets of questions' differences: `difference_interval` where all questions
    of a set differ alike, since all resamples are then the same, else `bootstrap_average`."""
    drawn = bootstrap_average(sets, seed=seed, num_resamples=num_resamples, confidence=confidence)
    if drawn.high - drawn.low > _NO_WIDTH:
        return drawn
    whole = difference_interval(clustered_mean(sets), confidence=confidence)
    return Interval(value=drawn.value, low=max(whole.low, -1.0), high=min(whole.high, 1.0))


def bootstrap_gap(
    first: Sequence[Scores],
    second: Sequence[Scores],
    *,
    seed: int = 0,
    num_resamples: int = 2000,
    confidence: float = 0.95,
) -> Interval:
    """Returns the percentile interval of the mean over the first sets minus the mean over the second ones, drawn as
    `bootstrap_average` draws."""
    shares = [1 / len(first)] * len(first) + [-1 / len(second)] * len(second)
    options = {"seed": seed, "num_resamples": num_resamples, "confidence": confidence}
    return _clustered_bootstrap([*first, *second], shares, **options)


def bootstrap_ratios(
    above: np.ndarray, below: np.ndarray, *, seed: int = 0, num_resamples: int = 2000, confidence: float = 0.95
) -> list[Interval | None]:
    """Returns the percentile interval of each share sum(above) / sum(below); None without a case.

    `above` and `below` are [questions, shares] and count cases; a question may have several or none. All shares are
    computed from the same draws of questions. Where every resample is the same, because all cases count or
    none does, the interval is Wilson's of the questions that have cases; one question has an unbounded one.
    """
    generator, number = np.random.default_rng(seed), len(above)
    sums = above.sum(axis=0), below.sum(axis=0)
    draws = np.empty((num_resamples, above.shape[1]))
    for start in range(0, num_resamples, _RESAMPLES_AT_ONCE):
        size = min(_RESAMPLES_AT_ONCE, num_resamples - start)
        times = np.stack([np.bincount(generator.integers(number, size=number), minlength=number) for _ in range(size)])
        with np.errstate(invalid="ignore"):  # a resample may have no case of a rare share
            draws[start : start + size] = (times @ above) / (times @ below)
    tail = (1 - confidence) / 2
    intervals: list[Interval | None] = []
    for index, (counted, cases) in enumerate(zip(*sums, strict=True)):
        with_cases = int(np.count_nonzero(below[:, index]))
        if not cases:
            intervals.append(None)
        elif with_cases == 1:
            intervals.append(unbounded(float(counted / cases)))
        elif counted in (0, cases):
            intervals.append(wilson_interval(with_cases * int(counted > 0), with_cases, confidence=confidence))
        else:
            low, high = np.nanquantile(draws[:, index], [tail, 1 - tail])
            intervals.append(Interval(value=float(counted / cases), low=float(low), high=float(high)))
    return intervals


def difference_interval(mean: ClusteredMean, *, confidence: float) -> Interval:
    """Returns an interval of a mean of differences between scores from 0 to 1, for a test against a margin.

    A value is inside when the estimate lies within a quantile of the standard error that belongs to that value, as in a
    score test: the distance between both is made of answers to whole questions, half of them beyond the changes that
    were seen. It is at least as wide as Wilson's interval of whole questions lost (or gained). So a difference that no
    question shows is as uncertain as the number of questions makes it, where a bootstrap has no width; and an end is
    missed no more often than `confidence` says where few questions change (tests/unit/test_budgets.py draws them).
    """
    if not mean.is_bounded:
        return unbounded(mean.value)
    low, high = (mean.value + sign * _reach(mean, sign * mean.value, confidence) for sign in (-1, 1))
    return Interval(value=mean.value, low=low, high=high)


def error_at_margin(mean: ClusteredMean, margin: float) -> float:
    """Returns the standard error that `difference_interval` gives to a loss of `margin` where none is seen."""
    changed = mean.variance + margin * (_BEYOND - margin) / mean.effective_questions
    return math.sqrt(max(changed, margin * (1 - margin) / mean.effective_questions))


def t_interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Returns the t-interval of the mean of a few trainings' values; it is unbounded for one training.

    It is not a bootstrap over trainings, whose interval is too narrow: two trainings have three different resamples,
    three trainings ten.
    """
    value = fmean(values)
    if len(values) == 1:
        return unbounded(value)
    reach = float(scipy.stats.t.ppf(0.5 + confidence / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return Interval(value=value, low=value - reach, high=value + reach)


def trainings_needed(deviation: float, margin: float, *, confidence: float, power: float) -> int:
    """Returns the trainings whose t-interval would lie above -margin with probability `power`, if there is no true
    difference and the differences of trainings have this standard deviation."""
    shares = (0.5 + confidence / 2, power)
    normal = sum(float(scipy.stats.norm.ppf(share)) for share in shares)
    number = max(2, math.ceil((normal * deviation / margin) ** 2))  # quantiles of t are larger
    while sum(float(scipy.stats.t.ppf(share, number - 1)) for share in shares) * deviation / math.sqrt(number) > margin:
        number += 1
    return number


def unbounded(value: float) -> Interval:
    """Returns an estimate with a value and no other information."""
    return Interval(value=value, low=-math.inf, high=math.inf)


def mcnemar_test(before: Sequence[bool], after: Sequence[bool]) -> PairedTest:
    """Runs the exact two-sided test that a question is as likely to be gained as to be lost.

    With no change at all the p-value is 1.
    """
    if len(before) != len(after):
        raise ValueError(f"paired answers need the same questions, got {len(before)} before and {len(after)} after")
    gained = sum(bool(b) and not a for a, b in zip(before, after, strict=True))
    lost = sum(bool(a) and not b for a, b in zip(before, after, strict=True))
    p_value = float(scipy.stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    return PairedTest(gained=gained, lost=lost, p_value=p_value)


def _scores(scores: Sequence[float]) -> np.ndarray:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise ValueError(
            f"expected at least one finite score per question, got {values.size} scores of shape {values.shape}"
        )
    return values


def _reach(mean: ClusteredMean, value: float, confidence: float) -> float:
    """Returns the distance from the estimate to the end of its interval in the direction in which `value` grows.

    With n questions, a quantile t and k = t^2 / n, the end at the distance x solves x^2 = k (n variance + x/2 - 2 v x -
    x^2), v being `value` where it is positive and else 0, and Wilson's solves x^2 = k (y - y^2) for y = value + x.
    """
    questions, tail = mean.effective_questions, 0.5 + confidence / 2
    factor = float(scipy.stats.t.ppf(tail, mean.num_clusters - 1)) ** 2 / questions
    half = factor * (_BEYOND - 2 * max(value, 0.0)) / 2
    changed = (half + math.sqrt(half**2 + (1 + factor) * factor * questions * mean.variance)) / (1 + factor)
    factor = float(scipy.stats.norm.ppf(tail)) ** 2 / questions
    half = value + factor / 2
    square = half**2 - (1 + factor) * value**2
    whole = (half + math.sqrt(square)) / (1 + factor) - value if half > 0 and square >= 0 else 0.0
    return max(changed, whole)


def _clustered_bootstrap(sets: Sequence[Scores], shares: Sequence[float], **options: Any) -> Interval:
    """Returns the percentile interval of the weighted mean of the sets' means; clusters are drawn. A resample has more
    or fewer questions of a set than there are, so its sum of deviations may exceed what any scores of these sets give:
    the ends are cut there.
    """
    mean = clustered_mean(sets, shares)
    if not mean.is_bounded:
        return unbounded(mean.value)
    drawn = _bootstrap(mean.value + mean.num_clusters * mean.spread, **options)
    ranges = [
        sorted(share * end(score for _, score in scores) for end in (min, max))
        for scores, share in zip(sets, shares, strict=True)
    ]
    least, most = (math.fsum(ends) for ends in zip(*ranges, strict=True))
    return Interval(value=drawn.value, low=max(drawn.low, least), high=min(drawn.high, most))


def _bootstrap(sample: np.ndarray, *, seed: int, num_resamples: int, confidence: float) -> Interval:
    """Returns the percentile interval of the sample's mean. It is unbounded for a single question, since all its
    resamples are equal.
    """
    value = float(sample.mean())
    if sample.size == 1:
        return unbounded(value)
    interval = scipy.stats.bootstrap(
        (sample,),
        np.mean,
        n_resamples=num_resamples,
        confidence_level=confidence,
        method="percentile",
        batch=_RESAMPLES_AT_ONCE,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(value=value, low=float(interval.low), high=float(interval.high))
