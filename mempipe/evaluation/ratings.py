"""Ratings of memories by people: their filled sheets, the share of yes, their agreement, and the verdict of the
automatic counts on the same turns.

A rating is yes or no. The score of a turn is the share of its raters who say yes, and the turns of a question are one
cluster: an interval draws them together.

Agreement is Krippendorff's alpha, 1 - D_o / D_e: D_o is the share of unequal pairs of ratings of one turn, D_e that of
pairs drawn from all ratings. It takes any number of people and turns that some of them skipped. Cohen's kappa takes two
people and turns that both rated. For two people and many turns alpha is Scott's pi.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mempipe.evaluation.memory_quality import MemoryQuality
from mempipe.evaluation.statistics import Interval, unbounded
from mempipe.settings import ConfigError

RATINGS = {
    "facts_kept": "does the new memory keep every needed fact of the old one and of the text that was read?",
    "noise_filtered": "does the new memory omit everything that the question does not need?",
}
"""The questions that a person answers for each memory turn, by the column of the sheet."""
KEY = ("trajectory", "turn")
"""The columns by which the turns of several sheets are joined."""
LABELS = {"yes": True, "no": False}
_NUM_RESAMPLES = 2000
_MAX_FIELD = 2**30  # characters of a text that was read; Python's own limit is 131,072


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedTurn:
    """A memory turn of the sheets. `ratings` has, for each question of RATINGS, what each person said; those who left
    it open are not in it."""

    trajectory: str
    turn: int
    question: str
    ratings: dict[str, dict[str, bool]] = field(default_factory=lambda: {name: {} for name in RATINGS})

    def score(self, name: str) -> float | None:
        """Returns the share of yes; None where it was not rated."""
        said = [*self.ratings[name].values()]
        return sum(said) / len(said) if said else None

    def majority(self, name: str) -> bool | None:
        """Returns the majority of the ratings; None for a tie, and without ratings."""
        score = self.score(name)
        return None if score is None or score == 0.5 else score > 0.5


def read_ratings(paths: Sequence[Path]) -> list[RatedTurn]:
    """Returns the turns of the sheets in their order; a person is named by the file.

    Raises ConfigError for a file that is not a sheet, that is given twice, or that shares no turn with the others, for
    a turn that is listed twice, and for a rating other than yes and no.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError(f"--ratings names a file twice: {', '.join(map(str, paths))}; give one file for each person")
    turns: dict[tuple[str, int], RatedTurn] = {}
    stems = Counter(path.stem for path in paths)
    sheets = {path: _read(path) for path in paths}
    for path, sheet in sheets.items():
        others = set().union(*(other for name, other in sheets.items() if name != path))
        if len(sheets) > 1 and not others & sheet.keys():
            raise ConfigError(f"{path} shares no turn with the other sheets; give sheets of the same trajectories")
        person = path.stem if stems[path.stem] == 1 else str(path)
        for key, (question, given) in sheet.items():
            rated = turns.setdefault(key, RatedTurn(trajectory=key[0], turn=key[1], question=question))
            for name, said in given.items():
                rated.ratings[name][person] = said
    return [*turns.values()]


def alpha_interval(rated: Sequence[tuple[Hashable, Sequence[bool]]]) -> tuple[float, Interval]:
    """Returns the share of equal pairs and Krippendorff's alpha of (cluster, ratings of one turn) with its 95 %
    interval; not a number where all ratings are equal, since then there is no disagreement by chance. Turns with one
    rating do not count. Clusters are drawn with all of their turns.

    Raises ValueError where no turn has two ratings.
    """
    tables: dict[Hashable, np.ndarray] = defaultdict(lambda: np.zeros((2, 2)))
    for cluster, ratings in rated:
        if len(ratings) > 1:
            counts = np.asarray([len(ratings) - sum(ratings), sum(ratings)], dtype=np.float64)
            tables[cluster] += (np.outer(counts, counts) - np.diag(counts)) / (len(ratings) - 1)
    if not tables:
        raise ValueError("no turn has two ratings")
    coincidences = np.stack([*tables.values()])  # [clusters, 2, 2]
    whole = coincidences.sum(axis=0)
    equal, value = float(np.trace(whole) / whole.sum()), float(_alpha(whole))
    if len(coincidences) == 1 or not np.isfinite(value):
        return equal, unbounded(value)
    drawn = np.random.default_rng(1).integers(len(coincidences), size=(_NUM_RESAMPLES, len(coincidences)))
    alphas = _alpha(coincidences[drawn].sum(axis=1))
    low, high = np.nanquantile(alphas, [0.025, 0.975])  # a resample with one label only has no alpha
    return equal, Interval(value=value, low=float(low), high=float(high))


def automatic_rating(counts: MemoryQuality) -> dict[str, bool]:
    """Returns the answers to RATINGS that follow from the counts of one turn; a question without a case is absent.

    The facts are kept when the memory knows each needed fact that was found or known before. The rest is omitted when
    none of its words is irrelevant (`irrelevant_rate` 0).
    """
    said = {}
    if counts.facts_retrieved + counts.facts_held:
        said["facts_kept"] = counts.facts_kept == counts.facts_retrieved and not counts.facts_lost
    if counts.judged_words:
        said["noise_filtered"] = not counts.irrelevant_words
    return said


def _alpha(coincidences: np.ndarray) -> np.ndarray:
    """Returns [..., 2, 2] -> [...]: Krippendorff's alpha of coincidences of labels; not a number where all are of one
    label."""
    of_label = coincidences.sum(axis=-1)
    number = of_label.sum(axis=-1)
    observed = 1 - np.trace(coincidences, axis1=-2, axis2=-1) / number
    with np.errstate(invalid="ignore"):
        expected = 1 - (of_label * (of_label - 1)).sum(axis=-1) / (number * (number - 1))
        return 1 - observed / expected


def _read(path: Path) -> dict[tuple[str, int], tuple[str, Mapping[str, bool]]]:
    """Returns the question and the ratings of each row of a sheet by KEY."""
    csv.field_size_limit(_MAX_FIELD)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            separator = max(",;\t", key=file.readline().count)  # a spreadsheet saves the one of its language
            file.seek(0)
            rows = list(csv.DictReader(file, delimiter=separator))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as a sheet: {error}") from error
    needed = [*KEY, "question", *RATINGS]
    if not rows or any(column not in rows[0] for column in needed):
        raise ConfigError(f"{path} is not a rating sheet; it needs rows and the columns {', '.join(needed)}")
    sheet: dict[tuple[str, int], tuple[str, Mapping[str, bool]]] = {}
    for line, row in enumerate(rows, start=1):
        if not any(row.values()):  # of cells below the sheet
            continue
        texts = {name: (row[name] or "").strip().lower() for name in RATINGS}
        if wrong := [f"{name} is {text!r}" for name, text in texts.items() if text not in ("", *LABELS)]:
            raise ConfigError(f"{path}, row {line}: {', '.join(wrong)}; expected yes, no or nothing")
        turn = (row["turn"] or "").strip()
        if not turn.isdecimal() or not int(turn):
            raise ConfigError(f"{path}, row {line}: turn is {turn!r}; expected a number from 1")
        key = (row["trajectory"] or "").strip(), int(turn)
        if key in sheet:
            raise ConfigError(f"{path}, row {line}: turn {turn} of trajectory {key[0]} is listed twice; keep one row")
        sheet[key] = row["question"] or "", {name: LABELS[text] for name, text in texts.items() if text}
    return sheet
