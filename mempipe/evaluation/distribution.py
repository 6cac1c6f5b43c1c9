"""The gap between the sets that a run was trained on and the others: a table over all sets of an evaluation that ask
the same number of questions at once, whatever the table of scores they are in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from statistics import fmean

from mempipe.evaluation.benchmarks import IN_DISTRIBUTION
from mempipe.evaluation.cells import JUDGE, Cell, clustered_scores, runs_of
from mempipe.evaluation.suite import Benchmark, Bootstrap
from mempipe.evaluation.table import (
    METRICS_OF,
    Row,
    ScoreTable,
    average_interval,
    merged_tables,
    ordered,
    point,
    published_tables,
)

COLUMNS = ("in distribution", "out of distribution", "gap")
"""The means over the sets that the run was trained on, and over the others, and their difference."""
TITLE = "trained sets against others"


def distribution_tables(cells: Sequence[Cell], *, bootstrap: Bootstrap, seed: int) -> list[ScoreTable]:
    """Returns a table per number of objectives and metric. Its lines are the runs that were trained on some of their
    sets and not on others, and its notes name the sets of both sides. A number of objectives without such a run has no
    table.
    """
    by_objectives: dict[int, list[Cell]] = {}
    for cell in cells:
        by_objectives.setdefault(cell.benchmark.objectives, []).append(cell)
    tables: list[ScoreTable] = []
    for objectives, members in by_objectives.items():
        judged = any(cell.judged for cell in members)
        metrics = (*METRICS_OF[""], *[JUDGE] * judged)
        made = [_table(members, objectives, metric=metric, bootstrap=bootstrap, seed=seed) for metric in metrics]
        tables += merged_tables([table for table in made if table.rows])
    return tables


def _table(cells: Sequence[Cell], objectives: int, *, metric: str, bootstrap: Bootstrap, seed: int) -> ScoreTable:
    interval = partial(average_interval, bootstrap=bootstrap, seed=seed)
    rows, sides = [], dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]]()
    for run in runs_of(cells):
        own = [cell for cell in cells if cell.run == run]
        inside, outside = _sides(_sets_of(own), own[0].trained_on or {})
        if not (inside and outside):
            continue
        scores = clustered_scores(own, metric=metric)
        values = [interval(scores, inside), interval(scores, outside), interval(scores, inside, minus=outside)]
        rows.append(Row(name=run, values=values))
        sides.setdefault((tuple(inside), tuple(outside)), []).append(run)
    sets = _sets_of(cells)
    published = _published_rows(sets, metric=metric) if rows else []
    if published:
        inside, outside = _sides(sets, IN_DISTRIBUTION)
        sides.setdefault((tuple(inside), tuple(outside)), []).append("published rows")
    return ScoreTable(
        title=TITLE + f", {objectives} objectives" * (objectives > 1),
        metric=metric,
        columns=COLUMNS,
        rows=[*rows, *published],
        notes=[
            f"{', '.join(names)}: in distribution {', '.join(inside)}; out of distribution {', '.join(outside)}."
            for (inside, outside), names in sides.items()
        ],
    )


def _sets_of(cells: Sequence[Cell]) -> dict[str, Benchmark]:
    return ordered({cell.benchmark.label: cell.benchmark for cell in cells})


def _sides(sets: Mapping[str, Benchmark], trained_on: Collection[str]) -> tuple[list[str], list[str]]:
    """Returns the labels of the sets that a model was trained on, and of the others."""
    names = {name.casefold() for name in trained_on}
    inside = [label for label, benchmark in sets.items() if benchmark.name.casefold() in names]
    return inside, [label for label in sets if label not in inside]


def _published_rows(sets: Mapping[str, Benchmark], *, metric: str) -> list[Row]:
    """Returns the gaps of papers that report all of these sets, as trained on IN_DISTRIBUTION."""
    sides = _sides(sets, IN_DISTRIBUTION)
    rows = []
    for published in published_tables():
        if published["metric"] != metric or not all(sides) or not sets.keys() <= set(published["columns"]):
            continue
        for name, numbers in published.get("rows", {}).items():
            known = dict(zip(published["columns"], numbers, strict=True))
            inside, outside = (fmean(known[label] for label in side) for side in sides)
            values = [*map(point, (inside, outside, inside - outside))]
            rows.append(Row(name=name, values=values, published=published["title"]))
    return rows
