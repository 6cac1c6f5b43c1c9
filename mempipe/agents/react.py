"""ReAct as Search-R1 trains it (arXiv 2210.03629, 2503.09516): the whole history in one growing context, to compare memories with.

One user prompt, then an assistant message that goes on after every observation until it answers. A message that neither searches nor
answers is told so and the trajectory goes on. When another turn would not fit the context the trajectory ends; nothing is ever cut off
on the left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from mempipe.agents.prompt_set import load_prompts
from mempipe.agents.protocol import Tokenizer, Tool
from mempipe.agents.tagged import TaggedAgent, TaggedLayout, TaggedMessage, TaggedPrompts
from mempipe.agents.turn import Memory, Turn, without_stop
from mempipe.config import Budget, CompatConfig, RunConfig
from mempipe.types import EndReason, Question


@dataclass(frozen=True, slots=True, kw_only=True)
class ReactPrompts(TaggedPrompts):
    """The words around questions and passages; `prompts/react.yaml` explains each key. Raises ConfigError."""

    retry: str


class ReactLayout(TaggedLayout):
    """`retry` is what stands in the place of an observation after a message that neither searches nor answers."""

    AGENT = "react"

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompts: ReactPrompts,
        tool: Tool,
        budget: Budget,
        final_answer_turn: bool = True,
        compat: CompatConfig | None = None,
    ) -> None:
        super().__init__(tokenizer, prompts=prompts, tool=tool, budget=budget, compat=compat)
        self.retry = tokenizer.encode_template(prompts.retry)
        self.num_messages = budget.max_turns + final_answer_turn

    @classmethod
    def from_config(cls, config: RunConfig, *, tokenizer: Tokenizer) -> ReactLayout:
        prompts = load_prompts(config.agent.prompts or "react", ReactPrompts)
        tool = Tool.from_config(config.agent, config.retrieval, config.compat)
        last = config.agent.final_answer_turn
        return cls(tokenizer, prompts=prompts, tool=tool, budget=config.budget, final_answer_turn=last, compat=config.compat)


class React(TaggedAgent[ReactLayout]):
    """The agent. `Context.action` is the whole assistant message, observations included."""

    async def _run(self, question: Question, finish: Callable[[Turn], None]) -> tuple[EndReason, str | None]:
        question_ids = self.layout.question(question)
        turn = Turn(index=0, question_ids=question_ids, memory=Memory())
        turn.inject(self.layout.prompt(question_ids))
        for number in itertools.count(1):
            completion, message = await self._act(turn)
            ending = self._ending(message, is_last=number == self.layout.num_messages)
            observation, num_tokens = self.layout.retry, 0
            if ending is None and message.query is not None:
                observation, num_tokens = await self._observe(turn, message.query, number=number, partition=question.partition)
            if ending is None:
                needed = len(turn.token_ids) + len(message.token_ids) + len(observation) + self._budget.action_tokens
                ending = EndReason.CONTEXT_LIMIT if needed > self._budget.context_tokens else None
            self._take_in(turn, completion, message, ends=ending is not None)
            if ending is not None:
                written = without_stop(turn.token_ids[turn.num_prompt_tokens :], self.layout)
                turn.action = self.layout.tokenizer.decode(written)
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
        """What follows the search of the message of that number, and how many ids of it count against the budget."""
        (search,) = await self._run_searches(turn, [(query, self.layout.tool.num_passages)], partition=partition)
        return self.layout.observation(search.passages, turns_left=max(self._budget.max_turns - number, 0))
