"""Says how much memory is enough: the runs of an evaluation that differ in their memory budget are compared with the
largest budget on the same questions.

A budget is sufficient when it and every budget above it is not significantly worse than the largest one. "Worse" is
tested for all budgets at once: each paired-bootstrap interval of (budget - largest) has the confidence 1 - alpha / k
for k budgets (Bonferroni), and one that ends below 0 is worse. A test overlooks differences that are too small for its
number of questions, so every budget says which difference would have been found in 8 of 10 evaluations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy import stats

from mempipe.evaluation.compare import SetComparison, compare_rows
from mempipe.evaluation.metrics import METRICS
from mempipe.evaluation.results import ResultRow, read_results
from mempipe.evaluation.statistics import Interval, bootstrap_average
from mempipe.settings import ConfigError

ALPHA = 0.05
POWER = 0.8
NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPoint:
    """One memory budget: the score of its run, and its distance to the largest budget."""

    run: str
    memory_tokens: int
    score: Interval
    """The unweighted mean over sets, with its own 95 % interval."""
    tokens_per_question: float
    """Tokens read and written in all contexts of an attempt."""
    against_largest: SetComparison | None
    """None for the largest budget itself. The difference is this budget's score minus the largest one's."""
    detectable: float | None
    """The smallest difference that the test would find with a probability of POWER."""

    @property
    def is_worse(self) -> bool:
        return self.against_largest is not None and self.against_largest.difference.high < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetCurve:
    """The budgets of one agent, the smallest first."""

    agent: str
    metric: str
    points: list[BudgetPoint]

    @property
    def smallest_sufficient(self) -> BudgetPoint:
        """Returns the smallest budget that, like every larger one, is not significantly worse than the largest."""
        sufficient = self.points[-1]
        for point in reversed(self.points):
            if point.is_worse:
                break
            sufficient = point
        return sufficient


Sets = Mapping[str, Sequence[ResultRow]]
"""The rows of a run, by set."""


def budget_curves(folder: Path, *, metric: str = "em", seed: int = 1) -> list[BudgetCurve]:
    """Returns a curve for every agent of an evaluation with runs under two memory budgets or more.

    Raises ConfigError when there is none, when one is unfinished, and when two of an agent have the same budget.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist; give the folder of an evaluation")
    if metric not in METRICS:
        raise ConfigError(f"--metric is {metric!r}; the metrics are {', '.join(METRICS)}")
    runs: dict[str, dict[int, Path]] = {}
    for run, agent, tokens in _budgets(folder):
        if (other := runs.setdefault(agent, {}).setdefault(tokens, run)) != run:
            raise ConfigError(
                f"{other.name} and {run.name} are both {agent} with budget.memory_tokens {tokens}; a curve has one "
                "run for each budget"
            )
    curves = [
        budget_curve(agent, {tokens: (run.name, _rows(run)) for tokens, run in found.items()}, metric=metric, seed=seed)
        for agent, found in runs.items()
        if len(found) > 1
    ]
    if not curves:
        raise ConfigError(f"{folder} has no agent that was evaluated under two values of budget.memory_tokens")
    return curves


def budget_curve(agent: str, runs: Mapping[int, tuple[str, Sets]], *, metric: str = "em", seed: int = 1) -> BudgetCurve:
    """Returns the curve of `runs`: memory tokens to a run's name and its rows by set. There are at least two.

    Raises ConfigError when a run shares no question with that of the largest budget.
    """
    largest = max(runs)
    confidence = 1 - ALPHA / (len(runs) - 1)
    options = {"seed": seed, "num_resamples": NUM_RESAMPLES, "confidence": confidence}
    points = []
    for tokens in sorted(runs):
        run, sets = runs[tokens]
        comparison = detectable = None
        if tokens != largest:
            compared = compare_rows(runs[largest][1], sets, metric=metric, options=options)
            if not compared:
                raise ConfigError(f"{run} and {runs[largest][0]} share no question")
            comparison = compared[-1]
            detectable = _detectable(comparison.difference, confidence)
        scores = [{row.question_id: row.score(metric) for row in rows} for rows in sets.values()]
        spent = [fmean(row.total_tokens) for rows in sets.values() for row in rows if row.total_tokens]
        points.append(
            BudgetPoint(
                run=run,
                memory_tokens=tokens,
                score=bootstrap_average(scores, seed=seed, num_resamples=NUM_RESAMPLES),
                tokens_per_question=fmean(spent) if spent else 0.0,
                against_largest=comparison,
                detectable=detectable,
            )
        )
    return BudgetCurve(agent=agent, metric=metric, points=points)


