"""MEM1 (arXiv 2506.15841): an agent whose memory is its own last message, thought and query together.

One user prompt, then an assistant message that goes on after every observation. Each turn is a context of its own that holds exactly
what the policy saw when it sampled: prompt, the last message, its observation, and the new message. Older turns are gone. The last
message was trained in the context before; here it is injected.
"""

from __future__ import annotations

from collections.abc import Callable

from mempipe.agents.prompt_set import load_prompts
from mempipe.agents.protocol import Tokenizer, Tool
from mempipe.agents.tagged import TaggedAgent, TaggedLayout, TaggedPrompts
from mempipe.agents.turn import Memory, Turn
from mempipe.config import RunConfig
from mempipe.types import EndReason, Question


class Mem1Layout(TaggedLayout):
    AGENT = "mem1"

    @classmethod
    def from_config(cls, config: RunConfig, *, tokenizer: Tokenizer) -> Mem1Layout:
        prompts = load_prompts(config.agent.prompts or "mem1", TaggedPrompts)
        tool = Tool.from_config(config.agent, config.retrieval, config.compat)
        return cls(tokenizer, prompts=prompts, tool=tool, budget=config.budget, compat=config.compat)


class Mem1(TaggedAgent[Mem1Layout]):
    """The agent. A search is noted in the context that reads its passages; the last turn's search would be read by none and is not made."""

    async def _run(self, question: Question, finish: Callable[[Turn], None]) -> tuple[EndReason, str | None]:
        question_ids = self.layout.question(question)
        turn = Turn(index=0, question_ids=question_ids, memory=Memory())
        turn.inject(self.layout.prompt(question_ids))
        while True:
            completion, message = await self._act(turn)
            turn.action = message.text
            self._take_in(turn, completion, message, ends=message.query is None)
            if message.query is None:
                finish(turn)
                return message.fault or EndReason.ANSWERED, message.answer
            state = turn.new_memory = Memory(token_ids=message.token_ids, text=message.text)
            finish(turn)
            if turn.index + 1 == self._budget.max_turns:
                return EndReason.MAX_TURNS, None
            turn = await self._next_turn(turn.index + 1, question_ids, state, query=message.query, partition=question.partition)

    async def _next_turn(self, index: int, question_ids: list[int], state: Memory, *, query: str, partition: str) -> Turn:
        """The context after a search, up to its first sampled token."""
        turn = Turn(index=index, question_ids=question_ids, memory=state)
        (search,) = await self._run_searches(turn, [(query, self.layout.tool.num_passages)], partition=partition)
        observation, turn.num_observation_tokens = self.layout.observation(search.passages, turns_left=self._budget.max_turns - index)
        turn.inject([*self.layout.prompt(question_ids), *state.token_ids, *observation])
        return turn
