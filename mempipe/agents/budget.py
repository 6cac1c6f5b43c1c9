"""Limits of one context, in tokens of the policy's tokenizer: the one source of these limits for prompts, engine
and metrics.

Each agent combines the limits that it needs from the classes here, and lists the parts of its largest context
(`parts`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from mempipe.settings import Section

MEMORY_TAG_TOKENS = 64
"""Tokens of a memory message in addition to the memory: its tags, a stop token and a few words. Used if the message's
limit is not set. 64 was not tuned.
"""


class Budget(Section):
    """The limits that every agent has."""

    question_tokens: int = Field(695, ge=1)
    """Longer questions are refused when the data is read (MemSearcher: 695, the rest of its context of 8192)."""
    action_tokens: int = Field(1024, ge=1)
    """Sampled tokens of a message that acts or answers (its thought included), stop token included."""
    context_tokens: int = Field(8192, ge=8)
    """The model's context: the parts of the agent's largest one and the template must fit."""

    def parts(self) -> dict[str, int]:
        """Returns the parts of the agent's largest context besides the template, in tokens by name."""
        return {"question": self.question_tokens, "action": self.action_tokens}

    @property
    def memory_limit(self) -> int | None:
        """Returns the most tokens, besides the question, that one context takes over from the last; None for the whole
        history.
        """
        return None

    @property
    def has_memory(self) -> bool:
        """Returns whether an agent that can hand a memory on does so within these limits."""
        return True

    @property
    def can_be_swept(self) -> bool:
        """Returns whether `memory_tokens` is among the limits and set, so that a sweep may vary it."""
        return getattr(self, "memory_tokens", None) is not None

    @property
    def turn_limit(self) -> int | None:
        """Returns the most turns of a trajectory; None if the length of the text decides."""
        return None


class MemoryBudget(Budget):
    """The limits of an agent that writes a memory."""

    memory_tokens: int = Field(1024, ge=1)
    """The memory that goes from one context to the next."""
    memory_message_tokens: int | None = Field(None, ge=1)
    """Sampled tokens of the memory message: the memory, its tags and the stop token; null: memory_tokens and 64 more.
    """
    on_overflow: Literal["cut", "end"] = "cut"
    """A memory longer than memory_tokens is cut at a token boundary, or ends the trajectory."""
    memory_choices: list[PositiveInt] = []
    """Set: while training, every group draws its limit of the memory from these, in place of memory_tokens, and the
    prompt set states it as {memory_tokens}: one policy for several budgets."""

    @field_validator("memory_tokens", mode="before")
    @classmethod
    def _one_memory(cls, tokens: Any) -> Any:
        if isinstance(tokens, list):
            raise ValueError(
                f"budget.memory_tokens is {tokens}; a run has one. `mempipe sweep` tries several, as its setting "
                "budgets, and budget.memory_choices trains one policy for several"
            )
        return tokens

    @model_validator(mode="after")
    def _message_holds_memory(self) -> MemoryBudget:
        if self.memory_message_limit < self.memory_tokens:
            raise ValueError(
                f"budget.memory_message_tokens is {self.memory_message_tokens}, less than budget.memory_tokens "
                f"{self.memory_tokens}: a full memory could never be written"
            )
        return self

    @field_validator("memory_choices")
    @classmethod
    def _no_choice_twice(cls, choices: list[int]) -> list[int]:
        if len(set(choices)) < len(choices):
            raise ValueError(f"budget.memory_choices is {choices}; every limit occurs in it once")
        return choices

    @model_validator(mode="after")
    def _choices_fit(self) -> MemoryBudget:
        if max(self.memory_choices, default=0) > self.memory_tokens:
            raise ValueError(
                f"budget.memory_choices is {self.memory_choices}, but budget.memory_tokens {self.memory_tokens}: set "
                "it to the largest of them, which decides what a context must hold"
            )
        return self

    def under(self, memory_tokens: int, *, fixed: Collection[str] = ()) -> dict[str, int]:
        """Returns the limits by name, in tokens, with which these hold a memory of `memory_tokens`.

        A larger memory raises the limit of its message and that of the context by what it adds to them. A smaller one
        leaves both as they are. `fixed` are limits that do not follow.
        """
        changes = {"memory_tokens": memory_tokens}
        more = memory_tokens - self.memory_tokens
        if more > 0 and self.memory_message_tokens is not None and "memory_message_tokens" not in fixed:
            changes["memory_message_tokens"] = self.memory_message_tokens + more
        parts = self.model_copy(update=changes).parts()
        added = sum(parts.values()) - sum(self.parts().values())
        if added > 0 and "context_tokens" not in fixed:
            changes["context_tokens"] = self.context_tokens + added
        return changes

    @property
    def memory_message_limit(self) -> int:
        """Returns `memory_message_tokens` if it is set, else `memory_tokens` and room for the tags."""
        return self.memory_message_tokens or self.memory_tokens + MEMORY_TAG_TOKENS

    @property
    def memory_limit(self) -> int | None:
        return self.memory_tokens


class SearchBudget(Budget):
    """The limits of an agent that searches."""

    observation_tokens: int = Field(2048, ge=1)
    """Passages and echoed calls of one turn; whole passages first, the last one cut at a token boundary."""
    max_turns: int = Field(5, ge=1)
    """Turns of a trajectory."""

    @property
    def turn_limit(self) -> int | None:
        return self.max_turns
