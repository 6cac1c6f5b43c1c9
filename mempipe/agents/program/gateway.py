"""The gateway: it answers the requests of a program at one question, and keeps their tokens as contexts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mempipe.agents.program.chat_completions import ChatRequest, read_request, reply
from mempipe.agents.program.memories import StatedMemories
from mempipe.agents.program.rendering import ProgramRenderer, Refused, Said
from mempipe.agents.program.tool_calls import Calls, calls_in
from mempipe.agents.turn import Memory, Message, Turn, without_stop
from mempipe.text import replace_surrogates, until_first
from mempipe.types import EndReason, Search

MESSAGE_BREAK = "\n---\n"
"""Between the messages of a context in transcripts."""
Sample = Callable[..., Awaitable[Message]]
"""(turn, *, max_tokens, stop_texts) -> the message, which is then part of the turn."""
RunSearches = Callable[[Turn, Sequence[tuple[str, int]]], Awaitable[list[Search]]]


class AttemptOver(Exception):
    """A request after which the policy writes nothing more: `reason` is how the attempt ends, unless the program has an
    answer.
    """

    def __init__(self, reason: EndReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True, eq=False)
class Open:
    """A context that a request can continue: its tools and its messages, replies included."""

    turn: Turn
    tools: str
    messages: list[Said]


@dataclass(slots=True)
class Gateway:
    """The contexts of one trajectory, in the order of their first messages.

    A request that adds messages of the user or of tools to an earlier request and its reply is appended to that
    context. Every other request opens a context.
    """

    renderer: ProgramRenderer
    question_ids: list[int]
    sample: Sample
    run_searches: RunSearches
    user: str = ""
    """Who asks."""
    turns: list[Turn] = field(default_factory=list)
    """Those in which the policy has written something."""
    over: AttemptOver | None = None
    """The limit that a request has met. The attempt ends by it, unless the program has an answer."""
    fault: Exception | None = None
    """The error of engine or search that a request has met, also if the program has caught it."""
    calls: dict[str, Calls] = field(default_factory=dict)
    """The replies with calls of tools, by the id of each call."""
    memories: StatedMemories = field(default_factory=StatedMemories)
    on_fault: Callable[[], object] = lambda: None
    """Called when `fault` is set."""
    _open: list[Open] = field(default_factory=list)
    _replies: dict[str, list[int]] = field(default_factory=dict)
    _num_messages: int = 0
    _num_sampling: int = 0
    _early_searches: list[Search] = field(default_factory=list)
    _running: set[asyncio.Task[Any]] = field(default_factory=set)
    _closed: bool = False
    _num_waiting: int = 0
    _waiting_since: float = 0.0
    _waited_s: float = 0.0

    def read(self, body: Any) -> ChatRequest:
        """Reads the body of a chat completion. Raises Refused."""
        return read_request(body, self.calls)

    async def complete(self, request: ChatRequest) -> dict[str, Any]:
        """Returns the chat completion. Raises AttemptOver, Refused when the model's chat template does not render the
        request, and what engine and search raise.
        """
        if self._closed:
            raise AttemptOver(EndReason.NO_ACTION, "the program has ended")
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            with self._waiting():
                return await self._complete(request)
        finally:
            self._running.discard(task)

    async def close(self) -> None:
        """Gives up the requests that the program has left behind, and refuses further ones."""
        self._closed = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _complete(self, request: ChatRequest) -> dict[str, Any]:
        budget = self.renderer.budget
        if self._num_messages + self._num_sampling == budget.max_turns:
            raise self._ended(
                EndReason.MAX_TURNS,
                f"budget.max_turns is {budget.max_turns}, and the policy has written as many messages",
            )
        told = self.over
        context, added = self._context_of(request)
        turn, start = context.turn, len(context.turn.token_ids)
        num_prompt_tokens = start + len(added)
        room = budget.context_tokens - num_prompt_tokens
        if room < 1:
            raise self._ended(
                EndReason.CONTEXT_LIMIT,
                f"the messages have {num_prompt_tokens} tokens, and budget.context_tokens is {budget.context_tokens}",
            )
        take_memory_back = self._take_memory(request.memory, turn, opens=not start)
        turn.inject(added)
        if start:
            self._open.remove(context)  # until it has its reply
        self._num_sampling += 1
        try:
            limit = min(budget.action_tokens, room, request.max_tokens or room)
            message = await self.sample(turn, max_tokens=limit, stop_texts=request.stop_texts)
        except BaseException:  # the program has given up the request, too
            take_memory_back()
            if start:
                turn.cut(start)
                self._open.append(context)
            raise
        finally:
            self._num_sampling -= 1
        self._num_messages += 1
        number = self._num_messages
        if self.over is told:
            self.over = None  # the program has read the refusal and asked for less
        if start:
            turn.num_observation_tokens += len(added)
        else:
            turn.searches, self._early_searches = self._early_searches, []
            self.turns.append(turn)
        self.memories.wrote(turn)
        turn.action += MESSAGE_BREAK * bool(turn.action) + message.text
        if message.breaks_roles:
            raise self._ended(EndReason.NO_ACTION, "the policy wrote a mark of its chat template")
        text = until_first(message.text, request.stop_texts)  # as the program reads it
        self._replies[text] = without_stop(turn.token_ids[num_prompt_tokens:], self.renderer)
        self._open.append(Open(turn, request.tools, [*request.messages, Said("assistant", text)]))
        found = calls_in(text, request.tools, self.renderer.parse_calls) if request.tools else None
        calls = {f"call_{number}_{place}": found for place, _ in enumerate(found.functions)} if found else {}
        self.calls |= calls
        num_sampled = len(turn.token_ids) - num_prompt_tokens
        return reply(
            number,
            text,
            calls,
            cut_off=message.cut_off,
            num_prompt_tokens=num_prompt_tokens,
            num_sampled=num_sampled,
        )

    @property
    def first_memory(self) -> str:
        """Returns the memory that the program starts from: that of a session in a service, else ""."""
        return self.renderer.tokenizer.decode(getattr(self.renderer, "empty_memory", []))

    def _take_memory(self, text: str | None, turn: Turn, *, opens: bool) -> Callable[[], None]:
        """Takes the memory that a request states. Returns what takes it back."""
        limit = self.renderer.budget.memory_tokens
        if limit is not None and text is not None:
            token_ids = self.renderer.encode(text)
            if len(token_ids) > limit:
                raise self._ended(
                    EndReason.MEMORY_OVERFLOW,
                    f"metadata.memory has {len(token_ids)} tokens, and budget.memory_tokens is {limit}",
                )
            return self.memories.state(Memory(token_ids=token_ids, text=text), turn, opens=opens)
        if limit is not None and opens:
            if self.turns and self.memories.newest is None:
                raise Refused(
                    f"budget.memory_tokens is {limit}, and the attempt is in its second context without a memory; "
                    'state in metadata.memory which part of the messages is the memory ("" for none yet)'
                )
            self.memories.inherit(turn)
        return lambda: None

    async def search(self, query: str) -> list[str]:
        """Returns the texts of the passages, best first. The search belongs to the newest context. An empty query finds
        nothing and a long one is cut, since the policy may have written them.

        Raises what the search raises, which is noted as the attempt's fault too.
        """
        tool = self.renderer.search
        query = replace_surrogates(query.strip())[: tool.max_query_chars]
        if not query:
            return []
        turn = self.turns[-1] if self.turns else Turn(index=0, question_ids=[], memory=Memory())
        try:
            with self._waiting():
                found = await self.run_searches(turn, [(query, tool.num_passages)])
        except Exception as error:
            self.fail(error)
            raise
        if not self.turns:
            self._early_searches += found
        return [replace_surrogates(passage.text) for search in found for passage in search.passages]

    @property
    def waited_s(self) -> float:
        """Returns for how many seconds the program has waited for the policy or a search."""
        return self._waited_s + (time.monotonic() - self._waiting_since if self._num_waiting else 0.0)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        if not self._num_waiting:
            self._waiting_since = time.monotonic()
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._waited_s += time.monotonic() - self._waiting_since

    def _ended(self, reason: EndReason, message: str) -> AttemptOver:
        self.over = AttemptOver(reason, message)
        return self.over

    def fail(self, error: Exception) -> None:
        """Notes an error that the attempt ends by, whatever the program does next."""
        self.fault = self.fault or error
        self.on_fault()

    def _context_of(self, request: ChatRequest) -> tuple[Open, list[int]]:
        """Returns the context that this request continues, a new one if there is none, and what it adds."""
        messages, tools = request.messages, request.tools
        for context in self._open:
            num_known = len(context.messages)
            is_known = context.tools == tools and context.messages == messages[:num_known]
            if is_known and all(message.role in ("user", "tool") for message in messages[num_known:]):
                last_id = context.turn.token_ids[-1]
                return context, self.renderer.added(messages, tools, num_known=num_known, last_id=last_id)
        turn = Turn(index=0, question_ids=self.question_ids, memory=Memory())
        return Open(turn, tools, []), self.renderer.prompt(messages, tools, self._replies)
