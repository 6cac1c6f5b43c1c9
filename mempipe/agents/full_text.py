"""The whole text in one context: what MemTrain's table 1 (arXiv 2606.03197) calls the model itself. Agents that read
with a memory are compared with it.

One prompt holds the text and the question, and the sampled message answers in a box. A text that does not fit
`budget.document_tokens` is refused with a sentence; none is shortened.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from mempipe.agents.budget import Budget
from mempipe.agents.config import AgentConfig
from mempipe.agents.prompt_set import PromptSet, load_prompts
from mempipe.agents.protocol import QuestionTooLong, Tokenizer, UnfitQuestion, parse_answer, thought_of
from mempipe.agents.registry import AgentSpec
from mempipe.agents.rendering import Renderer, encode_pieces, opened_thought
from mempipe.agents.tools import SearchLimits
from mempipe.agents.turn import Agent, Memory, Turn
from mempipe.text import BOX
from mempipe.types import EndReason, Question


class FullTextConfig(AgentConfig):
    """The agent reads a text in one context and answers."""


class FullTextBudget(Budget):
    """The limits of the one context."""

    document_tokens: int = Field(6000, ge=1)
    """The most tokens of a text. A longer one is refused, and none is shortened."""

    def parts(self) -> dict[str, int]:
        return {"question": self.question_tokens, "document": self.document_tokens, "answer": self.action_tokens}

    @property
    def turn_limit(self) -> int | None:
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FullTextPrompts(PromptSet):
    """The words around text and question; `prompts/full_text.yaml` explains each key. Raises ConfigError."""

    REQUIRED: ClassVar = {"user": {"question", "text"}}

    system: str
    user: str


class FullTextRenderer(Renderer[FullTextBudget]):
    """The prompt of one tokenizer, prompt set and budget. Raises as `Renderer` does.

    `reply_start` is what the assistant message holds before the first sampled token.
    """

    TAGS = ("think", "problem", "document")

    def __init__(self, tokenizer: Tokenizer, *, prompts: FullTextPrompts, budget: FullTextBudget) -> None:
        super().__init__(tokenizer, system=prompts.system, budget=budget, instructions=prompts.instructions)
        self.reply_start = opened_thought(self._chat.after_user)
        self._user = encode_pieces(tokenizer, self._chat.before_user, prompts.user, self._chat.after_user)
        # Siblings start one after the other with the same text, which is encoded once.
        self._encoded = functools.lru_cache(maxsize=1)(self.encode)
        self.template_tokens = self._user.num_tokens
        self._check_budget()

    @classmethod
    def from_settings(
        cls, config: FullTextConfig, budget: FullTextBudget, *, limits: SearchLimits, tokenizer: Tokenizer
    ) -> FullTextRenderer:
        return cls(tokenizer, prompts=load_prompts(config.prompts or "full_text", FullTextPrompts), budget=budget)

    def document(self, question: Question) -> list[int]:
        """Returns the ids of the question's text, all of it.

        Raises UnfitQuestion when there is no text, or when it has more than budget.document_tokens.
        """
        token_ids, limit = self._encoded(question.context), self.budget.document_tokens
        if not token_ids:
            raise UnfitQuestion(f"question {question.id} has an empty context; full_text reads one")
        if len(token_ids) > limit:
            raise QuestionTooLong(
                f"question {question.id} has a context of {len(token_ids)} tokens, more than budget.document_tokens "
                f"{limit}; raise it with budget.context_tokens, or read with memagent"
            )
        return token_ids

    def check(self, question: Question) -> None:
        super().check(question)
        # A token is a byte at least: a short text need not be encoded to see that it fits.
        if not question.context or len(question.context.encode(errors="surrogatepass")) > self.budget.document_tokens:
            self.document(question)

    def prepare(self, question: Question) -> None:
        self.document(question)

    def prompt(self, *, question: list[int], document: list[int]) -> list[int]:
        """Returns the context up to its first sampled token."""
        return self._user.filled({"question": question, "text": document})


class FullText(Agent[FullTextRenderer]):
    """The agent. `Context.chunk` is the whole text."""

    async def _run(self, question: Question, finish: Callable[[Turn], None]) -> tuple[EndReason, str | None]:
        question_ids, document = self.renderer.question(question), self.renderer.document(question)
        turn = Turn(index=0, question_ids=question_ids, memory=Memory(), chunk=self.renderer.tokenizer.decode(document))
        turn.inject(self.renderer.prompt(question=question_ids, document=document))
        turn.num_observation_tokens = len(document)
        message = await self._sample(turn, max_tokens=self.renderer.budget.action_tokens)
        turn.action = message.text
        finish(turn)
        return message.ending(parse_answer(self.renderer.reply_start + message.text, paired=["think"]))


AGENT = AgentSpec(
    config=FullTextConfig,
    budget=FullTextBudget,
    renderer=FullTextRenderer.from_settings,
    agent=FullText,
    prompts=FullTextPrompts,
    paper="the baseline of arXiv 2606.03197, table 1",
    reads=True,
    grows=True,
    thought=functools.partial(thought_of, actions=(BOX,)),
    reward={"answer": "em", "wrong_answer": 0.0},
    script="mempipe.data.scripted_agents:ScriptedFullText",
)
