"""Compares two evaluated runs on the same questions: what the one gains over the other, and how far that can be
trusted.

Rows are joined by the question's id, never by their order. The interval is a paired bootstrap over questions, in which
a question that is asked several times (at several lengths, in several sets) is drawn as one; where all questions differ
alike, so that it would have no width, it is `difference_interval`. McNemar's test is of exact
match, where a question is right or wrong, so it needs one attempt, one objective, and every question once. Questions
that only one side has are skipped and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from mempipe.evaluation.clusters import question_clusters
from mempipe.evaluation.metrics import METRICS
from mempipe.evaluation.results import SETTINGS, ResultRow, read_result_state, read_results
from mempipe.evaluation.statistics import Interval, PairedTest, Scores, mcnemar_test, paired_interval
from mempipe.settings import ConfigError

OVERALL = "all sets"

Pair = tuple[ResultRow, ResultRow]
"""One question in the first run and in the second."""
IntervalOf = Callable[[Sequence[Scores]], Interval]
"""Gives the interval of the unweighted mean over sets of questions' differences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetComparison:
    """One set, or all of them: means over the shared questions, and the difference second - first. `mcnemar` is None
    where it has no meaning: several attempts, several objectives, or a question that is asked several times."""

    label: str
    num_shared: int
    num_only_first: int
    num_only_second: int
    num_changed: int  # the same id, but another text or other golds
    first: float
    second: float
    difference: Interval
    mcnemar: PairedTest | None

    @property
    def verdict(self) -> str:
        """Says McNemar's test in words."""
        test = self.mcnemar
        return f"{test.gained} gained, {test.lost} lost, p = {test.p_value:.3g}" if test else "–"


def compare_runs(first: Path, second: Path, *, metric: str = "em") -> list[SetComparison]:
    """Compares every set that both have, then all of them together by the unweighted mean over sets.

    `first` and `second` are folders of a run (EVALUATION/RUN), or of an evaluation of a single run. Raises ConfigError
    when they are not, or share no question.
    """
    if metric not in METRICS:
        raise ConfigError(f"--metric is {metric!r}; the metrics are {', '.join(METRICS)}")
    sets = [_sets(_run_folder(folder)) for folder in (first, second)]
    rows = [{label: read_results(own[label]) for label in own if label in sets[0] and label in sets[1]} for own in sets]
    interval = partial(paired_interval, seed=1, num_resamples=2000, confidence=0.95)
    comparisons = compare_rows(*rows, metric=metric, interval=interval)
    if not comparisons:
        raise ConfigError(
            f"{first} and {second} share no question; their sets are {_names(sets[0])} and {_names(sets[1])}"
        )
    return comparisons


def compare_rows(
    first: Mapping[str, Sequence[ResultRow]],
    second: Mapping[str, Sequence[ResultRow]],
    *,
    metric: str,
    interval: IntervalOf,
) -> list[SetComparison]:
    """Compares two runs given as rows by set. Returns the sets in which they share a question, then, where there are
    several, all of them together.
    """
    pairs = {label: shared_pairs(first[label], second[label]) for label in first if label in second}
    pairs = {label: own for label, own in pairs.items() if own}
    gains = paired_differences(pairs, metric=metric)
    comparisons = []
    for label, own in pairs.items():
        before, after = ({row.question_id for row in rows[label]} for rows in (first, second))
        num_both = len(before & after)
        comparisons.append(
            SetComparison(
                label=label,
                num_shared=len(own),
                num_only_first=len(before) - num_both,
                num_only_second=len(after) - num_both,
                num_changed=num_both - len(own),
                first=fmean(row.score(metric) for row, _ in own),
                second=fmean(row.score(metric) for _, row in own),
                difference=interval([gains[label]]),
                mcnemar=_mcnemar(own, [cluster for cluster, _ in gains[label]]),
            )
        )
    if len(comparisons) < 2:
        return comparisons
    overall = SetComparison(
        label=OVERALL,
        num_shared=sum(each.num_shared for each in comparisons),
        num_only_first=sum(each.num_only_first for each in comparisons),
        num_only_second=sum(each.num_only_second for each in comparisons),
        num_changed=sum(each.num_changed for each in comparisons),
        first=fmean(each.first for each in comparisons),
        second=fmean(each.second for each in comparisons),
        difference=interval([*gains.values()]),
        mcnemar=_mcnemar(
            [*chain.from_iterable(pairs.values())],
            [cluster for scores in gains.values() for cluster, _ in scores],
        ),
    )
    return [*comparisons, overall]


