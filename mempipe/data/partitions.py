"""The parts of a corpus: the part that is searched by default, and questions about it."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from mempipe.data.config import Columns
from mempipe.data.qa import iter_questions
from mempipe.types import Question

MAX_QUESTIONS = 2000


def first_questions(file: str, *, columns: Columns) -> list[Question]:
    """Returns the first questions of a file, MAX_QUESTIONS at most; none where it is not on this machine. Raises
    ConfigError."""
    if not (file and Path(file).exists()):
        return []
    return list(itertools.islice(iter_questions(file, columns=columns), MAX_QUESTIONS))


def main_partition(questions: Sequence[Question]) -> str:
    """Returns the part of the corpus that most of the questions are about, the first by name of several; "" if every
    question has a different part."""
    counts = Counter(question.partition for question in questions)
    most = max(counts.values(), default=0)
    return min(name for name, count in counts.items() if count == most) if most > 1 else ""


def example_questions(questions: Sequence[Question], *, partition: str) -> list[Question]:
    """Returns the questions about a part of the corpus ("": about all of it), so that their hop counts take turns."""
    by_hops: dict[int, list[Question]] = defaultdict(list)
    for question in questions:
        if partition in ("", question.partition):
            by_hops[question.num_hops].append(question)
    turns = itertools.zip_longest(*(by_hops[hops] for hops in sorted(by_hops)))
    return [question for turn in turns for question in turn if question is not None]
