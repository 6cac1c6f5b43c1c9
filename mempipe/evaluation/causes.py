"""Finds the first cause of a wrong answer: the place in the chain of needed facts where an attempt went wrong.

Facts are those of `Question.evidence`, in their order, and their states per turn are `fact_states`. A joined question
has a chain of facts, an answer and a first cause for each objective. The *end memory*
is what the last turn could answer from: its memory_before and what it read, or all that was ever read where
the agent carries its whole history (`growing`). The *missing fact* is the first needed fact that the end memory does
not know. An attempt at a joined question answered if it wrote any answer.

    broken_protocol  the last message broke the agent's protocol, and no earlier turn caused the missing fact
    not_used         no fact is missing
    contradicted     the missing fact's passage was read, and the end memory states another value of it
    lost             a memory knew the missing fact, and a later one did not
    not_kept         the missing fact was found (`mempipe.evaluation.memory_quality`), and no memory took its value
    stopped_early    the missing fact was not found, and the agent answered
    same_search      it was not found, and the agent asked a query again that it had asked before
    never_found      it was not found, and all queries differed
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from mempipe.evaluation.memory_quality import contradicts
from mempipe.evaluation.metrics import right_answers
from mempipe.facts import FactState, contains_value, fact_states, places_by_objective
from mempipe.types import EndReason, Evidence, Question, Trajectory

_BROKEN = (
    EndReason.NO_ACTION,
    EndReason.INVALID_CALL,
    EndReason.LENGTH,
    EndReason.BAD_MEMORY,
    EndReason.MEMORY_OVERFLOW,
)


class Cause(StrEnum):
    """Why an answer was wrong; the module's docstring defines each."""

    NEVER_FOUND = "never_found"
    SAME_SEARCH = "same_search"
    STOPPED_EARLY = "stopped_early"
    NOT_KEPT = "not_kept"
    CONTRADICTED = "contradicted"
    LOST = "lost"
    NOT_USED = "not_used"
    BROKEN_PROTOCOL = "broken_protocol"


def first_causes(trajectory: Trajectory, question: Question, *, growing: bool) -> list[Cause | None]:
    """Returns the first cause of the wrong answer to each objective, in order (one without objectives); None for a
    right answer, and where the needed facts of the objective are not known.

    Right is an exact match (for a question without objectives, `Trajectory.em` is 1).
    """
    return [
        None if right or not places or not trajectory.contexts else _cause(trajectory, question, places, growing)
        for right, places in zip(right_answers(trajectory, question), places_by_objective(question), strict=True)
    ]


def _cause(trajectory: Trajectory, question: Question, places: Sequence[int], growing: bool) -> Cause:
    """Returns the first cause of a wrong answer that needed the facts in these places."""
    broken = trajectory.end_reason in _BROKEN
    facts = question.evidence
    gap = next((place for place in places if not _known(trajectory, facts[place], growing=growing)), None)
    if gap is None:
        return Cause.BROKEN_PROTOCOL if broken else Cause.NOT_USED
    states = [turn[gap] for turn in fact_states(trajectory, question)]
    earlier = states[:-1] if broken else states
    if not growing and _is_contradicted(trajectory, facts[gap]):
        return Cause.CONTRADICTED
    if FactState.LOST in earlier:
        return Cause.LOST
    if FactState.FOUND in earlier:
        return Cause.NOT_KEPT
    if broken:
        return Cause.BROKEN_PROTOCOL
    if trajectory.end_reason is EndReason.ANSWERED:
        return Cause.STOPPED_EARLY
    queries = [search.query for context in trajectory.contexts for search in context.searches]
    return Cause.SAME_SEARCH if len(set(queries)) < len(queries) else Cause.NEVER_FOUND


def _is_contradicted(trajectory: Trajectory, fact: Evidence) -> bool:
    """Returns whether the end memory states something else than the fact, whose passage was read."""
    read = [passage for context in trajectory.contexts for search in context.searches for passage in search.passages]
    stated = next((passage for passage in read if passage.id == fact.passage_id), None)
    return stated is not None and contradicts(_end_memory(trajectory), fact, stated)


def _end_memory(trajectory: Trajectory) -> str:
    last = trajectory.contexts[-1]
    return last.memory_before if trajectory.end_reason is EndReason.ANSWERED else last.memory_after


def _known(trajectory: Trajectory, fact: Evidence, *, growing: bool) -> bool:
    """Returns whether the end memory knows the fact."""
    last = trajectory.contexts[-1]
    read = trajectory.contexts if growing else [last] if trajectory.end_reason is EndReason.ANSWERED else []
    passages = {passage.id for context in read for search in context.searches for passage in search.passages}
    texts = [_end_memory(trajectory), *(context.chunk for context in read)]
    return fact.passage_id in passages or any(contains_value(text, fact.value) for text in texts)
