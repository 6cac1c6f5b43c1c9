"""Says how much memory is enough: runs that differ in their memory budget are compared with the largest budget on the
same questions, for each set, for each number of hops within a set, and for all sets together.

A budget is *enough* when it, and every budget above it, loses less than a margin against the largest one. That is a
test of non-inferiority: the interval of (budget - largest) lies above -margin. It is *not enough* when the interval is
below -margin, and else it *cannot be told* with these questions. "Not significantly worse" is not such a test: the
fewer questions there are, the less is significant.

All intervals of an agent hold together with a probability of 1 - ALPHA (Bonferroni over budgets and parts of the
study), so that the smallest budget may be looked for in all of them. Where budgets were trained several times, the
t-interval over trainings has to say the same. One training for each budget gives a verdict on these trainings alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import stdev

import scipy

from mempipe.evaluation.metrics import METRICS
from mempipe.evaluation.results import REPORT
from mempipe.evaluation.statistics import (
    ClusteredMean,
    Interval,
    Scores,
    clustered_mean,
    difference_interval,
    error_at_margin,
    t_interval,
    trainings_needed,
)
from mempipe.settings import ConfigError
from mempipe.studies.compare import OVERALL, SetComparison, compare_rows, paired_differences, shared_pairs
from mempipe.studies.measured import Measured, MeasuredRun, ModelSize, Sets, measured, measured_runs

ALPHA = 0.05
POWER = 0.8
MARGIN = 2.0
"""Points (percent) that a budget which is enough may lose against the largest one."""


class Verdict(StrEnum):
    """The verdict of the questions on a budget."""

    ENOUGH = "enough"
    NOT_ENOUGH = "not enough"
    UNKNOWN = "cannot be told"


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginTest:
    """A budget against the largest one: the difference is this budget's score minus the largest one's."""

    comparison: SetComparison
    num_questions: int
    """Questions that both were asked; those that are the same question count once."""
    by_training: list[float]
    """The difference of each training; empty where all runs measure the same weights."""
    over_trainings: Interval | None
    """The t-interval of several trainings."""
    trainings_needed: int | None
    """Trainings with which a budget that loses nothing would be shown to be enough with a probability of POWER, if
    trainings differ as these do; None without `over_trainings`."""
    margin: float
    power: float | None
    """A cautious estimate of the probability that as many questions say "enough" of a budget that loses nothing; None
    for a single question."""
    assumed: float
    """The true difference for which `questions_needed` is: 0, or the estimate where the questions were many enough for
    0."""
    questions_needed: int | None
    """Questions with which that would be shown to be enough with a probability of POWER; None where no number would
    do."""

    @property
    def difference(self) -> Interval:
        return self.comparison.difference

    @property
    def verdict(self) -> Verdict:
        """Says what both intervals say; the one over trainings where there is one."""
        intervals = [self.difference, *([self.over_trainings] if self.over_trainings else [])]
        if all(interval.low > -self.margin for interval in intervals):
            return Verdict.ENOUGH
        if all(interval.high < -self.margin for interval in intervals):
            return Verdict.NOT_ENOUGH
        return Verdict.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPoint:
    """One memory budget, and its test against the largest one, which has none."""

    memory_tokens: int
    measured: Measured
    test: MarginTest | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetCurve:
    """The budgets of one agent, the smallest first. There are at least two."""

    agent: str
    points: list[BudgetPoint]
    model: ModelSize | None = None
    skipped: Sequence[str] = ()
    """Sets of these questions that were asked under some of the budgets only."""

    @property
    def smallest_enough(self) -> BudgetPoint | None:
        """Returns the smallest budget that, like every larger one, is enough; None where only the largest is left."""
        found = None
        for point in reversed(self.points[:-1]):
            if self.verdict(point) is not Verdict.ENOUGH:
                break
            found = point
        return found

    def verdict(self, point: BudgetPoint) -> Verdict:
        """Returns the verdict on a budget other than the largest. It cannot be told that one is enough while a larger
        one is not."""
        smaller = self.points[self.points.index(point) : -1]
        verdicts = [each.test.verdict for each in smaller if each.test is not None]
        if verdicts[0] is Verdict.ENOUGH and set(verdicts) != {Verdict.ENOUGH}:
            return Verdict.UNKNOWN
        return verdicts[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An agent without a memory budget, and for each curve (agent) the budget that is recommended minus this agent."""

    agent: str
    measured: Measured
    differences: dict[str, SetComparison]
    """Each interval is wide enough for the choice of the budget by the same questions."""
    model: ModelSize | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPart:
    """The study of some of the questions."""

    label: str
    """"nq", "musique, 2 hops", or "all sets"."""
    num_hops: int
    """Hops of its questions; 0 where it has those of all."""
    curves: list[BudgetCurve]
    references: list[Reference]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetStudy:
    """All agents that were measured together, part by part."""

    metric: str
    margin: float
    """A share from 0 to 1."""
    parts: list[StudyPart]
    """All questions first, then each set where there are several, then each number of hops within a set."""

    @property
    def whole(self) -> StudyPart:
        return self.parts[0]


