"""Many small requests in few actor calls: all requests, or replies, of one turn of an event loop share one call.

A Ray actor call costs about a millisecond of CPU on both sides together; a short completion of a tiny model costs five
with it. `BatchedClient` is the caller's end, `BatchedServer` the actor's.
"""

from __future__ import annotations

import asyncio
import itertools
import traceback
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from ray.exceptions import RayError

from mempipe.actors.handles import Handle
from mempipe.faults import InfrastructureFault

Request: TypeAlias = tuple[int, tuple[Any, ...]]
"""(request id, arguments of the server's function). The id is unique per caller."""
Answer: TypeAlias = tuple[int, Any]
"""The request's number, and the function's result or the exception that it raised."""


class BatchedClient:
    """Sends one caller's requests to one actor, whose method `exchange` hands them to a `BatchedServer`.

    It is used from one event loop.
    """

    def __init__(self, actor: Handle) -> None:
        self._actor = actor
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._outbox: list[Request] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._exchanges: set[asyncio.Task[None]] = set()

    async def ask(self, *arguments: Any) -> Any:
        """Returns the answer to one request.

        Raises what the actor's function raised, and Ray's errors when the actor died meanwhile.
        """
        number, loop = next(self._numbers), asyncio.get_running_loop()
        answer = self._waiting[number] = loop.create_future()
        if not self._outbox:
            loop.call_soon(self._send)
        self._outbox.append((number, arguments))
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    def _send(self) -> None:
        requests, self._outbox = self._outbox, []
        exchange = asyncio.create_task(self._exchange(requests))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._ended)

    async def _exchange(self, requests: list[Request]) -> None:
        try:
            answers: list[Answer] = await self._actor.exchange.remote(self._name, requests)
        except RayError as error:  # requests and answers died with the actor, also those of earlier exchanges
            answers = [(number, error) for number in self._waiting]
            # A new caller id: late answers of an actor that is still alive must not reach retried requests.
            self._name = uuid.uuid4().hex
        for number, answer in answers:
            waiting = self._waiting.get(number)
            if waiting is None or waiting.done():  # given up
                continue
            if isinstance(answer, Exception):
                waiting.set_exception(answer)
            else:
                waiting.set_result(answer)

    def _ended(self, exchange: asyncio.Task[None]) -> None:
        """Opens another exchange when the last one has returned and answers are still missing: one long poll is always
        pending."""
        self._exchanges.remove(exchange)
        if not self._exchanges and not self._outbox and any(not answer.done() for answer in self._waiting.values()):
            self._send()


class BatchedServer:
    """Answers the requests of any number of callers with `function(*arguments)`, all at the same time."""

    def __init__(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._function = function
        self._callers: dict[str, _Caller] = {}

    @property
    def num_under_way(self) -> int:
        """Counts requests that are being answered."""
        return sum(len(caller.running) for caller in self._callers.values())

    async def exchange(self, name: str, requests: Sequence[Request]) -> list[Answer]:
        """Accepts requests of caller `name` and returns its answers in the order in which they became ready.

        Waits until there is one, unless another exchange of this caller waits already. Raises InfrastructureFault when
        an unknown caller asks for answers alone: its requests went to a process that Ray has replaced by this one.
        """
        if not requests and name not in self._callers:
            raise InfrastructureFault("the actor was started again and does not have the requests of before")
        caller = self._callers.setdefault(name, _Caller())
        for number, arguments in requests:
            task = asyncio.create_task(self._function(*arguments))
            caller.running.add(task)
            task.add_done_callback(partial(caller.finished, number))
        if caller.running and not caller.answers and not caller.is_waiting:
            caller.is_waiting = True
            caller.ready.clear()
            await caller.ready.wait()
            caller.is_waiting = False
        answers, caller.answers = caller.answers, []
        if not caller.running and not caller.is_waiting:
            self._callers.pop(name, None)
        return answers


@dataclass
class _Caller:
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    answers: list[Answer] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    is_waiting: bool = False

    def finished(self, number: int, task: asyncio.Task[Any]) -> None:
        self.running.remove(task)
        error = task.exception()
        if error is not None:
            trace = "".join(traceback.format_exception(error))  # which pickling drops
            error.add_note(f"raised in the actor:\n{trace}")
        self.answers.append((number, task.result() if error is None else error))
        self.ready.set()
