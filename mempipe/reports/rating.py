"""Sheets on which people rate memories turn by turn, and how far two raters agree."""

from __future__ import annotations

import csv
import hashlib
import random
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import scipy

from mempipe.facts import is_memory_turn
from mempipe.reports.traced import Traced
from mempipe.settings import ConfigError
from mempipe.storage.files import whole_file

RATINGS = {
    "facts_kept": "does the new memory keep every needed fact that the old one or the passages hold?",
    "noise_filtered": "does it omit everything that the question does not need?",
}
_LABELS = ("yes", "no")
_COLUMNS = ["trajectory", "turn", "question", "memory_before", "query", "passages", "memory_after"]
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_SEED = 1
_NUM_RESAMPLES = 2000


def write_sheet(path: Path, traced: Sequence[Traced], *, num_trajectories: str | int) -> int:
    """Writes a CSV with a row per memory turn of `num_trajectories` random trajectories, and empty columns to be filled
    with yes or no. Returns the number of trajectories.

    The same trajectories give the same sheet. The rater sees neither phase nor reward: a
    trajectory's name is the start of the SHA-256 of its key.
    """
    wanted = int(num_trajectories) if str(num_trajectories).isdigit() else 0
    if not wanted:
        raise ConfigError(f"--sheet is {num_trajectories}; expected a number of trajectories from 1, e.g. 20")
    rateable = [each for each in traced if _memory_turns(each)]
    if not rateable:
        raise ConfigError("no trajectory writes a memory, so there is nothing to rate")
    chosen = random.Random(_SEED).sample(rateable, min(wanted, len(rateable)))
    with whole_file(path) as partial, partial.open("w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*_COLUMNS, *RATINGS, "comment"])
        for each in chosen:
            for index in _memory_turns(each):
                writer.writerow([*map(_as_text, _row(each, index)), *([""] * (len(RATINGS) + 1))])
    return len(chosen)


def agreement_lines(first: Path, second: Path) -> list[str]:
    """Returns the agreement of two filled sheets, question by question: turns that both rated, share of equal ratings,
    Cohen's kappa with its interval.

    Raises ConfigError for a file that is not a sheet, for a rating other than yes and no, and if no turn is shared.
    """
    sheets = [_read(path) for path in (first, second)]
    shared = [key for key in sheets[0] if key in sheets[1]]
    if not shared:
        raise ConfigError(f"{first} and {second} share no turn; they are not of one sheet")
    lines = []
    for column, question in RATINGS.items():
        pairs = [(key[0], sheets[0][key][column], sheets[1][key][column]) for key in shared]
        rated = [(trajectory, a, b) for trajectory, a, b in pairs if a and b]
        lines.append(f"{column}: {question}")
        lines.append(f"  {_agreement(rated)}; {len(pairs) - len(rated)} turns without two ratings")
    return lines


def kappa_interval(rated: Sequence[tuple[str, str, str]]) -> tuple[float, float, float]:
    """Returns Cohen's kappa of (trajectory, rating, rating) and its 95 % interval, not a number where it has none.

    kappa = (p_o - p_e) / (1 - p_e), with the observed share p_o of equal ratings and the share p_e that raters with the
    same habits would reach by chance. A resample draws trajectories, since turns of one are not independent.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(trajectory for trajectory, *_ in rated))}
    tables = np.zeros((len(numbers), 2, 2))
    for trajectory, first, second in rated:
        tables[numbers[trajectory], _LABELS.index(first), _LABELS.index(second)] += 1
    value = float(_kappa(tables.sum(axis=0)))
    if len(tables) < 2:
        return value, float("nan"), float("nan")
    resampling = {"n_resamples": _NUM_RESAMPLES, "method": "percentile", "rng": np.random.default_rng(_SEED)}

    def kappas(drawn: np.ndarray, axis: int) -> np.ndarray:
        return _kappa(tables[drawn].sum(axis=axis - 2))  # drawn: [..., trajectories], axis -1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a resample may hold one label only, and then has no kappa
        resampled = scipy.stats.bootstrap((np.arange(len(tables)),), kappas, **resampling)
    low, high = np.nanquantile(resampled.bootstrap_distribution, [0.025, 0.975])
    return value, float(low), float(high)


def _kappa(tables: np.ndarray) -> np.ndarray:
    """[..., 2, 2] -> [...]: the kappa of counted pairs of labels; not a number where both raters gave one label."""
    shares = tables / tables.sum(axis=(-2, -1), keepdims=True)
    observed = np.trace(shares, axis1=-2, axis2=-1)
    expected = (shares.sum(axis=-1) * shares.sum(axis=-2)).sum(axis=-1)
    with np.errstate(invalid="ignore"):
        return (observed - expected) / (1 - expected)


def _agreement(rated: Sequence[tuple[str, str, str]]) -> str:
    if not rated:
        return "nobody rated it twice"
    equal = sum(a == b for _, a, b in rated) / len(rated)
    kappa, low, high = kappa_interval(rated)
    if not np.isfinite(kappa):
        return f"{len(rated)} turns, {equal:.1%} equal, no kappa: both raters gave one rating only"
    return f"{len(rated)} turns, {equal:.1%} equal, Cohen's kappa {kappa:.2f} ({low:.2f} to {high:.2f})"


def _memory_turns(traced: Traced) -> list[int]:
    trajectory = traced.trajectory
    return [index for index in range(len(trajectory.contexts)) if is_memory_turn(trajectory, index)]


def _row(traced: Traced, index: int) -> list[str]:
    context = traced.trajectory.contexts[index]
    passages = [f"[{p.title}] {p.text}" for search in context.searches for p in search.passages]
    queries = [search.query for search in context.searches]
    return [
        hashlib.sha256(traced.key.encode()).hexdigest()[:12],
        str(index + 1),
        traced.question.text,
        context.memory_before,
        "\n".join(queries),
        "\n".join(passages),
        context.memory_after,
    ]


def _as_text(text: str) -> str:
    """Returns the text so that a spreadsheet takes it for text and never for a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _read(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Returns the ratings by (trajectory, turn)."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as a sheet: {error}") from error
    needed = ["trajectory", "turn", *RATINGS]
    if not rows or any(column not in rows[0] for column in needed):
        raise ConfigError(f"{path} is not a rating sheet; it needs rows and the columns {', '.join(needed)}")
    ratings = {}
    for line, row in enumerate(rows, start=1):
        given = {column: (row[column] or "").strip().lower() for column in RATINGS}
        if wrong := [f"{column} is {text!r}" for column, text in given.items() if text not in ("", *_LABELS)]:
            raise ConfigError(f"{path}, row {line}: {', '.join(wrong)}; expected yes, no or nothing")
        ratings[row["trajectory"], row["turn"]] = given
    return ratings
