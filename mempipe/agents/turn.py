"""The base class of all agents: an unfinished context, and the calls to engine and retriever that fill it."""

from __future__ import annotations

import asyncio
import reprlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from mempipe.agents.protocol import GenerateFn, SearchFn
from mempipe.agents.rendering import Renderer
from mempipe.text import replace_surrogates
from mempipe.types import Completion, Context, EndReason, FinishReason, Question, Search, ToolUse, Trajectory

R = TypeVar("R", bound=Renderer[Any])
OnContext = Callable[[Context], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The text that goes from one context to the next, and its ids as the next prompt holds them."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A sampled message, without its stop token."""

    text: str
    cut_off: bool  # the token limit came before a stop token
    breaks_roles: bool  # it holds a role mark of the chat template

    def ending(self, answer: str | None) -> tuple[EndReason, str | None]:
        """Returns how a trajectory ends whose last message this is, and its answer; `answer` was found in the text."""
        if self.cut_off:
            return EndReason.LENGTH, None
        if answer is None or self.breaks_roles:
            return EndReason.NO_ACTION, None
        return EndReason.ANSWERED, answer


@dataclass(slots=True, kw_only=True)
class Turn:
    """An unfinished context."""

    index: int
    question_ids: list[int]
    memory: Memory
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_observation_tokens: int = 0
    num_dropped_tokens: int = 0
    chunk: str = ""
    action: str = ""
    searches: list[Search] = field(default_factory=list)
    tool_uses: list[ToolUse] = field(default_factory=list)
    new_memory: Memory | None = None
    generate_seconds: float = 0.0
    search_seconds: float = 0.0

    def inject(self, token_ids: Sequence[int]) -> None:
        if isinstance(token_ids, str):  # whose letters would be taken for ids
            raise TypeError(f"turn.inject is given the text {token_ids[:40]!r}; expected token ids (renderer.encode)")
        self._append(token_ids, mask=0, logprobs=[0.0] * len(token_ids), versions=[-1] * len(token_ids))

    def cut(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` tokens."""
        for values in (self.token_ids, self.loss_mask, self.logprobs, self.policy_versions):
            del values[num_tokens:]

    def sample(self, completion: Completion, *, num_kept: int | None = None) -> None:
        """Appends the sampled tokens, or the first `num_kept` of them."""
        if not self.num_prompt_tokens:
            self.num_prompt_tokens = len(self.token_ids)
        kept = completion.token_ids[:num_kept]
        versions = completion.policy_versions[:num_kept] or [completion.policy_version] * len(kept)
        self._append(kept, mask=1, logprobs=completion.logprobs[:num_kept], versions=versions)
        self.num_dropped_tokens += len(completion.token_ids) - len(kept)

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
            num_dropped_tokens=self.num_dropped_tokens,
            chunk=self.chunk,
            action=self.action,
            searches=self.searches,
            tool_uses=self.tool_uses,
            memory_before=self.memory.text,
            memory_after=after.text if after else "",
            num_new_memory_tokens=len(after.token_ids) if after else 0,
            memory_truncated=after.truncated if after else False,
            generate_seconds=self.generate_seconds,
            search_seconds=self.search_seconds,
        )

    def _append(
        self, token_ids: Sequence[int], *, mask: int, logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        self.token_ids += token_ids
        self.loss_mask += [mask] * len(token_ids)
        self.logprobs += logprobs
        self.policy_versions += versions


class Agent(ABC, Generic[R]):
    """An agent, bound to an engine and a retriever. It keeps no state between rollouts: any number of them may run at
    the same time.
    """

    def __init__(self, renderer: R, *, generate: GenerateFn, search: SearchFn, forgets: bool = False) -> None:
        """`forgets`: replace every memory by the empty one, whatever the policy writes (the no-memory ablation)."""
        self.renderer = renderer
        self._forgets = forgets
        self._generate = generate
        self._search = search

    async def rollout(
        self, question: Question, *, trajectory_id: str, group_id: str, member: int, on_context: OnContext | None = None
    ) -> Trajectory:
        """Plays one attempt at `question`; it is not scored yet. `on_context` is called with every context as soon as
        it is finished.

        Raises UnfitQuestion when the question does not fit the budget, TypeError and ValueError when `_run` returns
        neither a reason of the end nor an answer, and whatever `generate` and `search` raise.
        """
        contexts: list[Context] = []

        def finish(turn: Turn) -> None:
            if self._forgets and turn.new_memory is not None and turn.new_memory.token_ids != self._empty_memory:
                raise TypeError(
                    "control no_memory: turn.new_memory is not the empty memory; make every memory with "
                    "self._memory(token_ids), which empties it"
                )
            contexts.append(turn.context())
            if on_context is not None:
                on_context(contexts[-1])

        end_reason, answer = self._checked(await self._run(question, finish))
        return Trajectory(
            id=trajectory_id,
            group_id=group_id,
            member=member,
            contexts=contexts,
            end_reason=end_reason,
            answer=answer,
        )

    def _checked(self, ended: Any) -> tuple[EndReason, str | None]:
        """Returns what `_run` returned, which a user may have written. Raises TypeError and ValueError."""
        said = f"{type(self).__name__}._run returned"
        if not isinstance(ended, tuple | list) or len(ended) != 2:
            raise TypeError(f"{said} {reprlib.repr(ended)}; expected a pair: the reason of the end, and the answer")
        reason, answer = ended
        if reason not in list(EndReason):  # its text, too
            raise ValueError(f"{said} the reason {reprlib.repr(reason)}; expected one of {', '.join(EndReason)}")
        if not isinstance(answer, str | None):
            raise TypeError(f"{said} the answer {reprlib.repr(answer)}; expected a text, or None for no answer")
        return EndReason(reason), None if answer is None else replace_surrogates(answer)

    @abstractmethod
    async def _run(self, question: Question, finish: Callable[[Turn], None]) -> tuple[EndReason, str | None]:
        """Plays the trajectory, calls `finish` for each finished context, and returns the reason of its end and its
        answer.
        """

    async def _complete(self, turn: Turn, *, max_tokens: int) -> Completion:
        """Samples a completion of the turn's tokens; does not append it to the turn."""
        started = time.perf_counter()
        completion = await self._generate(list(turn.token_ids), max_tokens=max_tokens)
        turn.generate_seconds += time.perf_counter() - started
        token_ids = completion.token_ids
        assert len(token_ids) <= max_tokens, f"the engine sampled {len(token_ids)} tokens, {max_tokens} were allowed"
        assert len(token_ids) == len(completion.logprobs), (
            f"{len(token_ids)} tokens came with {len(completion.logprobs)} log-probs"
        )
        return completion

    async def _sample(self, turn: Turn, *, max_tokens: int, stop_texts: Sequence[str] = ()) -> Message:
        """Samples a message and appends it to the turn: the whole one, or up to the first of `stop_texts`."""
        completion = await self._complete(turn, max_tokens=max_tokens)
        body = without_stop(completion.token_ids, self.renderer)
        length = None
        if stop_texts:
            length = self.renderer.length_until(body, lambda text: any(stop in text for stop in stop_texts))
        turn.sample(completion, num_kept=length)
        body = body[:length]
        return Message(
            text=self.renderer.tokenizer.decode(body),
            cut_off=length is None and completion.finish_reason is FinishReason.LENGTH,
            breaks_roles=self.renderer.breaks_roles(body),
        )

    async def _run_searches(self, turn: Turn, queries: Sequence[tuple[str, int]], *, partition: str) -> list[Search]:
        """Searches for the (query, number of passages) pairs at the same time and notes the searches in the turn."""
        started = time.perf_counter()
        results = await asyncio.gather(
            *(self._search(query, num_passages=count, partition=partition) for query, count in queries)
        )
        turn.search_seconds += time.perf_counter() - started
        searches = [
            Search(query=query, num_passages=count, passages=result.passages, snapshot=result.snapshot)
            for (query, count), result in zip(queries, results, strict=True)
        ]
        turn.searches += searches
        return searches

    @property
    def _empty_memory(self) -> list[int]:
        return getattr(self.renderer, "empty_memory", [])

    def _memory(self, token_ids: list[int], *, cut_off: bool = False) -> Memory:
        """Makes a memory of the ids, cut to its budget; `cut_off` says that they were cut already. In the no-memory
        ablation it is the empty memory, whatever the ids are."""
        token_ids = self._empty_memory if self._forgets else token_ids
        kept = token_ids[: self.renderer.budget.memory_limit]
        return Memory(
            token_ids=kept, text=self.renderer.tokenizer.decode(kept), truncated=cut_off or len(kept) < len(token_ids)
        )


def without_stop(token_ids: list[int], renderer: Renderer[Any]) -> list[int]:
    """Returns a sampled message without the stop token that ended it."""
    return token_ids[:-1] if token_ids and token_ids[-1] in renderer.tokenizer.stop_token_ids else token_ids
