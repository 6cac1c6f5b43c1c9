"""Writes the report of an evaluation: `report.md`, `report.html` (one page that needs nothing else), `report.json` and
a plot as SVG.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mempipe.config import RunConfig
from mempipe.credentials import without_credentials
from mempipe.evaluation.cells import Cell, runs_of
from mempipe.evaluation.metrics import definitions
from mempipe.evaluation.quality_by_turn import TurnQuality
from mempipe.evaluation.results import REPORT, ResultRow
from mempipe.evaluation.statistics import Interval
from mempipe.evaluation.suite import EvaluationSuite
from mempipe.evaluation.table import NO_INTERVAL, Row, ScoreTable, percent_text
from mempipe.reports.charts import Figure, percent, with_legend
from mempipe.reports.evaluation_examples import side_by_side
from mempipe.reports.evaluation_figures import (
    cause_lines,
    causes_by_run,
    context_by_turn,
    scores_by_hops,
    scores_by_set,
)
from mempipe.reports.pages import Tile, render
from mempipe.storage.files import write_text
from mempipe.studies.suite_scores import NUM_POSITIONS, PositionScores, SuiteScores

PLOT_FILE = "context_tokens_by_turn.svg"
_GAIN_TITLE = "Differences in em on the same questions, percent points"
_GAIN_HEAD = ["runs", "set", "questions", "difference", "McNemar"]
_PAIRED = (
    "Intervals are paired bootstraps over questions; a question that is asked several times is drawn as one. McNemar's "
    "test is exact, and needs every question once."
)
_CAUSE_TITLE = "First cause of wrong answers"
_CAUSE_NOTE = "The place in the chain of needed facts where an answer went wrong; docs/memory.md defines each."
_MEMORY_NOTE = "Shares from 0 to 1, except memory tokens and compression; docs/memory.md has the formulas."
_TURN_TITLE = "Memory quality by turn, percent"
_TURN_NOTE = (
    "Intervals are bootstraps over questions; the cases of each share are in brackets. Attempts that end early have no "
    "later turns, so two lines may differ in their questions. docs/memory.md has the formulas."
)
_POSITION_TITLE = "em by the position of the needed documents in the context"
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
    lines of one with `num_names`, the number of columns that name a line, as columns where that makes it less wide.
    """

    title: str
    lines: list[list[str]]
    published: Sequence[str] = ()
    note: str = ""
    num_names: int = 0

    @property
    def upright(self) -> list[list[str]]:
        """Returns the lines as a page shows them."""
        return [list(column) for column in zip(*self.lines, strict=True)] if self._is_wide else self.lines

    @property
    def cell_names(self) -> list[str]:
        """Returns what a phone, which shows a cell below the other, writes before the cells of a line."""
        head, *lines = self.lines
        if not self._is_wide:
            return head
        others = range(1, self.num_names)
        return [head[0], *(", ".join([line[0], *(f"{head[i]} {line[i]}" for i in others)]) for line in lines)]

    @property
    def _is_wide(self) -> bool:
        return self.num_names > 0 and len(self.lines[0]) > len(self.lines)


