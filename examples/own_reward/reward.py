"""A user-defined reward: a right answer, found with few searches."""

from __future__ import annotations

from mempipe.types import Question, Trajectory

COST_OF_A_SEARCH = 0.05


def right_with_few_searches(trajectory: Trajectory, question: Question) -> dict[str, float]:
    """Returns 1 for a right answer and 0 for any other, less a twentieth for each search.

    `reward` is what training optimises. The other numbers are logged as measures of the attempt.
    """
    right = float((trajectory.answer or "").strip() in question.golden_answers)
    searches = sum(len(context.searches) for context in trajectory.contexts)
    return {"reward": right - COST_OF_A_SEARCH * searches, "right": right, "searches": float(searches)}
