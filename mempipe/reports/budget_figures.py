"""The curves of a budget study: the score and the first causes of wrong answers against the memory budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean

from mempipe.evaluation.causes import Cause
from mempipe.evaluation.results import ResultRow
from mempipe.evaluation.statistics import Interval
from mempipe.reports.charts import Figure, Key, Series, line_chart, percent, style_of
from mempipe.studies.budgets import BudgetCurve, BudgetStudy, StudyPart, hops_label
from mempipe.studies.measured import tokens_per_attempt

_WHISKERS = "Whiskers are 95 % intervals over questions."


def score_by_part(study: BudgetStudy) -> Figure:
    """Draws the score against the memory budget, a line for each agent and set, or for each number of hops of a single
    set. All questions together are a dashed line."""
    parts = [part for part in study.parts[1:] if not part.num_hops] or study.parts[1:]
    lines, keys = [], []
    for part, dashed in [*((part, "") for part in parts), (study.whole, " dashed")]:
        for curve in part.curves:
            style = style_of(len(lines)) + dashed
            lines.append(_series([(float(each.memory_tokens), each.measured.score) for each in curve.points], style))
            keys.append(Key(style=style, label=f"{curve.agent}, {part.label}"))
    title = f"{study.metric} by memory budget and part"
    chart = line_chart(lines, title=title, x_label="tokens of the memory", y_format=percent, doubles=True)
    return Figure(title=title, chart=chart, keys=keys, caption=_WHISKERS)


def score_by_budget(study: BudgetStudy, part: StudyPart) -> Figure:
    """Draws the part's score against the memory budget, a line per agent; one without a budget is a dashed line."""
    budgets = [point.memory_tokens for curve in part.curves for point in curve.points]
    lines, keys = [], []
    for index, curve in enumerate(part.curves):
        places = [(float(point.memory_tokens), point.measured.score) for point in curve.points]
        lines.append(_series(places, style_of(index)))
        keys.append(Key(style=style_of(index), label=curve.agent))
    for index, reference in enumerate(part.references, start=len(part.curves)):
        ends = [(float(tokens), reference.measured.score.value) for tokens in (min(budgets), max(budgets))]
        lines.append(Series(label="", style=f"{style_of(index)} dashed", points=ends))
        keys.append(Key(style=style_of(index), label=reference.agent, value="no budget"))
    title = f"{study.metric} by memory budget{_of(study, part)}"
    chart = line_chart(lines, title=title, x_label="tokens of the memory", y_format=percent, doubles=True)
    return Figure(title=title, chart=chart, keys=keys, caption=_WHISKERS)


def score_by_tokens(study: BudgetStudy, part: StudyPart) -> Figure:
    """Draws the part's score against all tokens of an attempt, a point per budget."""
    lines, keys = [], []
    for index, curve in enumerate(part.curves):
        places = [(point.measured.tokens_per_question, point.measured.score) for point in curve.points]
        lines.append(_series(sorted(places, key=lambda place: place[0]), style_of(index)))
        keys.append(Key(style=style_of(index), label=curve.agent))
    for index, reference in enumerate(part.references, start=len(part.curves)):
        place = (reference.measured.tokens_per_question, reference.measured.score)
        lines.append(_series([place], style_of(index)))
        keys.append(Key(style=style_of(index), label=reference.agent, value="no budget"))
    title = f"{study.metric} by tokens per question{_of(study, part)}"
    chart = line_chart(lines, title=title, x_label="tokens read and written", y_format=percent)
    return Figure(title=title, chart=chart, keys=keys, caption="A point is a memory budget.")


