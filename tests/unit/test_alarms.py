"""Engine and learner that drift apart are told before the run ends."""

from __future__ import annotations

import math

import pytest

from mempipe.engines.config import FEWEST_TOKENS, MISMATCH_TOLERANCE
from mempipe.engines.proof import SamplingMismatch, check_sampled
from mempipe.reports.alarms import MISMATCH, alarms, mismatch_alarm

BFLOAT16 = {"model": {"dtype": "bfloat16"}}


def rows(*gaps: float, tokens: float = 1000.0) -> list[dict[str, float]]:
    return [
        {"step": step, MISMATCH: gap, "learner/same_version/tokens": tokens} for step, gap in enumerate(gaps, start=1)
    ]


def test_the_alarm_comes_at_half_of_what_ends_the_run():
    half = MISMATCH_TOLERANCE["bfloat16"] / 2
    assert mismatch_alarm(rows(0.01, half), BFLOAT16) is None
    told = mismatch_alarm(rows(0.01, 0.03, 0.02, 0.04), BFLOAT16)
    assert told is not None and told in alarms(rows(0.01, 0.03, 0.02, 0.04), BFLOAT16)
    assert "in 2 of 4 steps, first in step 2" in told and "by 0.04 in step 4" in told
    assert "exceeds 0.05 (generation.mismatch_tolerance)" in told


def test_a_tolerance_that_is_set_decides():
    assert mismatch_alarm(rows(0.03), BFLOAT16 | {"generation": {"mismatch_tolerance": 0.2}}) is None
    assert mismatch_alarm(rows(0.03), BFLOAT16 | {"generation": {"canary_tolerance": 0.2}}) is None
    assert mismatch_alarm(rows(0.03), {"model": {"dtype": "float32"}, "generation": {"mismatch_tolerance": None}})


def test_few_tokens_and_steps_without_any_are_not_judged():
    assert mismatch_alarm(rows(0.9, tokens=FEWEST_TOKENS - 1.0), BFLOAT16) is None
    assert mismatch_alarm([{"step": 1, "reward": 0.5}], BFLOAT16) is None


def test_what_is_not_a_number_is_a_mismatch():
    told = mismatch_alarm(rows(0.04, math.nan, 0.03), BFLOAT16)
    assert told is not None and "by nan in step 2" in told
    with pytest.raises(SamplingMismatch, match="differ by nan"):
        check_sampled(math.nan, FEWEST_TOKENS, tolerance=0.05)


def test_a_mean_is_judged_over_enough_tokens():
    check_sampled(0.05 * FEWEST_TOKENS, FEWEST_TOKENS, tolerance=0.05 + 1e-9)
    check_sampled(99.0, FEWEST_TOKENS - 1, tolerance=0.05)
    with pytest.raises(SamplingMismatch):
        check_sampled(0.051 * FEWEST_TOKENS, FEWEST_TOKENS, tolerance=0.05)