def shared_pairs(first: Sequence[ResultRow], second: Sequence[ResultRow]) -> list[Pair]:
    """Returns the questions that both runs were asked with the same id, text and golden answers."""
    after = {row.question_id: row for row in second}
    pairs = [(row, after[row.question_id]) for row in first if row.question_id in after]
    return [(before, now) for before, now in pairs if _asked(before) == _asked(now)]


def paired_differences(pairs: Mapping[str, Sequence[Pair]], *, metric: str) -> dict[str, Scores]:
    """Returns for each set every question's cluster and difference second - first."""
    clusters = question_clusters({label: [row for row, _ in own] for label, own in pairs.items()})
    return {
        label: [
            (cluster, after.score(metric) - before.score(metric))
            for cluster, (before, after) in zip(clusters[label], own, strict=True)
        ]
        for label, own in pairs.items()
    }


def warnings(first: Path, second: Path, comparisons: Sequence[SetComparison]) -> list[str]:
    """Returns warnings for the reader of the table: unfinished sets, skipped questions and sets, settings that
    differ."""
    sets = [_sets(_run_folder(folder)) for folder in (first, second)]
    lines = [f"only {folder} has {_names(own)}" for folder, own in _lonely(first, second, *sets)]
    for each in comparisons:
        left_out = {
            f"only in {first}": each.num_only_first,
            f"only in {second}": each.num_only_second,
            "asked differently": each.num_changed,
        }
        if each.label != OVERALL and any(left_out.values()):
            counts = ", ".join(f"{count} {what}" for what, count in left_out.items() if count)
            lines.append(f"{each.label}: questions skipped: {counts}")
    compared = {each.label for each in comparisons}
    for label in sorted(sets[0].keys() & sets[1].keys()):
        if label not in compared:
            lines.append(f"{label}: no question is shared; the set is skipped")
        states = [read_result_state(own[label]) for own in sets]
        lines += [
            f"{label}: {folder} is unfinished; run its evaluation to its end for the other questions"
            for folder, state in zip((first, second), states, strict=True)
            if not state["finished"]
        ]
        settings = [state["settings"] for state in states]
        for name in ("sampling", "num_samples", "judge"):
            here, there = (each.get(name) for each in settings)
            if here != there:
                lines.append(f"{label}: {name} is {here} in {first} and {there} in {second}")
    return lines


def _mcnemar(pairs: Sequence[Pair], clusters: Sequence[Any]) -> PairedTest | None:
    if any(len(row.em_by_objective) > 1 or len(row.answers) > 1 for pair in pairs for row in pair):
        return None
    if len(set(clusters)) < len(clusters):
        return None
    return mcnemar_test([first.em == 1 for first, _ in pairs], [second.em == 1 for _, second in pairs])


def _run_folder(folder: Path) -> Path:
    """Returns the folder of a run, whose folders hold results."""
    if not folder.is_dir():
        fault = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {fault}; give the folder of an evaluated run, EVALUATION/RUN")
    if _sets(folder):
        return folder
    runs = sorted(each for each in folder.iterdir() if each.is_dir() and _sets(each))
    if len(runs) != 1:
        found = (
            f"the results of {', '.join(run.name for run in runs)}; name one of them, {folder}/RUN"
            if runs
            else "no results"
        )
        raise ConfigError(f"{folder} holds {found}")
    return runs[0]


def _sets(folder: Path) -> dict[str, Path]:
    return {each.name: each for each in sorted(folder.iterdir()) if each.is_dir() and (each / SETTINGS).exists()}


def _lonely(first: Path, second: Path, *sets: dict[str, Path]) -> list[tuple[Path, list[str]]]:
    own = [
        (first, [label for label in sets[0] if label not in sets[1]]),
        (second, [label for label in sets[1] if label not in sets[0]]),
    ]
    return [(folder, labels) for folder, labels in own if labels]


def _names(labels: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(labels) or "none"


def _asked(row: ResultRow) -> tuple[str, list[str]]:
    return row.question, row.golden_answers
