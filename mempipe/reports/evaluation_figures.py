"""Charts of an evaluation: scores by set, scores by hops, context by turn. A colour is a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from mempipe.evaluation.causes import Cause
from mempipe.evaluation.cells import Cell, runs_of
from mempipe.evaluation.results import ResultRow
from mempipe.evaluation.statistics import Interval
from mempipe.evaluation.table import ScoreTable
from mempipe.reports.charts import Bar, BarGroup, Figure, Key, Series, bar_chart, line_chart, style_of
from mempipe.studies.budgets import hops_label
from mempipe.studies.suite_scores import METRIC, HopScores

_MIN_SHARE = 0.05  # of the attempts: a turn that hardly any reached is not drawn


def scores_by_set(table: ScoreTable) -> Figure:
    """Draws our rows of a table, a group of bars per column."""
    own = [row for row in table.rows if not row.published]
    groups = [
        BarGroup(label=column, bars=[_bar(row.values[index], number) for number, row in enumerate(own)])
        for index, column in enumerate(table.columns)
    ]
    return Figure(
        title=f"{table.metric} by set",
        chart=bar_chart(groups, title=table.heading, y_max=1.0),
        keys=[Key(style=style_of(number), label=row.name) for number, row in enumerate(own)],
        caption="Whiskers are the intervals of the table.",
    )


def scores_by_hops(scores: Sequence[HopScores]) -> Figure | None:
    """Draws the scores by the hops of the questions, over all sets; None without any."""
    if not scores:
        return None
    groups = [
        BarGroup(
            label=hops_label(each.hops),
            note=f"{each.num_questions} questions",
            bars=[_bar(interval, number) for number, interval in enumerate(each.by_run.values())],
        )
        for each in scores
    ]
    return Figure(
        title=f"{METRIC} by hops",
        chart=bar_chart(groups, title=f"{METRIC} by hops", y_max=1.0),
        keys=[Key(style=style_of(number), label=run) for number, run in enumerate(scores[0].by_run)],
        caption="Questions of all sets; whiskers are intervals over questions.",
    )


def cause_lines(cells: Sequence[Cell], budgets: Mapping[str, int | None]) -> list[list[str]]:
    """Returns head and lines of a table: per run and hops, how many wrong answers have which first cause. Empty where
    no cause is known.
    """
    counts: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    wrong: Counter[tuple[str, int]] = Counter()
    for cell in cells:
        for row in cell.rows:
            counts[cell.run, row.num_hops].update(cause for cause in row.first_causes if cause)
            wrong[cell.run, row.num_hops] += _num_wrong(row)
    lines = [
        [
            run,
            str(budgets[run] or "–"),
            str(hops or "–"),
            str(wrong[run, hops]),
            str(causes.total()),
            *(str(causes[each]) for each in Cause),
        ]
        for run in runs_of(cells)
        for hops in sorted(hops for name, hops in counts if name == run)
        if (causes := counts[run, hops])
    ]
    names = [each.replace("_", " ") for each in Cause]
    return [["run", "memory budget", "hops", "wrong answers", "with a known cause", *names], *lines] if lines else []


def causes_by_run(cells: Sequence[Cell]) -> Figure | None:
    """Draws the first causes of wrong answers, a bar per run, as shares of all of its answers: two mistakes in a
    hundred are two bars that hardly show."""
    runs = runs_of(cells)
    rows = {run: [row for cell in cells if cell.run == run for row in cell.rows] for run in runs}
    counts = {run: Counter(cause for row in rows[run] for cause in row.first_causes if cause) for run in runs}
    if not any(counts.values()):
        return None
    answers = {run: sum(len(row.answers) * len(row.em_by_objective) for row in rows[run]) for run in runs}
    wrong = {run: sum(map(_num_wrong, rows[run])) for run in runs}
    groups = [
        BarGroup(
            label=cause.replace("_", " "),
            bars=[
                Bar(value=counts[run][cause] / answers[run], style=style_of(number)) if counts[run][cause] else None
                for number, run in enumerate(runs)
            ],
        )
        for cause in Cause
        if any(counts[run][cause] for run in runs)
    ]
    title = "First cause of wrong answers"
    keys = [
        Key(style=style_of(number), label=run, value=_wrong_of(counts[run].total(), wrong[run], answers[run]))
        for number, run in enumerate(runs)
    ]
    caption = "Shares of all answers of a run. A cause is known where the facts that the question needs are."
    return Figure(title=title, chart=bar_chart(groups, title=title), keys=keys, caption=caption)


def _num_wrong(row: ResultRow) -> int:
    """Returns how many answers of the row, one for each objective of each attempt, are wrong."""
    return round(len(row.answers) * sum(1 - em for em in row.em_by_objective))


def _wrong_of(known: int, wrong: int, answers: int) -> str:
    some = "" if known == wrong else f", {known:,} with a known cause"
    return f"{wrong:,} wrong of {answers:,}{some}"


def context_by_turn(cells: Sequence[Cell]) -> Figure | None:
    """Draws the context's tokens by turn, a line per run, over all its sets: flat where memory is bounded, rising where
    history grows. A dashed line is the same run with the whole history in the memory's place.
    """
    lines, keys = [], []
    for number, run in enumerate(runs_of(cells)):
        rows = [row for cell in cells if cell.run == run for row in cell.rows]
        attempts = [turns for row in rows for turns in row.context_tokens_by_turn]
        full = [turns for row in rows for turns in row.full_history_tokens_by_turn]
        if not any(attempts):
            continue
        lines.append(Series(label=run, style=style_of(number), points=_means_by_turn(attempts), markers=True))
        keys.append(Key(style=style_of(number), label=run, value=f"{len(attempts):,} attempts"))
        if any(full):
            lines.append(Series(label="", style=f"{style_of(number)} dashed", points=_means_by_turn(full)))
    if not lines:
        return None
    title = "Context tokens by turn"
    caption = f"A line ends where fewer than {_MIN_SHARE:.0%} of its attempts continue."
    if len(lines) > len(keys):
        caption += " Dashed: the same turns with the whole history in the memory's place."
    return Figure(title=title, chart=line_chart(lines, title=title, x_label="turn"), keys=keys, caption=caption)


def _means_by_turn(attempts: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    by_turn: dict[int, list[int]] = defaultdict(list)
    for turns in attempts:
        for turn, tokens in enumerate(turns, start=1):
            by_turn[turn].append(tokens)
    enough = _MIN_SHARE * len(attempts)
    return [(float(turn), fmean(tokens)) for turn, tokens in by_turn.items() if len(tokens) >= enough]


def _bar(interval: Interval | None, number: int) -> Bar | None:
    """Returns None where the run has no such set."""
    if interval is None:
        return None
    ends = {"low": interval.low, "high": interval.high} if interval.is_bounded else {}
    return Bar(value=interval.value, style=style_of(number), **ends)
