"""Rewards of single turns, independent of the reward of the attempt.

A function of turns takes (trajectory, question) and returns a number for every context of the attempt, in order, or
None where a turn has none. The weights of `reward.per_turn` multiply them; `mempipe.rl.advantages` compares each turn
with the same turn of the other attempts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from mempipe.facts import FactState, contains_value, fact_states, finds, golden_by_objective, is_memory_turn
from mempipe.types import Measure, Question, Trajectory

TurnValues = Sequence[float | None]
TurnReward = Callable[[Trajectory, Question], TurnValues]


def kept_fact(trajectory: Trajectory, question: Question) -> list[float | None]:
    """Returns for every memory turn the needed facts that it found and its memory took, less those that its memory
    lost. Facts of all objectives count. None for other turns, and for a question without evidence.

    A fact that is lost and taken again earns nothing in the end, and a name that was guessed earns nothing.
    """
    if not question.evidence:
        return [None] * len(trajectory.contexts)
    values: list[float | None] = []
    for index, (context, states) in enumerate(zip(trajectory.contexts, fact_states(trajectory, question), strict=True)):
        kept = sum(
            state is FactState.GAINED and finds(context, fact)
            for state, fact in zip(states, question.evidence, strict=True)
        )
        values.append(float(kept - states.count(FactState.LOST)) if is_memory_turn(trajectory, index) else None)
    return values


def answer_in_memory(trajectory: Trajectory, question: Question) -> list[float | None]:
    """Returns for every memory turn 1 if its memory knows a golden answer, else 0; with several objectives it is the
    share of those with a golden answer that the memory knows. None for other turns.
    """
    golds = [answers for answers in golden_by_objective(question) if answers]
    if not golds:
        return [None] * len(trajectory.contexts)
    return [
        fmean(any(contains_value(context.memory_after, gold) for gold in answers) for answers in golds)
        if is_memory_turn(trajectory, index)
        else None
        for index, context in enumerate(trajectory.contexts)
    ]


def token_price(trajectory: Trajectory, question: Question) -> list[float | None]:
    """Returns for every turn its sampled tokens, dropped ones included, as a loss: a weight of 0.001 makes 100 tokens
    cost 0.1.
    """
    return [-float(context.num_sampled_tokens + context.num_dropped_tokens) for context in trajectory.contexts]


BUILT_IN: Mapping[str, TurnReward] = {
    "kept_fact": kept_fact,
    "answer_in_memory": answer_in_memory,
    "token_price": token_price,
}


def weighted(values: Mapping[str, TurnValues], weights: Mapping[str, float]) -> list[list[Measure]]:
    """Returns the rewards of each turn by name: every value times the weight of its name; none for a None."""
    named = [[(name, value) for value in of_name] for name, of_name in values.items()]
    return [
        [Measure(name=name, value=weights[name] * value) for name, value in turn if value is not None]
        for turn in zip(*named, strict=True)
    ]
