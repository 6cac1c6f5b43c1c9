"""One table over a chain's seeds: what every row reached, with the interval over trainings, and what the last stage
gains by the first one.

A seed is one training of every row, so a row has one value for each seed and set. The interval over trainings is
Student's t of these values; that over questions is a bootstrap in which the attempts of all seeds at a question are
drawn together. Differences are taken within a seed before anything is averaged: both sides of a seed have the same
questions, and in a world of its own the same world. Seeds are never counted as questions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from mempipe.evaluation.statistics import Interval, mean_interval, paired_interval, t_interval
from mempipe.evaluation.suite import Bootstrap
from mempipe.evaluation.table import AVERAGE
from mempipe.settings import ConfigError
from mempipe.studies.compare import compare_rows
from mempipe.studies.measured import Sets, clustered, mean_score, measured_runs, pooled


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedCell:
    """One row, or one difference, on one set or on the average of all."""

    by_seed: Sequence[float]
    """In the order of the seeds."""
    questions: Interval
    """Over questions, for these trainings."""
    trainings: Interval | None
    """Over trainings; None where all seeds have the same weights. Unbounded for one seed."""

    @property
    def mean(self) -> float:
        """Returns the mean over the seeds."""
        return fmean(self.by_seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedTable:
    """All rows in one metric. `rows` and `differences` are cells by name and column."""

    metric: str
    seeds: Sequence[int]
    labels: Sequence[str]
    """The sets."""
    kind: str = ""
    """Their family (`mempipe.evaluation.table.family`)."""
    rows: Mapping[str, Mapping[str, SeedCell]]
    differences: Mapping[str, Mapping[str, SeedCell]]

    @property
    def columns(self) -> list[str]:
        return [*self.labels, *[AVERAGE] * (len(self.labels) > 1)]


Evaluated = Mapping[int, Mapping[str, Sets]]
"""The rows of every run by set, by seed and name of the run."""


def read_seeds(
    folders: Mapping[int, Path], names: Sequence[str], *, labels: Collection[str] | None = None
) -> Evaluated:
    """Reads these runs in the evaluation of every seed, on the sets with these `labels` (None: on all). What else an
    evaluation has from earlier, with other sets or rows, does not count. Raises ConfigError for one that is unfinished
    or lacks a run or a set."""
    found = {
        seed: {run.name: run.sets for run in measured_runs(folder, names=names, labels=labels)}
        for seed, folder in folders.items()
    }
    for seed, runs in found.items():
        if missing := [name for name in names if name not in runs]:
            raise ConfigError(f"{folders[seed]} has no results of {', '.join(missing)}; run the chain to its end first")
    for (first, ours), (seed, theirs) in pairwise(found.items()):
        for name in names:
            if ours[name].keys() != theirs[name].keys():
                raise ConfigError(
                    f"{folders[seed]}: {name} has the sets {', '.join(theirs[name])}, but under seed {first} "
                    f"{', '.join(ours[name])}; evaluate both on the same ones"
                )
    return {seed: {name: runs[name] for name in names} for seed, runs in found.items()}


def on_sets(evaluated: Evaluated, labels: Sequence[str]) -> Evaluated:
    """Returns the results on these sets alone, in their order."""
    return {
        seed: {name: {label: sets[label] for label in labels} for name, sets in runs.items()}
        for seed, runs in evaluated.items()
    }


def over_seeds(
    evaluated: Evaluated,
    *,
    metric: str,
    kind: str = "",
    compared: Sequence[tuple[str, str]],
    untrained: Sequence[str] = (),
    bootstrap: Bootstrap,
    seed: int = 1,
) -> SeedTable:
    """Returns the table. `compared` are (row, row it is compared with); `untrained` rows have the same weights under
    every seed, and so no interval over trainings. `seed` is that of the bootstrap.
    """
    drawn = {"seed": seed, "num_resamples": bootstrap.num_resamples, "confidence": bootstrap.confidence}
    runs = list(evaluated.values())
    names, labels = list(runs[0]), list(next(iter(runs[0].values())))
    rows = {
        name: {
            column: _cell(
                [mean_score(sets, metric) for sets in parts],
                mean_interval(clustered(pooled(parts), metric=metric), **drawn),
                bootstrap=bootstrap,
                trained=name not in untrained,
            )
            for column, parts in _columns([each[name] for each in runs], labels).items()
        }
        for name in names
    }
    differences = {}
    for name, other in compared:
        first, second = (_columns([each[side] for each in runs], labels) for side in (other, name))
        differences[f"{name} - {other}"] = {
            column: _cell(
                [
                    mean_score(after, metric) - mean_score(before, metric)
                    for before, after in zip(first[column], second[column], strict=True)
                ],
                compare_rows(
                    pooled(first[column]),
                    pooled(second[column]),
                    metric=metric,
                    interval=partial(paired_interval, **drawn),
                )[-1].difference,
                bootstrap=bootstrap,
                trained=True,
            )
            for column in first
        }
    return SeedTable(metric=metric, seeds=list(evaluated), labels=labels, kind=kind, rows=rows, differences=differences)


def _columns(repeats: Sequence[Sets], labels: Sequence[str]) -> dict[str, list[Sets]]:
    """Returns the rows of every seed by column: a set, or all of them."""
    columns: dict[str, list[Sets]] = {label: [{label: sets[label]} for sets in repeats] for label in labels}
    if len(labels) > 1:
        columns[AVERAGE] = [*repeats]
    return columns


def _cell(by_seed: Sequence[float], questions: Interval, *, bootstrap: Bootstrap, trained: bool) -> SeedCell:
    over = t_interval(by_seed, confidence=bootstrap.confidence) if trained else None
    return SeedCell(by_seed=by_seed, questions=questions, trainings=over)
