"""Results of people's ratings of memories, as lines of text."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mempipe.evaluation.memory_quality import MemoryQuality
from mempipe.evaluation.quality_by_turn import first_of_row, row_label
from mempipe.evaluation.ratings import RATINGS, RatedTurn, alpha_interval, automatic_rating
from mempipe.evaluation.statistics import (
    Interval,
    bootstrap_gap,
    bootstrap_ratios,
    clustered_mean,
    difference_interval,
)
from mempipe.evaluation.table import percent_text
from mempipe.settings import ConfigError

_SEED = 1
_CONFIDENCE = 0.95


def rating_lines(
    turns: Sequence[RatedTurn], automatic: Mapping[tuple[str, int], MemoryQuality] | None = None
) -> list[str]:
    """Returns for each question of RATINGS the share of yes, the agreement of people, the share by turn, and with
    `automatic` (the counts of turns by name and turn) how well these agree with the people.

    Raises ConfigError if `automatic` has none of the turns.
    """
    if automatic is not None and not any((each.trajectory, each.turn) in automatic for each in turns):
        raise ConfigError("the run has none of the rated turns; give the folder that the sheet was written from")
    attempts = len({each.trajectory for each in turns})
    lines = [
        f"{_number(len(turns), 'memory turn')} of {_number(attempts, 'trajectory', 'trajectories')}; percent with 95 % "
        "intervals over questions"
    ]
    for name, question in RATINGS.items():
        rated = [each for each in turns if each.ratings[name]]
        lines += ["", f"{name}: {question}"]
        if not rated:
            lines.append("  not rated")
            continue
        lines += _share_lines(name, rated)
        lines += _turn_lines(name, rated)
        if automatic is not None:
            lines += _automatic_lines(name, rated, automatic)
    return lines


def _share_lines(name: str, rated: Sequence[RatedTurn]) -> list[str]:
    people = list(dict.fromkeys(person for each in rated for person in each.ratings[name]))
    lines = [_line("yes", f"{_share(name, rated)} of {_number(len(rated), 'turn')}")]
    if len(people) == 1:
        return lines
    for person in people:
        own = [each.ratings[name][person] for each in rated if person in each.ratings[name]]
        lines.append(_line(f"  {person}", f"{100 * sum(own) / len(own):.2f} of {_number(len(own), 'turn')}"))
    twice = [(each.question, [*each.ratings[name].values()]) for each in rated if len(each.ratings[name]) > 1]
    text = f"{_alpha(twice)}; {_number(len(twice), 'turn')} with two ratings or more" if twice else "no turn in common"
    return [*lines, _line("agreement", text)]


def _turn_lines(name: str, rated: Sequence[RatedTurn]) -> list[str]:
    rows: dict[int, list[RatedTurn]] = defaultdict(list)
    attempts: dict[str, list[RatedTurn]] = defaultdict(list)
    for each in sorted(rated, key=lambda each: each.turn):
        rows[first_of_row(each.turn)].append(each)
        attempts[each.trajectory].append(each)
    lines = [
        _line(f"turn {row_label(first)}", f"{_share(name, own)} of {_number(len(own), 'turn')}")
        for first, own in rows.items()
    ]
    ends = [(own[0], own[-1]) for own in attempts.values() if len(own) > 1]
    if ends:
        changes = [(first.question, _score(name, last) - _score(name, first)) for first, last in ends]
        change = difference_interval(clustered_mean([changes]), confidence=_CONFIDENCE)
        of = _number(len(ends), "trajectory", "trajectories")
        lines.append(_line("last - first", f"{_points(change)} points, of the same {of}"))
    return lines


def _automatic_lines(
    name: str, rated: Sequence[RatedTurn], automatic: Mapping[tuple[str, int], MemoryQuality]
) -> list[str]:
    """Compares the automatic verdict with that of most people, and the share of irrelevant words with it."""
    pairs = []
    for each in rated:
        counts, most = automatic.get((each.trajectory, each.turn), MemoryQuality()), each.majority(name)
        said = automatic_rating(counts)
        if name in said and most is not None:
            pairs.append((each, counts, most, said[name]))
    if not pairs:
        return [_line("automatic", "no turn has both an automatic verdict and one of most people")]
    text = _alpha([(each.question, [most, said]) for each, _, most, said in pairs])
    lines = [_line("automatic", f"with most people {text}; {_number(len(pairs), 'turn')}")]
    lines.append(_line("", f"yes in {100 * sum(said for *_, said in pairs) / len(pairs):.2f} of them"))
    if len(pairs) < len(rated):
        skipped = _number(len(rated) - len(pairs), "turn")
        lines.append(_line("", f"{skipped} without a needed fact in the data, or with as many yes as no"))
    if name == "noise_filtered":
        lines += _irrelevance_lines(
            (each.question, counts.irrelevant_words / counts.judged_words, most) for each, counts, most, _ in pairs
        )
    return lines


def _irrelevance_lines(judged: Iterable[tuple[str, float, bool]]) -> list[str]:
    """Says how many words of a memory are irrelevant where most people say no, and where they say yes."""
    shares: dict[bool, list[tuple[str, float]]] = {True: [], False: []}
    for question, share, most in judged:
        shares[most].append((question, share))
    if not all(shares.values()):
        return []
    no, yes = (clustered_mean([shares[most]]).value for most in (False, True))
    gap = bootstrap_gap([shares[False]], [shares[True]], seed=_SEED, confidence=_CONFIDENCE)
    text = f"irrelevant words: {100 * no:.2f} percent where most say no, {100 * yes:.2f} where most say yes"
    return [_line("", f"{text}; difference {_points(gap)}")]


def _share(name: str, rated: Sequence[RatedTurn]) -> str:
    """Returns the share of yes among turns. Questions have different numbers of turns, which the interval draws with
    them, as that of the automatic rates by turn does."""
    scores: dict[str, list[float]] = defaultdict(list)
    for each in rated:
        scores[each.question].append(_score(name, each))
    yes, turns = (np.asarray([[count(of)] for of in scores.values()], dtype=np.float64) for count in (sum, len))
    (interval,) = bootstrap_ratios(yes, turns, seed=_SEED, confidence=_CONFIDENCE)
    return percent_text(interval)


def _score(name: str, turn: RatedTurn) -> float:
    score = turn.score(name)
    assert score is not None, "the turn is rated"
    return score


def _alpha(rated: Sequence[tuple[str, Sequence[bool]]]) -> str:
    equal, alpha = alpha_interval(rated)
    text = f"{100 * equal:.1f} percent of pairs equal, "
    if math.isnan(alpha.value):
        return f"{text}no alpha because all ratings are the same"
    ends = f" ({alpha.low:.2f} to {alpha.high:.2f})" if alpha.is_bounded else ""
    return f"{text}Krippendorff's alpha {alpha.value:.2f}{ends}"


def _points(interval: Interval) -> str:
    ends = f" ({100 * interval.low:.1f} to {100 * interval.high:.1f})" if interval.is_bounded else ""
    return f"{100 * interval.value:.1f}{ends}"


def _line(label: str, text: str) -> str:
    return f"  {label:<13} {text}".rstrip()


def _number(count: int, word: str, plural: str = "") -> str:
    return f"{count:,} {word if count == 1 else plural or f'{word}s'}"
