"""Results in the layout of the papers: runs as rows, sets as columns, averages last, published numbers next to ours.

All values are shares in [0, 1]; they are written in percent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from mempipe.evaluation.benchmarks import RULER, SEARCH_QA
from mempipe.evaluation.cells import JUDGE, Cell, clustered_scores, runs_of
from mempipe.evaluation.metrics import METRICS
from mempipe.evaluation.statistics import Interval, Scores, bootstrap_gap, mean_interval
from mempipe.evaluation.suite import Benchmark, Bootstrap

OTHER = "other sets"
AVERAGE = "average"
"""The column of the unweighted mean over the sets."""
_MAX_NAMED = 3  # sets that a title names
METRICS_OF = {RULER: ("sub_em_two_way", "em", "f1"), "": ("em", "f1", "acc")}
"""The metrics that get a table, by family; the others are in report.json. Rows that a judge saw get one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of a table. `published` says where it is from; our own lines have intervals. None is a set that was not
    evaluated.
    """

    name: str
    values: Sequence[Interval | None]
    published: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTable:
    title: str
    metric: str
    same: Sequence[str] = ()
    """Further metrics whose every number is the same."""
    columns: Sequence[str]
    rows: list[Row] = field(default_factory=list)
    claims: Sequence[str] = ()
    """Statements of papers about these sets, outside of their tables."""
    notes: Sequence[str] = ()
    """Sentences about our lines."""

    @property
    def heading(self) -> str:
        return f"{self.title}: {' = '.join((self.metric, *self.same))}, percent"


def score_tables(cells: Sequence[Cell], *, bootstrap: Bootstrap, seed: int) -> list[ScoreTable]:
    """Returns a table per family of sets (search QA, the same with several objectives, RULER-HQA, others) and metric.
    Metrics that agree in every number share one.
    """
    families: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        families.setdefault(family(cell.benchmark), []).append(cell)
    tables: list[ScoreTable] = []
    for (kind, objectives), members in families.items():
        judged = any(cell.judged for cell in members)
        metrics = (*METRICS_OF.get(kind, METRICS_OF[""]), *[JUDGE] * judged)
        tables += merged_tables(
            [_table(kind, objectives, members, metric=metric, bootstrap=bootstrap, seed=seed) for metric in metrics]
        )
    return tables


def merged_tables(tables: Sequence[ScoreTable]) -> list[ScoreTable]:
    """Returns the tables of several metrics, those that follow each other with the same numbers as one."""
    merged: list[ScoreTable] = []
    for table in tables:
        if merged and (merged[-1].rows, merged[-1].notes) == (table.rows, table.notes):
            merged[-1] = replace(merged[-1], same=[*merged[-1].same, table.metric])
        else:
            merged.append(table)
    return merged


def family(benchmark: Benchmark) -> tuple[str, int]:
    """Returns the common properties of the sets of one table."""
    if benchmark.name in SEARCH_QA:
        return "search-QA", benchmark.objectives
    return (RULER if benchmark.num_docs else OTHER), benchmark.objectives


NO_INTERVAL = "(one question: no interval)"


def percent_text(interval: Interval | None) -> str:
    """Returns an estimate with its interval, in percent; a published one has none, and neither has that of one
    question.
    """
    if interval is None:
        return "–"
    value = f"{100 * interval.value:.2f}"
    if not interval.is_bounded:
        return f"{value} {NO_INTERVAL}"
    if interval.low == interval.high == interval.value:
        return value
    between = " to " if interval.low < 0 else "–"  # a dash next to a minus cannot be read
    return f"{value} ({100 * interval.low:.1f}{between}{100 * interval.high:.1f})"


def published_tables() -> list[dict[str, Any]]:
    """Returns the papers' tables."""
    return [each for each in _published() if "columns" in each]


def published_claims(kind: str) -> list[str]:
    """Returns the values that papers report for sets of this family outside of their tables, each with its source."""
    return [
        f"{each['title']}: {claim}" for each in _published() if each.get("family") == kind for claim in each["claims"]
    ]


@cache
def _published() -> list[dict[str, Any]]:
    return yaml.safe_load(files("mempipe.evaluation").joinpath("published.yaml").read_text(encoding="utf-8"))


