"""Intervals and tests for scores over questions: how far a difference can be trusted. `scipy.stats` computes them.

The unit is the question, never the attempt: attempts at one question are not independent, so give one score per
question (the mean over its attempts).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTest:
    """McNemar's test of two runs on the same questions: `gained` counts the questions that only the second run answers
    rightly, `lost` those that only the first does.
    """

    gained: int
    lost: int
    p_value: float


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
    return _bootstrap([_scores(scores)], seed=seed, num_resamples=num_resamples, confidence=confidence)


def paired_bootstrap(
    before: Sequence[float],
    after: Sequence[float],
    *,
    seed: int = 0,
    num_resamples: int = 2000,
    confidence: float = 0.95,
) -> Interval:
    """Returns the interval of mean(after) - mean(before). Entry i of both belongs to the same question, and a resample
    draws both together.
    """
    if len(before) != len(after):
        raise ValueError(f"paired scores need the same questions, got {len(before)} before and {len(after)} after")
    differences = _scores(after) - _scores(before)
    return _bootstrap([differences], seed=seed, num_resamples=num_resamples, confidence=confidence)


def bootstrap_average(
    sets: Sequence[Mapping[str, float]], *, seed: int = 0, num_resamples: int = 2000, confidence: float = 0.95
) -> Interval:
    """Returns the interval of the unweighted mean over sets of their means; each set maps a question to its score.

    A resample draws sets with the same questions (a text at several lengths) together: the question is the cluster. It
    draws all others apart.
    """
    clusters: dict[frozenset[str], list[Mapping[str, float]]] = {}
    for scores in sets:
        clusters.setdefault(frozenset(scores), []).append(scores)
    samples = [
        _scores([sum(scores[question] for scores in members) for question in sorted(questions)]) / len(sets)
        for questions, members in clusters.items()
    ]
    return _bootstrap(samples, seed=seed, num_resamples=num_resamples, confidence=confidence)


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


def _bootstrap(samples: Sequence[np.ndarray], *, seed: int, num_resamples: int, confidence: float) -> Interval:
    """Returns the percentile interval of the sum of the samples' means; every sample is drawn apart. It is unbounded
    when one of them is a single question: every resample of that is the same.
    """
    value = float(sum(sample.mean() for sample in samples))
    if any(sample.size == 1 for sample in samples):
        return Interval(value=value, low=-math.inf, high=math.inf)

    def sum_of_means(*resamples: np.ndarray, axis: int) -> Any:
        return sum(resample.mean(axis=axis) for resample in resamples)

    interval = scipy.stats.bootstrap(
        samples,
        sum_of_means,
        n_resamples=num_resamples,
        confidence_level=confidence,
        method="percentile",
        batch=_RESAMPLES_AT_ONCE,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(value=value, low=float(interval.low), high=float(interval.high))
