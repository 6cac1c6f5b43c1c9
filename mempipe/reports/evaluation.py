"""Writes the report of an evaluation: `report.md`, `report.html` (one page that needs nothing else), `report.json` and
a plot as SVG.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from mempipe.config import RunConfig
from mempipe.evaluation.metrics import METRICS, definitions
from mempipe.evaluation.quality_by_turn import TurnQuality
from mempipe.evaluation.statistics import Interval, bootstrap_average, bootstrap_interval
from mempipe.evaluation.suite import EvaluationSuite
from mempipe.evaluation.table import (
    JUDGE,
    NO_INTERVAL,
    Cell,
    Row,
    ScoreTable,
    evidence_lines,
    percent_text,
    score_tables,
)
from mempipe.reports.charts import Figure, percent, with_legend
from mempipe.reports.evaluation_examples import side_by_side
from mempipe.reports.evaluation_figures import (
    cause_lines,
    causes_by_run,
    context_by_turn,
    runs_of,
    scores_by_hops,
    scores_by_set,
)
from mempipe.reports.pages import Tile, render
from mempipe.storage.files import write_text
from mempipe.studies.compare import compare_rows
from mempipe.tracking.mlflow_writer import without_credentials

PLOT_FILE = "context_tokens_by_turn.svg"
NUM_EVIDENCE_BINS = 5
_DIFFERENCE_TITLE = "Differences in em on the same questions, percent points"
_DIFFERENCE_HEAD = ["runs", "set", "questions", "difference", "McNemar"]
_PAIRED = (
    "Intervals are paired bootstraps over questions; a question that is asked several times is drawn as one. McNemar's "
    "test is exact, and needs every question once."
)
_CAUSE_TITLE = "First cause of wrong answers"
_CAUSE_NOTE = "The place in the chain of needed facts where an attempt went wrong; docs/memory.md defines each."
_MEMORY_NOTE = "Shares from 0 to 1, memory tokens apart; docs/memory.md has the formulas."
_TURN_TITLE = "Memory quality by turn, percent"
_TURN_NOTE = (
    "Intervals are bootstraps over questions; the cases of each share are in brackets. Attempts that end early have no "
    "later turns, so two lines may differ in their questions. docs/memory.md has the formulas."
)
_EVIDENCE_TITLE = "em by the position of the needed documents in the context"
_MAX_REASONS = 3
_COSTS = {
    "turns": "turns",
    "context_tokens_by_turn": "context tokens by turn",
    "sampled_tokens": "sampled tokens",
    "total_tokens": "total tokens",
    "seconds": "seconds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSection:
    """A table of the page: its head and lines, and the names of the lines that are published numbers. A page shows the
    lines of a `long` one as columns where that makes it less wide.
    """

    title: str
    lines: list[list[str]]
    published: Sequence[str] = ()
    note: str = ""
    long: bool = False

    @property
    def upright(self) -> list[list[str]]:
        """Returns the lines as a page shows them."""
        is_wide = self.long and len(self.lines[0]) > len(self.lines)
        return [list(column) for column in zip(*self.lines, strict=True)] if is_wide else self.lines


def write_evaluation_report(
    folder: Path,
    suite: EvaluationSuite,
    cells: Sequence[Cell],
    *,
    configs: Mapping[str, RunConfig],
    settings: Mapping[str, Mapping[str, Any]],
) -> list[Path]:
    """Writes the report into the evaluation's folder, each file atomically, and returns their paths.

    `configs` are the runs' configs by name; `settings` those of their result folders by "RUN/LABEL".
    """
    tables = score_tables(cells, bootstrap=suite.bootstrap, seed=suite.seed)
    plot = context_by_turn(cells)
    causes = cause_lines(cells, {run: config.budget.memory_limit for run, config in configs.items()})
    facts = {run: _facts(run, cells, configs[run], settings) for run in dict.fromkeys(cell.run for cell in cells)}
    sections = _sections(suite, cells, tables, causes=causes, facts=facts)
    figures = [*_score_figures(cells, tables, suite), plot]
    texts = {
        "report.md": _markdown(suite, sections, has_plot=plot is not None),
        "report.html": render(
            "evaluation.html",
            name=suite.name,
            facts=[*_head(suite), "a question that failed counts with 0"],
            findings=[],
            tiles=_tiles(tables),
            examples=side_by_side(folder, cells, configs),
            sections=sections,
            figures=[figure for figure in figures if figure is not None],
            metrics=definitions(),
        ),
        "report.json": json.dumps(_json(suite, cells, tables, facts), indent=1) + "\n",
    }
    if plot is not None:
        texts[PLOT_FILE] = render("chart.svg", chart=with_legend(plot))
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def flat_metrics(cells: Sequence[Cell]) -> dict[str, float]:
    """Returns every mean of every cell by the name that MLflow shows: "RUN/LABEL/METRIC"."""
    return {
        f"{cell.run}/{cell.benchmark.label}/{name}": value for cell in cells for name, value in _means(cell).items()
    }


def _means(cell: Cell) -> dict[str, float]:
    """Returns the metrics over all questions, failed ones included, and the costs over the attempted ones."""
    attempts = sum(len(row.answers) for row in cell.rows)
    means = {name: fmean(row.score(name) for row in cell.rows) for name in METRICS}
    if judged := cell.scores(JUDGE):
        means |= {
            JUDGE: fmean(judged.values()),
            "judge_unparsed": float(sum(row.judge_unparsed for row in cell.rows)),
        }
    means |= {"num_questions": float(len(cell.rows)), "num_failed": float(cell.num_failed)}
    if attempts:
        means |= {
            "answered": sum(answer is not None for row in cell.rows for answer in row.answers) / attempts,
            **{name: fmean(values) for name, values in _costs(cell).items()},
        }
    return means | {f"memory/{name}": rate for name, rate in cell.memory.items()}


def _costs(cell: Cell) -> dict[str, list[float]]:
    """Returns the cost of every attempted question, a mean over its attempts; context tokens also over its turns."""
    rows = [row for row in cell.rows if row.answers]
    return {
        "turns": [fmean(map(len, row.context_tokens_by_turn)) for row in rows],
        "context_tokens_by_turn": [fmean([*chain.from_iterable(row.context_tokens_by_turn)] or [0]) for row in rows],
        "sampled_tokens": [fmean(row.sampled_tokens) for row in rows],
        "total_tokens": [fmean(row.total_tokens) for row in rows],
        "seconds": [row.seconds for row in rows],
    }


def _facts(
    run: str, cells: Sequence[Cell], config: RunConfig, settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns how a row of the table came about."""
    own = [cell for cell in cells if cell.run == run]
    rows = [row for cell in own for row in cell.rows]
    served = settings[f"{run}/{own[0].benchmark.label}"]
    ends = Counter(end for row in rows for end in row.end_reasons)
    reasons = Counter(row.failed for row in rows if row.failed)
    return {
        "agent": config.agent.name,
        "model": served["weights"],
        "trained on": ", ".join(f"{name} ({number:,})" for name, number in (own[0].trained_on or {}).items())
        or "not known",
        "control": str(served.get("control") or "none").replace("_", " "),
        "prompt hash": ", ".join(sorted({row.prompt_hash for row in rows})),
        "index snapshots": ", ".join(sorted({snapshot for row in rows for snapshot in row.snapshots}))
        or "none was searched",
        "compat switches on": ", ".join(config.agent.compat.active()) or "none",
        "ends": ", ".join(f"{count} {reason}" for reason, count in ends.most_common()),
        "failed questions": "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common(_MAX_REASONS))
        or "none",
        "num_failed": sum(reasons.values()),
    }


