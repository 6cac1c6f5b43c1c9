"""Writes the answer to "how much memory is enough?": `budgets.md`, `budgets.html`, and two plots as SVG: the score and
the first causes of wrong answers, against the budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean

from mempipe.evaluation.causes import Cause
from mempipe.evaluation.metrics import definitions
from mempipe.evaluation.results import ResultRow
from mempipe.evaluation.statistics import Interval
from mempipe.evaluation.table import NO_INTERVAL
from mempipe.reports.charts import Figure, Key, Series, line_chart, number, percent, with_legend
from mempipe.reports.evaluation import TableSection, markdown_table
from mempipe.reports.pages import render
from mempipe.storage.files import write_text
from mempipe.studies.budgets import (
    ALPHA,
    POWER,
    BudgetCurve,
    BudgetPoint,
    BudgetStudy,
    Measured,
    ModelSize,
    Reference,
    tokens_per_attempt,
)

PLOT_FILE = "budgets.svg"
CAUSES_FILE = "causes.svg"
_NUM_STYLES = 10  # part-0 to part-9 of the style sheet
_COST_HEADS = ["tokens per question", "seconds per question", "largest context", "its KV cache"]
_REFERENCE_TITLE = "Against agents without a memory budget"


def write_budget_report(folder: Path, study: BudgetStudy, *, name: str) -> list[Path]:
    """Writes the report into the folder, each file atomically, and returns their paths."""
    figures = [score_by_budget(study), score_by_tokens(study)]
    causes = [figure for curve in study.curves for figure in causes_by_budget(curve)]
    figures += [*(figure for curve in study.curves for figure in figures_by_hops(study, curve)), *causes]
    page = render(
        "evaluation.html",
        name=f"{name}: how much memory is enough?",
        facts=[*map(verdict, study.curves), *reference_verdicts(study)],
        sections=_sections(study),
        figures=figures,
        metrics={study.metric: definitions()[study.metric]},
    )
    plots = {PLOT_FILE: score_by_budget(study)} | ({CAUSES_FILE: causes[0]} if causes else {})
    texts = {
        "budgets.md": "\n".join(
            [*budget_lines(study), *(f"![{plot.title}]({file})" for file, plot in plots.items()), ""]
        ),
        "budgets.html": page,
        **{file: render("chart.svg", chart=with_legend(figure)) for file, figure in plots.items()},
    }
    for file, text in texts.items():
        write_text(folder / file, text)
    return [folder / file for file in texts]


def budget_lines(study: BudgetStudy) -> list[str]:
    """Returns the report in Markdown, without the plot."""
    lines = ["# How much memory is enough?", ""]
    verdicts = {curve.agent: [verdict(curve)] for curve in study.curves}
    verdicts[_REFERENCE_TITLE] = reference_verdicts(study)
    for section in _sections(study):
        lines += [f"## {section.title}", ""]
        lines += [line for text in verdicts[section.title] for line in (text, "")]
        lines += [markdown_table(section.lines), "", *([section.note, ""] if section.note else [])]
    return lines


def verdict(curve: BudgetCurve) -> str:
    """Says the smallest sufficient budget in a sentence."""
    answer, largest = curve.smallest_sufficient, curve.points[-1]
    if all(point.measured.score.value == 0 for point in curve.points):
        return f"{curve.agent}: every score is 0 under every budget, which says nothing of the memory that is enough."
    if answer is largest:
        return (
            f"{curve.agent}: no smaller budget is enough: {curve.points[-2].memory_tokens} tokens are significantly "
            f"worse than {largest.memory_tokens}, so a larger one may be better still."
        )
    return (
        f"{curve.agent}: {answer.memory_tokens} tokens are enough: no budget from there on is significantly worse than "
        f"{largest.memory_tokens} tokens."
    )


def reference_verdicts(study: BudgetStudy) -> list[str]:
    """Says in a sentence each what the smallest sufficient budget is worth against an agent without a budget."""
    return [
        _against(study, curve, reference)
        for reference in study.references
        for curve in study.curves
        if curve.agent in reference.differences
    ]


def _against(study: BudgetStudy, curve: BudgetCurve, reference: Reference) -> str:
    difference = reference.differences[curve.agent].difference
    outcome = "is not significantly different from"
    if difference.low > 0:
        outcome = "is significantly better than"
    elif difference.high < 0:
        outcome = "is significantly worse than"
    size = ""
    if curve.model is not None and reference.model is not None:
        size = f" and {reference.model.num_parameters / curve.model.num_parameters:.1f} times the parameters"
    return (
        f"{curve.agent} with {curve.smallest_sufficient.memory_tokens} memory tokens {outcome} {reference.agent}, "
        f"which has no memory budget{size}: {_percent(difference)} points of {study.metric}."
    )


def score_by_budget(study: BudgetStudy) -> Figure:
    """Draws the score against the memory budget, a line per agent; an agent without a budget is a dashed line."""
    budgets = [point.memory_tokens for curve in study.curves for point in curve.points]
    lines, keys = [], []
    for index, curve in enumerate(study.curves):
        places = [(float(point.memory_tokens), point.measured.score) for point in curve.points]
        lines.append(_series(places, _style(index)))
        keys.append(Key(style=_style(index), label=curve.agent))
    for index, reference in enumerate(study.references, start=len(study.curves)):
        ends = [(float(tokens), reference.measured.score.value) for tokens in (min(budgets), max(budgets))]
        lines.append(Series(label="", style=f"{_style(index)} dashed", points=ends))
        keys.append(Key(style=_style(index), label=reference.agent, value="no budget"))
    title = f"{study.metric} by memory budget"
    chart = line_chart(lines, title=title, x_label="tokens of the memory", y_format=percent)
    return Figure(title=title, chart=chart, keys=keys, caption="Whiskers are 95 % intervals over questions.")


def score_by_tokens(study: BudgetStudy) -> Figure:
    """Draws the score against all tokens of an attempt, a point per budget."""
    lines, keys = [], []
    for index, curve in enumerate(study.curves):
        places = [(point.measured.tokens_per_question, point.measured.score) for point in curve.points]
        lines.append(_series(sorted(places, key=lambda place: place[0]), _style(index)))
        keys.append(Key(style=_style(index), label=curve.agent))
    for index, reference in enumerate(study.references, start=len(study.curves)):
        place = (reference.measured.tokens_per_question, reference.measured.score)
        lines.append(_series([place], _style(index)))
        keys.append(Key(style=_style(index), label=reference.agent, value="no budget"))
    title = f"{study.metric} by tokens per question"
    chart = line_chart(lines, title=title, x_label="tokens read and written", y_format=percent)
    return Figure(title=title, chart=chart, keys=keys, caption="A point is a memory budget.")


def figures_by_hops(study: BudgetStudy, curve: BudgetCurve) -> list[Figure]:
    """Draws one agent's score against the budget and against the tokens of an attempt, a line per number of hops; none
    where the hops are not known."""
    by_hops: dict[int, dict[int, list[ResultRow]]] = {}  # hops to memory tokens to rows
    for point in curve.points:
        for row in (row for rows in point.measured.sets.values() for row in rows if row.num_hops):
            by_hops.setdefault(row.num_hops, {}).setdefault(point.memory_tokens, []).append(row)
    if len(by_hops) < 2:
        return []
    budgets, costs = {}, {}
    for hops, asked in sorted(by_hops.items()):
        scores = [fmean(row.score(study.metric) for row in rows) for rows in asked.values()]
        budgets[hops] = list(zip(map(float, asked), scores, strict=True))
        costs[hops] = sorted(zip(map(tokens_per_attempt, asked.values()), scores, strict=True))
    return [
        _hops_figure(f"{curve.agent}: {study.metric} by memory budget and hops", budgets, "tokens of the memory"),
        _hops_figure(f"{curve.agent}: {study.metric} by tokens and hops", costs, "tokens read and written"),
    ]


def causes_by_budget(curve: BudgetCurve) -> list[Figure]:
    """Draws the shares of attempts that each first cause made wrong against the budget, a line per cause: over all
    questions, then for every number of hops. None where the needed facts are not known."""
    asked = {point.memory_tokens: [*chain.from_iterable(point.measured.sets.values())] for point in curve.points}
    hops = sorted({row.num_hops for rows in asked.values() for row in rows if row.num_hops})
    parts = {"of wrong answers": asked}
    for count in hops if len(hops) > 1 else []:
        own = {tokens: [row for row in rows if row.num_hops == count] for tokens, rows in asked.items()}
        parts[f"at {_hops_label(count)}"] = own
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
            series.append(Series(label="", style=_style(index), points=points, markers=True))
            keys.append(Key(style=_style(index), label=cause.replace("_", " ")))
    if not series:
        return None
    chart = line_chart(series, title=title, x_label="tokens of the memory", y_format=percent)
    return Figure(title=title, chart=chart, keys=keys, caption="Shares of all attempts; right ones have no cause.")


def _hops_label(count: int) -> str:
    return "1 hop" if count == 1 else f"{count} hops"


def _hops_figure(title: str, lines: Mapping[int, Sequence[tuple[float, float]]], x_label: str) -> Figure:
    styles = {hops: _style(index) for index, hops in enumerate(lines)}
    series = [Series(label="", style=styles[hops], points=points, markers=True) for hops, points in lines.items()]
    keys = [Key(style=style, label=_hops_label(hops)) for hops, style in styles.items()]
    chart = line_chart(series, title=title, x_label=x_label, y_format=percent)
    return Figure(title=title, chart=chart, keys=keys, caption="Questions of all sets whose hops are known.")


def _sections(study: BudgetStudy) -> list[TableSection]:
    seeds = max(len(point.measured.by_seed) for curve in study.curves for point in curve.points) > 1
    head = ["memory tokens", f"{study.metric}, percent", *["by seed"] * seeds]
    head += [*_COST_HEADS, "minus the largest budget", "McNemar on em", "would have been found", "verdict"]
    sections = [
        TableSection(
            title=curve.agent,
            lines=[head, *(_line(point, curve.model, seeds=seeds) for point in curve.points)],
            note=_note(curve),
        )
        for curve in study.curves
    ]
    if study.references:
        sections.append(_references(study, seeds=seeds))
    return sections


def _line(point: BudgetPoint, model: ModelSize | None, *, seeds: bool) -> list[str]:
    cells = [str(point.memory_tokens), *_measured_cells(point.measured, model, seeds=seeds)]
    if point.against_largest is None or point.detectable is None:
        return [*cells, "–", "–", "–", "largest"]
    judgement = "worse" if point.is_worse else "not significantly worse"
    difference = _percent(point.against_largest.difference)
    return [*cells, difference, point.against_largest.verdict, _detectable(point.detectable), judgement]


def _detectable(difference: float) -> str:
    return f"{100 * difference:.1f}" if math.isfinite(difference) else "none"


def _references(study: BudgetStudy, *, seeds: bool) -> TableSection:
    compared = [
        f"{curve.agent} with {curve.smallest_sufficient.memory_tokens} tokens minus it" for curve in study.curves
    ]
    head = ["agent", "parameters", f"{study.metric}, percent", *["by seed"] * seeds, *_COST_HEADS]
    lines = [
        [
            reference.agent,
            "–" if reference.model is None else f"{reference.model.num_parameters / 1e6:,.2f} M",
            *_measured_cells(reference.measured, reference.model, seeds=seeds),
            *(
                _percent(reference.differences[curve.agent].difference) if curve.agent in reference.differences else "–"
                for curve in study.curves
            ),
        ]
        for reference in study.references
    ]
    note = "Differences are of the smallest sufficient budget on the same questions, each with its own 95 % interval."
    return TableSection(title=_REFERENCE_TITLE, lines=[[*head, *compared], *lines], note=note)


def _measured_cells(measured: Measured, model: ModelSize | None, *, seeds: bool) -> list[str]:
    by_seed = ", ".join(f"{100 * score:.1f}" for score in measured.by_seed)
    cache = "–" if model is None else _size(measured.largest_context * model.cache_bytes_per_token)
    cost = [f"{measured.tokens_per_question:,.0f}", f"{measured.seconds_per_question:.2f}"]
    return [_percent(measured.score), *[by_seed] * seeds, *cost, f"{measured.largest_context:,.0f}", cache]


def _size(num_bytes: float) -> str:
    """Writes bytes in kB, or in MB from one on."""
    return f"{number(num_bytes / 1e6)} MB" if num_bytes >= 1e6 else f"{number(num_bytes / 1e3)} kB"


def _note(curve: BudgetCurve) -> str:
    compared = len(curve.points) - 1
    return (
        "Scores have 95 % bootstrap intervals over questions, sets weighing the same. Differences are paired by "
        f"question; their intervals together have an error rate of {ALPHA:.0%} (Bonferroni over {compared} budgets). "
        f'"Would have been found" is the difference that this test finds with a probability of {POWER:.0%}. '
        "The largest context is in tokens, a mean over attempts."
    )


def _series(places: Sequence[tuple[float, Interval]], style: str) -> Series:
    return Series(
        label="",
        style=style,
        points=[(x, score.value) for x, score in places],
        intervals=[(x, score.low, score.high) for x, score in places if score.is_bounded],
        markers=True,
    )


def _style(number: int) -> str:
    return f"part-{number % _NUM_STYLES}"


def _percent(interval: Interval) -> str:
    ends = f"({100 * interval.low:.1f} to {100 * interval.high:.1f})" if interval.is_bounded else NO_INTERVAL
    return f"{100 * interval.value:.1f} {ends}"
