"""A notebook agent: it solves a problem calculation by calculation and keeps nothing but the question and a notebook.

Every turn has its own context: question and notebook, then one sampled message that calls the tool or answers in a
box. What the tool returned is the next line of the notebook; the policy does not write the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from mempipe.agents.budget import Budget
from mempipe.agents.config import AgentConfig
from mempipe.agents.prompt_set import PromptSet, load_prompts
from mempipe.agents.protocol import Action, Tokenizer, parse_action
from mempipe.agents.registry import AgentSpec
from mempipe.agents.rendering import Renderer, encode_pieces
from mempipe.agents.tools import SearchLimits, Toolbox, load_tools
from mempipe.agents.turn import Agent, Memory, Message, Turn
from mempipe.types import EndReason, Question, ToolUse


class NotebookConfig(AgentConfig):
    """The `agent` section of this agent."""

    tools: list[str] = ["notebook_agent.calculator:Calculator"]
    """Tools that the agent may call, MODULE:NAME each."""


class NotebookBudget(Budget):
    """The `budget` section of this agent: the limits of one turn."""

    notebook_tokens: int = Field(256, ge=1)
    """The notebook that goes from one turn to the next; the oldest lines make room."""
    max_turns: int = Field(6, ge=1)
    """Turns of a trajectory."""

    def parts(self) -> dict[str, int]:
        return {
            "question": self.question_tokens,
            "notebook": self.notebook_tokens,
            "action": self.action_tokens,
        }

    @property
    def memory_limit(self) -> int:
        return self.notebook_tokens

    @property
    def turn_limit(self) -> int:
        return self.max_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class NotebookPrompts(PromptSet):
    """The words around question and notebook (prompts.yaml)."""

    REQUIRED: ClassVar = {"user": {"question", "memory"}}
    OPTIONAL: ClassVar = {"system": {"tools"}}

    system: str
    user: str


class NotebookRenderer(Renderer[NotebookBudget]):
    """The prompt of a turn as token ids."""

    TAGS = ("tool_call", "notebook")

    def __init__(
        self, tokenizer: Tokenizer, *, prompts: NotebookPrompts, tools: Toolbox, budget: NotebookBudget
    ) -> None:
        system = prompts.system.replace("{tools}", tools.schemas())
        super().__init__(tokenizer, system=system, budget=budget)
        self.tools = tools
        self._prompt = encode_pieces(tokenizer, self._chat.before_user, prompts.user, self._chat.after_user)
        self.template_tokens = self._prompt.num_tokens
        self._check_budget()

    @classmethod
    def from_settings(
        cls, config: NotebookConfig, budget: NotebookBudget, *, limits: SearchLimits, tokenizer: Tokenizer
    ) -> NotebookRenderer:
        prompts = load_prompts(config.prompts or str(Path(__file__).with_name("prompts.yaml")), NotebookPrompts)
        return cls(tokenizer, prompts=prompts, tools=Toolbox(own=load_tools(config.tools)), budget=budget)

    def prompt(self, *, question: list[int], notebook: list[int]) -> list[int]:
        """Returns a context up to its first sampled token."""
        return self._prompt.filled({"question": question, "memory": notebook})


class Notebook(Agent[NotebookRenderer]):
    """The agent."""

    async def _run(self, question: Question, finish: Callable[[Turn], None]) -> tuple[EndReason, str | None]:
        question_ids, notebook = self.renderer.question(question), Memory()
        async with self.renderer.tools.attempt(question) as tools:
            for index in range(self.renderer.budget.max_turns):
                turn = Turn(index=index, question_ids=question_ids, memory=notebook)
                turn.inject(self.renderer.prompt(question=question_ids, notebook=notebook.token_ids))
                message = await self._sample(turn, max_tokens=self.renderer.budget.action_tokens)
                turn.action = message.text
                action = self._parsed(message, tools)
                if action.end_reason is not None:
                    finish(turn)
                    return action.end_reason, action.answer
                turn.tool_uses = await asyncio.gather(*map(tools.use, action.calls))
                notebook = turn.new_memory = self._noted(notebook, turn.tool_uses)
                finish(turn)
        return EndReason.MAX_TURNS, None

    def _parsed(self, message: Message, tools: Toolbox) -> Action:
        if message.cut_off:
            return Action(end_reason=EndReason.LENGTH)
        if message.breaks_roles:
            return Action(end_reason=EndReason.NO_ACTION)
        return parse_action(message.text, tools=tools)

    def _noted(self, notebook: Memory, uses: Sequence[ToolUse]) -> Memory:
        """Returns the notebook with a line for every result, without the oldest tokens that do not fit."""
        lines = [notebook.text, *(text for use in uses for text in use.texts)]
        token_ids = self.renderer.encode("\n".join(filter(None, lines)))
        kept = token_ids[-self.renderer.budget.notebook_tokens :]
        return self._memory(kept, cut_off=len(kept) < len(token_ids))


AGENT = AgentSpec(
    config=NotebookConfig,
    budget=NotebookBudget,
    renderer=NotebookRenderer.from_settings,
    agent=Notebook,
)
