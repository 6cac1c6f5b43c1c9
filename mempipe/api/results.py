"""Reads what evaluations and sweeps have written, as one frame."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from mempipe.evaluation.results import SETTINGS, ResultRow, read_result_state, read_results
from mempipe.settings import ConfigError

_DEPTH = 5
"""Levels that are looked into: the given folder, trials, a trial, a run, a set."""
_TRIALS = "trials"
"""The folder of a sweep with one evaluation for each trial."""


def results(folder: str | Path) -> pl.DataFrame:
    """Returns a row for each question of each run and set that `mempipe evaluate` or `mempipe sweep` has measured;
    `folder` is that of an evaluation, a run in it, a set, or a sweep. An evaluation that is not finished has the rows
    so far.

    Scores are means over the attempts; answer, end_reason, cause, turns and tokens are those of the first one; a joined
    question has a cause for each of its answers ("none; lost"). `trial` is the sweep's; `memory_tokens` is null for an
    agent without that budget, and for a control run. Raises ConfigError for a folder without results, or with those of
    several evaluations, and for a damaged file.
    """
    top = Path(folder)
    if not top.is_dir():
        raise ConfigError(f"{top} does not exist; give the folder of an evaluation or a sweep")
    places = sorted(file.parent for depth in range(_DEPTH) for file in top.glob("*/" * depth + SETTINGS))
    if not places:
        raise ConfigError(f"{top} holds no results; give the folder of an evaluation or a sweep")
    folders = dict.fromkeys(place.resolve().parents[1] for place in places)
    evaluations = [each for each in folders if each.parent.name != _TRIALS]
    if len(evaluations) > 1:
        names = ", ".join(each.name for each in evaluations)
        raise ConfigError(f"{top} holds several evaluations ({names}), whose runs may have the same names; give one")
    return pl.DataFrame([row for place in places for row in _rows(place)], schema=_SCHEMA)


def _rows(place: Path) -> list[dict[str, Any]]:
    """Returns the rows of the folder of one run on one set."""
    place = place.resolve()
    settings = read_result_state(place)["settings"]
    config, is_control = settings["run"], settings.get("control") is not None
    of_run = {
        "trial": place.parents[1].name if place.parents[2].name == _TRIALS else None,
        "run": place.parent.name,
        "set": place.name,
        "agent": config["agent"]["name"],
        "memory_tokens": None if is_control else config["budget"].get("memory_tokens"),
    }
    return [
        {**of_run, "question_id": row.question_id, "num_hops": row.num_hops or None, **row_values(row)}
        for row in read_results(place)
    ]


def causes_text(causes: Sequence[str | None]) -> str | None:
    """Returns the first causes of an attempt, one for each objective, as a text; None where there is none."""
    return "; ".join(cause or "none" for cause in causes) if any(causes) else None


def row_values(row: ResultRow) -> dict[str, Any]:
    """Returns what a frame shows of a question's result, by column."""
    return {
        "question": row.question,
        "golden_answers": row.golden_answers,
        "answer": row.answers[0] if row.answers else None,
        "em": row.em,
        "f1": row.f1,
        "end_reason": str(row.end_reasons[0]) if row.end_reasons else None,
        "cause": causes_text(row.first_causes[: max(len(row.em_by_objective), 1)]),
        "turns": len(row.context_tokens_by_turn[0]) if row.context_tokens_by_turn else 0,
        "tokens": row.total_tokens[0] if row.total_tokens else 0,
        "seconds": row.seconds,
        "failed": row.failed or None,
    }


_SCHEMA: dict[str, Any] = {
    "trial": pl.String,
    "run": pl.String,
    "set": pl.String,
    "agent": pl.String,
    "memory_tokens": pl.Int64,
    "question_id": pl.String,
    "question": pl.String,
    "golden_answers": pl.List(pl.String),
    "num_hops": pl.Int64,
    "answer": pl.String,
    "em": pl.Float64,
    "f1": pl.Float64,
    "end_reason": pl.String,
    "cause": pl.String,
    "turns": pl.Int64,
    "tokens": pl.Int64,
    "seconds": pl.Float64,
    "failed": pl.String,
}
