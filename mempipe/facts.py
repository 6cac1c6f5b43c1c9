"""Finds the needed facts that a text knows, a turn finds, and a memory keeps or loses; memory quality and rewards of
turns are computed from them. The terms are defined in `mempipe.evaluation.memory_quality`.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence
from enum import StrEnum

from mempipe.text import UNSPACED, visible, with_marks
from mempipe.types import Context, EndReason, Evidence, Question, Trajectory

_WORD = re.compile(rf"[^\W_{UNSPACED}]+|[{UNSPACED}]")
_ARTICLES = frozenset({"a", "an", "the"})


def is_memory_turn(trajectory: Trajectory, index: int) -> bool:
    """Returns whether the turn wrote a memory or had to, as `mempipe.evaluation.memory_quality` defines it."""
    context, is_last = trajectory.contexts[index], index + 1 == len(trajectory.contexts)
    answered = is_last and trajectory.end_reason is EndReason.ANSWERED
    return bool(context.memory_after) or not is_last or (bool(context.searches) and not answered)


def places_by_objective(question: Question) -> list[list[int]]:
    """Returns the places in `question.evidence` of each objective's facts, in the order of need. A question without
    objectives has one list.
    """
    facts = list(enumerate(question.evidence))
    return [[place for place, fact in facts if fact.objective == n] for n in range(len(question.objectives) or 1)]


def facts_by_objective(question: Question) -> list[list[Evidence]]:
    """Returns the facts of each objective, in the order of need. A question without objectives has one list."""
    return [[question.evidence[place] for place in places] for places in places_by_objective(question)]


def golden_by_objective(question: Question) -> list[list[str]]:
    """Returns the golden answers of each objective. A question without objectives has one list."""
    return question.objectives or [question.golden_answers]


class FactState(StrEnum):
    """The effect of a turn on a needed fact."""

    MISSING = "missing"  # neither in memory nor found in the turn
    FOUND = "found"  # it was found, and the memory of the turn does not know it
    GAINED = "gained"
    KNOWN = "known"
    LOST = "lost"  # memory_before knew it, memory_after does not


def fact_states(trajectory: Trajectory, question: Question) -> list[list[FactState]]:
    """Returns, per turn, the state of each fact of `question.evidence`."""
    states = []
    for index, context in enumerate(trajectory.contexts):
        wrote = is_memory_turn(trajectory, index)
        turn = []
        for fact in question.evidence:
            before = contains_value(context.memory_before, fact.value)
            after = contains_value(context.memory_after, fact.value) if wrote else before
            if before or after:
                turn.append(FactState.LOST if not after else FactState.KNOWN if before else FactState.GAINED)
            else:
                turn.append(FactState.FOUND if finds(context, fact) else FactState.MISSING)
        states.append(turn)
    return states


def finds(context: Context, fact: Evidence) -> bool:
    """Returns whether a search of the turn returned the fact's passage, or the turn read a chunk that knows it."""
    returned = any(passage.id == fact.passage_id for search in context.searches for passage in search.passages)
    return returned or contains_value(context.chunk, fact.value)


def contains_value(text: str, value: str) -> bool:
    """Returns whether the words of `value` occur in `text` next to each other; case, punctuation and articles do not
    count, nor do characters that nobody sees. In scripts without spaces every character is a word; elsewhere vowel
    signs and other marks are part of theirs.

    A value of articles only is matched as words, one of punctuation only as it is. An empty one is in no text.
    """
    if words_of(value):
        return spaced(words_of(value)) in spaced(words_of(text))
    if _all_words(value):  # nothing but articles
        return spaced(_all_words(value)) in spaced(_all_words(text))
    return bool(value.strip()) and value.strip() in text


def spaced(words: Sequence[str]) -> str:
    """Returns the words with a space before and after each, so that looking up a text finds whole words only."""
    return f" {' '.join(words)} "


@functools.lru_cache(maxsize=256)  # attempts of a group read the same chunks
def words_of(text: str) -> tuple[str, ...]:
    return tuple([word for word in _all_words(text) if word not in _ARTICLES])


def _all_words(text: str) -> list[str]:
    if text.isascii():
        return _WORD.findall(text.casefold())
    return _word_with_marks().findall(visible(unicodedata.normalize("NFKC", text)).casefold())


@functools.cache
def _word_with_marks() -> re.Pattern[str]:
    return re.compile(with_marks(rf"[^\W_{UNSPACED}]") + f"|[{UNSPACED}]")