def _memory_lines(cells: Sequence[Cell]) -> list[list[str]]:
    """Returns head and lines of the memory-quality rates, a line per run and set; empty where no agent has a memory."""
    names = list(dict.fromkeys(name for cell in cells for name in cell.memory))
    lines = [
        [
            cell.run,
            cell.benchmark.label,
            *(f"{cell.memory[name]:.3g}" if name in cell.memory else "–" for name in names),
        ]
        for cell in cells
        if cell.memory
    ]
    return [["run", "set", *(name.replace("_", " ") for name in names)], *lines] if lines else []


def _turn_lines(cells: Sequence[Cell]) -> list[list[str]]:
    """Returns head and lines of the memory-quality rates by turn; empty where no agent has a memory."""
    names = list(dict.fromkeys(name for cell in cells for each in cell.memory_by_turn for name in each.rates))

    def text(each: TurnQuality, name: str) -> str:
        return f"{percent_text(each.rates[name])} [{each.num_cases[name]:,}]" if name in each.rates else "–"

    lines = [
        [cell.run, cell.benchmark.label, each.turns, f"{each.num_memories:,}", *(text(each, name) for name in names)]
        for cell in cells
        for each in cell.memory_by_turn
    ]
    head = ["run", "set", "turns", "memories", *(name.replace("_", " ") for name in names)]
    return [head, *lines] if names else []


