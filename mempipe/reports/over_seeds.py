"""Writes a chain's table over seeds: `seeds.md`, `seeds.html` and `seeds.json`, with published numbers in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mempipe.evaluation.metrics import definitions
from mempipe.evaluation.statistics import Interval
from mempipe.evaluation.table import Row, ScoreTable, percent_text, published_claims, with_published
from mempipe.reports.evaluation import TableSection, markdown_table, score_lines, sources
from mempipe.reports.pages import render
from mempipe.storage.files import write_text
from mempipe.studies.over_seeds import SeedCell, SeedTable

_NOTE = (
    "Means over seeds with their interval over trainings (Student's t of one value for each seed). A row without one "
    "has the same weights under every seed, or there is one seed only. With few seeds an interval is wide and "
    "may pass 0 or 100."
)
_DIFFERENCE_NOTE = "Differences within a seed, then their mean with the interval over trainings."
_VALUES_NOTE = "The interval over questions holds for these trainings alone."


def write_seed_report(folder: Path, tables: Sequence[SeedTable], *, name: str) -> list[Path]:
    """Writes the report into the folder, each file atomically, and returns their paths."""
    sections = [section for table in tables for section in _sections(table)]
    labels = dict.fromkeys(label for table in tables for label in table.labels)
    facts = [f"seeds {', '.join(map(str, tables[0].seeds))}", f"sets {', '.join(labels)}"]
    lines = [f"# {name} over seeds", " · ".join(facts)]
    for section in sections:
        lines += [f"## {section.title}", markdown_table(section.lines), *filter(None, [section.note])]
    metrics = {table.metric: definitions()[table.metric] for table in tables}
    texts = {
        "seeds.md": "\n\n".join(lines) + "\n",
        "seeds.html": render(
            "evaluation.html",
            name=f"{name} over seeds",
            facts=facts,
            findings=[],
            tiles=[],
            examples=[],
            sections=sections,
            figures=[],
            metrics=metrics,
        ),
        "seeds.json": json.dumps([_json(table) for table in tables], indent=1) + "\n",
    }
    for file, text in texts.items():
        write_text(folder / file, text)
    return [folder / file for file in texts]


def _sections(table: SeedTable) -> list[TableSection]:
    measured = f"{table.kind}: {table.metric}" if table.kind else table.metric
    means = with_published(_scores(table, table.rows), table.labels)
    published = [f"{row.name} (published)" for row in means.rows if row.published]
    note = " ".join(filter(None, [_NOTE, sources(means)]))
    sections = [TableSection(title=f"{measured}, percent", lines=score_lines(means), published=published, note=note)]
    if table.differences:
        gains = score_lines(_scores(table, table.differences))
        sections.append(TableSection(title=f"{measured}, points gained", lines=gains, note=_DIFFERENCE_NOTE))
    values = [["", *(f"seed {seed}" for seed in table.seeds), "over questions"]]
    for line, cells in {**table.rows, **table.differences}.items():
        last = cells[table.columns[-1]]
        values.append([line, *(f"{100 * value:.2f}" for value in last.by_seed), percent_text(last.questions)])
    title = f"{measured}, {table.columns[-1]}, by seed"
    return [*sections, TableSection(title=title, lines=values, note=_VALUES_NOTE)]


def _scores(table: SeedTable, rows: Mapping[str, Mapping[str, SeedCell]]) -> ScoreTable:
    lines = [
        Row(name=name, values=[_over_trainings(cells[column]) for column in table.columns])
        for name, cells in rows.items()
    ]
    return ScoreTable(
        title="", metric=table.metric, columns=table.columns, rows=lines, claims=published_claims(table.kind)
    )


def _over_trainings(cell: SeedCell) -> Interval:
    """Returns the mean with its interval over trainings; a point where there is none."""
    over = cell.trainings
    return over if over is not None and over.is_bounded else Interval(value=cell.mean, low=cell.mean, high=cell.mean)


def _json(table: SeedTable) -> dict[str, Any]:
    def cells(rows: Mapping[str, Mapping[str, SeedCell]]) -> dict[str, Any]:
        return {
            name: {
                column: {
                    "mean": cell.mean,
                    "by_seed": list(cell.by_seed),
                    "questions": cell.questions.as_json(),
                    "trainings": cell.trainings and cell.trainings.as_json(),
                }
                for column, cell in own.items()
            }
            for name, own in rows.items()
        }

    return {
        "metric": table.metric,
        "sets": list(table.labels),
        "seeds": list(table.seeds),
        "rows": cells(table.rows),
        "differences": cells(table.differences),
    }
