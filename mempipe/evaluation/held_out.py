"""Results of a training run on its held-out questions, by evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from mempipe.data.trajectories import read_made_of, read_trajectories
from mempipe.evaluation.rollout_metrics import num_turns

_ORDER = {"untrained": -2, "before": -1, "after": 1}
"""Order of evaluations of the same step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutEvaluation:
    """The means of one evaluation over its attempts, one at each question."""

    label: str
    """"untrained", "before", "after", or "step-NUMBER"."""
    step: int
    """The learner step whose policy answered."""
    num_questions: int
    em: float
    f1: float
    turns: float
    sampled_tokens: float


def read_held_out(run: Path, *, growing: bool) -> list[HeldOutEvaluation]:
    """Returns the evaluations in the folder of a run, in the order of training. `growing` is true for an agent that
    writes no memory. Raises ConfigError for a damaged file."""
    found = [_read(file, growing=growing) for file in (run / "evaluation").glob("*.parquet")]
    return sorted(found, key=lambda each: (each.step, _ORDER.get(each.label, 0)))


def _read(file: Path, *, growing: bool) -> HeldOutEvaluation:
    attempts = [trajectory for group in read_trajectories(file) for trajectory in group.trajectories]
    return HeldOutEvaluation(
        label=file.stem,
        step=(read_made_of(file) or {}).get("step", 0),
        num_questions=len(attempts),
        em=fmean(each.em for each in attempts),
        f1=fmean(each.f1 for each in attempts),
        turns=fmean(num_turns(each, growing=growing) for each in attempts),
        sampled_tokens=fmean(sum(c.num_sampled_tokens for c in each.contexts) for each in attempts),
    )
