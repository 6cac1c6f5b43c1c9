"""MemSearcher (arXiv 2511.02805): an agent that searches turn by turn and carries nothing but the question and a
bounded memory.

Every turn is a separate context: the prompt, the sampled action and, when the action searches, the injected
observation and the sampled memory message. The same code serves training, evaluation and serving; only `generate` and
`search` differ.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from mempipe.agents.budget import MemoryBudget, SearchBudget
from mempipe.agents.config import AgentConfig, SearchCompat
from mempipe.agents.mcp_client import McpServer
from mempipe.agents.mcp_tools import load_mcp_tools
from mempipe.agents.prompt_set import ANSWER_OPEN, PromptSet, load_prompts, split_slots
from mempipe.agents.protocol import Action, Tokenizer, parse_action, parse_memory, thought_of
from mempipe.agents.registry import AgentSpec
from mempipe.agents.rendering import (
    AnswerProbe,
    SearchRenderer,
    alternate,
    encode_pieces,
    fit_passages,
    opened_thought,
    unless_open,
)
from mempipe.agents.tools import SearchArguments, SearchLimits, SearchTool, Toolbox, ToolCall, ToolResult, load_tools
from mempipe.agents.turn import Agent, Memory, Message, Turn
from mempipe.text import BOX
from mempipe.types import EndReason, Question


class MemSearcherCompat(SearchCompat):
    PRESETS: ClassVar = {
        "none": {},
        "memsearcher-train": {
            "box_in_thought": True,
            "question_mark": True,
            "literal_newlines": True,
            "num_passages": 10,
        },
        "memsearcher-eval": {"bad_memory": "continue", "literal_newlines": True, "num_passages": 10},
    }

    bad_memory: Literal["end", "continue"] = "end"
    """A memory message without a memory ends the trajectory, or leaves an empty memory."""
    box_in_thought: bool = False
    """A box inside a thought is an answer too."""
    literal_newlines: bool = False
    """Write a backslash and an n, twice, after every passage in place of what the prompt set puts between passages."""


class MemSearcherConfig(AgentConfig):
    """MemSearcher searches turn by turn and carries the question and a memory."""

    tool_name: str = "wikipedia_search"
    """Name of the search function."""
    tools: list[str] = []
    """Your own tools in addition to search, MODULE:NAME each; see docs/extending.md."""
    mcp_servers: list[McpServer] = []
    """MCP servers (Model Context Protocol) whose tools the policy may call too; see docs/mcp.md."""
    compat: MemSearcherCompat = MemSearcherCompat()


class MemSearcherBudget(MemoryBudget, SearchBudget):
    """The limits of one MemSearcher turn."""

    def parts(self) -> dict[str, int]:
        return {
            "question": self.question_tokens,
            "memory": self.memory_tokens,
            "action": self.action_tokens,
            "observation": self.observation_tokens,
            "memory message": self.memory_message_limit,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MemSearcherPrompts(PromptSet):
    """The words around questions, memories and passages; `prompts/memsearcher.yaml` explains each key. Raises
    ConfigError.
    """

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
    answer_open: str = ANSWER_OPEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The injected tokens between an action with calls and the memory message."""

    token_ids: list[int]
    num_tokens: int  # of them, those that count against budget.observation_tokens


