"""MemAgent (arXiv 2507.02259): an agent that reads a text of any length chunk by chunk and keeps a bounded memory of
it.

Every chunk is a separate context: question, memory and chunk, then the sampled reply. The whole reply, without thoughts
between `<think>` tags, is the next memory. The last context holds question and memory only and is answered in a box.
Every chunk is read, nothing is searched, and nothing ends the reading early.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from mempipe.agents.budget import MemoryBudget
from mempipe.agents.config import AgentConfig, CompatConfig
from mempipe.agents.prompt_set import ANSWER_OPEN, PromptSet, load_prompts
from mempipe.agents.protocol import (
    QuestionTooLong,
    Tokenizer,
    UnfitQuestion,
    last_stated,
    parse_answer,
    thought_of,
    without_blocks,
)
from mempipe.agents.registry import AgentSpec
from mempipe.agents.rendering import AnswerProbe, Renderer, encode_pieces, opened_thought
from mempipe.agents.tools import SearchLimits
from mempipe.agents.turn import Agent, Memory, Message, Turn
from mempipe.text import BOX
from mempipe.types import EndReason, Question


class MemAgentCompat(CompatConfig):
    PRESETS: ClassVar = {"none": {}, "memagent-eval": {"answer_sentence": True}}

    box_in_thought: bool = False
    """A box inside a thought is an answer too."""
    answer_sentence: bool = False
    """The answer is what follows the last "the answer is", not the last box."""


class MemAgentConfig(AgentConfig):
    """MemAgent reads a long text chunk by chunk and carries the question and a memory."""

    chunk_first: bool = False
    """The chunk precedes the memory, so that attempts of a group share it in the prefix cache. Off, as
    published."""
    compat: MemAgentCompat = MemAgentCompat()


class MemAgentBudget(MemoryBudget):
    """The limits of one MemAgent context."""

    chunk_tokens: int = Field(5000, ge=1)
    """Tokens of the long text that one context reads (MemAgent: 5000)."""
    max_chunks: int = Field(0, ge=0)
    """The most chunks of a text; longer texts are refused. 0: no limit. A text is never shortened."""

    def parts(self) -> dict[str, int]:
        start = {"question": self.question_tokens, "memory": self.memory_tokens}
        update = {**start, "chunk": self.chunk_tokens, "memory message": self.memory_message_limit}
        return max(update, {**start, "answer": self.action_tokens}, key=lambda parts: sum(parts.values()))


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
    answer_open: str = ANSWER_OPEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of a long text. Where a character was cut in two, `text` has a replacement character."""

    token_ids: list[int]
    text: str


class MemAgentRenderer(Renderer[MemAgentBudget]):
    """The two prompts of one tokenizer, prompt set and budget. Raises as `Renderer` does.

    `reply_start` is what an assistant message holds before the first sampled token.
    """

    TAGS = ("think", "problem", "memory", "section")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompts: MemAgentPrompts,
        budget: MemAgentBudget,
        chunk_first: bool = False,
        compat: MemAgentCompat | None = None,
    ) -> None:
        self.compat = compat or MemAgentCompat()
        super().__init__(
            tokenizer,
            system=prompts.system,
            budget=budget,
            instructions=prompts.instructions,
            question_mark=self.compat.question_mark,
        )
        chat = self._chat
        self.reply_start = opened_thought(chat.after_user)
        self.empty_memory = self._checked_empty_memory(prompts.empty_memory)
        read = prompts.read_chunk_first if chunk_first else prompts.read
        self._read = encode_pieces(tokenizer, chat.before_user, read, chat.after_user)
        self._answer_open = prompts.answer_open
        self._answer = encode_pieces(tokenizer, chat.before_user, prompts.answer, chat.after_user)
        # Siblings start one after the other with the same text, which is cut once.
        self._cut = functools.lru_cache(maxsize=1)(self._chunks)
        self.template_tokens = max(self._read.num_tokens, self._answer.num_tokens)
        self._check_budget()

    @classmethod
    def from_settings(
        cls, config: MemAgentConfig, budget: MemAgentBudget, *, limits: SearchLimits, tokenizer: Tokenizer
    ) -> MemAgentRenderer:
        prompts = load_prompts(config.prompts or "memagent", MemAgentPrompts, memory=budget)
        return cls(tokenizer, prompts=prompts, budget=budget, chunk_first=config.chunk_first, compat=config.compat)

    def chunks(self, question: Question) -> list[Chunk]:
        """Returns the question's text, all of it, cut every budget.chunk_tokens.

        Raises UnfitQuestion when there is no text, or when it is longer than budget.max_chunks allows.
        """
        chunks, limit = self._cut(question.context), self.budget.max_chunks
        if not chunks:
            raise UnfitQuestion(f"question {question.id} has an empty context; memagent reads one")
        if limit and len(chunks) > limit:
            raise QuestionTooLong(
                f"question {question.id} has a context of {len(chunks)} chunks (budget.chunk_tokens "
                f"{self.budget.chunk_tokens}), more than budget.max_chunks {limit}"
            )
        return chunks

    def check(self, question: Question) -> None:
        super().check(question)
        limit = self.budget.max_chunks * self.budget.chunk_tokens
        # A token is a byte at least: most texts need not be encoded to see that they fit.
        if not question.context or (limit and len(question.context.encode(errors="surrogatepass")) > limit):
            self.chunks(question)

    def prepare(self, question: Question) -> None:
        self.chunks(question)

    def read_prompt(self, *, question: list[int], memory: list[int], chunk: list[int]) -> list[int]:
        """Returns a context that reads a chunk, up to its first sampled token."""
        return self._read.filled({"question": question, "memory": memory, "chunk": chunk})

    def answer_prompt(self, *, question: list[int], memory: list[int]) -> list[int]:
        """Returns the last context up to its first sampled token."""
        return self._answer.filled({"question": question, "memory": memory})

    def answer_probe(self, question: Question, memory: str) -> AnswerProbe:
        held = self.encode(memory)[: self.budget.memory_tokens] if memory else self.empty_memory
        prompt = self.answer_prompt(question=self.question(question), memory=held)
        return self._probe(prompt, question, written=self.reply_start, answer_open=self._answer_open)

    def _chunks(self, text: str) -> list[Chunk]:
        token_ids, size = self.encode(text), self.budget.chunk_tokens
        return [self._chunk(token_ids[start : start + size]) for start in range(0, len(token_ids), size)]

    def _chunk(self, token_ids: list[int]) -> Chunk:
        return Chunk(token_ids=token_ids, text=self.tokenizer.decode(token_ids))