def write_evaluation_report(
    folder: Path,
    suite: EvaluationSuite,
    scores: SuiteScores,
    *,
    configs: Mapping[str, RunConfig],
    settings: Mapping[str, Mapping[str, Any]],
) -> list[Path]:
    """Writes the report into the evaluation's folder, each file atomically, and returns their paths.

    `configs` are the runs' configs by name; `settings` those of their result folders by "RUN/LABEL".
    """
    cells = scores.cells
    plot = context_by_turn(cells)
    causes = cause_lines(cells, {run: config.budget.memory_limit for run, config in configs.items()})
    facts = {run: _facts(run, cells, configs[run], settings) for run in runs_of(cells)}
    sections = _sections(scores, causes=causes, facts=facts)
    figures = [*_figures(scores), plot]
    texts = {
        "report.md": _markdown(suite, sections, has_plot=plot is not None),
        "report.html": render(
            "evaluation.html",
            name=suite.name,
            facts=[*_head(suite), "a question that failed counts with 0"],
            findings=[],
            tiles=_tiles(scores.tables),
            examples=side_by_side(folder, cells, configs),
            sections=sections,
            figures=[figure for figure in figures if figure is not None],
            metrics=definitions(),
        ),
        REPORT: json.dumps(_json(suite, scores, facts), indent=1) + "\n",
    }
    if plot is not None:
        texts[PLOT_FILE] = render("chart.svg", chart=with_legend(plot))
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def _facts(
    run: str, cells: Sequence[Cell], config: RunConfig, settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns how a row of the table came about."""
    own = [cell for cell in cells if cell.run == run]
    rows = [row for cell in own for row in cell.rows]
    served = settings[f"{run}/{own[0].benchmark.label}"]
    ends = Counter(end for row in rows for end in row.end_reasons)
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
        "failed questions": "; ".join(failure_reasons(rows)) or "none",
        "num_failed": sum(bool(row.failed) for row in rows),
    }


def failure_reasons(rows: Iterable[ResultRow]) -> list[str]:
    """Returns why questions failed, the most frequent reasons first, each with the number of its questions."""
    reasons = Counter(row.failed for row in rows if row.failed)
    return [f"{count} × {reason}" for reason, count in reasons.most_common(_MAX_REASONS)]


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


def _position_lines(scores: Sequence[PositionScores]) -> list[list[str]]:
    """Returns head and lines of the scores by position, a line per run and set."""
    step = 100 // NUM_POSITIONS
    head = ["run and length", *(f"{step * i}–{step * (i + 1)} %" for i in range(NUM_POSITIONS))]
    return [head] + [
        [
            f"{each.run}, {each.label}",
            *(f"{percent_text(score)}, n = {n}" for score, n in zip(each.scores, each.counts, strict=True)),
        ]
        for each in scores
    ]


def _figures(scores: SuiteScores) -> list[Figure | None]:
    first_of_family = {table.title: table for table in reversed(scores.tables)}
    by_set = [scores_by_set(first_of_family[title]) for title in reversed(first_of_family)]
    return [*by_set, scores_by_hops(scores.by_hops), causes_by_run(scores.cells)]


def _gain_lines(scores: SuiteScores) -> list[list[str]]:
    """Returns a line per set, or all sets, and later run: its EM minus that of the first run, on the same questions."""
    first = scores.cells[0].run
    return [
        [f"{run} - {first}", each.label, str(each.num_shared), percent_text(each.difference), each.verdict]
        for run, gains in scores.gains.items()
        for each in gains
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
    """Returns the notes about our rows, where the published ones are from, and what else is published of
    the sets."""
    titles = list(dict.fromkeys(row.published for row in table.rows if row.published))
    texts = [*table.notes]
    texts += [f"Published numbers are from {'; '.join(titles)}."] if titles else []
    texts += [f"Also published: {'; '.join(table.claims)}."] if table.claims else []
    return " ".join(texts)


def _counts(scores: SuiteScores) -> list[list[str]]:
    """Returns the number of questions and the cost of one, with intervals."""
    lines = [["run", "set", "questions", "failed", "answered", *_COSTS.values()]]
    for cell, means, costs in zip(scores.cells, scores.means, scores.costs, strict=True):
        answered = means.get("answered")
        counts = [str(len(cell.rows)), str(cell.num_failed), "–" if answered is None else f"{answered:.2f}"]
        lines.append([cell.run, cell.benchmark.label, *counts, *(_cost_text(costs.get(name)) for name in _COSTS)])
    return lines


def _cost_text(interval: Interval | None) -> str:
    if interval is None:
        return "–"
    ends = f"({interval.low:.2f}–{interval.high:.2f})" if interval.is_bounded else NO_INTERVAL
    return f"{interval.value:.2f} {ends}"


def _sections(
    scores: SuiteScores, *, causes: list[list[str]], facts: Mapping[str, Mapping[str, Any]]
) -> list[TableSection]:
    """Returns the report's tables in their order; those without a line are skipped."""
    cells = scores.cells
    sections = [
        TableSection(
            title=table.heading,
            lines=score_lines(table),
            published=[_line_name(row) for row in table.rows if row.published],
            note=sources(table),
        )
        for table in (*scores.tables, *scores.distribution)
    ]
    if gains := _gain_lines(scores):
        sections.append(TableSection(title=_GAIN_TITLE, lines=[_GAIN_HEAD, *gains], note=_PAIRED))
    if causes:
        sections.append(TableSection(title=_CAUSE_TITLE, lines=causes, note=_CAUSE_NOTE, num_names=3))
    if memory := _memory_lines(cells):
        sections.append(TableSection(title="Memory quality", lines=memory, note=_MEMORY_NOTE, num_names=2))
    if by_turn := _turn_lines(cells):
        sections.append(TableSection(title=_TURN_TITLE, lines=by_turn, note=_TURN_NOTE))
    if scores.by_position:
        sections.append(TableSection(title=_POSITION_TITLE, lines=_position_lines(scores.by_position)))
    sections.append(TableSection(title="Questions and tokens", lines=_counts(scores), num_names=2))
    sections.append(TableSection(title="Runs", lines=_fact_lines(facts), num_names=1))
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


def _turn(quality: TurnQuality) -> dict[str, Any]:
    rates = {name: rate.as_json() | {"cases": quality.num_cases[name]} for name, rate in quality.rates.items()}
    return {"turns": quality.turns, "num_memories": quality.num_memories, "rates": rates}


def _json(suite: EvaluationSuite, scores: SuiteScores, facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "name": suite.name,
        "settings": without_credentials(suite.model_dump(mode="json")),
        "metrics": definitions(),
        "cells": [
            {
                "run": cell.run,
                "set": cell.benchmark.label,
                **means,
                "memory_by_turn": [_turn(each) for each in cell.memory_by_turn],
            }
            for cell, means in zip(scores.cells, scores.means, strict=True)
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
                        "values": [value.as_json() if value else None for value in row.values],
                    }
                    for row in table.rows
                ],
                "notes": list(table.notes),
            }
            for table in (*scores.tables, *scores.distribution)
        ],
        "runs": facts,
    }