class MemSearcherRenderer(SearchRenderer[MemSearcherBudget]):
    """Prompts and observations of one tokenizer, prompt set, set of tools and budget.

    `action_start` and `memory_start` are what an assistant message holds before the first sampled token. Raises as
    `Renderer` does.
    """

    TAGS = ("think", "tool_call", "tool_response", "memory", "question")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompts: MemSearcherPrompts,
        tools: Toolbox,
        budget: MemSearcherBudget,
        compat: MemSearcherCompat | None = None,
    ) -> None:
        compat = compat or MemSearcherCompat()
        assert tools.search is not None, "MemSearcher searches"
        passage, separator = prompts.passage, prompts.passage_separator
        if compat.literal_newlines:
            passage, separator = passage + "\\n\\n", ""
        system = prompts.system.replace("{tools}", tools.schemas())
        super().__init__(
            tokenizer,
            system=system,
            passage=passage,
            separator=separator,
            search=tools.search,
            budget=budget,
            instructions=prompts.instructions,
            question_mark=compat.question_mark,
        )
        self.tools, self.compat = tools, compat
        chat, calls = self._chat, split_slots(prompts.observation)
        action_prefill = unless_open(prompts.action_prefill, chat.after_user)
        memory_prefill = unless_open(prompts.memory_prefill, chat.after_observation)

        self.action_start = opened_thought(chat.after_user) + action_prefill
        self.memory_start = opened_thought(chat.after_observation) + memory_prefill
        self.empty_memory = self._checked_empty_memory(prompts.empty_memory)
        self._prompt = encode_pieces(tokenizer, chat.before_user, prompts.user, chat.after_user + action_prefill)
        self._reply = encode_pieces(
            tokenizer, chat.after_action, prompts.observation, chat.after_observation + memory_prefill
        )
        self._answer_open = prompts.answer_open
        self._next_call = tokenizer.encode_template(calls[-1] + calls[0])
        self._reply.literals[0].pop(0)  # the closing id: the policy samples it
        self.template_tokens = self._prompt.num_tokens + self._reply.num_tokens + 1  # the closing id
        self._check_budget()

    @classmethod
    def from_settings(
        cls, config: MemSearcherConfig, budget: MemSearcherBudget, *, limits: SearchLimits, tokenizer: Tokenizer
    ) -> MemSearcherRenderer:
        prompts = load_prompts(config.prompts or "memsearcher", MemSearcherPrompts, memory=budget)
        search = SearchTool.of(limits, name=config.tool_name, num_passages=config.compat.num_passages)
        own = load_tools(config.tools, taken=[search.name])
        own |= load_mcp_tools(config.mcp_servers, taken=[search.name, *own])
        tools = Toolbox(search=search, own=own)
        return cls(tokenizer, prompts=prompts, tools=tools, budget=budget, compat=config.compat)

    def prompt(self, *, question: list[int], memory: list[int]) -> list[int]:
        """Returns a context up to its first sampled token."""
        return self._prompt.filled({"question": question, "memory": memory})

    def answer_probe(self, question: Question, memory: str) -> AnswerProbe:
        held = self.encode(memory)[: self.budget.memory_tokens] if memory else self.empty_memory
        prompt = self.prompt(question=self.question(question), memory=held)
        return self._probe(prompt, question, written=self.action_start, answer_open=self._answer_open)

    def observation_room(self, calls: Sequence[ToolCall]) -> int:
        """Returns how many tokens of the observation budget are left for passages; fewer than 1 when the calls are too
        long or too many.
        """
        between = len(self._next_call) + sum(map(len, self._reply.literals[1:-1]))
        return (
            self.budget.observation_tokens - sum(len(self._echo(call)) for call in calls) - (len(calls) - 1) * between
        )

    def observation(self, calls: Sequence[ToolCall], results: Sequence[ToolResult], *, last_id: int) -> Observation:
        """Returns the answer to `calls` after an action whose last token is `last_id`, with as much of the results as
        there is room for.
        """
        room = self.observation_room(calls)
        shown = fit_passages(
            [self._passage_pieces(result.passages) + self._text_pieces(result.texts) for result in results], room=room
        )
        # The policy may end a message with a stop token that is not the template's; then the template's follows it.
        token_ids = [] if last_id == self.closing_id else [self.closing_id]
        first, *inner, last = self._reply.literals
        for number, (call, passages) in enumerate(zip(calls, shown, strict=True)):
            slots = {"call": self._echo(call), "passages": passages}
            filled = [slots[name] for name in self._reply.slots]
            token_ids.extend(
                itertools.chain.from_iterable(alternate([self._next_call if number else first, *inner, []], filled))
            )
        used = self.budget.observation_tokens - room + sum(map(len, shown))
        return Observation(token_ids=token_ids + last, num_tokens=used)

    def _echo(self, call: ToolCall) -> list[int]:
        return self.encode(call.text) if "call" in self._reply.slots else []


