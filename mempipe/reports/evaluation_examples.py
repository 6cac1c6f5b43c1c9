"""Questions of an evaluation with the attempts of its runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mempipe.config import RunConfig
from mempipe.evaluation.cells import Cell, runs_of
from mempipe.evaluation.results import ResultRow, find_groups
from mempipe.reports.charts import style_of
from mempipe.reports.examples import Example, facts_of, side
from mempipe.reports.steps import ActionText

NUM_EXAMPLES = 3
MAX_RUNS = 4


def side_by_side(folder: Path, cells: Sequence[Cell], configs: Mapping[str, RunConfig]) -> list[Example]:
    """Returns at most three questions of the first set with the first attempt of each run, of the first four: those
    first that the first run answered and most others did not. `folder` is the evaluation's."""
    if not cells:
        return []
    label, runs = cells[0].benchmark.label, runs_of(cells)[:MAX_RUNS]
    rows = {cell.run: {row.question_id: row for row in cell.rows} for cell in cells if cell.benchmark.label == label}
    runs = [run for run in runs if run in rows]
    chosen = _choose([rows[run] for run in runs])
    groups = {run: find_groups(folder / run / label, chosen) for run in runs}
    return [
        Example(
            question=groups[runs[0]][id].question.text,
            facts=facts_of(groups[runs[0]][id].question),
            sides=[
                side(
                    run,
                    groups[run][id],
                    style=style_of(number),
                    text=ActionText.of(configs[run].agent_spec, configs[run].budget),
                )
                for number, run in enumerate(runs)
            ],
        )
        for id in chosen
        if all(id in groups[run] for run in runs)
    ]


def _choose(rows: Sequence[Mapping[str, ResultRow]]) -> list[str]:
    """Returns the ids of questions that every run has attempted, each those with other hop counts first."""
    first, *others = rows
    shared = [id for id in first if all(id in own and own[id].answers for own in rows)]
    shared.sort(key=lambda id: (-first[id].em, sum(own[id].em for own in others), -first[id].num_hops, id))
    seen: set[int] = set()
    fresh = [id for id in shared if not (first[id].num_hops in seen or seen.add(first[id].num_hops))]
    return [*fresh, *(id for id in shared if id not in fresh)][:NUM_EXAMPLES]
