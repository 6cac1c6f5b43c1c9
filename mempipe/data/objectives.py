"""Several questions asked as one, with an answer for each: the objectives of MEM1 (arXiv 2506.15841)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from mempipe.settings import ConfigError
from mempipe.types import Question

MAX_OBJECTIVES = 16


def join_objectives(
    questions: Iterable[Question],
    *,
    objectives: int,
    seed: int | None = None,
    file: str = "",
    left_out: Counter[str] | None = None,
) -> Iterator[Question]:
    """Yields every `objectives` neighbours as one question, their texts (each ending in "?") joined by "; ". A
    remainder is skipped, and counted in `left_out`. Each fact of the new question's evidence has its objective. It has
    no hops and no document: these belong to one of them alone.

    As published (MEM1) neighbours are those of the file; `seed` shuffles the questions first. Raises ConfigError for
    neighbours that search different parts of the corpus, since an agent searches one part at a time. `file` is where
    the questions are from, for this message.
    """
    if seed is not None:
        listed = list(questions)
        random.Random(f"{seed}:objectives").shuffle(listed)
        questions = listed
    remaining = iter(questions)
    while len(group := list(islice(remaining, objectives))) == objectives:
        if len({question.partition for question in group}) > 1:
            parts = ", ".join(f"{question.id} searches {question.partition!r}" for question in group)
            raise ConfigError(
                f"{f'{file}: ' * bool(file)}neighbouring questions cannot be asked as one: {parts}; put questions of "
                "the same part of the corpus next to each other"
            )
        yield replace(
            group[0],
            id="+".join(question.id for question in group),
            text=joined_texts(question.text for question in group),
            golden_answers=["; ".join(joinable(question.golden_answers) for question in group)],
            objectives=[question.golden_answers for question in group],
            num_hops=0,
            evidence=[
                replace(fact, objective=number) for number, question in enumerate(group) for fact in question.evidence
            ],
            context="",
            recall_targets=[],
        )
    if group and left_out is not None:
        left_out["too few for one more"] += len(group)


def joinable(golden_answers: Sequence[str]) -> str:
    """Returns the first golden answer without a semicolon, which would part it in two; the first where all have one."""
    return next((answer for answer in golden_answers if ";" not in answer), golden_answers[0])


def joined_texts(questions: Iterable[str]) -> str:
    """Returns several questions as one, each ending in "?"."""
    return "; ".join(text if text.endswith("?") else f"{text}?" for text in questions)