class MemSearcher(Agent[MemSearcherRenderer]):
    """The agent. `compat.bad_memory` and `compat.box_in_thought` select the behaviour of the published evaluation or
    training.
    """

    async def _run(self, question: Question, finish: Callable[[Turn], None]) -> tuple[EndReason, str | None]:
        question_ids = self.renderer.question(question)
        memory = self._memory(self.renderer.empty_memory)
        async with self.renderer.tools.attempt(question) as tools:
            for index in range(self.renderer.budget.max_turns):
                turn = Turn(index=index, question_ids=question_ids, memory=memory)
                outcome = await self._play(turn, tools, partition=question.partition)
                finish(turn)
                if not isinstance(outcome, Memory):
                    return outcome
                memory = outcome
        return EndReason.MAX_TURNS, None

    async def _play(self, turn: Turn, tools: Toolbox, *, partition: str) -> Memory | tuple[EndReason, str | None]:
        """Fills `turn`. Returns the memory for the next turn, or how the trajectory ends and with which answer."""
        turn.inject(self.renderer.prompt(question=turn.question_ids, memory=turn.memory.token_ids))
        message = await self._sample(turn, max_tokens=self.renderer.budget.action_tokens)
        turn.action = message.text
        action = self._parse_action(message, tools)
        if action.end_reason is not None:
            return action.end_reason, action.answer

        results = await self._make_calls(turn, action.calls, tools, partition=partition)
        observation = self.renderer.observation(action.calls, results, last_id=turn.token_ids[-1])
        turn.inject(observation.token_ids)
        turn.num_observation_tokens = observation.num_tokens

        message = await self._sample(turn, max_tokens=self.renderer.budget.memory_message_limit)
        memory = self._parse_memory(message)
        if isinstance(memory, EndReason):
            return memory, None
        turn.new_memory = memory
        return memory

    async def _make_calls(
        self, turn: Turn, calls: Sequence[ToolCall], tools: Toolbox, *, partition: str
    ) -> list[ToolResult]:
        """Makes all calls at the same time and returns their results in order."""
        searches = [call.arguments for call in calls if isinstance(call.arguments, SearchArguments)]
        own = [call for call in calls if not isinstance(call.arguments, SearchArguments)]
        found, used = await asyncio.gather(
            self._run_searches(turn, [(each.query, each.num_passages) for each in searches], partition=partition),
            asyncio.gather(*map(tools.use, own)),
        )
        turn.tool_uses += used
        passages = iter([ToolResult(passages=search.passages) for search in found])
        texts = iter([ToolResult(texts=use.texts) for use in used])
        return [next(passages if isinstance(call.arguments, SearchArguments) else texts) for call in calls]

    def _parse_action(self, message: Message, tools: Toolbox) -> Action:
        if message.cut_off:
            return Action(end_reason=EndReason.LENGTH)
        if message.breaks_roles:
            return Action(end_reason=EndReason.NO_ACTION)
        text = self.renderer.action_start + message.text
        action = parse_action(text, tools=tools, box_in_thought=self.renderer.compat.box_in_thought)
        if action.calls and self.renderer.observation_room(action.calls) < 1:
            return Action(end_reason=EndReason.INVALID_CALL)
        return action

    def _parse_memory(self, message: Message) -> Memory | EndReason:
        goes_on = self.renderer.compat.bad_memory == "continue"
        if message.cut_off and not goes_on:
            return EndReason.LENGTH
        text = "" if message.breaks_roles else parse_memory(self.renderer.memory_start + message.text)
        token_ids = self.renderer.encode(text)
        if not token_ids and not goes_on:
            return EndReason.BAD_MEMORY
        if len(token_ids) > self.renderer.budget.memory_tokens and self.renderer.budget.on_overflow == "end":
            return EndReason.MEMORY_OVERFLOW
        return self._memory(token_ids)


AGENT = AgentSpec(
    config=MemSearcherConfig,
    budget=MemSearcherBudget,
    renderer=MemSearcherRenderer.from_settings,
    agent=MemSearcher,
    prompts=MemSearcherPrompts,
    paper="arXiv 2511.02805",
    searches=True,
    thought=functools.partial(thought_of, actions=("<tool_call>", BOX)),
    script="mempipe.data.scripted_agents:ScriptedMemSearcher",
    text_script="mempipe.masking.demonstrations:ClozeMemSearcher",
)
