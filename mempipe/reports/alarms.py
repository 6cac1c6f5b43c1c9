"""Finds warnings in the metrics of a training: a sentence each, for its report and its last lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from mempipe.engines.config import FEWEST_TOKENS, MISMATCH_TOLERANCE

MISMATCH = "learner/same_version/abs_logprob_diff"
FEWEST_STEPS = 8
"""Learner steps of the shortest training that is judged."""
ERRORS = 3.0
"""Standard errors by which a mean must have moved."""
_PAYERS = ("function", "per_turn", "wrong_answer", "information_weight", "recall_weight")


def alarms(metrics: Sequence[Mapping[str, float]], settings: Mapping[str, Any]) -> list[str]:
    """Returns the alarms of a training from its rows of metrics.jsonl and its config as nested plain values."""
    found = [form_alarm(metrics, reward=settings.get("reward") or {}), mismatch_alarm(metrics, settings)]
    return [alarm for alarm in found if alarm]


def mismatch_alarm(metrics: Sequence[Mapping[str, float]], settings: Mapping[str, Any]) -> str | None:
    """Returns a sentence where engine and learner drifted apart: the mean |Δ log-prob| over a step's tokens of the
    learner's own version exceeded half of generation.mismatch_tolerance. None otherwise."""
    generation, dtype = settings.get("generation") or {}, (settings.get("model") or {}).get("dtype", "bfloat16")
    tolerances = (generation.get(name) for name in ("mismatch_tolerance", "canary_tolerance"))
    tolerance = next((value for value in tolerances if value), MISMATCH_TOLERANCE[dtype])
    gaps = {row["step"]: row[MISMATCH] for row in metrics if MISMATCH in row and _is_judged(row)}
    wide = {step: gap for step, gap in gaps.items() if not gap <= tolerance / 2}
    if not wide:
        return None
    worst = max(wide, key=lambda step: math.inf if math.isnan(wide[step]) else wide[step])
    return (
        f"Engine and learner drift apart: in {len(wide)} of {len(gaps)} steps, first in step {min(wide):.0f}, they "
        f"gave tokens of the same version log-probs that differ by more than {tolerance / 2:g} on average, by "
        f"{wide[worst]:.3g} in step {worst:.0f}. The run ends where that exceeds {tolerance:g} "
        "(generation.mismatch_tolerance)."
    )


def _is_judged(row: Mapping[str, float]) -> bool:
    return row.get("learner/same_version/tokens", math.inf) >= FEWEST_TOKENS


def form_alarm(metrics: Sequence[Mapping[str, float]], *, reward: Mapping[str, Any]) -> str | None:
    """Returns a sentence where form is rewarded without an answer: what an attempt without a word of the answer earned
    (`unanswered_reward`) rose by more than three standard errors from the first quarter of the steps to the last one,
    and F1 did not. None otherwise, and for fewer than 8 steps that have both.
    """
    rows = [row for row in metrics if row["step"] > 0 and "unanswered_reward" in row and "f1" in row]
    if len(rows) < FEWEST_STEPS:
        return None
    window = len(rows) // 4
    paid, answered = ([row[name] for row in rows] for name in ("unanswered_reward", "f1"))
    if not _rose(paid, window) or _rose(answered, window):
        return None
    names = [f"reward.{name}" for name in _PAYERS if reward.get(name)]
    names += ["reward.format"] * (reward.get("format", "none") != "none")
    before, after = (f"{fmean(part):.3f}" for part in (paid[:window], paid[-window:]))
    answers = (f"{fmean(part):.3f}" for part in (answered[:window], answered[-window:]))
    return (
        f"Form is rewarded without an answer: an attempt without a word of the answer earned {before} in the first "
        f"{window} steps and {after} in the last {window}, while F1 went from {' to '.join(answers)}. "
        f"What pays for more than the answer: {', '.join(names) or 'none of the settings of reward'}."
    )


def _rose(values: Sequence[float], window: int) -> bool:
    """Returns whether the mean of the last `window` steps is above that of the first ones by more than `ERRORS`
    standard errors.

    The variance of a step is half the mean square of the difference between neighbouring steps (von Neumann). The
    variance within a window would count learning as noise: a policy that learns to be paid for form does so within the
    first steps.
    """
    noise = fmean((after - before) ** 2 for before, after in pairwise(values)) / 2
    rise = fmean(values[-window:]) - fmean(values[:window])
    return rise > max(ERRORS * math.sqrt(2 * noise / window), 1e-9)
