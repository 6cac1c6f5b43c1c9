"""Reads and summarises the files that the report of a run shows: config.yaml, state.json, metrics.jsonl and
evaluation/{before,after}.parquet.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from mempipe.agents.budget import Budget
from mempipe.agents.registry import AgentSpec, agent_spec
from mempipe.config import DEFAULT_AGENT
from mempipe.data.trajectories import read_made_of, read_trajectories
from mempipe.evaluation.memory_quality import MemoryQuality, trajectory_quality
from mempipe.evaluation.quality_by_turn import quality_by_turn
from mempipe.evaluation.rollout_metrics import rollout_metrics
from mempipe.evaluation.statistics import (
    Interval,
    Scores,
    mcnemar_test,
    mean_interval,
    paired_interval,
    wilson_interval,
)
from mempipe.loader import parse_section
from mempipe.provenance import differences
from mempipe.reports.alarms import alarms
from mempipe.reports.steps import ActionText
from mempipe.runs import read_state, saved_settings, saved_source
from mempipe.tracking.losses import read_losses
from mempipe.tracking.metrics_file import describe_bad_lines, read_metrics, read_rows
from mempipe.types import Group

Number = float | int | str | None

_SECONDS = "seconds/"
_TRAINING_ONLY = ("reward_std", "advantage_mean", "advantage_std", "zero_variance_groups")
_NOT_PARTS = ("step",)  # the whole step, not a part of it


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """The data of a report. Every field may be empty; the report then skips the parts that need it."""

    settings: Mapping[str, Any]
    """The run's config as nested plain values."""
    metrics: Sequence[Mapping[str, float]] = field(default_factory=list)
    """One row per learner step, as `read_metrics` gives them."""
    before: Sequence[Group] = field(default_factory=list)
    """Held-out questions under the weights that training started from."""
    after: Sequence[Group] = field(default_factory=list)
    """The same questions under the trained weights."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time by phase of the run, in order."""
    num_steps: int = 0
    source: str = ""
    """The passages behind the questions that the run created, with their licence; "" where it created none."""
    folder: str = ""
    """The run's folder, as the commands of the page name it."""
    notices: Sequence[str] = ()
    """A sentence for each thing that the run's record lacks."""
    note: str = ""
    """A note on the comparison for the reader; "" for none."""

    @property
    def name(self) -> str:
        return str(self.settings.get("name", "run"))

    @property
    def memory_budget(self) -> int | None:
        """Returns the most tokens that a memory may have; None where the whole history is carried. Raises ConfigError
        for a budget that this version cannot read."""
        return self._budget.memory_limit

    @property
    def growing(self) -> bool:
        """Returns whether the agent writes no memory, so that every message is a turn."""
        return not self._agent.has_memory(self._budget)

    @property
    def context_label(self) -> str:
        """Returns what the contexts hold, for a chart."""
        if not self.growing:
            return "bounded memory"
        return "full history" if self._agent.grows else "own contexts"

    @property
    def text(self) -> ActionText:
        """Returns how the text of an action is read."""
        return ActionText.of(self._agent, self._budget)

    @property
    def _budget(self) -> Budget:
        return parse_section(self.settings.get("budget", {}), self._agent.budget)

    @property
    def _agent(self) -> AgentSpec:
        return agent_spec(self.settings.get("agent", {}).get("name", DEFAULT_AGENT))

    @property
    def train_seconds(self) -> dict[str, float]:
        """Sums the `seconds/…` metrics: where the time of the learner steps went."""
        totals: dict[str, float] = defaultdict(float)
        for row in self.metrics:
            for name, value in row.items():
                part = name.removeprefix(_SECONDS)
                if name.startswith(_SECONDS) and part not in _NOT_PARTS and math.isfinite(value):
                    totals[part] += value
        return dict(totals)