class MemAgent(Agent[MemAgentRenderer]):
    """The agent. A memory that was cut off by its token limit is kept, as published; `memory_truncated` says so."""

    async def _run(self, question: Question, finish: Callable[[Turn], None]) -> tuple[EndReason, str | None]:
        return await self._read(question, finish, on_memory=lambda step, memory: None)

    async def _read(
        self, question: Question, finish: Callable[[Turn], None], *, on_memory: Callable[[int, Memory], None]
    ) -> tuple[EndReason, str | None]:
        """Reads and answers; `on_memory` is called with every memory, and after how many chunks it was written."""
        question_ids, chunks = self.renderer.question(question), self.renderer.chunks(question)
        memory = self._memory(self.renderer.empty_memory)
        for index, chunk in enumerate(chunks):
            turn = Turn(index=index, question_ids=question_ids, memory=memory, chunk=chunk.text)
            turn.inject(
                self.renderer.read_prompt(question=question_ids, memory=memory.token_ids, chunk=chunk.token_ids)
            )
            turn.num_observation_tokens = len(chunk.token_ids)
            message = await self._sample(turn, max_tokens=self.renderer.budget.memory_message_limit)
            turn.action = message.text
            token_ids = self.renderer.encode(self._noted(message.text))
            if len(token_ids) > self.renderer.budget.memory_tokens and self.renderer.budget.on_overflow == "end":
                finish(turn)
                return EndReason.MEMORY_OVERFLOW, None
            memory = turn.new_memory = self._memory(token_ids, cut_off=message.cut_off)
            finish(turn)
            on_memory(index + 1, memory)
        turn = Turn(index=len(chunks), question_ids=question_ids, memory=memory)
        turn.inject(self.renderer.answer_prompt(question=question_ids, memory=memory.token_ids))
        message = await self._sample(turn, max_tokens=self.renderer.budget.action_tokens)
        turn.action = message.text
        finish(turn)
        return self._parse_answer(message)

    def _noted(self, reply: str) -> str:
        """Returns the memory in a reply: all of it, without the thoughts of a model that thinks."""
        return without_blocks(self.renderer.reply_start + reply, "think").strip() if "</think>" in reply else reply

    def _parse_answer(self, message: Message) -> tuple[EndReason, str | None]:
        text, compat = self.renderer.reply_start + message.text, self.renderer.compat
        if compat.answer_sentence:
            return message.ending(last_stated(text))
        return message.ending(parse_answer(text, paired=["think"], box_in_thought=compat.box_in_thought))


AGENT = AgentSpec(
    config=MemAgentConfig,
    budget=MemAgentBudget,
    renderer=MemAgentRenderer.from_settings,
    agent=MemAgent,
    prompts=MemAgentPrompts,
    paper="arXiv 2507.02259",
    reads=True,
    thought=functools.partial(thought_of, actions=(BOX,)),
    reward={"answer": "em", "wrong_answer": 0.0},
    script="mempipe.data.scripted_agents:ScriptedMemAgent",
    text_script="mempipe.masking.demonstrations:ReadingMemAgent",
    script_needs_order=True,
)
