"""The memory that goes from one question of a conversation to the next, in a session or in the messages of a chat."""

from __future__ import annotations

import copy
from typing import Any

from mempipe.agents.rendering import Renderer
from mempipe.answers.errors import ApiError
from mempipe.types import EndReason, Question, Trajectory

_MOST_CHARS = 64
"""More than a token has: characters beyond this number per token of the memory need not be encoded."""


def noted(memory: str, question: str, answer: str | None) -> str:
    """Returns the memory with one more exchange of a conversation on a separate line."""
    line = exchange(question, answer)
    return f"{memory}\n{line}" if memory else line


def exchange(question: str, answer: str | None) -> str:
    """Returns a question and its answer on one line."""
    return " ".join([*question.split(), *(answer or "no answer").split()])


def next_memory(question: Question, trajectory: Trajectory) -> str:
    """Returns what a session keeps: the agent's last memory, and the question with its answer."""
    answer = trajectory.answer if trajectory.end_reason is EndReason.ANSWERED else None
    return noted(trajectory.last_memory, question.text, answer)


def starting_from(renderer: Renderer[Any], memory: str, *, agent: str) -> Renderer[Any]:
    """Returns the renderer with `memory` in place of the empty one. Raises ApiError 400 for an agent without memory."""
    if not hasattr(renderer, "empty_memory"):
        raise ApiError(400, f"agent {agent!r} carries no memory from one question to the next", param="agent")
    token_ids = fitted(renderer, memory)
    if not token_ids:
        return renderer
    changed: Any = copy.copy(renderer)
    changed.empty_memory = token_ids
    return changed


def fitted(renderer: Renderer[Any], memory: str) -> list[int]:
    """Returns the ids of a memory, or of the newest lines of one that is longer than its budget."""
    limit, kept, used = renderer.budget.memory_limit, list[str](), 0
    for line in reversed(memory.split("\n")):
        line = line if limit is None else line[: limit * _MOST_CHARS]
        used += len(renderer.encode(line)) + 1
        if limit is not None and used > limit and kept:
            break
        kept.append(line)
    return renderer.encode("\n".join(reversed(kept)))[:limit]