def budget_lines(curves: Sequence[BudgetCurve]) -> list[str]:
    """Returns the report of all curves in Markdown."""
    lines = ["# How much memory is enough?", ""]
    for curve in curves:
        answer, largest = curve.smallest_sufficient, curve.points[-1]
        if answer is largest:
            verdict = (
                f"No smaller budget is enough: {curve.points[-2].memory_tokens} tokens are significantly worse than "
                f"{largest.memory_tokens}, so a larger one may be better still."
            )
        else:
            verdict = (
                f"**{answer.memory_tokens} tokens** are enough: no budget from there on is significantly worse than "
                f"{largest.memory_tokens} tokens."
            )
        lines += [
            f"## {curve.agent}",
            "",
            verdict,
            "",
            f"| memory tokens | {curve.metric}, percent | tokens per question | minus the largest budget | McNemar on "
            "em | would have been found | |",
            "|---|---|---|---|---|---|---|",
            *(_row(point) for point in curve.points),
            "",
        ]
    compared = max(len(curve.points) - 1 for curve in curves)
    return [
        *lines,
        "Scores have 95 % bootstrap intervals over questions, sets weighing the same. Differences are paired by "
        f"question; their intervals together have an error rate of {ALPHA:.0%} (Bonferroni over up to {compared} "
        f'budgets). "Would have been found" is the difference that this test finds with a probability of {POWER:.0%}.',
    ]


def _budgets(folder: Path) -> Iterator[tuple[Path, str, int]]:
    """Yields (folder, agent, memory tokens) of every evaluated run whose agent has a memory."""
    for run in sorted(each for each in folder.iterdir() if each.is_dir()):
        for file in sorted(run.glob("*/settings.json")):
            state: dict[str, Any] = json.loads(file.read_text())
            config = state["settings"].get("run", {})
            tokens = config.get("budget", {}).get("memory_tokens")
            if tokens is not None and not state["finished"]:
                raise ConfigError(f"{file.parent} is unfinished; run the evaluation to its end first")
            if tokens is not None:
                yield run, config["agent"]["name"], tokens


def _rows(run: Path) -> dict[str, Sequence[ResultRow]]:
    return {file.parent.name: read_results(file.parent) for file in sorted(run.glob("*/settings.json"))}


def _detectable(difference: Interval, confidence: float) -> float:
    """Returns the difference that a test of this confidence finds with a probability of POWER: two normal quantiles
    times the standard error, which follows from the interval's width."""
    quantile = float(stats.norm.ppf(0.5 + confidence / 2))
    error = (difference.high - difference.low) / (2 * quantile)
    return (quantile + float(stats.norm.ppf(POWER))) * error


def _row(point: BudgetPoint) -> str:
    cells = [str(point.memory_tokens), _percent(point.score), f"{point.tokens_per_question:,.0f}"]
    if point.against_largest is None or point.detectable is None:
        cells += ["–", "–", "–", "largest"]
    else:
        verdict = "worse" if point.is_worse else "not significantly worse"
        difference = _percent(point.against_largest.difference)
        cells += [difference, point.against_largest.verdict, f"{100 * point.detectable:.1f}", verdict]
    return f"| {' | '.join(cells)} |"


def _percent(interval: Interval) -> str:
    return f"{100 * interval.value:.1f} ({100 * interval.low:.1f} to {100 * interval.high:.1f})"