def figures_by_hops(study: BudgetStudy, curve: BudgetCurve) -> list[Figure]:
    """Draws one agent's score against the budget and against the tokens of an attempt, set by set, a line per number of
    hops; none for a set whose hops are not known or all the same."""
    by_hops: dict[str, dict[int, dict[int, list[ResultRow]]]] = {}  # set to hops to memory tokens to rows
    for point in curve.points:
        for label, rows in point.measured.sets.items():
            for row in (row for row in rows if row.num_hops):
                of_set = by_hops.setdefault(label, {}).setdefault(row.num_hops, {})
                of_set.setdefault(point.memory_tokens, []).append(row)
    figures = []
    for label, asked in by_hops.items():
        if len(asked) > 1:
            name = f"{curve.agent}, {label}" if len(by_hops) > 1 else curve.agent
            figures += _figures_by_hops(f"{name}: {study.metric}", asked, study.metric)
    return figures


def _figures_by_hops(title: str, by_hops: Mapping[int, Mapping[int, Sequence[ResultRow]]], metric: str) -> list[Figure]:
    budgets, costs = {}, {}
    for hops, asked in sorted(by_hops.items()):
        scores = [fmean(row.score(metric) for row in rows) for rows in asked.values()]
        budgets[hops] = list(zip(map(float, asked), scores, strict=True))
        costs[hops] = sorted(zip(map(tokens_per_attempt, asked.values()), scores, strict=True))
    return [
        _hops_figure(f"{title} by memory budget and hops", budgets, "tokens of the memory", doubles=True),
        _hops_figure(f"{title} by tokens and hops", costs, "tokens read and written"),
    ]


def causes_by_budget(curve: BudgetCurve) -> list[Figure]:
    """Draws the shares of answers that each first cause made wrong against the budget, a line per cause: over all
    questions, then for every number of hops. None where the needed facts are not known."""
    asked = {point.memory_tokens: [*chain.from_iterable(point.measured.sets.values())] for point in curve.points}
    hops = sorted({row.num_hops for rows in asked.values() for row in rows if row.num_hops})
    parts = {"of wrong answers": asked}
    for count in hops if len(hops) > 1 else []:
        own = {tokens: [row for row in rows if row.num_hops == count] for tokens, rows in asked.items()}
        parts[f"at {hops_label(count)}"] = own
    figures = [_causes_figure(f"{curve.agent}: first causes {part}", rows) for part, rows in parts.items()]
    return [figure for figure in figures if figure is not None]


def _causes_figure(title: str, asked: Mapping[int, Sequence[ResultRow]]) -> Figure | None:
    """Draws the causes in the rows of every budget; None where there are none."""
    series, keys = [], []
    for index, cause in enumerate(Cause):
        shares = {
            tokens: fmean([each == cause for row in rows for each in row.first_causes] or [0.0])
            for tokens, rows in asked.items()
        }
        if any(shares.values()):
            points = [(float(tokens), share) for tokens, share in shares.items()]
            series.append(Series(label="", style=style_of(index), points=points, markers=True))
            keys.append(Key(style=style_of(index), label=cause.replace("_", " ")))
    if not series:
        return None
    chart = line_chart(series, title=title, x_label="tokens of the memory", y_format=percent, doubles=True)
    caption = "Shares of all answers; a right one has no cause, nor has one whose needed facts are not known."
    return Figure(title=title, chart=chart, keys=keys, caption=caption)


def _hops_figure(
    title: str, lines: Mapping[int, Sequence[tuple[float, float]]], x_label: str, *, doubles: bool = False
) -> Figure:
    styles = {hops: style_of(index) for index, hops in enumerate(lines)}
    series = [Series(label="", style=styles[hops], points=points, markers=True) for hops, points in lines.items()]
    keys = [Key(style=style, label=hops_label(hops)) for hops, style in styles.items()]
    chart = line_chart(series, title=title, x_label=x_label, y_format=percent, doubles=doubles)
    return Figure(title=title, chart=chart, keys=keys, caption="Questions whose hops are known.")


def _of(study: BudgetStudy, part: StudyPart) -> str:
    return "" if len(study.parts) == 1 else f", {part.label}"


def _series(places: Sequence[tuple[float, Interval]], style: str) -> Series:
    return Series(
        label="",
        style=style,
        points=[(x, score.value) for x, score in places],
        intervals=[(x, score.low, score.high) for x, score in places if score.is_bounded],
        markers=True,
    )
