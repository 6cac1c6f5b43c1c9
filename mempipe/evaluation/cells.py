"""The results of one run on one set of an evaluation, with their means and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean

from mempipe.evaluation.clusters import question_clusters
from mempipe.evaluation.metrics import METRICS
from mempipe.evaluation.quality_by_turn import TurnQuality
from mempipe.evaluation.results import ResultRow
from mempipe.evaluation.statistics import Scores
from mempipe.evaluation.suite import Benchmark

JUDGE = "judge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run on one set."""

    run: str
    benchmark: Benchmark
    rows: Sequence[ResultRow]
    memory: Mapping[str, float] = field(default_factory=dict)
    """Rates of `memory_quality` over its trajectories; empty for an agent without a memory."""
    memory_by_turn: Sequence[TurnQuality] = ()
    """The same by turn."""
    trained_on: Mapping[str, int] | None = None
    """The sets that the run's model was trained on, with their numbers of questions; None where that is not known."""

    @property
    def num_failed(self) -> int:
        return sum(bool(row.failed) for row in self.rows)

    @property
    def judged(self) -> bool:
        """Returns whether a judge was asked, also where none of its verdicts could be read."""
        return any(row.judge is not None or row.judge_unparsed for row in self.rows)

    def scores(self, metric: str) -> dict[str, float]:
        """Returns each question's score by its id; failed ones have 0, those without a verdict of the judge are
        skipped."""
        if metric != JUDGE:
            return {row.question_id: row.score(metric) for row in self.rows}
        verdicts = {row.question_id: 0.0 if row.failed else row.judge for row in self.rows}
        return {question: verdict for question, verdict in verdicts.items() if verdict is not None}

    def means(self) -> dict[str, float]:
        """Returns the metrics over all questions, failed ones included, and the costs over the attempted ones."""
        attempts = sum(len(row.answers) for row in self.rows)
        means = {name: fmean(row.score(name) for row in self.rows) for name in METRICS}
        if judged := self.scores(JUDGE):
            means |= {
                JUDGE: fmean(judged.values()),
                "judge_unparsed": float(sum(row.judge_unparsed for row in self.rows)),
            }
        means |= {"num_questions": float(len(self.rows)), "num_failed": float(self.num_failed)}
        if attempts:
            means |= {
                "answered": sum(answer is not None for row in self.rows for answer in row.answers) / attempts,
                **{name: fmean(values) for name, values in self.costs().items()},
            }
        return means | {f"memory/{name}": rate for name, rate in self.memory.items()}

    def costs(self) -> dict[str, list[float]]:
        """Returns the cost of every attempted question, a mean over its attempts; context tokens also over its
        turns."""
        rows = [row for row in self.rows if row.answers]
        turns = [[*chain.from_iterable(row.context_tokens_by_turn)] for row in rows]
        return {
            "turns": [fmean(map(len, row.context_tokens_by_turn)) for row in rows],
            "context_tokens_by_turn": [fmean(tokens or [0]) for tokens in turns],
            "sampled_tokens": [fmean(row.sampled_tokens) for row in rows],
            "total_tokens": [fmean(row.total_tokens) for row in rows],
            "seconds": [row.seconds for row in rows],
        }


def runs_of(cells: Sequence[Cell]) -> list[str]:
    """Returns the names of the runs, each once, in their order."""
    return list(dict.fromkeys(cell.run for cell in cells))


def clustered_scores(cells: Sequence[Cell], *, metric: str) -> dict[str, Scores]:
    """Returns for each set of one run the cluster and the score of every question that has one."""
    clusters = question_clusters({cell.benchmark.label: cell.rows for cell in cells})
    scores: dict[str, Scores] = {}
    for cell in cells:
        label, own = cell.benchmark.label, cell.scores(metric)
        scores[label] = [
            (cluster, own[row.question_id])
            for cluster, row in zip(clusters[label], cell.rows, strict=True)
            if row.question_id in own
        ]
    return scores
