"""Takes the text of a context apart for a reader: a context of several messages is shown message by message, and each
of them is a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mempipe.agents.registry import AgentSpec, whole_text
from mempipe.facts import is_memory_turn
from mempipe.types import Context, Search, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionText:
    """Says how the text of an action is read."""

    thought: Callable[[str], str] = str.strip
    """Returns the thought in a message."""
    messages: Callable[[str], list[str]] = whole_text
    """Returns the messages in the text of a context."""
    full_history: bool = False
    """The agent carries its whole history in one context and writes no memory."""

    @classmethod
    def of(cls, spec: AgentSpec) -> ActionText:
        return cls(thought=spec.thought, messages=spec.messages, full_history=spec.grows)

    def wrote_memory(self, trajectory: Trajectory, index: int) -> bool:
        """Returns whether the context of that index wrote a memory or had to."""
        return not self.full_history and is_memory_turn(trajectory, index)


UNKNOWN_AGENT = ActionText()
"""Reads trajectories whose agent is not known."""


@dataclass(frozen=True, slots=True)
class Step:
    """A message of the policy, and the searches that it asked for."""

    message: str
    searches: Sequence[Search]


def sizes(context: Context, turns: range, *, is_only: bool) -> str:
    """Returns the tokens of the context that holds these turns, for a person; `is_only`: there is no other one."""
    places = "" if len(turns) == 1 else " in all turns" if is_only else f" in turns {turns[0]} to {turns[-1]}"
    return f"{context.num_prompt_tokens:,} prompt tokens, {context.num_sampled_tokens:,} sampled{places}"


def steps(context: Context, text: ActionText) -> list[Step]:
    """Returns the messages of a context in order, at least one. A search belongs to the first message that has its
    query and no other search for the same; those of no message belong to the last one."""
    *messages, last = text.messages(context.action) or [""]
    found, left = list[Step](), list(context.searches)
    for message in messages:
        own = list[Search]()
        while left and left[0].query in message and left[0].query not in (search.query for search in own):
            own.append(left.pop(0))
        found.append(Step(message, own))
    return [*found, Step(last, left)]
