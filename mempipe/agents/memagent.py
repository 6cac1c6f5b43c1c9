"""MemAgent (arXiv 2507.02259): an agent that reads a text of any length chunk by chunk and keeps a bounded memory of it.

Every chunk is a context of its own: question, memory and chunk, then the sampled reply, which is the next memory as it stands. The last
context holds question and memory only and is answered in a box. Every chunk is read, nothing is searched, and nothing ends the reading.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from mempipe.agents.prompt_set import PromptSet, load_prompts
from mempipe.agents.protocol import Tokenizer, UnfitQuestion, last_stated, parse_answer
from mempipe.agents.rendering import Layout, encode_pieces, opened_thought
from mempipe.agents.turn import Agent, Message, Turn
from mempipe.config import Budget, CompatConfig, RunConfig
from mempipe.types import EndReason, Question


@dataclass(frozen=True, slots=True, kw_only=True)
class MemAgentPrompts(PromptSet):
    """The words around question, memory and chunk; `prompts/memagent.yaml` explains each key. Raises ConfigError."""

    REQUIRED: ClassVar = {
        "read": {"question", "memory", "chunk"},
        "read_chunk_first": {"question", "memory", "chunk"},
        "answer": {"question", "memory"},
    }

    system: str
    read: str
    read_chunk_first: str
    answer: str
    empty_memory: str


class MemAgentLayout(Layout):
    """The two prompts of one tokenizer, prompt set and budget. Raises as `Layout` does.

    `reply_start` is what an assistant message holds before the first sampled token.
    """

    AGENT = "memagent"
    TAGS = ("think", "problem", "memory", "section")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompts: MemAgentPrompts,
        budget: Budget,
        chunk_first: bool = False,
        compat: CompatConfig | None = None,
    ) -> None:
        super().__init__(tokenizer, system=prompts.system, budget=budget, compat=compat or CompatConfig())
        chat = self._chat
        self.reply_start = opened_thought(chat.after_user)
        self.empty_memory = self._checked_empty_memory(prompts.empty_memory)
        read = prompts.read_chunk_first if chunk_first else prompts.read
        self._read = encode_pieces(tokenizer, chat.before_user, read, chat.after_user)
        self._answer = encode_pieces(tokenizer, chat.before_user, prompts.answer, chat.after_user)
        self._cut = functools.lru_cache(maxsize=1)(self._chunks)  # siblings start one behind the other, with the same text
        self.template_tokens = max(self._read.num_tokens, self._answer.num_tokens)
        self._check_budget()

    @classmethod
    def from_config(cls, config: RunConfig, *, tokenizer: Tokenizer) -> MemAgentLayout:
        prompts = load_prompts(config.agent.prompts or "memagent", MemAgentPrompts)
        return cls(tokenizer, prompts=prompts, budget=config.budget, chunk_first=config.agent.chunk_first, compat=config.compat)

    def chunks(self, question: Question) -> list[list[int]]:
        """Ids of the question's text, all of them, cut every budget.chunk_tokens.

        Raises UnfitQuestion when there is no text, or when it is longer than budget.max_chunks allows.
        """
        chunks, limit = self._cut(question.context), self.budget.max_chunks
        if not chunks:
            raise UnfitQuestion(f"question {question.id} has an empty context; memagent reads one")
        if limit and len(chunks) > limit:
            raise UnfitQuestion(
                f"question {question.id} has a context of {len(chunks)} chunks (budget.chunk_tokens {self.budget.chunk_tokens}), "
                f"more than budget.max_chunks {limit}"
            )
        return chunks

    def check(self, question: Question) -> None:
        super().check(question)
        limit = self.budget.max_chunks * self.budget.chunk_tokens
        # A token is a byte at least: most texts need not be encoded to see that they fit.
        if not question.context or (limit and len(question.context.encode()) > limit):
            self.chunks(question)

    def read_prompt(self, *, question: list[int], memory: list[int], chunk: list[int]) -> list[int]:
        """A context that reads a chunk, up to its first sampled token."""
        return self._read.filled({"question": question, "memory": memory, "chunk": chunk})

    def answer_prompt(self, *, question: list[int], memory: list[int]) -> list[int]:
        """The last context up to its first sampled token."""
        return self._answer.filled({"question": question, "memory": memory})

    def _chunks(self, text: str) -> list[list[int]]:
        token_ids, size = self.encode(text), self.budget.chunk_tokens
        return [token_ids[start : start + size] for start in range(0, len(token_ids), size)]


class MemAgent(Agent[MemAgentLayout]):
    """The agent. A memory that its token limit cut off is a memory all the same, as published; `memory_truncated` counts it."""

    async def _run(self, question: Question, finish: Callable[[Turn], None]) -> tuple[EndReason, str | None]:
        question_ids, chunks = self.layout.question(question), self.layout.chunks(question)
        memory = self._memory(self.layout.empty_memory)
        for index, chunk in enumerate(chunks):
            turn = Turn(index=index, question_ids=question_ids, memory=memory)
            turn.inject(self.layout.read_prompt(question=question_ids, memory=memory.token_ids, chunk=chunk))
            turn.num_observation_tokens = len(chunk)
            message = await self._sample(turn, max_tokens=self._budget.memory_message_tokens)
            turn.action = message.text
            token_ids = self.layout.encode(message.text)
            if len(token_ids) > self._budget.memory_tokens and self._budget.on_overflow == "end":
                finish(turn)
                return EndReason.MEMORY_OVERFLOW, None
            memory = turn.new_memory = self._memory(token_ids, cut_off=message.cut_off)
            finish(turn)
        turn = Turn(index=len(chunks), question_ids=question_ids, memory=memory)
        turn.inject(self.layout.answer_prompt(question=question_ids, memory=memory.token_ids))
        message = await self._sample(turn, max_tokens=self._budget.action_tokens)
        turn.action = message.text
        finish(turn)
        return self._parse_answer(message)

    def _parse_answer(self, message: Message) -> tuple[EndReason, str | None]:
        if message.cut_off:
            return EndReason.LENGTH, None
        text, compat = self.layout.reply_start + message.text, self.layout.compat
        if compat.answer_sentence:
            answer = last_stated(text)
        else:
            answer = parse_answer(text, paired=["think"], box_in_thought=compat.box_in_thought)
        if answer is None or message.breaks_roles:
            return EndReason.NO_ACTION, None
        return EndReason.ANSWERED, answer
