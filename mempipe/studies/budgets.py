"""Says how much memory is enough: runs that differ in their memory budget are compared with the largest budget on the
same questions.

A budget is sufficient when it and every budget above it is not significantly worse than the largest one. "Worse" is
tested for all budgets at once: each paired-bootstrap interval of (budget - largest) has the confidence 1 - alpha / k
for k budgets (Bonferroni), and one that ends below 0 is worse. A test overlooks differences that are too small for its
number of questions, so every budget says which difference would have been found in 8 of 10 evaluations.

Runs of the same agent and budget under several seeds are put together: a question's score is its mean over them.

Costs are tokens, seconds, and the KV cache of an attempt's largest context: 2 * layers * KV heads * head dimension *
bytes of a number, for each token that the context holds.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import scipy

from mempipe.engines.config import ModelConfig
from mempipe.evaluation.metrics import METRICS
from mempipe.evaluation.results import SETTINGS, ResultRow, read_result_state, read_results
from mempipe.evaluation.statistics import Interval, bootstrap_average
from mempipe.planning.capacity import model_shape, weight_width
from mempipe.settings import ConfigError
from mempipe.studies.compare import SetComparison, compare_rows

ALPHA = 0.05
POWER = 0.8
NUM_RESAMPLES = 2000
_PER_ATTEMPT = (
    "answers",
    "end_reasons",
    "context_tokens_by_turn",
    "sampled_tokens",
    "total_tokens",
    "full_history_tokens_by_turn",
    "first_causes",
    "recalls",
)

Sets = Mapping[str, Sequence[ResultRow]]
"""The rows of a run, by set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Says how large a policy is, and the cache of its contexts."""

    num_parameters: int
    cache_bytes_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A run of an evaluation or of a sweep. `memory_tokens` is None where the agent has no such budget, `model` where
    the model's shape is not known."""

    name: str
    agent: str
    memory_tokens: int | None
    sets: Sets
    model: ModelSize | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Holds what an agent reached under one budget, over all its seeds."""

    sets: Sets
    score: Interval
    """The unweighted mean over sets, with its own 95 % interval over questions."""
    by_seed: list[float]
    """The same mean of every run."""
    tokens_per_question: float
    """Tokens read and written in all contexts of an attempt."""
    seconds_per_question: float
    """From the first call to the last, while other questions were at work too."""
    largest_context: float
    """Tokens of an attempt's largest context, as a mean over attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPoint:
    """One memory budget, and its distance to the largest one."""

    memory_tokens: int
    measured: Measured
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
    points: list[BudgetPoint]
    model: ModelSize | None = None

    @property
    def smallest_sufficient(self) -> BudgetPoint:
        """Returns the smallest budget that, like every larger one, is not significantly worse than the largest."""
        sufficient = self.points[-1]
        for point in reversed(self.points):
            if point.is_worse:
                break
            sufficient = point
        return sufficient


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An agent without a memory budget, and per curve (agent) the smallest sufficient budget minus this agent."""

    agent: str
    measured: Measured
    differences: dict[str, SetComparison]
    model: ModelSize | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetStudy:
    """All agents that were measured together."""

    metric: str
    curves: list[BudgetCurve]
    references: list[Reference]


def study_evaluation(folder: Path, *, metric: str = "em", seed: int = 1) -> BudgetStudy:
    """Returns the study of an evaluation that has an agent with runs under two memory budgets or more.

    Raises ConfigError when there is none, when a run is unfinished, and when two of an agent have the same budget.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist; give the folder of an evaluation")
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
    study = study_runs(named, metric=metric, seed=seed)
    if not study.curves:
        raise ConfigError(f"{folder} has no agent that was evaluated under two values of budget.memory_tokens")
    return study