def not_ended(folder: Path) -> str:
    """Returns a sentence about an evaluation that has no report yet, since runs that it did not begin have no folder;
    "" for one that has."""
    if (folder / REPORT).exists():
        return ""
    return f"{folder} has no {REPORT}: the evaluation has not ended, and may have more budgets than those in the table"


def study_evaluation(folder: Path, *, metric: str = "em", margin: float | None = None, seed: int = 1) -> BudgetStudy:
    """Returns the study of an evaluation that has an agent with runs under two memory budgets or more. `margin` is in
    points; None: MARGIN.

    Raises ConfigError when there is none, when a run is unfinished, and when two of an agent have the same budget.
    """
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {problem}; give the folder of a sweep or an evaluation")
    runs = list(measured_runs(folder))
    seen: dict[tuple[str, int | None], str] = {}
    for run in runs:
        other = seen.setdefault((run.agent, run.memory_tokens), run.name)
        if other != run.name and run.memory_tokens is not None:
            raise ConfigError(
                f"{other} and {run.name} are both {run.agent} with budget.memory_tokens {run.memory_tokens}; a curve "
                "has one run for each budget"
            )
    # Without a budget, runs are distinguished by their names: the same agent at two model sizes is two references.
    named = [replace(run, agent=run.name) if run.memory_tokens is None else run for run in runs]
    study = study_runs(named, metric=metric, margin=MARGIN if margin is None else margin, seed=seed)
    if not study.whole.curves:
        raise ConfigError(
            f"{folder} has no agent that was evaluated under two values of budget.memory_tokens; `mempipe sweep` makes "
            "such a folder, from a run's folder too"
        )
    return study


def study_runs(
    runs: Sequence[MeasuredRun], *, metric: str = "em", margin: float = MARGIN, seed: int = 1
) -> BudgetStudy:
    """Returns for every part a curve for each agent with two memory budgets or more, and the agents without one as
    references. `margin` is in points (percent).

    Raises ConfigError for an unknown metric, for a margin that is none, and for runs that share no question.
    """
    if metric not in METRICS:
        raise ConfigError(f"--metric is {metric!r}; the metrics are {', '.join(METRICS)}")
    if not 0 < margin < 100:
        raise ConfigError(f"margin is {margin:g}; expected more than 0 and less than 100 percent points")
    selections = _selections(runs)
    parts = [
        _part(label, runs, chosen, metric=metric, margin=margin / 100, seed=seed, num_parts=len(selections))
        for label, chosen in selections.items()
    ]
    return BudgetStudy(metric=metric, margin=margin / 100, parts=parts)


_Selection = tuple[str, int]  # a set's label and a number of hops; "" and 0 are all of them


