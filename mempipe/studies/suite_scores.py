"""All numbers of an evaluation's report that are measured over its questions. Each interval is drawn once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mempipe.evaluation.cells import Cell, runs_of
from mempipe.evaluation.clusters import question_clusters
from mempipe.evaluation.distribution import distribution_tables
from mempipe.evaluation.results import ResultRow
from mempipe.evaluation.statistics import Interval, Scores, bootstrap_interval, paired_interval
from mempipe.evaluation.suite import Bootstrap
from mempipe.evaluation.table import ScoreTable, score_interval, score_tables
from mempipe.studies.compare import SetComparison, compare_rows

METRIC = "em"
"""The metric of comparisons, hops and positions."""
NUM_POSITIONS = 5
"""Equal parts of a context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HopScores:
    """The scores of all runs on the questions of one number of hops, over all sets; None where a run has none."""

    hops: int
    num_questions: int
    """Questions of the run that has most of them."""
    by_run: Mapping[str, Interval | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionScores:
    """The score of a run on a set by the position of the needed documents in the context, and the number of needed
    documents there. A question counts once for each of its needed documents, which are drawn together."""

    run: str
    label: str
    scores: Sequence[Interval | None]
    counts: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteScores:
    """An evaluation, measured."""

    cells: Sequence[Cell]
    tables: Sequence[ScoreTable]
    """By family of sets and metric."""
    distribution: Sequence[ScoreTable]
    """The gap between trained sets and others; empty where no run has both."""
    gains: Mapping[str, Sequence[SetComparison]]
    """Comparisons of every later run with the first one, on the questions that both were asked."""
    by_hops: Sequence[HopScores]
    """Empty where hops are unknown or all the same."""
    by_position: Sequence[PositionScores]
    """Empty where positions are unknown."""
    means: Sequence[Mapping[str, float]]
    """The means of each cell (`Cell.means`)."""
    costs: Sequence[Mapping[str, Interval]]
    """The costs of a question, for each cell; empty for a cell in which every question failed."""

    def flat_metrics(self) -> dict[str, float]:
        """Returns every mean of every cell by the name that MLflow shows: "RUN/LABEL/METRIC"."""
        return {
            f"{cell.run}/{cell.benchmark.label}/{name}": value
            for cell, means in zip(self.cells, self.means, strict=True)
            for name, value in means.items()
        }


def score_suite(cells: Sequence[Cell], *, bootstrap: Bootstrap, seed: int) -> SuiteScores:
    """Measures an evaluation, which has a cell at least; its intervals are drawn with `seed`."""
    drawn = {"seed": seed, "num_resamples": bootstrap.num_resamples, "confidence": bootstrap.confidence}
    first, *others = runs_of(cells)
    rows = {run: {cell.benchmark.label: cell.rows for cell in cells if cell.run == run} for run in (first, *others)}
    compare = partial(compare_rows, rows[first], metric=METRIC, interval=partial(paired_interval, **drawn))
    score = partial(score_interval, bootstrap=bootstrap, seed=seed)
    return SuiteScores(
        cells=cells,
        tables=score_tables(cells, bootstrap=bootstrap, seed=seed),
        distribution=distribution_tables(cells, bootstrap=bootstrap, seed=seed),
        gains={run: compare(rows[run]) for run in others},
        by_hops=[
            HopScores(
                hops=hops,
                num_questions=max(map(len, scores.values())),
                by_run={run: score(scores.get(run)) for run in rows},
            )
            for hops, scores in _by_hops(rows)
        ],
        by_position=[
            PositionScores(
                run=cell.run, label=cell.benchmark.label, scores=[*map(score, parts)], counts=[*map(len, parts)]
            )
            for cell in cells
            if any(parts := _by_position(cell))
        ],
        means=[cell.means() for cell in cells],
        costs=[
            {name: bootstrap_interval(values, **drawn) for name, values in cell.costs().items() if values}
            for cell in cells
        ],
    )


def _by_hops(rows: Mapping[str, Mapping[str, Sequence[ResultRow]]]) -> Sequence[tuple[int, Mapping[str, Scores]]]:
    """Returns the hops in their order, and the clustered scores of each run on their questions."""
    by_hops: dict[int, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for run, sets in rows.items():
        for label, clusters in question_clusters(sets).items():
            for cluster, row in zip(clusters, sets[label], strict=True):
                if row.num_hops:
                    by_hops[row.num_hops][run].append((cluster, row.score(METRIC)))
    return sorted(by_hops.items()) if len(by_hops) > 1 else []


def _by_position(cell: Cell) -> list[list[tuple[str, float]]]:
    """Returns the question and the score of every needed document, by the part of the context that it is in."""
    parts: list[list[tuple[str, float]]] = [[] for _ in range(NUM_POSITIONS)]
    for row in cell.rows:
        for depth in row.evidence_depths:
            parts[min(int(depth * NUM_POSITIONS), NUM_POSITIONS - 1)].append((row.question_id, row.score(METRIC)))
    return parts
