"""Intervals and tests for scores over questions: how far a difference can be trusted.

The unit is the question, never the attempt: attempts at one question are not independent, so give one score per
question (the mean over its attempts).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_RESAMPLES_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and the ends of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTest:
    """McNemar's test of two runs on the same questions:
    `gained` are right only in the second run, `lost` only in the first.
    """

    gained: int
    lost: int
    p_value: float


def wilson_interval(num_right: int, num_questions: int, *, confidence: float = 0.95) -> Interval:
    """Score interval of a proportion; it stays within [0, 1] and is sensible at 0 and 1, unlike the normal
    approximation.

    Raises ValueError unless 0 <= num_right <= num_questions and num_questions >= 1.
    """
    if not 0 <= num_right <= num_questions or num_questions < 1:
        raise ValueError(
            f"{num_right} right of {num_questions} questions; expected 0 <= right <= questions and at least one "
            "question"
        )
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    n, share = num_questions, num_right / num_questions
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    low = 0.0 if num_right == 0 else centre - half
    high = 1.0 if num_right == n else centre + half
    return Interval(value=share, low=low, high=high)


def bootstrap_interval(
    scores: Sequence[float], *, seed: int = 0, num_resamples: int = 2000, confidence: float = 0.95
) -> Interval:
    """Percentile interval of the mean; questions are drawn with replacement. The same seed gives the same interval."""
    values = _scores(scores)
    means = _resampled_means(values, seed=seed, num_resamples=num_resamples)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value=float(values.mean()), low=float(low), high=float(high))


def paired_bootstrap(
    before: Sequence[float],
    after: Sequence[float],
    *,
    seed: int = 0,
    num_resamples: int = 2000,
    confidence: float = 0.95,
) -> Interval:
    """Interval of mean(after) - mean(before); entry i of both is the same question, and both are drawn together."""
    if len(before) != len(after):
        raise ValueError(f"paired scores need the same questions, got {len(before)} before and {len(after)} after")
    return bootstrap_interval(
        (_scores(after) - _scores(before)).tolist(), seed=seed, num_resamples=num_resamples, confidence=confidence
    )


def bootstrap_average(
    sets: Sequence[Mapping[str, float]], *, seed: int = 0, num_resamples: int = 2000, confidence: float = 0.95
) -> Interval:
    """Interval of the unweighted mean over sets of their means; each maps a question to its score.

    Sets with the same questions (a text at several lengths) are drawn together: the question is the cluster. Others are
    drawn apart.
    """
    clusters: dict[frozenset[str], list[Mapping[str, float]]] = {}
    for scores in sets:
        clusters.setdefault(frozenset(scores), []).append(scores)
    means, value = np.zeros(num_resamples), 0.0
    for number, (questions, members) in enumerate(clusters.items()):
        values = _scores([sum(scores[question] for scores in members) for question in sorted(questions)]) / len(sets)
        means += _resampled_means(values, seed=seed + number, num_resamples=num_resamples)
        value += float(values.mean())
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value=value, low=float(low), high=float(high))


def mcnemar_test(before: Sequence[bool], after: Sequence[bool]) -> PairedTest:
    """Exact two-sided test that a question is as likely to be gained as to be lost.
    With no change at all the p-value is 1.
    """
    if len(before) != len(after):
        raise ValueError(f"paired answers need the same questions, got {len(before)} before and {len(after)} after")
    gained = sum(bool(b) and not a for a, b in zip(before, after, strict=True))
    lost = sum(bool(a) and not b for a, b in zip(before, after, strict=True))
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1))
    return PairedTest(gained=gained, lost=lost, p_value=min(1.0, 2 * tail / 2**changed))


def _scores(scores: Sequence[float]) -> np.ndarray:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise ValueError(
            f"expected at least one finite score per question, got {values.size} scores of shape {values.shape}"
        )
    return values


def _resampled_means(values: np.ndarray, *, seed: int, num_resamples: int) -> np.ndarray:
    """[num_resamples]; drawn in slices, so that many questions do not need num_resamples x questions of memory."""
    if num_resamples < 1:
        raise ValueError(f"num_resamples is {num_resamples}, expected at least 1")
    generator = np.random.default_rng(seed)
    means = np.empty(num_resamples)
    for start in range(0, num_resamples, _RESAMPLES_AT_ONCE):
        stop = min(start + _RESAMPLES_AT_ONCE, num_resamples)
        means[start:stop] = values[generator.integers(values.size, size=(stop - start, values.size))].mean(axis=1)
    return means