def _table(
    kind: str, objectives: int, cells: Sequence[Cell], *, metric: str, bootstrap: Bootstrap, seed: int
) -> ScoreTable:
    benchmarks = ordered({cell.benchmark.label: cell.benchmark for cell in cells})
    labels = list(benchmarks)
    rows = []
    for run in runs_of(cells):
        scores = clustered_scores([cell for cell in cells if cell.run == run], metric=metric)
        values = [score_interval(scores.get(label), bootstrap=bootstrap, seed=seed) for label in labels]
        if len(labels) > 1:
            values.append(average_interval(scores, labels, bootstrap=bootstrap, seed=seed))
        rows.append(Row(name=run, values=values))
    title = ", ".join(labels) if kind == OTHER and len(labels) <= _MAX_NAMED else kind
    title += f", {objectives} objectives" * (objectives > 1)
    return with_published(
        ScoreTable(
            title=title,
            metric=metric,
            columns=[*labels, *[AVERAGE] * (len(labels) > 1)],
            rows=rows,
            claims=published_claims(kind),
            notes=_unjudged(cells) if metric == JUDGE else (),
        ),
        labels,
    )


def _unjudged(cells: Sequence[Cell]) -> list[str]:
    """Returns a sentence for each run whose attempts the judge gave no verdict on, or not on all of them."""
    sentences = []
    for run in runs_of(cells):
        rows = [row for cell in cells if cell.run == run for row in cell.rows]
        missing, attempts = sum(row.judge_unparsed for row in rows), sum(len(row.answers) for row in rows)
        if missing:
            sentences.append(f"{run}: {missing:,} of {attempts:,} attempts have no verdict and do not count.")
    return sentences


def with_published(table: ScoreTable, labels: Sequence[str]) -> ScoreTable:
    """Returns the table with what papers report in its metric on its sets, which `labels` are, below our rows."""
    return replace(table, rows=[*table.rows, *_published_rows(table, labels)])


def average_interval(
    scores: Mapping[str, Scores], labels: Sequence[str], *, minus: Sequence[str] = (), bootstrap: Bootstrap, seed: int
) -> Interval | None:
    """Returns the mean over these sets of a run, minus that over others; None where it lacks one of them."""
    if not labels or not all(scores.get(label) for label in (*labels, *minus)):
        return None
    options = {"seed": seed, "num_resamples": bootstrap.num_resamples, "confidence": bootstrap.confidence}
    sets, others = ([scores[label] for label in chosen] for chosen in (labels, minus))
    return bootstrap_gap(sets, others, **options) if others else mean_interval(sets, **options)


def _published_rows(table: ScoreTable, labels: Sequence[str]) -> list[Row]:
    """Returns the values that papers report in this metric on sets of this table. Averages are the papers' own, over
    all their columns."""
    rows = []
    for published in published_tables():
        shared = set(published["columns"]) & set(table.columns)
        if published["metric"] != table.metric or not shared:
            continue
        for name, numbers in published.get("rows", {}).items():
            known = dict(zip(published["columns"], numbers, strict=True))
            if set(labels) == known.keys():
                known[AVERAGE] = sum(known.values()) / len(known)
            rows.append(
                Row(
                    name=name,
                    values=[point(known.get(column)) for column in table.columns],
                    published=published["title"],
                )
            )
        for name, average in published.get("averages", {}).items():
            complete = set(published["columns"]) <= set(table.columns)
            values = [point(average if column == AVERAGE and complete else None) for column in table.columns]
            rows.append(Row(name=name, values=values, published=published["title"]))
    return [row for row in rows if any(row.values)]


def ordered(benchmarks: Mapping[str, Benchmark]) -> dict[str, Benchmark]:
    """Returns the sets in the order of the papers' tables, and RULER's by their number of documents."""

    def place(benchmark: Benchmark) -> tuple[int, int]:
        return SEARCH_QA.index(benchmark.name) if benchmark.name in SEARCH_QA else len(SEARCH_QA), benchmark.num_docs

    return dict(sorted(benchmarks.items(), key=lambda item: place(item[1])))


def score_interval(scores: Scores | None, *, bootstrap: Bootstrap, seed: int) -> Interval | None:
    """Returns the `mean_interval` of one set; None without scores."""
    if not scores:
        return None
    return mean_interval([scores], seed=seed, num_resamples=bootstrap.num_resamples, confidence=bootstrap.confidence)


def point(percent: float | None) -> Interval | None:
    """Returns a published number, which has no interval."""
    return None if percent is None else Interval(value=percent / 100, low=percent / 100, high=percent / 100)


assert set().union(*METRICS_OF.values()) <= METRICS.keys()