def _selections(runs: Sequence[MeasuredRun]) -> dict[str, _Selection]:
    """Returns the parts of the study: all questions, the sets, and the numbers of hops of those that have several."""
    hops: dict[str, set[int]] = defaultdict(set)
    for run in runs:
        for label, rows in run.sets.items():
            hops[label] |= {row.num_hops for row in rows if row.num_hops}
    labels = [*hops]
    parts: dict[str, _Selection] = {labels[0] if len(labels) == 1 else OVERALL: ("", 0)}
    for label in labels:
        if len(labels) > 1:
            parts[label] = (label, 0)
        if len(hops[label]) > 1:
            parts |= {f"{label}, {hops_label(count)}": (label, count) for count in sorted(hops[label])}
    return parts


def hops_label(count: int) -> str:
    return "1 hop" if count == 1 else f"{count} hops"


def _selected(sets: Sets, selection: _Selection) -> Sets:
    label, hops = selection
    chosen = {
        name: [row for row in rows if hops in (0, row.num_hops)] for name, rows in sets.items() if label in ("", name)
    }
    return {name: rows for name, rows in chosen.items() if rows}


def _part(
    label: str,
    runs: Sequence[MeasuredRun],
    selection: _Selection,
    *,
    metric: str,
    margin: float,
    seed: int,
    num_parts: int,
) -> StudyPart:
    budgets: dict[str, dict[int, list[MeasuredRun]]] = defaultdict(lambda: defaultdict(list))
    unbounded: dict[str, list[MeasuredRun]] = defaultdict(list)
    for run in runs:
        chosen = replace(run, sets=_selected(run.sets, selection))
        if chosen.sets:
            own = unbounded[run.agent] if run.memory_tokens is None else budgets[run.agent][run.memory_tokens]
            own.append(chosen)
    curves = [
        budget_curve(agent, own, metric=metric, margin=margin, seed=seed, num_parts=num_parts)
        for agent, own in budgets.items()
        if len(own) > 1
    ]
    references = [
        _reference(agent, repeats, curves, metric=metric, seed=seed, num_parts=num_parts)
        for agent, repeats in unbounded.items()
    ]
    return StudyPart(label=label, num_hops=selection[1], curves=curves, references=references)


def budget_curve(
    agent: str,
    budgets: Mapping[int, Sequence[MeasuredRun]],
    *,
    metric: str = "em",
    margin: float = MARGIN / 100,
    seed: int = 1,
    num_parts: int = 1,
) -> BudgetCurve:
    """Returns the curve of `budgets`: memory tokens to every run under them. There are at least two. The intervals hold
    together with those of the other parts. A set that was not asked under all budgets is skipped, since means over
    different sets cannot be compared.

    Raises ConfigError when a budget shares no set with the others, or no question with the largest one.
    """
    largest = max(budgets)
    everywhere = set.intersection(*(set(run.sets) for runs in budgets.values() for run in runs))
    if not everywhere:
        raise ConfigError(f"{agent}: no set was asked under all of its budgets, {', '.join(map(str, sorted(budgets)))}")
    skipped = sorted({label for runs in budgets.values() for run in runs for label in run.sets} - everywhere)
    budgets = {tokens: [_on_sets(run, everywhere) for run in runs] for tokens, runs in budgets.items()}
    confidence = 1 - ALPHA / (num_parts * (len(budgets) - 1))
    points = [
        BudgetPoint(memory_tokens=tokens, measured=measured(budgets[tokens], metric=metric, seed=seed), test=None)
        for tokens in sorted(budgets)
    ]
    tested = []
    for point in points[:-1]:
        test = _margin_test(
            points[-1].measured.sets, point.measured.sets, metric=metric, margin=margin, confidence=confidence
        )
        if test is None:
            raise ConfigError(
                f"{agent}: the runs with {point.memory_tokens} and {largest} memory tokens share no question"
            )
        by_training = _by_training(budgets[largest], budgets[point.memory_tokens], metric=metric)
        over = t_interval(by_training, confidence=confidence) if len(by_training) > 1 else None
        needed = trainings_needed(stdev(by_training), margin, confidence=confidence, power=POWER) if over else None
        test = replace(test, by_training=by_training, over_trainings=over, trainings_needed=needed)
        tested.append(replace(point, test=test))
    return BudgetCurve(agent=agent, points=[*tested, points[-1]], model=budgets[largest][0].model, skipped=skipped)