def read_report_data(folder: str | Path) -> ReportData:
    """Reads the files that the run of this folder saved, attempts without token ids. Only config.yaml must exist."""
    folder = Path(folder)
    metrics_file = folder / "metrics.jsonl"
    state = read_state(folder) if (folder / "state.json").exists() else {}
    evaluations = {label: folder / "evaluation" / f"{label}.parquet" for label in ("before", "after")}
    groups = {
        label: read_trajectories(path, tokens=False) if path.exists() else [] for label, path in evaluations.items()
    }
    metrics = read_metrics(metrics_file) if metrics_file.exists() else []
    bad_lines = read_rows(metrics_file)[1] if metrics_file.exists() else []
    damage = [describe_bad_lines(metrics_file, bad_lines)] if bad_lines else []
    return ReportData(
        settings=saved_settings(folder),
        metrics=metrics,
        before=groups["before"],
        after=groups["after"],
        seconds=state.get("seconds", {}),
        num_steps=state.get("num_steps", 0),
        source=saved_source(folder),
        folder=str(folder),
        notices=[*read_losses(folder), *damage],
        note=_asked_otherwise(*evaluations.values()),
    )


def _asked_otherwise(before: Path, after: Path) -> str:
    """Returns the settings in which two evaluations differ, besides their policies and questions; "" where they do
    not."""
    made_of = [read_made_of(path) if path.exists() else None for path in (before, after)]
    if None in made_of:  # not there, or of an earlier version
        return ""
    names = ", ".join(name for name, *_ in differences(*made_of, free=("step", "weights", "questions")))
    return f"Before and after training the questions were asked with another {names}." if names else ""


def summarise(data: ReportData) -> dict[str, Number]:
    """Returns the flat numbers of report.json.

    `…_start` and `…_end` are of the evaluations before and after training: em, f1 and em_K_hops with `_low`, `_high`
    (95 % intervals over questions), the names of `rollout_metrics`, and what its memory rates are shares of
    (facts_retrieved, facts_held, answers). kept_rate_turn_1, lost_rate_turn_5_to_8 and their like are the rates of
    `quality_by_turn` with `_low`, `_high` and `_cases`. em_difference, questions_gained, questions_lost and mcnemar_p
    compare the same questions. seconds_PHASE add up to seconds_total; seconds_train_PART split the learner steps.
    """
    data = comparable(data)
    numbers: dict[str, Number] = {"name": data.name, "seed": data.settings.get("seed"), "num_steps": data.num_steps}
    numbers["num_questions"] = len(data.after or data.before)
    for label, groups in (("start", data.before), ("end", data.after)):
        numbers |= _evaluation(groups, label=label, memory_budget=data.memory_budget, growing=data.growing)
    numbers |= _comparison(data.before, data.after)
    if data.note:
        numbers["note"] = data.note
    if raised := alarms(data.metrics, data.settings):
        numbers["alarms"] = " ".join(raised)
    for name in ("context_tokens_per_turn", "full_history_tokens_per_turn"):
        numbers[name] = numbers.get(f"{name}_end", numbers.get(f"{name}_start"))
    numbers["memory_budget"] = data.memory_budget
    numbers |= {f"seconds_{phase}": seconds for phase, seconds in data.seconds.items()}
    numbers["seconds_total"] = sum(data.seconds.values())
    numbers |= {f"seconds_train_{part}": seconds for part, seconds in data.train_seconds.items()}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in numbers.items()
    }


def em_interval(groups: Sequence[Group]) -> Interval:
    """Returns the mean EM over questions with its 95 % interval: Wilson's when every question is right or wrong, else
    (several attempts or objectives) a bootstrap over questions.
    """
    scores = _per_question(groups, "em")
    if _right_or_wrong(scores):
        return wilson_interval(round(sum(scores)), len(scores))
    return mean_interval([_apart(scores)])


def comparable(data: ReportData) -> ReportData:
    """Returns the data with the questions that were asked both before and after training, and only those: both sides
    show the same questions. Questions are the same when id, text and golden answers are.

    Without `before` or `after` there is nothing to compare, and the data stays as it is.
    """
    before, after = ({_identity(group): group for group in groups} for groups in (data.before, data.after))
    if not before or not after or before.keys() == after.keys():
        return data
    shared = before.keys() & after.keys()
    left_out = f"{len(before) - len(shared)} only before, {len(after) - len(shared)} only after"
    if not shared:
        note = f"Before training other questions were asked than after ({left_out}), so nothing is compared with them."
        return dataclasses.replace(data, before=[], note=f"{data.note} {note}".strip())
    note = (
        f"Before and after training different questions were asked ({left_out}); the numbers are of the {len(shared)} "
        "that were asked both times."
    )
    kept = [[group for key, group in side.items() if key in shared] for side in (before, after)]
    return dataclasses.replace(data, before=kept[0], after=kept[1], note=f"{data.note} {note}".strip())


