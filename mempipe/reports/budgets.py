"""Writes the answer to "how much memory is enough?": `budgets.md`, `budgets.html`, the numbers in `budgets.json`, and
two plots as SVG: the score and the first causes of wrong answers, against the budget. Files about another metric than
exact match have its name (`budgets_f1.md`), and the first report stays.

Every set and every number of hops has its own table, verdict and line. All of them together come last.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mempipe.evaluation.metrics import definitions
from mempipe.evaluation.statistics import Interval
from mempipe.evaluation.table import NO_INTERVAL
from mempipe.reports.budget_figures import (
    causes_by_budget,
    figures_by_hops,
    score_by_budget,
    score_by_part,
    score_by_tokens,
)
from mempipe.reports.charts import number, with_legend
from mempipe.reports.evaluation import TableSection, markdown_table
from mempipe.reports.pages import render
from mempipe.storage.files import write_text
from mempipe.studies.budgets import (
    ALPHA,
    POWER,
    BudgetCurve,
    BudgetPoint,
    BudgetStudy,
    MarginTest,
    Reference,
    StudyPart,
    Verdict,
    recommended,
)
from mempipe.studies.measured import Measured, ModelSize

CAUSES_FILE = "causes.svg"
_COST_HEADS = ["tokens per question", "seconds per question", "largest context", "its KV cache"]
_REFERENCE_TITLE = "Against agents without a memory budget"


def write_budget_report(folder: Path, study: BudgetStudy, *, name: str) -> list[Path]:
    """Writes the report into the folder, each file atomically, and returns their paths."""
    parts, curves = _in_order(study), study.whole.curves
    plot = score_by_part(study) if len(parts) > 1 else score_by_budget(study, study.whole)
    causes = [figure for curve in curves for figure in causes_by_budget(curve)]
    figures = [score_by_part(study)] * (len(parts) > 1)
    drawn = [part for part in parts if part.curves]  # a set may have been asked under one budget only
    figures += [draw(study, part) for part in drawn for draw in (score_by_budget, score_by_tokens)]
    figures += [*(figure for curve in curves for figure in figures_by_hops(study, curve)), *causes]
    page = render(
        "evaluation.html",
        name=f"{name}: how much memory is enough?",
        facts=[],
        findings=verdicts(study),
        tiles=[],
        examples=[],
        sections=_sections(study),
        figures=figures,
        metrics={study.metric: definitions()[study.metric]},
    )
    stem = "budgets" if study.metric == "em" else f"budgets_{study.metric}"
    plots = {f"{stem}.svg": plot} | ({CAUSES_FILE: causes[0]} if causes else {})
    texts = {
        f"{stem}.md": "\n".join(
            [*budget_lines(study), *(f"![{plot.title}]({file})" for file, plot in plots.items()), ""]
        ),
        f"{stem}.html": page,
        f"{stem}.json": json.dumps(budget_numbers(study), indent=1) + "\n",
        **{file: render("chart.svg", chart=with_legend(figure)) for file, figure in plots.items()},
    }
    for file, text in texts.items():
        write_text(folder / file, text)
    return [folder / file for file in texts]


def budget_numbers(study: BudgetStudy) -> dict[str, Any]:
    """Returns the metric, the margin and a row for each part, agent and budget, for a program. Shares are from 0 to 1;
    an interval is a value with its ends, null where it has none.
    """
    return {
        "metric": study.metric,
        "margin": study.margin,
        "budgets": [
            {"part": part.label, "num_hops": part.num_hops, "agent": curve.agent, **_numbers(curve, point)}
            for part in study.parts
            for curve in part.curves
            for point in curve.points
        ],
    }


def _numbers(curve: BudgetCurve, point: BudgetPoint) -> dict[str, Any]:
    measured, test = point.measured, point.test
    return {
        "memory_tokens": point.memory_tokens,
        "score": measured.score.as_json(),
        "score_by_run": measured.by_seed,
        "score_over_trainings": measured.over_trainings and measured.over_trainings.as_json(),
        "tokens_per_question": measured.tokens_per_question,
        "seconds_per_question": measured.seconds_per_question,
        "largest_context": measured.largest_context,
        "verdict": None if test is None else str(curve.verdict(point)),
        "difference": None if test is None else test.difference.as_json(),
        "difference_over_trainings": test and test.over_trainings and test.over_trainings.as_json(),
        "num_questions": None if test is None else test.num_questions,
        "power": None if test is None else test.power,
        "questions_needed": None if test is None else test.questions_needed,
    }


def budget_lines(study: BudgetStudy) -> list[str]:
    """Returns the report in Markdown, without the plot."""
    lines = ["# How much memory is enough?", ""]
    lines += [line for text in verdicts(study) for line in (text, "")]
    for section in _sections(study):
        lines += [f"## {section.title}", "", markdown_table(section.lines), ""]
        lines += [section.note, ""] if section.note else []
    return lines


def verdicts(study: BudgetStudy) -> list[str]:
    """Returns, for each part and agent, a line about the smallest budget that is enough and its comparison with agents
    without a budget."""
    parts = _in_order(study)
    return [
        *(verdict(study, part, curve) for part in parts for curve in part.curves),
        *(
            _against(study, part, curve, reference)
            for part in parts
            for reference in part.references
            for curve in part.curves
            if curve.agent in reference.differences
        ),
    ]


def verdict(study: BudgetStudy, part: StudyPart, curve: BudgetCurve) -> str:
    """Says of one agent in one part which budgets are enough, whether the next smaller one is not, and where that
    cannot be told, which is the largest that is not."""
    where, margin = _where(study, part, curve.agent), _points(study.margin)
    largest, answer = curve.points[-1].memory_tokens, curve.smallest_enough
    if all(point.measured.score.value == 0 for point in curve.points):
        return f"{where}: every score is 0 under every budget, which says nothing of the memory that is enough."
    smaller = curve.points[: curve.points.index(recommended(curve))]
    texts = []
    if answer is not None:
        texts.append(f"{answer.memory_tokens} tokens are enough: they lose less than {margin} against {largest} tokens")
    if smaller and smaller[-1].test is not None:
        texts.append(_on_next(smaller[-1].memory_tokens, smaller[-1].test, margin, largest))
    if answer is None and curve.verdict(smaller[-1]) is Verdict.NOT_ENOUGH:
        texts[-1] += ", so a larger budget than that may be better still"
    short = next((point for point in reversed(smaller) if curve.verdict(point) is Verdict.NOT_ENOUGH), None)
    if short is not None and short.test is not None and short is not smaller[-1]:
        texts.append(_on_next(short.memory_tokens, short.test, margin, largest))
    if len(curve.points[0].test.by_training if curve.points[0].test else []) == 1:
        texts.append("each budget was trained once, and another training of it may answer otherwise")
    return f"{where}: {'; '.join(texts)}."


def _on_next(tokens: int, test: MarginTest, margin: str, largest: int) -> str:
    """Says why a budget is not called enough."""
    if test.verdict is Verdict.NOT_ENOUGH:
        return f"{tokens} tokens are not enough: they lose more than {margin} against {largest} tokens"
    if test.power is None:
        return f"whether {tokens} tokens are enough cannot be told with one question"
    over = test.over_trainings
    if over is not None and test.difference.low > -test.margin:
        return (
            f"whether {tokens} tokens are enough cannot be told with {len(test.by_training)} trainings; "
            f"{test.trainings_needed:,} would do if they lose nothing and trainings differ as these do"
        )
    unsure = f"whether {tokens} tokens are enough cannot be told with {test.num_questions:,} questions"
    if test.questions_needed is None:
        return f"{unsure}, since the loss seen is {_points(-test.difference.value)} and the margin {margin}"
    loss = (
        f"the loss of {_points(-test.assumed)} that was seen is the true one" if test.assumed else "they lose nothing"
    )
    return f"{unsure}; {test.questions_needed:,} would do if {loss}"


def _against(study: BudgetStudy, part: StudyPart, curve: BudgetCurve, reference: Reference) -> str:
    difference = reference.differences[curve.agent].difference
    outcome = "cannot be told from"
    if difference.low > 0:
        outcome = "is significantly better than"
    elif difference.high < 0:
        outcome = "is significantly worse than"
    size = ""
    if curve.model is not None and reference.model is not None:
        size = f" and {reference.model.num_parameters / curve.model.num_parameters:.1f} times the parameters"
    return (
        f"{_where(study, part, curve.agent)}: {recommended(curve).memory_tokens} memory tokens, the agent {outcome} "
        f"{reference.agent}, which has no memory budget{size}: {_percent(difference)} points of {study.metric}."
    )


def _in_order(study: BudgetStudy) -> list[StudyPart]:
    """Returns the parts, the one of all questions last."""
    return [*study.parts[1:], study.whole]


def _where(study: BudgetStudy, part: StudyPart, agent: str) -> str:
    return agent if len(study.parts) == 1 else f"{agent}, {part.label}"


def _sections(study: BudgetStudy) -> list[TableSection]:
    sections = [
        TableSection(title=_where(study, part, curve.agent), lines=_lines(study, curve), note=_note(study, curve))
        for part in _in_order(study)
        for curve in part.curves
    ]
    if study.whole.references:
        sections.append(_references(study))
    return sections


def _lines(study: BudgetStudy, curve: BudgetCurve) -> list[list[str]]:
    trained = any(point.measured.over_trainings for point in curve.points)
    seeds = any(len(point.measured.by_seed) > 1 for point in curve.points)
    head = ["memory tokens", f"{study.metric}, percent", *_seed_heads(seeds=seeds, trained=trained), *_COST_HEADS]
    head += ["minus the largest budget", *["over trainings"] * trained, "McNemar on em"]
    head += [f"power at {_points(study.margin)}", f"questions for {POWER:.0%}", "verdict"]
    return [head, *(_line(curve, point, seeds=seeds, trained=trained) for point in curve.points)]


def _line(curve: BudgetCurve, point: BudgetPoint, *, seeds: bool, trained: bool) -> list[str]:
    cells = [str(point.memory_tokens), *_measured_cells(point.measured, curve.model, seeds=seeds, trained=trained)]
    test = point.test
    if test is None:
        return [*cells, "–", *["–"] * trained, "–", "–", "–", "largest"]
    over = [_percent(test.over_trainings) if test.over_trainings else "–"] * trained
    power = "–" if test.power is None else f"{test.power:.0%}"
    needed = "–" if test.questions_needed is None else f"{test.questions_needed:,}"
    return [*cells, _percent(test.difference), *over, test.comparison.verdict, power, needed, curve.verdict(point)]


def _references(study: BudgetStudy) -> TableSection:
    parts = [part for part in _in_order(study) if part.references]
    measured = [reference.measured for part in parts for reference in part.references]
    seeds = any(len(each.by_seed) > 1 for each in measured)
    trained = any(each.over_trainings for each in measured)
    names = [curve.agent for curve in study.whole.curves]
    head = ["agent", *["questions of"] * (len(study.parts) > 1), "parameters", f"{study.metric}, percent"]
    head += [*_seed_heads(seeds=seeds, trained=trained), *_COST_HEADS, *(f"{name} minus it" for name in names)]
    lines = [
        [
            reference.agent,
            *[part.label] * (len(study.parts) > 1),
            "–" if reference.model is None else f"{reference.model.num_parameters / 1e6:,.2f} M",
            *_measured_cells(reference.measured, reference.model, seeds=seeds, trained=trained),
            *(_minus(part, reference, name) for name in names),
        ]
        for part in parts
        for reference in part.references
    ]
    note = (
        "Differences are of the smallest budget that is enough (or the largest, where none is known to be) on the same "
        f"questions. Their intervals hold together with a probability of {1 - ALPHA:.0%} over all budgets that it was "
        "chosen from."
    )
    return TableSection(title=_REFERENCE_TITLE, lines=[head, *lines], note=note)


def _minus(part: StudyPart, reference: Reference, agent: str) -> str:
    if agent not in reference.differences:
        return "–"
    (curve,) = (each for each in part.curves if each.agent == agent)
    return f"{recommended(curve).memory_tokens} tokens: {_percent(reference.differences[agent].difference)}"


def _seed_heads(*, seeds: bool, trained: bool) -> list[str]:
    return [*["by training" if trained else "by seed"] * seeds, *["over trainings"] * trained]


def _measured_cells(measured: Measured, model: ModelSize | None, *, seeds: bool, trained: bool) -> list[str]:
    by_seed = ", ".join(f"{100 * score:.1f}" for score in measured.by_seed)
    over = _percent(measured.over_trainings, least=0.0) if measured.over_trainings else "–"
    cache = "–" if model is None else _size(measured.largest_context * model.cache_bytes_per_token)
    cost = [f"{measured.tokens_per_question:,.0f}", f"{measured.seconds_per_question:.2f}"]
    scores = [_percent(measured.score, least=0.0), *[by_seed] * seeds, *[over] * trained]
    return [*scores, *cost, f"{measured.largest_context:,.0f}", cache]


def _size(num_bytes: float) -> str:
    """Writes bytes in kB, or in MB from one on."""
    return f"{number(num_bytes / 1e6)} MB" if num_bytes >= 1e6 else f"{number(num_bytes / 1e3)} kB"


def _note(study: BudgetStudy, curve: BudgetCurve) -> str:
    compared, margin = (len(curve.points) - 1) * len(study.parts), _points(study.margin)
    skipped = f"Skipped, since not asked under every budget: {', '.join(curve.skipped)}. " if curve.skipped else ""
    return (
        f"{skipped}Scores have 95 % bootstrap intervals over questions, sets weighing the same. Differences are paired "
        f"by question; their intervals hold together with a probability of {1 - ALPHA:.0%} (Bonferroni over {compared} "
        f"differences). A budget is enough when the interval, of it and of every larger budget, lies above -{margin}, "
        "and not enough when it is below. The power is a cautious estimate of the probability that a "
        "budget which loses nothing is called enough. The largest context is in tokens, a mean over attempts."
    )


def _points(share: float) -> str:
    """Writes a share as percent points: "2 points", "1.5 points"."""
    value = f"{100 * share:.3g}"
    return f"{value} point{'s' * (value != '1')}"


def _percent(interval: Interval, *, least: float = -1.0) -> str:
    """Writes a share, or by default a difference of shares. The interval of a few trainings may exceed the range of
    shares, so it is cut at `least` and at 1."""
    low, high = max(interval.low, least), min(interval.high, 1.0)
    ends = f"({100 * low:.1f} to {100 * high:.1f})" if interval.is_bounded else NO_INTERVAL
    return f"{100 * interval.value:.1f} {ends}"
