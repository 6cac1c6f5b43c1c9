"""MEM1 (arXiv 2506.15841): an agent whose memory is its own last message, thought and query together.

The policy reads one user prompt and then an assistant message that continues after every observation. Each turn is a
separate context with exactly the text that the policy saw when it sampled: the prompt, the last message, its
observation, and the new message. Older turns are gone. The last message was trained on in the context before; here it
is injected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from mempipe.agents.budget import SearchBudget
from mempipe.agents.config import AgentConfig, SearchCompat
from mempipe.agents.prompt_set import load_prompts
from mempipe.agents.protocol import Tokenizer
from mempipe.agents.registry import AgentSpec
from mempipe.agents.tagged import STOP_TEXTS, TaggedAgent, TaggedPrompts, TaggedRenderer, tagged_thought
from mempipe.agents.tools import SearchLimits, SearchTool
from mempipe.agents.turn import Memory, Turn
from mempipe.types import EndReason, Question


class Mem1Compat(SearchCompat):
    PRESETS: ClassVar = {"none": {}, "mem1": {"question_mark": True, "num_passages": 3}}


class Mem1Config(AgentConfig):
    """MEM1 searches turn by turn and carries the question and its last message."""

    compat: Mem1Compat = Mem1Compat()


class Mem1Budget(SearchBudget):
    """The limits of one MEM1 context; its memory is a message of `action_tokens`."""

    def parts(self) -> dict[str, int]:
        return {
            "question": self.question_tokens,
            "state": self.action_tokens,
            "observation": self.observation_tokens,
            "action": self.action_tokens,
        }

    @property
    def memory_limit(self) -> int | None:
        return self.action_tokens


class Mem1Renderer(TaggedRenderer[Mem1Budget]):
    @classmethod
    def from_settings(
        cls, config: Mem1Config, budget: Mem1Budget, *, limits: SearchLimits, tokenizer: Tokenizer
    ) -> Mem1Renderer:
        prompts = load_prompts(config.prompts or "mem1", TaggedPrompts)
        search = SearchTool.of(limits, num_passages=config.compat.num_passages)
        return cls(tokenizer, prompts=prompts, search=search, budget=budget, question_mark=config.compat.question_mark)


class Mem1(TaggedAgent[Mem1Renderer]):
    """The agent. A search is noted in the context that reads its passages. The search of the last turn is not made,
    since no context would read its passages.
    """

    async def _run(self, question: Question, finish: Callable[[Turn], None]) -> tuple[EndReason, str | None]:
        question_ids = self.renderer.question(question)
        turn = Turn(index=0, question_ids=question_ids, memory=Memory())
        turn.inject(self.renderer.prompt(question_ids))
        while True:
            completion, message = await self._act(turn)
            turn.action = message.text
            self._take_in(turn, completion, message, ends=message.query is None)
            if message.query is None:
                finish(turn)
                return message.fault or EndReason.ANSWERED, message.answer
            state = turn.new_memory = Memory(token_ids=message.token_ids, text=message.text)
            finish(turn)
            if turn.index + 1 == self.renderer.budget.max_turns:
                return EndReason.MAX_TURNS, None
            turn = await self._next_turn(
                turn.index + 1, question_ids, state, query=message.query, partition=question.partition
            )

    async def _next_turn(
        self, index: int, question_ids: list[int], state: Memory, *, query: str, partition: str
    ) -> Turn:
        """Returns the context after a search, up to its first sampled token."""
        turn = Turn(index=index, question_ids=question_ids, memory=state)
        (search,) = await self._run_searches(turn, [(query, self.renderer.search.num_passages)], partition=partition)
        observation, turn.num_observation_tokens = self.renderer.observation(
            search.passages, turns_left=self.renderer.budget.max_turns - index
        )
        turn.inject([*self.renderer.prompt(question_ids), *state.token_ids, *observation])
        return turn


AGENT = AgentSpec(
    config=Mem1Config,
    budget=Mem1Budget,
    renderer=Mem1Renderer.from_settings,
    agent=Mem1,
    prompts=TaggedPrompts,
    paper="arXiv 2506.15841",
    searches=True,
    stop_texts=STOP_TEXTS,
    thought=tagged_thought,
    reward={"answer": "objectives_em", "wrong_answer": 0.0},
    script="mempipe.data.scripted_agents:ScriptedMem1",
    text_script="mempipe.masking.demonstrations:ClozeMem1",
)
