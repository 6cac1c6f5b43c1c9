"""The functions that a policy may call: the search function, and user-defined tools.

A tool has a name, a JSON schema that the policy reads, a check of its arguments, and an async call. A call that fails
for reasons of the infrastructure raises an `InfrastructureFault`, and its whole group is played again. An error that
the policy should read (division by zero, an unknown city) is an ordinary result text.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from mempipe.settings import ConfigError
from mempipe.text import call_json, replace_surrogates
from mempipe.types import Passage, Question, ToolUse
from mempipe.user_code import load_user_object, user_code


class InvalidCall(ValueError):
    """A tool call that cannot be made; the message describes the fault."""


class ToolSpec(Protocol):
    """The part of a tool that the policy reads, and the check of what it asks for."""

    @property
    def name(self) -> str: ...

    def schema(self) -> dict[str, Any]:
        """Returns the function in OpenAI's form: {"name", "description", "parameters": a JSON schema}."""
        ...

    def check(self, arguments: dict[str, Any]) -> Any:
        """Returns the arguments as `call` takes them. Raises InvalidCall, which ends the trajectory."""
        ...


class Tool(ToolSpec, Protocol):
    """A user-defined tool (docs/extending.md)."""

    async def call(self, arguments: Any) -> list[str]:
        """Returns the texts that the policy reads, best first: they are fitted into budget.observation_tokens."""
        ...


@dataclass(slots=True, kw_only=True)
class Attempt:
    """The attempt that a stateful tool is started for."""

    question: Question
    """`question.user` is who asks: a store that lasts longer than the attempt keeps a part for each user."""
    shared: dict[str, Any] = field(default_factory=dict)
    """For tools that work on the same thing, e.g. a store that one writes and another one reads. Empty at the start of
    every attempt."""
    error: BaseException | None = None
    """When the tool is ended: what broke the attempt off, so that it is played again or never answered. None for one
    that came to its end: only then should a tool write to a store that lasts."""


@runtime_checkable
class StatefulTool(Protocol):
    """A user-defined tool that has a state for each attempt: notes, a sandbox, an environment."""

    def attempt(self, attempt: Attempt) -> AbstractAsyncContextManager[Tool]:
        """Yields the tool of this attempt, and releases at its end what it holds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A valid call. `text` is the call as the policy wrote it, `arguments` is the result of the tool's `check`."""

    text: str
    tool: str
    arguments: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchArguments:
    """A search as it is made."""

    query: str
    num_passages: int