def _evidence(cells: Sequence[Cell], suite: EvaluationSuite) -> list[list[str]]:
    return evidence_lines(cells, metric="em", bootstrap=suite.bootstrap, seed=suite.seed, num_bins=NUM_EVIDENCE_BINS)


def _evidence_head() -> list[str]:
    step = 100 // NUM_EVIDENCE_BINS
    return ["run and length", *(f"{step * i}–{step * (i + 1)} %" for i in range(NUM_EVIDENCE_BINS))]


def _score_figures(cells: Sequence[Cell], tables: Sequence[ScoreTable], suite: EvaluationSuite) -> list[Figure | None]:
    first_of_family = {table.title: table for table in reversed(tables)}
    by_hops = scores_by_hops(cells, metric="em", bootstrap=suite.bootstrap, seed=suite.seed)
    by_set = [scores_by_set(first_of_family[title]) for title in reversed(first_of_family)]
    return [*by_set, by_hops, causes_by_run(cells)]


def _differences(cells: Sequence[Cell], suite: EvaluationSuite) -> list[list[str]]:
    """Returns a line per set, or all sets, and later run: its EM minus that of the first run, on the same questions."""
    drawn = suite.bootstrap
    interval = partial(
        bootstrap_average, seed=suite.seed, num_resamples=drawn.num_resamples, confidence=drawn.confidence
    )
    rows = {run: {c.benchmark.label: c.rows for c in cells if c.run == run} for run in runs_of(cells)}
    first, *others = rows
    return [
        [f"{run} - {first}", each.label, str(each.num_shared), percent_text(each.difference), each.verdict]
        for run in others
        for each in compare_rows(rows[first], rows[run], metric="em", interval=interval)
    ]


def _head(suite: EvaluationSuite) -> list[str]:
    sampling = suite.sampling
    greedy = (
        "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}"
    )
    bootstrap = suite.bootstrap
    interval = (
        f"{100 * bootstrap.confidence:g} % bootstrap intervals over questions ({bootstrap.num_resamples} resamples)"
    )
    return [
        f"{greedy}, {suite.num_samples} attempt{'s' * (suite.num_samples > 1)} per question",
        f"seed {suite.seed}",
        interval,
    ]


def score_lines(table: ScoreTable) -> list[list[str]]:
    """Returns head and lines of a table of scores."""
    lines = [["", *table.columns]]
    for row in table.rows:
        lines.append([_line_name(row), *(percent_text(value) for value in row.values)])
    return lines


def _line_name(row: Row) -> str:
    return row.name + " (published)" * bool(row.published)


def sources(table: ScoreTable) -> str:
    """Says where the published rows of a table are from, and what else is published of its sets."""
    titles = list(dict.fromkeys(row.published for row in table.rows if row.published))
    texts = [f"Published numbers are from {'; '.join(titles)}."] if titles else []
    texts += [f"Also published: {'; '.join(table.claims)}."] if table.claims else []
    return " ".join(texts)


def _counts(cells: Sequence[Cell], suite: EvaluationSuite) -> list[list[str]]:
    """Returns the number of questions and the cost of one, with intervals."""
    lines = [["run", "set", "questions", "failed", "answered", *_COSTS.values()]]
    for cell in cells:
        costs, answered = _costs(cell), _means(cell).get("answered")
        counts = [str(len(cell.rows)), str(cell.num_failed), "–" if answered is None else f"{answered:.2f}"]
        lines.append([cell.run, cell.benchmark.label, *counts, *(_cost_text(costs[name], suite) for name in _COSTS)])
    return lines


def _cost_text(values: Sequence[float], suite: EvaluationSuite) -> str:
    if not values:
        return "–"
    drawn = suite.bootstrap
    interval = bootstrap_interval(
        values, seed=suite.seed, num_resamples=drawn.num_resamples, confidence=drawn.confidence
    )
    ends = f"({interval.low:.2f}–{interval.high:.2f})" if interval.is_bounded else NO_INTERVAL
    return f"{interval.value:.2f} {ends}"