def _on_sets(run: MeasuredRun, labels: Collection[str]) -> MeasuredRun:
    return replace(run, sets={label: rows for label, rows in run.sets.items() if label in labels})


def _margin_test(largest: Sets, budget: Sets, *, metric: str, margin: float, confidence: float) -> MarginTest | None:
    """Returns the test over questions; None where none is shared."""
    compared = compare_rows(largest, budget, metric=metric, interval=_interval(confidence))
    if not compared:
        return None
    mean = clustered_mean(_differences(largest, budget, metric=metric))
    power, assumed, needed = None, 0.0, None
    if mean.is_bounded:
        quantile, error = _quantile(confidence), error_at_margin(mean, margin)
        rest = margin - quantile * error  # what an estimate may lose and still be called enough
        # Few questions without a change do not promise that others have none, so the larger error counts where there is
        # a rest; where there is none, only changes that were seen can make up for it.
        scale = error if rest > 0 else math.sqrt(mean.variance)
        power = float(scipy.stats.norm.cdf(rest / scale)) if scale else 0.0
        needed = _questions_needed(mean, error, margin=margin, quantile=quantile)
        if needed <= mean.num_clusters and mean.value < 0:
            assumed = mean.value
            left = margin + mean.value
            needed = _questions_needed(mean, error, margin=left, quantile=quantile) if left > 0 else None
    return MarginTest(
        comparison=compared[-1],
        num_questions=mean.num_clusters,
        by_training=[],
        over_trainings=None,
        trainings_needed=None,
        margin=margin,
        power=power,
        assumed=assumed,
        questions_needed=needed,
    )


def _questions_needed(mean: ClusteredMean, error: float, *, margin: float, quantile: float) -> int:
    """Returns the questions with which the distance to the margin is two quantiles of the error, which falls with their
    root."""
    return math.ceil(mean.num_clusters * (error * (quantile + _quantile(2 * POWER - 1)) / margin) ** 2)


def _by_training(largest: Sequence[MeasuredRun], budget: Sequence[MeasuredRun], *, metric: str) -> list[float]:
    """Returns the difference of each training, joined by their seeds; none where all runs measure the same weights."""
    first, second = ({run.training: run.sets for run in runs} for runs in (largest, budget))
    seeds = [seed for seed in first if seed is not None and seed in second]
    differences = [_differences(first[seed], second[seed], metric=metric) for seed in seeds]
    return [clustered_mean(sets).value for sets in differences if sets]


def _reference(
    agent: str,
    repeats: Sequence[MeasuredRun],
    curves: Sequence[BudgetCurve],
    *,
    metric: str,
    seed: int,
    num_parts: int,
) -> Reference:
    own = measured(repeats, metric=metric, seed=seed)
    differences = {}
    for curve in curves:
        # The budget was chosen by the same questions, so the interval is that of all budgets that it was chosen from.
        interval = _interval(1 - ALPHA / (num_parts * len(curve.points)))
        chosen = recommended(curve).measured.sets
        if compared := compare_rows(own.sets, chosen, metric=metric, interval=interval):
            differences[curve.agent] = compared[-1]
    return Reference(agent=agent, measured=own, differences=differences, model=repeats[0].model)


def recommended(curve: BudgetCurve) -> BudgetPoint:
    """Returns the smallest budget that is enough, or the largest one where none is known to be."""
    return curve.smallest_enough or curve.points[-1]


def _differences(first: Sets, second: Sets, *, metric: str) -> list[Scores]:
    pairs = {label: shared_pairs(first[label], second[label]) for label in first if label in second}
    return [*paired_differences({label: own for label, own in pairs.items() if own}, metric=metric).values()]


def _interval(confidence: float) -> partial[Interval]:
    return partial(_difference, confidence=confidence)


def _difference(sets: Sequence[Scores], *, confidence: float) -> Interval:
    return difference_interval(clustered_mean(sets), confidence=confidence)


def _quantile(confidence: float) -> float:
    return float(scipy.stats.norm.ppf(0.5 + confidence / 2))