class SearchLimits(Protocol):
    """The part of `RetrievalConfig` that agents need."""

    @property
    def num_passages(self) -> int: ...
    @property
    def max_passages(self) -> int: ...
    @property
    def max_query_chars(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTool:
    """The search function, and the limits of every search."""

    name: str
    num_passages: int  # when the call names no number
    max_passages: int
    max_query_chars: int
    promised_passages: int | None = None  # in the schema instead of num_passages; published code returns another number

    @classmethod
    def of(cls, limits: SearchLimits, *, name: str = "search", num_passages: int | None = None) -> SearchTool:
        """Makes the tool within `limits`. A search without a number gets `num_passages`, whatever the
        schema promises.
        """
        return cls(
            name=name,
            num_passages=num_passages or limits.num_passages,
            max_passages=limits.max_passages,
            max_query_chars=limits.max_query_chars,
            promised_passages=limits.num_passages,
        )

    def schema(self) -> dict[str, Any]:
        query = {
            "type": "string",
            "description": "What to look for, in a few words.",
            "maxLength": self.max_query_chars,
        }
        top_n = {
            "type": "integer",
            "description": "How many passages to return.",
            "default": self.promised_passages or self.num_passages,
            "minimum": 1,
            "maximum": self.max_passages,
        }
        parameters = {"type": "object", "properties": {"query": query, "top_n": top_n}, "required": ["query"]}
        return {"name": self.name, "description": "Finds the passages that fit a query best.", "parameters": parameters}

    def check(self, arguments: dict[str, Any]) -> SearchArguments:
        if unknown := arguments.keys() - {"query", "top_n"}:
            raise InvalidCall(f"unknown arguments {sorted(unknown)}")
        query = arguments.get("query")
        if not isinstance(query, str) or not query.strip():
            raise InvalidCall("query is not a text")
        query = self.checked_query(query)
        num_passages = arguments.get("top_n", self.num_passages)
        if type(num_passages) is not int or not 1 <= num_passages <= self.max_passages:  # True is an int too
            raise InvalidCall(f"top_n is not a whole number from 1 to {self.max_passages}")
        return SearchArguments(query=query, num_passages=num_passages)

    def checked_query(self, text: str) -> str:
        """Returns the query as it is searched. Raises InvalidCall when it is empty or longer than the tool takes."""
        query = replace_surrogates(text.strip())
        if not query:
            raise InvalidCall("query is empty")
        if len(query) > self.max_query_chars:
            raise InvalidCall(f"query has {len(query)} characters, more than {self.max_query_chars}")
        return query


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """The tools of one agent: the search function first, if it searches, then the user-defined tools, by name."""

    search: SearchTool | None = None
    own: Mapping[str, Tool] = field(default_factory=dict)
    started: bool = False  # those of one attempt
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    """Tasks of its calls. When the attempt is over they are given up, before its tools end: another call has failed."""

    @asynccontextmanager
    async def attempt(self, question: Question) -> AsyncIterator[Toolbox]:
        """Yields the tools of one attempt: the stateful ones are started for it and ended with it, in reverse order.

        Raises UserCodeError when a tool fails to start or to end; an `InfrastructureFault` that it raises passes.
        """
        own, attempt, running = dict(self.own), Attempt(question=question), set[asyncio.Task[Any]]()
        async with AsyncExitStack() as stack:
            try:
                for name, tool in self.own.items():
                    if not isinstance(tool, StatefulTool):
                        continue
                    with user_code(f"agent.tools: {name} failed to start for question {question.id}"):
                        opened = tool.attempt(attempt)
                        if not isinstance(opened, AbstractAsyncContextManager):
                            raise TypeError("its attempt is not an asynchronous context manager (@asynccontextmanager)")
                        own[name] = await opened.__aenter__()
                    stack.push_async_callback(_end, name, opened, attempt)
                yield replace(self, own=own, started=True, running=running)
            except BaseException as error:
                attempt.error = error
                raise
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    def schemas(self) -> str:
        """Returns the schemas that the policy reads: one JSON object per line."""
        functions = [{"type": "function", "function": tool.schema()} for tool in self._all.values()]
        return "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)

    def parse(self, text: str) -> ToolCall:
        """Parses the JSON of a call, with U+FFFD for each half of a character, which no tool could send on.

        Raises InvalidCall unless it is a call of a tool here with arguments that the tool takes, and UserCodeError when
        the check of your own tool fails in another way.
        """
        try:
            call = call_json(text)
        except (ValueError, RecursionError) as error:  # ValueError: also numbers of more digits than Python converts
            raise InvalidCall(f"the call is not JSON: {error}") from error
        tools = self._all
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in tools:
            raise InvalidCall(f"the call names none of {', '.join(tools)}")
        arguments = call.get("arguments")
        if not isinstance(arguments, dict):
            raise InvalidCall("arguments is not an object")
        with user_code(f"agent.tools: {name} failed to check {text.strip()}", passing=(InvalidCall,)):
            return ToolCall(text=text, tool=name, arguments=tools[name].check(arguments))

    async def use(self, call: ToolCall) -> ToolUse:
        """Makes a call of your own tool.

        Raises UserCodeError with the user's file when the tool fails; an `InfrastructureFault` that it raises passes,
        and the group is tried again.
        """
        tool, task = self.own[call.tool], asyncio.current_task()
        assert task is not None, "a call is made in a task"
        with user_code(f"agent.tools: {call.tool} failed for the call {call.text.strip()}"):
            if isinstance(tool, StatefulTool) and not self.started:
                raise TypeError("it has a state for each attempt; use the tools of `async with toolbox.attempt(…)`")
            self.running.add(task)
            try:
                texts = await tool.call(call.arguments)
            finally:
                self.running.discard(task)
            if isinstance(texts, str):
                raise TypeError(f"it returned the text {texts!r}; expected a list of texts")
            texts = list(texts)
            if wrong := [text for text in texts if not isinstance(text, str)]:
                raise TypeError(f"it returned {wrong[0]!r} among its texts")
        return ToolUse(tool=call.tool, arguments=call.text.strip(), texts=list(map(replace_surrogates, texts)))

    @property
    def _all(self) -> dict[str, ToolSpec]:
        return {**({self.search.name: self.search} if self.search else {}), **self.own}


async def _end(name: str, opened: AbstractAsyncContextManager[Tool], attempt: Attempt) -> None:
    """Ends a tool as after an attempt without errors, so that it cannot swallow the error that ended the attempt. If
    it fails itself, the tools that end after it find its error in the attempt.
    """
    try:
        with user_code(f"agent.tools: {name} failed to end"):
            await opened.__aexit__(None, None, None)
    except BaseException as error:
        attempt.error = error
        raise


def load_tools(paths: Sequence[str], *, taken: Sequence[str] = ()) -> dict[str, Tool]:
    """Makes the tools that `agent.tools` names as MODULE:NAME, by the name that the policy calls; `taken` are other
    names.

    Raises ConfigError for a name that cannot be imported, that is not a tool, or that another tool has.
    """
    tools: dict[str, Tool] = {}
    for path in paths:
        made: Any = load_user_object(path, setting="agent.tools")
        with user_code(f"agent.tools: {path} cannot be made"):
            tool: Tool = made()
        missing = [name for name in ("name", "schema", "check", "call") if not hasattr(tool, name)]
        if missing:
            raise ConfigError(
                f"agent.tools: {path} has no {', '.join(missing)}; a tool has name, schema, check and call"
            )
        if tool.name in (*tools, *taken):
            raise ConfigError(f"agent.tools: {path} is called {tool.name!r}, which another tool is called")
        tools[tool.name] = tool
    return tools


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of a call: passages of a search, or the texts of your own tool."""

    passages: list[Passage] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
