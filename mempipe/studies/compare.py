"""Compares two evaluated runs on the same questions: what the one gains over the other, and how far that can be
trusted.

The interval is a paired bootstrap over questions. McNemar's test is of exact match, where a question is right or wrong,
so it needs one attempt and one objective. Questions that only one side has are skipped and counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mempipe.evaluation.metrics import METRICS
from mempipe.evaluation.results import SETTINGS, ResultRow, read_result_state, read_results
from mempipe.evaluation.statistics import Interval, PairedTest, bootstrap_average, mcnemar_test, paired_bootstrap
from mempipe.settings import ConfigError

OVERALL = "all sets"

_Pair = tuple[ResultRow, ResultRow]  # one question, in the first run and in the second


@dataclass(frozen=True, slots=True, kw_only=True)
class SetComparison:
    """One set, or all of them: means over the shared questions, and the difference second - first. `mcnemar` is None
    where it has no meaning: several attempts or objectives."""

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


Options = Mapping[str, Any]
"""Of the bootstrap: seed, num_resamples, confidence."""


def compare_runs(
    first: Path, second: Path, *, metric: str = "em", seed: int = 1, num_resamples: int = 2000, confidence: float = 0.95
) -> list[SetComparison]:
    """Compares every set that both have, then all of them together: the unweighted mean over sets, and McNemar's test
    over all questions.

    `first` and `second` are folders of a run (EVALUATION/RUN), or of an evaluation of a single run. Raises ConfigError
    when they are not, or share no question.
    """
    if metric not in METRICS:
        raise ConfigError(f"--metric is {metric!r}; the metrics are {', '.join(METRICS)}")
    sets = [_sets(_run_folder(folder)) for folder in (first, second)]
    rows = [{label: read_results(own[label]) for label in own if label in sets[0] and label in sets[1]} for own in sets]
    options = {"seed": seed, "num_resamples": num_resamples, "confidence": confidence}
    comparisons = compare_rows(*rows, metric=metric, options=options)
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
    options: Options,
) -> list[SetComparison]:
    """Compares two runs given as rows by set. Returns the sets in which they share a question, then, where there are
    several, all of them together.
    """
    comparisons: list[SetComparison] = []
    pairs: dict[str, list[_Pair]] = {}
    for label in [label for label in first if label in second]:
        before, after = _by_id(first[label]), _by_id(second[label])
        both = [key for key in before if key in after]
        shared = [key for key in both if _asked(before[key]) == _asked(after[key])]
        if not shared:
            continue
        pairs[label] = [(before[key], after[key]) for key in shared]
        scores = [[pair[i].score(metric) for pair in pairs[label]] for i in (0, 1)]
        comparisons.append(
            SetComparison(
                label=label,
                num_shared=len(shared),
                num_only_first=len(before) - len(both),
                num_only_second=len(after) - len(both),
                num_changed=len(both) - len(shared),
                first=sum(scores[0]) / len(shared),
                second=sum(scores[1]) / len(shared),
                difference=paired_bootstrap(*scores, **options),
                mcnemar=_mcnemar(pairs[label]),
            )
        )
    return [*comparisons, _overall(comparisons, pairs, metric, options)] if len(comparisons) > 1 else comparisons


def warnings(first: Path, second: Path, comparisons: Sequence[SetComparison]) -> list[str]:
    """Returns warnings for the reader of the table: skipped questions and sets, settings that differ."""
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
        settings = [read_result_state(own[label])["settings"] for own in sets]
        for name in ("sampling", "num_samples", "judge"):
            here, there = (each.get(name) for each in settings)
            if here != there:
                lines.append(f"{label}: {name} is {here} in {first} and {there} in {second}")
    return lines


def _overall(
    comparisons: Sequence[SetComparison],
    pairs: Mapping[str, list[_Pair]],
    metric: str,
    options: Options,
) -> SetComparison:
    # A set's name before the id: two sets may use the same ids for different questions.
    gains = [
        {f"{label}/{a.question_id}": b.score(metric) - a.score(metric) for a, b in rows}
        for label, rows in pairs.items()
    ]
    return SetComparison(
        label=OVERALL,
        num_shared=sum(each.num_shared for each in comparisons),
        num_only_first=sum(each.num_only_first for each in comparisons),
        num_only_second=sum(each.num_only_second for each in comparisons),
        num_changed=sum(each.num_changed for each in comparisons),
        first=sum(each.first for each in comparisons) / len(comparisons),
        second=sum(each.second for each in comparisons) / len(comparisons),
        difference=bootstrap_average(gains, **options),
        mcnemar=_mcnemar([pair for rows in pairs.values() for pair in rows]),
    )


def _mcnemar(pairs: Sequence[_Pair]) -> PairedTest | None:
    if any(len(row.em_by_objective) > 1 or len(row.answers) > 1 for pair in pairs for row in pair):
        return None
    return mcnemar_test([first.em == 1 for first, _ in pairs], [second.em == 1 for _, second in pairs])


def _run_folder(folder: Path) -> Path:
    """Returns the folder of a run, whose folders hold results."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist; give the folder of an evaluated run, EVALUATION/RUN")
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


def _by_id(rows: Sequence[ResultRow]) -> dict[str, ResultRow]:
    return {row.question_id: row for row in rows}


def _asked(row: ResultRow) -> tuple[str, list[str]]:
    return row.question, row.golden_answers