def study_runs(runs: Sequence[MeasuredRun], *, metric: str = "em", seed: int = 1) -> BudgetStudy:
    """Returns a curve for every agent with two memory budgets or more, and the agents without one as references.

    Raises ConfigError for an unknown metric and for runs that share no question.
    """
    if metric not in METRICS:
        raise ConfigError(f"--metric is {metric!r}; the metrics are {', '.join(METRICS)}")
    by_agent: dict[str, dict[int, list[Sets]]] = defaultdict(lambda: defaultdict(list))
    unbounded: dict[str, list[Sets]] = defaultdict(list)
    for run in runs:
        own = unbounded[run.agent] if run.memory_tokens is None else by_agent[run.agent][run.memory_tokens]
        own.append(run.sets)
    models = {run.agent: run.model for run in runs}
    curves = [
        budget_curve(agent, budgets, metric=metric, seed=seed, model=models[agent])
        for agent, budgets in by_agent.items()
        if len(budgets) > 1
    ]
    references = []
    for agent, repeats in unbounded.items():
        measured = _measured(repeats, metric=metric, seed=seed)
        options = {"seed": seed, "num_resamples": NUM_RESAMPLES, "confidence": 1 - ALPHA}
        compared = {
            curve.agent: compare_rows(
                measured.sets, curve.smallest_sufficient.measured.sets, metric=metric, options=options
            )
            for curve in curves
        }
        differences = {name: each[-1] for name, each in compared.items() if each}
        references.append(Reference(agent=agent, measured=measured, differences=differences, model=models[agent]))
    return BudgetStudy(metric=metric, curves=curves, references=references)


def budget_curve(
    agent: str,
    budgets: Mapping[int, Sequence[Sets]],
    *,
    metric: str = "em",
    seed: int = 1,
    model: ModelSize | None = None,
) -> BudgetCurve:
    """Returns the curve of `budgets`: memory tokens to the rows of every run under them. There are at least two.

    Raises ConfigError when a budget shares no question with the largest one.
    """
    measured = {tokens: _measured(budgets[tokens], metric=metric, seed=seed) for tokens in sorted(budgets)}
    largest = max(measured)
    confidence = 1 - ALPHA / (len(measured) - 1)
    options = {"seed": seed, "num_resamples": NUM_RESAMPLES, "confidence": confidence}
    points = []
    for tokens, own in measured.items():
        comparison = detectable = None
        if tokens != largest:
            compared = compare_rows(measured[largest].sets, own.sets, metric=metric, options=options)
            if not compared:
                raise ConfigError(f"{agent}: the runs with {tokens} and {largest} memory tokens share no question")
            comparison = compared[-1]
            detectable = _detectable(comparison.difference, confidence)
        points.append(
            BudgetPoint(memory_tokens=tokens, measured=own, against_largest=comparison, detectable=detectable)
        )
    return BudgetCurve(agent=agent, points=points, model=model)


def measured_runs(folder: Path) -> Iterator[MeasuredRun]:
    """Reads the runs of an evaluation, named by their folders. Raises ConfigError for one that is unfinished."""
    for run in sorted(each for each in folder.iterdir() if each.is_dir()):
        states = {file.parent: read_result_state(file.parent) for file in sorted(run.glob(f"*/{SETTINGS}"))}
        for path, state in states.items():
            if not state["finished"]:
                raise ConfigError(f"{path} is unfinished; run the evaluation to its end first")
        if states:
            settings = next(iter(states.values()))["settings"]
            config, is_control = settings["run"], settings.get("control") is not None
            yield MeasuredRun(
                name=run.name,
                agent=config["agent"]["name"],
                memory_tokens=None if is_control else config["budget"].get("memory_tokens"),
                sets=read_sets(run),
                model=_model_size(config.get("model", {})),
            )


