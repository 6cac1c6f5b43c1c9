"""MemSearcher (arXiv 2511.02805): an agent that searches turn by turn and carries nothing but the question and a bounded memory.

Every turn is a context of its own: prompt, sampled action and, when the action searches, the injected observation and the sampled
memory message. The same code serves training, evaluation and serving; only `generate` and `search` differ.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mempipe.agents.protocol import Action, GenerateFn, SearchFn, ToolCall, parse_action, parse_memory
from mempipe.agents.rendering import Layout
from mempipe.types import Completion, Context, EndReason, FinishReason, Question, Search, Trajectory


class MemSearcher:
    """The agent, bound to an engine and a retriever. It keeps no state between rollouts: any number of them may run at the same time."""

    def __init__(self, layout: Layout, *, generate: GenerateFn, search: SearchFn) -> None:
        self._layout = layout
        self._budget = layout.budget
        self._generate = generate
        self._search = search

    async def rollout(
        self,
        question: Question,
        *,
        trajectory_id: str,
        group_id: str,
        member: int,
        on_context: Callable[[Context], None] | None = None,
    ) -> Trajectory:
        """One attempt at `question`, not scored yet. `on_context` is called with every context as soon as it is finished.

        Raises ValueError when the question is longer than its budget, and whatever `generate` and `search` raise.
        """
        question_ids = self._layout.question(question)
        memory = self._memory(self._layout.empty_memory)
        contexts: list[Context] = []
        end_reason, answer = EndReason.MAX_TURNS, None
        while len(contexts) < self._budget.max_turns:
            turn = _Turn(index=len(contexts), question_ids=question_ids, memory=memory)
            outcome = await self._play(turn, question)
            contexts.append(turn.context())
            if on_context is not None:
                on_context(contexts[-1])
            if not isinstance(outcome, _Memory):
                end_reason, answer = outcome
                break
            memory = outcome
        return Trajectory(id=trajectory_id, group_id=group_id, member=member, contexts=contexts, end_reason=end_reason, answer=answer)

    async def _play(self, turn: _Turn, question: Question) -> _Memory | tuple[EndReason, str | None]:
        """Fills `turn`; returns the memory for the next one, or how and with which answer the trajectory ends."""
        turn.inject(self._layout.prompt(question=turn.question_ids, memory=turn.memory.token_ids))
        message = await self._sample(turn, max_tokens=self._budget.action_tokens)
        turn.action = message.text
        action = self._parse_action(message)
        if action.end_reason is not None:
            return action.end_reason, action.answer

        await self._run_searches(turn, action.calls, partition=question.partition)
        passages = [search.passages for search in turn.searches]
        observation = self._layout.observation(action.calls, passages, last_id=turn.token_ids[-1])
        turn.inject(observation.token_ids)
        turn.num_observation_tokens = observation.num_tokens

        message = await self._sample(turn, max_tokens=self._budget.memory_message_tokens)
        memory = self._parse_memory(message)
        if isinstance(memory, EndReason):
            return memory, None
        turn.new_memory = memory
        return memory

    async def _sample(self, turn: _Turn, *, max_tokens: int) -> _Message:
        started = time.perf_counter()
        completion = await self._generate(list(turn.token_ids), max_tokens=max_tokens)
        turn.generate_seconds += time.perf_counter() - started
        token_ids, tokenizer = completion.token_ids, self._layout.tokenizer
        assert len(token_ids) <= max_tokens, f"the engine sampled {len(token_ids)} tokens, {max_tokens} were allowed"
        assert len(token_ids) == len(completion.logprobs), f"{len(token_ids)} tokens came with {len(completion.logprobs)} log-probs"
        turn.sample(completion)
        body = token_ids[:-1] if token_ids and token_ids[-1] in tokenizer.stop_token_ids else token_ids
        return _Message(
            text=tokenizer.decode(body),
            cut_off=completion.finish_reason is FinishReason.LENGTH,
            breaks_roles=self._layout.breaks_roles(body),
        )

    async def _run_searches(self, turn: _Turn, calls: Sequence[ToolCall], *, partition: str) -> None:
        started = time.perf_counter()
        results = await asyncio.gather(*(self._search(c.query, num_passages=c.num_passages, partition=partition) for c in calls))
        turn.search_seconds += time.perf_counter() - started
        turn.searches = [
            Search(query=call.query, num_passages=call.num_passages, passages=result.passages, snapshot=result.snapshot)
            for call, result in zip(calls, results, strict=True)
        ]

    def _parse_action(self, message: _Message) -> Action:
        if message.cut_off:
            return Action(end_reason=EndReason.LENGTH)
        if message.breaks_roles:
            return Action(end_reason=EndReason.NO_ACTION)
        action = parse_action(self._layout.action_start + message.text, tool=self._layout.tool)
        if action.calls and self._layout.observation_room(action.calls) < 1:
            return Action(end_reason=EndReason.INVALID_CALL)
        return action

    def _parse_memory(self, message: _Message) -> _Memory | EndReason:
        if message.cut_off:
            return EndReason.LENGTH
        token_ids = self._layout.encode(parse_memory(self._layout.memory_start + message.text))
        if message.breaks_roles or not token_ids:
            return EndReason.BAD_MEMORY
        if len(token_ids) > self._budget.memory_tokens and self._budget.on_overflow == "end":
            return EndReason.MEMORY_OVERFLOW
        return self._memory(token_ids)

    def _memory(self, token_ids: list[int]) -> _Memory:
        kept = token_ids[: self._budget.memory_tokens]
        return _Memory(token_ids=kept, text=self._layout.tokenizer.decode(kept), truncated=len(kept) < len(token_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """A memory as the next prompt holds it: at most budget.memory_tokens ids, and their text."""

    token_ids: list[int]
    text: str
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """A sampled message, without its stop token."""

    text: str
    cut_off: bool  # the token limit came before a stop token
    breaks_roles: bool  # it holds a role mark of the chat template


@dataclass(slots=True, kw_only=True)
class _Turn:
    """A context while it grows."""

    index: int
    question_ids: list[int]
    memory: _Memory
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_observation_tokens: int = 0
    action: str = ""
    searches: list[Search] = field(default_factory=list)
    new_memory: _Memory | None = None
    generate_seconds: float = 0.0
    search_seconds: float = 0.0

    def inject(self, token_ids: Sequence[int]) -> None:
        self._append(token_ids, mask=0, logprobs=[0.0] * len(token_ids), version=-1)

    def sample(self, completion: Completion) -> None:
        if not self.num_prompt_tokens:
            self.num_prompt_tokens = len(self.token_ids)
        self._append(completion.token_ids, mask=1, logprobs=completion.logprobs, version=completion.policy_version)

    def context(self) -> Context:
        after = self.new_memory
        return Context(
            index=self.index,
            token_ids=self.token_ids,
            loss_mask=self.loss_mask,
            logprobs=self.logprobs,
            policy_versions=self.policy_versions,
            num_prompt_tokens=self.num_prompt_tokens,
            num_question_tokens=len(self.question_ids),
            num_memory_tokens=len(self.memory.token_ids),
            num_observation_tokens=self.num_observation_tokens,
            action=self.action,
            searches=self.searches,
            memory_before=self.memory.text,
            memory_after=after.text if after else "",
            num_new_memory_tokens=len(after.token_ids) if after else 0,
            memory_truncated=after.truncated if after else False,
            generate_seconds=self.generate_seconds,
            search_seconds=self.search_seconds,
        )

    def _append(self, token_ids: Sequence[int], *, mask: int, logprobs: Sequence[float], version: int) -> None:
        self.token_ids += token_ids
        self.loss_mask += [mask] * len(token_ids)
        self.logprobs += logprobs
        self.policy_versions += [version] * len(token_ids)
