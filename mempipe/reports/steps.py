"""Takes the text of a context apart for a reader: a context of several messages is shown message by message, and each
of them is a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from mempipe.agents.budget import Budget
from mempipe.agents.registry import AgentSpec, whole_text
from mempipe.facts import is_memory_turn
from mempipe.types import Context, Search, Trajectory


class Searched(Protocol):
    @property
    def query(self) -> str: ...


S = TypeVar("S", bound=Searched)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionText:
    """Says how the text of an action is read."""

    thought: Callable[[str], str] = str.strip
    """Returns the thought in a message."""
    messages: Callable[[str], list[str]] = whole_text
    """Returns the messages in the text of a context."""
    has_memory: bool = True
    """The contexts of the agent hand on a memory."""

    @classmethod
    def of(cls, spec: AgentSpec, budget: Budget) -> ActionText:
        return cls(thought=spec.thought, messages=spec.messages, has_memory=spec.has_memory(budget))

    def wrote_memory(self, trajectory: Trajectory, index: int) -> bool:
        """Returns whether the context of that index wrote a memory or had to."""
        return self.has_memory and is_memory_turn(trajectory, index)


UNKNOWN_AGENT = ActionText()
"""Reads trajectories whose agent is not known."""


@dataclass(frozen=True, slots=True)
class Step:
    """A message of the policy, and the searches that it asked for."""

    message: str
    searches: Sequence[Search]


@dataclass(frozen=True, slots=True)
class ShownContext:
    """A context, and the turns that its messages are."""

    index: int
    context: Context
    turns: Sequence[tuple[int, Step]]
    """Each message with its number in the trajectory, from 1."""
    sizes: str
    """The tokens of the context, for a person."""


def shown_contexts(trajectory: Trajectory, text: ActionText) -> Iterator[ShownContext]:
    """Yields the contexts of a trajectory. Every message is a turn, also where one context holds several."""
    number = 0
    for index, context in enumerate(trajectory.contexts):
        turns = list(enumerate(steps(context, text), start=number + 1))
        first, number = number + 1, turns[-1][0]
        is_only = len(trajectory.contexts) == 1
        places = "" if first == number else " in all turns" if is_only else f" in turns {first} to {number}"
        sizes = f"{context.num_prompt_tokens:,} prompt tokens, {context.num_sampled_tokens:,} sampled{places}"
        yield ShownContext(index, context, turns, sizes)


def steps(context: Context, text: ActionText) -> list[Step]:
    """Returns the messages of a context in order, at least one, with their searches."""
    return [Step(*each) for each in with_searches(text.messages(context.action), context.searches)]


def with_searches(messages: Sequence[str], searches: Sequence[S]) -> list[tuple[str, list[S]]]:
    """Returns the messages of a context, at least one, each with its searches. A search belongs to the first message
    that has its query and no other search for the same; those of no message belong to the last one.
    """
    *others, last = messages or [""]
    found, left = list[tuple[str, list[S]]](), list(searches)
    for message in others:
        own = list[S]()
        while left and left[0].query in message and left[0].query not in (search.query for search in own):
            own.append(left.pop(0))
        found.append((message, own))
    return [*found, (last, left)]