def pooled(repeats: Sequence[Sets]) -> Sets:
    """Returns the rows of several runs as those of one: attempts at the same question are in one row.

    The same question has the same id, text and golden answers. Synthetic worlds of two seeds share ids only.
    """
    if len(repeats) == 1:
        return repeats[0]
    sets: dict[str, list[ResultRow]] = {}
    for label in dict.fromkeys(chain.from_iterable(repeats)):
        asked: dict[str, list[ResultRow]] = defaultdict(list)
        for rows in repeats:
            for row in rows.get(label, ()):
                asked[_identity(row)].append(row)
        sets[label] = [_merged(identity, rows) for identity, rows in asked.items()]
    return sets


def read_sets(run: Path) -> Sets:
    """Reads the rows of an evaluated run's folder, by set."""
    return {file.parent.name: read_results(file.parent) for file in sorted(run.glob(f"*/{SETTINGS}"))}


def mean_score(sets: Sets, metric: str) -> float:
    """Returns the unweighted mean over sets of their mean scores."""
    return fmean(fmean(row.score(metric) for row in rows) for rows in sets.values())


def tokens_per_attempt(rows: Sequence[ResultRow]) -> float:
    """Returns the tokens of all contexts of an attempt, as a mean over the questions that were attempted."""
    return fmean([fmean(row.total_tokens) for row in rows if row.answers] or [0.0])


def _measured(repeats: Sequence[Sets], *, metric: str, seed: int) -> Measured:
    sets = pooled(repeats)
    rows = [row for rows in sets.values() for row in rows if row.answers]
    scores = [{row.question_id: row.score(metric) for row in rows} for rows in sets.values()]
    return Measured(
        sets=sets,
        score=bootstrap_average(scores, seed=seed, num_resamples=NUM_RESAMPLES),
        by_seed=[mean_score(own, metric) for own in repeats],
        tokens_per_question=tokens_per_attempt(rows),
        seconds_per_question=fmean([row.seconds for row in rows] or [0.0]),
        largest_context=fmean([max(turns, default=0) for row in rows for turns in row.context_tokens_by_turn] or [0.0]),
    )


def _model_size(settings: Mapping[str, Any]) -> ModelSize | None:
    """Returns the size of the model that a run was measured with; None where its folder is not there any more."""
    model = ModelConfig.model_validate(settings)
    shape = model_shape(model) if model.path else None
    if shape is None:
        return None
    cache_bytes = shape.kv_bytes_per_token(weight_width(model))
    return ModelSize(num_parameters=shape.num_parameters, cache_bytes_per_token=cache_bytes)


def _identity(row: ResultRow) -> str:
    asked = json.dumps([row.question, row.golden_answers])
    return f"{row.question_id}/{hashlib.sha256(asked.encode()).hexdigest()[:12]}"


def _merged(identity: str, rows: Sequence[ResultRow]) -> ResultRow:
    """Returns one row with the attempts of all; its scores are means over the rows."""
    together: dict[str, Any] = {name: [*chain.from_iterable(getattr(r, name) for r in rows)] for name in _PER_ATTEMPT}
    means: dict[str, Any] = {name: fmean(row.score(name) for row in rows) for name in METRICS}
    objectives = [fmean(ems) for ems in zip(*(row.em_by_objective for row in rows), strict=True)]
    return replace(
        rows[0],
        question_id=identity,
        failed="; ".join(dict.fromkeys(row.failed for row in rows if row.failed)),
        seconds=fmean(row.seconds for row in rows),
        num_retries=sum(row.num_retries for row in rows),
        em_by_objective=objectives,
        snapshots=sorted({*chain.from_iterable(row.snapshots for row in rows)}),
        **means,
        **together,
    )


def _detectable(difference: Interval, confidence: float) -> float:
    """Returns the difference that a test of this confidence finds with a probability of POWER: two normal quantiles
    times the standard error, which follows from the interval's width."""
    quantile = float(scipy.stats.norm.ppf(0.5 + confidence / 2))
    error = (difference.high - difference.low) / (2 * quantile)
    return (quantile + float(scipy.stats.norm.ppf(POWER))) * error
