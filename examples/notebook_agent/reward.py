"""A user-defined reward: the right number, with as few words as possible."""

from __future__ import annotations

from mempipe.types import Question, Trajectory

COST_OF_1000_CHARACTERS = 0.1


def right_and_brief(trajectory: Trajectory, question: Question) -> dict[str, float]:
    """Returns 1 for the right number, less a tenth for every thousand characters that were written.

    "reward" is optimised; the other numbers are logged as measures of the trajectory.
    """
    right = float(is_number(trajectory.answer, question.golden_answers[0]))
    characters = sum(len(context.action) for context in trajectory.contexts)
    calls = sum(len(context.tool_uses) for context in trajectory.contexts)
    return {
        "reward": right - COST_OF_1000_CHARACTERS * characters / 1000,
        "right": right,
        "calls": float(calls),
    }


def is_number(answer: str | None, golden: str) -> bool:
    """Returns whether the answer states the number, in whatever form: 12, 12.0 or 1,200."""
    try:
        return answer is not None and float(answer.replace(",", "")) == float(golden)
    except ValueError:
        return False
