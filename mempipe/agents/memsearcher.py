"""MemSearcher (arXiv 2511.02805): an agent that searches turn by turn and carries nothing but the question and a bounded memory.

Every turn is a context of its own: prompt, sampled action and, when the action searches, the injected observation and the sampled
memory message. The same code serves training, evaluation and serving; only `generate` and `search` differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mempipe.agents.prompt_set import PromptSet, load_prompts, split_slots
from mempipe.agents.protocol import Action, Tokenizer, Tool, ToolCall, parse_action, parse_memory
from mempipe.agents.rendering import SearchLayout, alternate, encode_pieces, fit_passages, opened_thought, unless_open
from mempipe.agents.turn import Agent, Memory, Message, Turn
from mempipe.config import Budget, CompatConfig, RunConfig
from mempipe.types import EndReason, Passage, Question


@dataclass(frozen=True, slots=True, kw_only=True)
class MemSearcherPrompts(PromptSet):
    """The words around questions, memories and passages; `prompts/memsearcher.yaml` explains each key. Raises ConfigError."""

    REQUIRED: ClassVar = {"user": {"question", "memory"}, "observation": {"passages"}, "passage": {"text"}}
    OPTIONAL: ClassVar = {"system": {"tools"}, "observation": {"call"}, "passage": {"title", "index"}}

    system: str
    user: str
    action_prefill: str
    observation: str
    passage: str
    passage_separator: str
    memory_prefill: str
    empty_memory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What stands between an action with calls and the memory message."""

    token_ids: list[int]
    num_tokens: int  # of them, those that count against budget.observation_tokens


class MemSearcherLayout(SearchLayout):
    """Prompts and observations of one tokenizer, prompt set, tool and budget.

    `action_start` and `memory_start` are what an assistant message holds before the first sampled token. Raises as `Layout` does.
    """

    AGENT = "memsearcher"
    TAGS = ("think", "tool_call", "tool_response", "memory", "question")

    def __init__(
        self, tokenizer: Tokenizer, *, prompts: MemSearcherPrompts, tool: Tool, budget: Budget, compat: CompatConfig | None = None
    ) -> None:
        compat = compat or CompatConfig()
        passage, separator = prompts.passage, prompts.passage_separator
        if compat.literal_newlines:
            passage, separator = passage + "\\n\\n", ""
        system = prompts.system.replace("{tools}", tool.schema())
        super().__init__(tokenizer, system=system, passage=passage, separator=separator, tool=tool, budget=budget, compat=compat)
        chat, calls = self._chat, split_slots(prompts.observation)
        action_prefill = unless_open(prompts.action_prefill, chat.after_user)
        memory_prefill = unless_open(prompts.memory_prefill, chat.after_observation)

        self.action_start = opened_thought(chat.after_user) + action_prefill
        self.memory_start = opened_thought(chat.after_observation) + memory_prefill
        self.empty_memory = self._checked_empty_memory(prompts.empty_memory)
        self._prompt = encode_pieces(tokenizer, chat.before_user, prompts.user, chat.after_user + action_prefill)
        self._reply = encode_pieces(tokenizer, chat.after_action, prompts.observation, chat.after_observation + memory_prefill)
        self._next_call = tokenizer.encode_template(calls[-1] + calls[0])
        self._reply.literals[0].pop(0)  # the closing id: the policy samples it
        self.template_tokens = self._prompt.num_tokens + self._reply.num_tokens + 1  # the closing id
        self._check_budget()

    @classmethod
    def from_config(cls, config: RunConfig, *, tokenizer: Tokenizer) -> MemSearcherLayout:
        prompts = load_prompts(config.agent.prompts or "memsearcher", MemSearcherPrompts)
        tool = Tool.from_config(config.agent, config.retrieval, config.compat)
        return cls(tokenizer, prompts=prompts, tool=tool, budget=config.budget, compat=config.compat)

    def prompt(self, *, question: list[int], memory: list[int]) -> list[int]:
        """A context up to its first sampled token."""
        return self._prompt.filled({"question": question, "memory": memory})

    def observation_room(self, calls: Sequence[ToolCall]) -> int:
        """Tokens of the observation budget that are left for passages; below 1 the calls are too long or too many."""
        between = len(self._next_call) + sum(map(len, self._reply.literals[1:-1]))
        return self.budget.observation_tokens - sum(len(self._echo(call)) for call in calls) - (len(calls) - 1) * between

    def observation(self, calls: Sequence[ToolCall], results: Sequence[Sequence[Passage]], *, last_id: int) -> Observation:
        """The answer to `calls` after an action whose last token is `last_id`, with as many of the passages as there is room for."""
        room = self.observation_room(calls)
        shown = fit_passages([self._passage_pieces(passages) for passages in results], room=room)
        # The policy may end a message with a stop token that is not the template's; then the template's follows it.
        token_ids = [] if last_id == self.closing_id else [self.closing_id]
        first, *inner, last = self._reply.literals
        for number, (call, passages) in enumerate(zip(calls, shown, strict=True)):
            slots = {"call": self._echo(call), "passages": passages}
            filled = [slots[name] for name in self._reply.slots]
            token_ids.extend(itertools.chain.from_iterable(alternate([self._next_call if number else first, *inner, []], filled)))
        used = self.budget.observation_tokens - room + sum(map(len, shown))
        return Observation(token_ids=token_ids + last, num_tokens=used)

    def _echo(self, call: ToolCall) -> list[int]:
        return self.encode(call.text) if "call" in self._reply.slots else []