def _identity(group: Group) -> tuple[str, str, tuple[str, ...]]:
    return group.question.id, group.question.text, tuple(group.question.golden_answers)


def by_hops(groups: Sequence[Group]) -> dict[int, list[Group]]:
    """Returns the groups by the number of hops of their question, where that is known."""
    parts: dict[int, list[Group]] = defaultdict(list)
    for group in groups:
        if group.question.num_hops:
            parts[group.question.num_hops].append(group)
    return dict(sorted(parts.items()))


def _evaluation(groups: Sequence[Group], *, label: str, memory_budget: int | None, growing: bool) -> dict[str, Number]:
    if not groups:
        return {}
    metrics = rollout_metrics(groups, memory_budget=memory_budget, growing=growing).items()
    numbers: dict[str, Number] = {
        f"{name.replace('/', '_')}_{label}": value for name, value in metrics if name not in _TRAINING_ONLY
    }
    if not growing:
        counts = MemoryQuality()
        for group in groups:
            counts = sum((trajectory_quality(t, group.question) for t in group.trajectories), counts)
        numbers |= {f"{name}_{label}": getattr(counts, name) for name in ("facts_retrieved", "facts_held", "answers")}
        numbers |= _by_turn(groups, label=label)
    intervals = {"em": em_interval(groups), "f1": mean_interval([_apart(_per_question(groups, "f1"))])}
    for hops, part in by_hops(groups).items():
        intervals[f"em_{hops}_hops"] = em_interval(part)
        numbers[f"num_questions_{hops}_hops"] = len(part)
    for name, interval in intervals.items():
        numbers |= _with_ends(f"{name}_{label}", interval)
    return numbers


def _by_turn(groups: Sequence[Group], *, label: str) -> dict[str, Number]:
    numbers: dict[str, Number] = {}
    for row in quality_by_turn(groups):
        for name, rate in row.rates.items():
            key = f"{turn_name(name, row.turns)}_{label}"
            numbers |= _with_ends(key, rate) | {f"{key}_cases": row.num_cases[name]}
    return numbers


def turn_name(rate: str, turns: str) -> str:
    """Returns the name of a rate by turn: "kept_rate_turn_5_to_8"."""
    return f"{rate}_turn_{turns.replace(' ', '_')}"


def _with_ends(name: str, interval: Interval) -> dict[str, Number]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _comparison(before: Sequence[Group], after: Sequence[Group]) -> dict[str, Number]:
    first = {group.question.id: group for group in before}
    pairs = [(first[group.question.id], group) for group in after if group.question.id in first]
    if not pairs:
        return {}
    scores = [_per_question(groups, "em") for groups in ([a for a, _ in pairs], [b for _, b in pairs])]
    difference = paired_interval([_apart([after - before for before, after in zip(*scores, strict=True)])])
    numbers: dict[str, Number] = {"em_difference": difference.value, "em_difference_low": difference.low}
    numbers["em_difference_high"] = difference.high
    if all(map(_right_or_wrong, scores)):
        test = mcnemar_test(*([score == 1.0 for score in side] for side in scores))
        numbers |= {"questions_gained": test.gained, "questions_lost": test.lost, "mcnemar_p": test.p_value}
    return numbers


def _apart(scores: Sequence[float]) -> Scores:
    """Returns the scores of questions that are all different."""
    return [*enumerate(scores)]


def _right_or_wrong(scores: Sequence[float]) -> bool:
    return all(score in (0.0, 1.0) for score in scores)


def _per_question(groups: Sequence[Group], score: str) -> list[float]:
    return [fmean(getattr(trajectory, score) for trajectory in group.trajectories) for group in groups]
