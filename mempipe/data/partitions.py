"""The parts of a corpus that questions are about, and the one that stands for all when nobody names any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mempipe.types import Question


def main_partition(questions: Sequence[Question]) -> str:
    """Returns the part of the corpus that most of the questions are about, the first by name of several; "" where every
    question has a part of its own."""
    counts = Counter(question.partition for question in questions)
    most = max(counts.values(), default=0)
    return min(name for name, count in counts.items() if count == most) if most > 1 else ""
