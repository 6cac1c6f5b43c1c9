"""ReAct as Search-R1 trains it (arXiv 2210.03629, 2503.09516): the whole history in one growing context. Agents with a
memory are compared with it.

The policy reads one user prompt and then writes an assistant message that continues after every observation until it
answers. After a message that neither searches nor answers, the policy reads a text that says so, and the trajectory
continues. When another turn would not fit the context, the trajectory ends; the context is never cut on the left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from mempipe.agents.budget import SearchBudget
from mempipe.agents.config import AgentConfig, SearchCompat
from mempipe.agents.prompt_set import load_prompts
from mempipe.agents.protocol import Tokenizer
from mempipe.agents.registry import AgentSpec
from mempipe.agents.rendering import opened_thought
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
from mempipe.agents.turn import Memory, Turn, without_stop
from mempipe.types import EndReason, Question


class ReactCompat(SearchCompat):
    PRESETS: ClassVar = {"none": {}, "search-r1": {"question_mark": True, "num_passages": 3}}


class ReactConfig(AgentConfig):
    """ReAct searches turn by turn and carries its whole history."""

    final_answer_turn: bool = True
    """After max_turns one more message is sampled, in which no search is made (as published)."""
    compat: ReactCompat = ReactCompat()


class ReactBudget(SearchBudget):
    """The limits of a ReAct context, which grows until the next turn does not fit."""

    def parts(self) -> dict[str, int]:
        """Returns the least that a context holds: one search and an answer."""
        return {
            "question": self.question_tokens,
            "action": self.action_tokens,
            "observation": self.observation_tokens,
            "answer": self.action_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReactPrompts(TaggedPrompts):
    """The words around questions and passages; `prompts/react.yaml` explains each key. Raises ConfigError."""

    retry: str


class ReactRenderer(TaggedRenderer[SearchBudget]):
    """Prompt, observations, `retry`, which follows a message that neither searches nor answers, and `action_start`, the
    thought that the chat template opens for the policy.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompts: ReactPrompts,
        search: SearchTool,
        budget: SearchBudget,
        final_answer_turn: bool = True,
        question_mark: bool = False,
    ) -> None:
        super().__init__(tokenizer, prompts=prompts, search=search, budget=budget, question_mark=question_mark)
        self.retry = tokenizer.encode_template(prompts.retry)
        opened = opened_thought(self._chat.after_user)
        self.action_start = "" if "</think>" in opened else opened
        self.num_messages = budget.max_turns + final_answer_turn

    @classmethod
    def from_settings(
        cls, config: ReactConfig, budget: ReactBudget, *, limits: SearchLimits, tokenizer: Tokenizer
    ) -> ReactRenderer:
        return cls(
            tokenizer,
            prompts=load_prompts(config.prompts or "react", ReactPrompts),
            search=SearchTool.of(limits, num_passages=config.compat.num_passages),
            budget=budget,
            final_answer_turn=config.final_answer_turn,
            question_mark=config.compat.question_mark,
        )


class React(TaggedAgent[ReactRenderer]):
    """The agent. `Context.action` is the whole assistant message, observations and an opened thought included."""

    async def _run(self, question: Question, finish: Callable[[Turn], None]) -> tuple[EndReason, str | None]:
        question_ids = self.renderer.question(question)
        turn = Turn(index=0, question_ids=question_ids, memory=Memory())
        turn.inject(self.renderer.prompt(question_ids))
        for number in itertools.count(1):
            completion, message = await self._act(turn)
            ending = self._ending(message, is_last=number == self.renderer.num_messages)
            observation, num_tokens = self.renderer.retry, 0
            if ending is None and message.query is not None:
                observation, num_tokens = await self._observe(
                    turn, message.query, number=number, partition=question.partition
                )
            if ending is None:
                needed = (
                    len(turn.token_ids) + len(message.token_ids) + len(observation) + self.renderer.budget.action_tokens
                )
                ending = EndReason.CONTEXT_LIMIT if needed > self.renderer.budget.context_tokens else None
            self._take_in(turn, completion, message, ends=ending is not None)
            if ending is not None:
                written = without_stop(turn.token_ids[turn.num_prompt_tokens :], self.renderer)
                turn.action = self.renderer.action_start + self.renderer.tokenizer.decode(written)
                finish(turn)
                return ending, message.answer
            turn.inject(observation)
            turn.num_observation_tokens += num_tokens
        raise AssertionError("the last message ends the trajectory")

    def _ending(self, message: TaggedMessage, *, is_last: bool) -> EndReason | None:
        if message.answer is not None:
            return EndReason.ANSWERED
        if message.breaks_roles:
            return EndReason.NO_ACTION
        return EndReason.MAX_TURNS if is_last else None

    async def _observe(self, turn: Turn, query: str, *, number: int, partition: str) -> tuple[list[int], int]:
        """Searches. Returns the tokens that follow the message of that number, and the number of those that count
        against the budget.
        """
        (search,) = await self._run_searches(turn, [(query, self.renderer.search.num_passages)], partition=partition)
        return self.renderer.observation(search.passages, turns_left=max(self.renderer.budget.max_turns - number, 0))


AGENT = AgentSpec(
    config=ReactConfig,
    budget=ReactBudget,
    renderer=ReactRenderer.from_settings,
    agent=React,
    prompts=ReactPrompts,
    paper="arXiv 2210.03629, trained as in arXiv 2503.09516",
    searches=True,
    grows=True,
    stop_texts=STOP_TEXTS,
    thought=tagged_thought,
    messages=tagged_messages,
    reward={"answer": "em", "wrong_answer": 0.0},
    reward_formats=("none", "search_r1"),
    script="mempipe.data.scripted_agents:ScriptedReact",
    text_script="mempipe.masking.demonstrations:ClozeReact",
)
