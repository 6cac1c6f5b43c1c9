"""An agent that compacts: it carries its whole history until the context is full, then writes a summary of it, and
continues in a new context that holds only the question and the summary.

Coding agents work in this way. `budget.context_tokens` decides how often it compacts: with a large one the agent is
ReAct, with the smallest one that fits it writes a memory after every search, as MemSearcher does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from mempipe.agents.budget import MemoryBudget, SearchBudget
from mempipe.agents.config import AgentConfig
from mempipe.agents.prompt_set import load_prompts
from mempipe.agents.protocol import Tokenizer
from mempipe.agents.registry import AgentSpec
from mempipe.agents.tagged import (
    STOP_TEXTS,
    TaggedAgent,
    TaggedMessage,
    TaggedPrompts,
    TaggedRenderer,
    tagged_messages,
    tagged_thought,
)
from mempipe.agents.tools import SearchLimits, SearchTool
from mempipe.agents.turn import Memory, Message, Turn, without_stop
from mempipe.types import EndReason, Question


class CompactionConfig(AgentConfig):
    """The `agent` section of this agent."""


class CompactionBudget(MemoryBudget, SearchBudget):
    """The `budget` section of this agent. `memory_tokens` limits the summary."""

    max_turns: int = Field(12, ge=1)
    """Messages of a trajectory that search or answer, in all of its contexts."""

    def parts(self) -> dict[str, int]:
        """Returns what a context must hold: one search and a summary."""
        return {
            "question": self.question_tokens,
            "memory": self.memory_tokens,
            "action": self.action_tokens,
            "observation": self.observation_tokens,
            "summary": self.memory_message_limit,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPrompts(TaggedPrompts):
    """The words around questions, summaries and passages (prompts.yaml)."""

    REQUIRED: ClassVar = TaggedPrompts.REQUIRED | {"user": {"question", "memory"}}

    compact: str
    empty_memory: str


class CompactionRenderer(TaggedRenderer[CompactionBudget]):
    """Prompts, observations, and the request for a summary, which is a message of the user."""

    TAGS = (*TaggedRenderer.TAGS, "memory")

    def __init__(
        self, tokenizer: Tokenizer, *, prompts: CompactionPrompts, search: SearchTool, budget: CompactionBudget
    ) -> None:
        super().__init__(tokenizer, prompts=prompts, search=search, budget=budget)
        self.empty_memory = self._checked_empty_memory(prompts.empty_memory)
        request = self._chat.after_action + prompts.compact + self._chat.after_observation
        self.request = tokenizer.encode_template(request)
        self.template_tokens += len(self.request)
        observation = self._observation.num_tokens + budget.observation_tokens
        self.turn_tokens = budget.action_tokens + observation + len(self.request) + budget.memory_message_limit
        """The most that a search and the summary after it add to a context."""
        self._check_budget()

    @classmethod
    def from_settings(
        cls, config: CompactionConfig, budget: CompactionBudget, *, limits: SearchLimits, tokenizer: Tokenizer
    ) -> CompactionRenderer:
        file = config.prompts or str(Path(__file__).with_name("prompts.yaml"))
        prompts = load_prompts(file, CompactionPrompts, memory=budget)
        return cls(tokenizer, prompts=prompts, search=SearchTool.of(limits), budget=budget)

    def start(self, question: list[int], memory: list[int]) -> list[int]:
        """Returns a context up to its first sampled token."""
        return self._prompt.filled({"question": question, "memory": memory})

    def is_full(self, num_tokens: int) -> bool:
        """Returns whether a context of `num_tokens` has no room for another search and the summary after it."""
        return num_tokens + self.turn_tokens > self.budget.context_tokens


class Compaction(TaggedAgent[CompactionRenderer]):
    """The agent."""

    async def _run(self, question: Question, finish: Callable[[Turn], None]) -> tuple[EndReason, str | None]:
        question_ids, memory = self.renderer.question(question), self._memory(self.renderer.empty_memory)
        turns_left = iter(reversed(range(self.renderer.budget.max_turns)))
        for index in itertools.count():
            turn = Turn(index=index, question_ids=question_ids, memory=memory)
            turn.inject(self.renderer.start(question_ids, memory.token_ids))
            last = await self._search_until_full(turn, turns_left, partition=question.partition)
            written = without_stop(turn.token_ids[turn.num_prompt_tokens :], self.renderer)
            turn.action = self.renderer.tokenizer.decode(written)
            if last is not None:
                finish(turn)
                if last.query is not None:
                    return EndReason.MAX_TURNS, None
                return last.fault or EndReason.ANSWERED, last.answer
            turn.inject(self.renderer.request)
            summary = self._parsed(await self._sample(turn, max_tokens=self.renderer.budget.memory_message_limit))
            if isinstance(summary, EndReason):
                finish(turn)
                return summary, None
            memory = turn.new_memory = summary
            finish(turn)
        raise AssertionError("a turn without a search ends the trajectory")

    async def _search_until_full(
        self, turn: Turn, turns_left: Iterator[int], *, partition: str
    ) -> TaggedMessage | None:
        """Appends searches and their passages to the context. Returns the message that ends the trajectory, or None
        when the context is full.
        """
        for left in turns_left:
            completion, message = await self._act(turn)
            query = message.query if left else None
            self._take_in(turn, completion, message, ends=query is None)
            if query is None:
                return message
            queries = [(query, self.renderer.search.num_passages)]
            (search,) = await self._run_searches(turn, queries, partition=partition)
            observation, num_tokens = self.renderer.observation(search.passages, turns_left=left)
            turn.inject(observation)
            turn.num_observation_tokens += num_tokens
            if self.renderer.is_full(len(turn.token_ids)):
                break
        return None

    def _parsed(self, message: Message) -> Memory | EndReason:
        token_ids = self.renderer.encode(message.text.strip())
        if message.breaks_roles or not token_ids:
            return EndReason.BAD_MEMORY
        if self.renderer.budget.on_overflow == "end" and len(token_ids) > self.renderer.budget.memory_tokens:
            return EndReason.MEMORY_OVERFLOW
        return self._memory(token_ids, cut_off=message.cut_off)


AGENT = AgentSpec(
    config=CompactionConfig,
    budget=CompactionBudget,
    renderer=CompactionRenderer.from_settings,
    agent=Compaction,
    prompts=CompactionPrompts,
    searches=True,
    stop_texts=STOP_TEXTS,
    thought=tagged_thought,
    messages=tagged_messages,
    script="compaction_agent.script:ScriptedCompaction",
)
