"""Shows whether memories become worse from turn to turn: the rates of `memory_quality` for every turn, with intervals.

Turns are numbered from 1. Those from the fifth on share a row that is twice as long as the one before (5 to 8, 9 to 16,
...), so that 180 chunks have nine rows. Attempts that end early have no later turns; a difference between two rows may
be one between their questions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mempipe.evaluation.memory_quality import MemoryQuality, trajectory_quality, turn_qualities
from mempipe.evaluation.statistics import Interval, bootstrap_ratios
from mempipe.types import Group

RATES = ("kept_rate", "lost_rate", "answer_in_memory", "irrelevant_rate", "contradiction_rate")
"""The rates that are shares from 0 to 1 and that a turn has."""
_SINGLE = 4  # each of these turns has its own row


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnQuality:
    """The rates of one row. A rate without a case is absent."""

    turns: str
    """"1", or "5 to 8"."""
    num_memories: int
    rates: dict[str, Interval]
    num_cases: dict[str, int]
    """Cases of each rate: the number below its line."""


def quality_by_turn(
    groups: Iterable[Group], *, seed: int = 1, num_resamples: int = 2000, confidence: float = 0.95
) -> list[TurnQuality]:
    """Returns the rates of all attempts by turn, the first turns first; turns without a memory have no row.

    Intervals are bootstraps over questions: attempts at the same question, and its turns, are drawn together.
    """
    return quality_and_by_turn(groups, seed=seed, num_resamples=num_resamples, confidence=confidence)[1]


def quality_and_by_turn(
    groups: Iterable[Group],
    *,
    memory_budget: int | None = None,
    seed: int = 1,
    num_resamples: int = 2000,
    confidence: float = 0.95,
) -> tuple[dict[str, float], list[TurnQuality]]:
    """Returns `memory_quality` and `quality_by_turn` of the groups. Each group is read once and not kept."""
    whole = MemoryQuality()
    rows: dict[int, dict[tuple[str, str], MemoryQuality]] = defaultdict(dict)
    for group in groups:
        question = group.question
        key = question.text, question.golden_answers[0] if question.golden_answers else ""
        for trajectory in group.trajectories:
            turns = turn_qualities(trajectory, question)
            whole += trajectory_quality(trajectory, question, turns)
            for turn, counts in enumerate(turns, start=1):
                if counts.memory_turns:
                    row = rows[first_of_row(turn)]
                    row[key] = row.get(key, MemoryQuality()) + counts
    drawn = {"seed": seed, "num_resamples": num_resamples, "confidence": confidence}
    by_turn = [_row(start, [*rows[start].values()], **drawn) for start in sorted(rows)]
    return whole.rates(memory_budget=memory_budget), by_turn


def first_of_row(turn: int) -> int:
    """Returns the first turn of the row that a turn belongs to."""
    return turn if turn <= _SINGLE else 2 ** ((turn - 1).bit_length() - 1) + 1


def row_label(first: int) -> str:
    """Returns the turns of a row in words; `first` is what `first_of_row` returns."""
    return str(first) if first <= _SINGLE else f"{first} to {2 * (first - 1)}"


def _row(start: int, questions: Sequence[MemoryQuality], **drawn) -> TurnQuality:
    ratios = [counts.ratios() for counts in questions]
    table = np.asarray([[each[name] for name in RATES] for each in ratios], dtype=np.float64)  # [questions, rates, 2]
    intervals = bootstrap_ratios(table[..., 0], table[..., 1], **drawn)
    cases = {name: int(number) for name, number in zip(RATES, table[..., 1].sum(axis=0), strict=True)}
    return TurnQuality(
        turns=row_label(start),
        num_memories=sum(counts.memory_turns for counts in questions),
        rates={name: interval for name, interval in zip(RATES, intervals, strict=True) if interval is not None},
        num_cases={name: number for name, number in cases.items() if number},
    )
