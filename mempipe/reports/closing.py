"""The last lines of a run and of a sweep on the terminal: results, the places of files, and the next commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mempipe.credentials import without_credentials
from mempipe.engines.learner_settings import profile_files
from mempipe.evaluation.table import percent_text
from mempipe.reports.budgets import verdicts
from mempipe.reports.next_steps import next_steps
from mempipe.reports.terminal import console, table
from mempipe.runs import Run
from mempipe.studies.budgets import BudgetStudy

_ROWS = (
    ("exact match", "em"),
    ("F1", "f1"),
    ("recalls that are right", "measure_recall"),
    ("needed fact kept in memory", "kept_rate"),
    ("needed passage found", "found_rate"),
    ("answered before it was known", "early_answer_rate"),
    ("context tokens per turn", "context_tokens_per_turn"),
    ("  full history would carry", "full_history_tokens_per_turn"),
)


def closing_table(run: Run, *, losses: Sequence[str] = ()) -> None:
    """Prints the results of a run, the places of its files, the missing records, and the next commands."""
    report = json.loads((run.folder / "report.json").read_text())
    out = console()
    sampled = run.config.evaluation.sampled
    shown = table(
        "", "before", "after", title=f"{run.config.name}: held-out questions, {sampled}", right=("before", "after")
    )
    for label, key in _ROWS:
        values = [report.get(f"{key}_{end}") for end in ("start", "end")]
        if any(value is not None for value in values):
            shown.add_row(label, *map(_short, values))
    out.print(shown)
    for name in ("note", "alarms"):
        if name in report:
            out.print(report[name])
    steps = next_steps(run.folder, without_credentials(run.config.model_dump(mode="json")))
    minutes = sum(run.seconds.values()) / 60
    longest = sorted(run.seconds.items(), key=lambda phase: -phase[1])
    phases = ", ".join(f"{name.replace('_', ' ')} {seconds:.0f} s" for name, seconds in longest if seconds >= 1)
    lines = (
        f"{run.state.get('num_steps', 0)} steps, {minutes:.1f} minutes: {phases}",
        f"Report: {run.folder / 'report.html'}",
        *_profiles(run),
        *(f"Not on record: {loss}" for loss in losses),
        "Next:",
        *(line for command, meaning in steps for line in (f"  {command}", f"      {meaning}")),
    )
    for line in lines:
        out.print(line, soft_wrap=True)  # commands can be copied whole


def _profiles(run: Run) -> list[str]:
    """Returns a line for each step that was to be profiled and was trained."""
    files = profile_files(run.folder, run.config.tracking.profile_steps)
    return [
        f"Profile of step {step}: {f'{file}, to be opened in ui.perfetto.dev' if file.exists() else 'not written'}"
        for step, file in files.items()
        if step <= run.state.get("num_steps", 0)
    ]


def closing_study(study: BudgetStudy, *, paths: Sequence[Path]) -> None:
    """Prints the score of each agent under each memory budget, how much memory is enough, and where the report is."""
    out, numbers = console(), ("memory tokens", study.metric, "tokens per question")
    shown = table("agent", *numbers, title="percent over all questions, with 95 % intervals", right=numbers)
    rows = [
        (curve.agent, f"{point.memory_tokens:,}", point.measured)
        for curve in study.whole.curves
        for point in curve.points
    ]
    rows += [(reference.agent, "no budget", reference.measured) for reference in study.whole.references]
    for agent, budget, measured in rows:
        shown.add_row(agent, budget, percent_text(measured.score), f"{measured.tokens_per_question:,.0f}")
    if rows:
        out.print(shown)
    pages = [f"Report: {path}" for path in paths if path.suffix == ".html"]
    for line in [*verdicts(study), *pages]:
        out.print(line, soft_wrap=True, highlight=False)


def _short(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.0f}"