def _sections(
    suite: EvaluationSuite,
    cells: Sequence[Cell],
    tables: Sequence[ScoreTable],
    *,
    causes: list[list[str]],
    facts: Mapping[str, Mapping[str, Any]],
) -> list[TableSection]:
    """Returns the report's tables in their order; those without a line are skipped."""
    sections = [
        TableSection(
            title=table.heading,
            lines=score_lines(table),
            published=[_line_name(row) for row in table.rows if row.published],
            note=sources(table),
        )
        for table in tables
    ]
    if differences := _differences(cells, suite):
        sections.append(TableSection(title=_DIFFERENCE_TITLE, lines=[_DIFFERENCE_HEAD, *differences], note=_PAIRED))
    if causes:
        sections.append(TableSection(title=_CAUSE_TITLE, lines=causes, note=_CAUSE_NOTE, long=True))
    if memory := _memory_lines(cells):
        sections.append(TableSection(title="Memory quality", lines=memory, note=_MEMORY_NOTE, long=True))
    if by_turn := _turn_lines(cells):
        sections.append(TableSection(title=_TURN_TITLE, lines=by_turn, note=_TURN_NOTE))
    if evidence := _evidence(cells, suite):
        sections.append(TableSection(title=_EVIDENCE_TITLE, lines=[_evidence_head(), *evidence]))
    sections.append(TableSection(title="Questions and tokens", lines=_counts(cells, suite), long=True))
    sections.append(TableSection(title="Runs", lines=_fact_lines(facts), long=True))
    return sections


def _tiles(tables: Sequence[ScoreTable]) -> list[Tile]:
    """Returns a figure for each run: its score in the last column of the first table, which holds averages."""
    if not tables:
        return []
    tiles = []
    for row in (row for row in tables[0].rows if not row.published):
        score = row.values[-1]
        if score is None:
            continue
        over = f"{tables[0].metric}, {tables[0].columns[-1]}"
        ends = f"; {percent(score.low)} to {percent(score.high)}" if score.is_bounded else ""
        tiles.append(Tile(label=row.name, value=percent(score.value), note=over + ends))
    return tiles


def _markdown(suite: EvaluationSuite, sections: Sequence[TableSection], *, has_plot: bool) -> str:
    parts = [f"# {_cell(suite.name)}", " · ".join(_head(suite)), "A question that failed counts with 0."]
    for section in sections:
        parts += [f"## {section.title}", markdown_table(section.lines), *filter(None, [section.note])]
    if has_plot:
        parts.append(f"![Context tokens by turn]({PLOT_FILE})")
    parts += ["## Metrics", "\n".join(f"- **{name}**: {text}" for name, text in definitions().items())]
    return "\n\n".join(parts) + "\n"


def _fact_lines(facts: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    names = [name for name in next(iter(facts.values()), {}) if name != "num_failed"]
    return [["run", *names], *([run, *(str(values[name]) for name in names)] for run, values in facts.items())]


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Returns head and lines as a table; their content is escaped."""
    head, *body = lines
    rows = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in rows)


def _cell(text: str) -> str:
    """Returns text that cannot end its cell or become markup."""
    for mark in ("\\", "|", "<", "`", "[", "*"):
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


def _interval(interval: Interval) -> dict[str, float | None]:
    """Returns an interval for JSON, which has no infinite numbers."""
    return {name: end if math.isfinite(end) else None for name, end in asdict(interval).items()}


def _turn(quality: TurnQuality) -> dict[str, Any]:
    rates = {name: _interval(rate) | {"cases": quality.num_cases[name]} for name, rate in quality.rates.items()}
    return {"turns": quality.turns, "num_memories": quality.num_memories, "rates": rates}


def _json(
    suite: EvaluationSuite, cells: Sequence[Cell], tables: Sequence[ScoreTable], facts: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    return {
        "name": suite.name,
        "settings": without_credentials(suite.model_dump(mode="json")),
        "metrics": definitions(),
        "cells": [
            {
                "run": cell.run,
                "set": cell.benchmark.label,
                **_means(cell),
                "memory_by_turn": [_turn(each) for each in cell.memory_by_turn],
            }
            for cell in cells
        ],
        "tables": [
            {
                "title": table.title,
                "metric": table.metric,
                "same": list(table.same),
                "columns": list(table.columns),
                "rows": [
                    {
                        "name": row.name,
                        "published": row.published,
                        "values": [_interval(value) if value else None for value in row.values],
                    }
                    for row in table.rows
                ],
            }
            for table in tables
        ],
        "runs": facts,
    }