class MemSearcher(Agent[MemSearcherLayout]):
    """The agent. `compat.bad_memory` and `compat.box_in_thought` make it play as the published evaluation or training does."""

    async def _run(self, question: Question, finish: Callable[[Turn], None]) -> tuple[EndReason, str | None]:
        question_ids = self.layout.question(question)
        memory = self._memory(self.layout.empty_memory)
        for index in range(self._budget.max_turns):
            turn = Turn(index=index, question_ids=question_ids, memory=memory)
            outcome = await self._play(turn, question)
            finish(turn)
            if not isinstance(outcome, Memory):
                return outcome
            memory = outcome
        return EndReason.MAX_TURNS, None

    async def _play(self, turn: Turn, question: Question) -> Memory | tuple[EndReason, str | None]:
        """Fills `turn`; returns the memory for the next one, or how and with which answer the trajectory ends."""
        turn.inject(self.layout.prompt(question=turn.question_ids, memory=turn.memory.token_ids))
        message = await self._sample(turn, max_tokens=self._budget.action_tokens)
        turn.action = message.text
        action = self._parse_action(message)
        if action.end_reason is not None:
            return action.end_reason, action.answer

        queries = [(call.query, call.num_passages) for call in action.calls]
        searches = await self._run_searches(turn, queries, partition=question.partition)
        passages = [search.passages for search in searches]
        observation = self.layout.observation(action.calls, passages, last_id=turn.token_ids[-1])
        turn.inject(observation.token_ids)
        turn.num_observation_tokens = observation.num_tokens

        message = await self._sample(turn, max_tokens=self._budget.memory_message_tokens)
        memory = self._parse_memory(message)
        if isinstance(memory, EndReason):
            return memory, None
        turn.new_memory = memory
        return memory

    def _parse_action(self, message: Message) -> Action:
        if message.cut_off:
            return Action(end_reason=EndReason.LENGTH)
        if message.breaks_roles:
            return Action(end_reason=EndReason.NO_ACTION)
        text = self.layout.action_start + message.text
        action = parse_action(text, tool=self.layout.tool, box_in_thought=self.layout.compat.box_in_thought)
        if action.calls and self.layout.observation_room(action.calls) < 1:
            return Action(end_reason=EndReason.INVALID_CALL)
        return action

    def _parse_memory(self, message: Message) -> Memory | EndReason:
        goes_on = self.layout.compat.bad_memory == "continue"
        if message.cut_off and not goes_on:
            return EndReason.LENGTH
        text = "" if message.breaks_roles else parse_memory(self.layout.memory_start + message.text)
        token_ids = self.layout.encode(text)
        if not token_ids and not goes_on:
            return EndReason.BAD_MEMORY
        if len(token_ids) > self._budget.memory_tokens and self._budget.on_overflow == "end":
            return EndReason.MEMORY_OVERFLOW
        return self._memory(token_ids)
