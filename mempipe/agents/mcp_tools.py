"""Tools of MCP servers (Model Context Protocol), which a tool-calling agent calls like user-defined tools.

The texts of a server are untrusted. Its names, descriptions and schemas are in every prompt, so special tokens and
protocol tags in them are broken, and its results are encoded as text, as passages are.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anyio

from mempipe.agents.mcp_client import McpServer, McpUnavailable, Session, attempt_session, with_client
from mempipe.agents.tools import Attempt, InvalidCall
from mempipe.settings import ConfigError

if TYPE_CHECKING:
    from mcp import Client

MAX_TOOLS = 64
MAX_SCHEMA_CHARS = 8192
MAX_RESULT_CHARS = 100_000
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TAG = re.compile(r"([<\[])(?=\S)")
"""Characters with which a special token or a tag of any template can begin."""
_CALLERS_MISTAKES = (-32602, -32601)
"""JSON-RPC's codes for wrong arguments and an unknown method; the policy reads these errors as results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpTool:
    """One tool of a server (`mempipe.agents.tools.Tool`)."""

    name: str
    description: str
    parameters: dict[str, Any]
    server: McpServer

    def schema(self) -> dict[str, Any]:
        return {"name": self.name, "description": self.description, "parameters": _broken(self.parameters)}

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments with the names of the server in place of the broken ones that the policy reads. Raises
        InvalidCall for those that do not fit the tool's schema, or cannot be compared with it: a number too large for
        multipleOf, a nesting too deep for a schema that refers to itself.
        """
        names = {broken: text for text in _texts_in(self.parameters) if (broken := _broken(text)) != text}
        try:
            if names:
                arguments = _each_text(arguments, lambda text: names.get(text, text))
            error = next(_validator(self.parameters).iter_errors(arguments), None)
        except (OverflowError, RecursionError) as failure:
            raise InvalidCall(f"arguments: {failure}") from failure
        if error is not None:
            where = ".".join(map(str, error.absolute_path))
            raise InvalidCall(f"{where or 'arguments'}: {error.message[:200]}")
        return arguments

    async def call(self, arguments: dict[str, Any]) -> list[str]:
        """Returns the texts of the result; one that starts with "error:" for a call that the server refuses.

        Raises McpUnavailable when the server does not answer within its timeout.
        """
        from mcp import MCPError

        async def make(client: Client) -> list[str]:
            try:
                return _texts(await client.call_tool(self.name, arguments))
            except MCPError as error:
                if error.error.code in _CALLERS_MISTAKES:
                    return [f"error: {error.error.message}"[:MAX_RESULT_CHARS]]
                raise

        return await with_client(self.server, make, session=self._session)

    @property
    def _session(self) -> Session | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatefulMcpTool(McpTool):
    """One tool of a server that is started for each attempt (`mempipe.agents.tools.StatefulTool`)."""

    session: Session | None = None

    @asynccontextmanager
    async def attempt(self, attempt: Attempt) -> AsyncIterator[McpTool]:
        """Yields the tool with the session that all tools of the server have in this attempt."""
        settings = self.server.model_dump_json()
        if settings in attempt.shared:
            yield replace(self, session=attempt.shared[settings])
        else:
            async with attempt_session(self.server) as session:
                attempt.shared[settings] = session
                yield replace(self, session=session)

    @property
    def _session(self) -> Session | None:
        return self.session


def load_mcp_tools(servers: Sequence[McpServer], *, taken: Sequence[str] = ()) -> dict[str, McpTool]:
    """Asks the servers for their tools and returns those that the settings name, by name; `taken` are other names.

    A process asks each server once. Raises ConfigError for a server that does not answer, a tool that it does not have,
    and a name that another tool has.
    """
    tools: dict[str, McpTool] = {}
    for server in servers:
        for tool in _asked(server.model_dump_json(), server.key):
            if tool.name in (*tools, *taken):
                where = f"agent.mcp_servers: {server.place}"
                raise ConfigError(f"{where} has a tool {tool.name!r}, which another tool is called")
            tools[tool.name] = tool
    return tools


@functools.lru_cache(maxsize=64)
def _asked(setting: str, key: str) -> tuple[McpTool, ...]:
    """Returns the tools of the server with these settings, as JSON; `key` keeps answers for different keys apart."""
    server = McpServer.model_validate_json(setting)

    async def listed(client: Client) -> tuple[McpTool, ...]:
        page = await client.list_tools()
        offered = list(page.tools)
        while page.next_cursor:
            page = await client.list_tools(cursor=page.next_cursor)
            offered += page.tools
        return tuple(_tool(each, server) for each in _chosen(offered, server))

    def ask() -> tuple[McpTool, ...]:
        return anyio.run(with_client, server, listed)

    with ThreadPoolExecutor(max_workers=1) as thread:  # the caller's own thread may run an event loop
        try:
            return thread.submit(ask).result()
        except McpUnavailable as error:
            raise ConfigError(f"agent.mcp_servers: {error}") from error


def _chosen(listed: Sequence[Any], server: McpServer) -> list[Any]:
    """Returns those of the server's tools that the settings name. Raises ConfigError for one that it does not have, and
    for too many."""
    offered = {tool.name: tool for tool in listed}
    if missing := [name for name in server.tools if name not in offered]:
        there = ", ".join(filter(_NAME.fullmatch, sorted(offered)))[:1000] or "none"
        raise ConfigError(f"agent.mcp_servers: {server.place} has no tool {missing[0]!r}; it has {there}")
    names = list(server.tools or offered)
    if len(names) > MAX_TOOLS:
        place = f"agent.mcp_servers: {server.place}"
        raise ConfigError(f"{place} has {len(names)} tools; name up to {MAX_TOOLS} in `tools`")
    return [offered[name] for name in names]


def _tool(listed: Any, server: McpServer) -> McpTool:
    """Returns a tool as its server describes it. Raises ConfigError for one that no prompt should hold, and for a
    schema with which calls cannot be checked."""
    if not _NAME.fullmatch(listed.name):
        raise ConfigError(
            f"agent.mcp_servers: {server.place} has a tool {listed.name[:80]!r}, which is not a plain name"
        )
    if len(str(listed.input_schema)) + len(listed.description or "") > MAX_SCHEMA_CHARS:
        raise ConfigError(
            f"agent.mcp_servers: the schema of {listed.name!r} has more than {MAX_SCHEMA_CHARS} characters"
        )
    try:
        _check_schema(dict(listed.input_schema))
    except ValueError as error:
        raise ConfigError(f"agent.mcp_servers: the schema of {listed.name!r} cannot be used: {error}") from error
    kind = StatefulMcpTool if server.per_attempt else McpTool
    return kind(
        name=listed.name,
        description=_broken(listed.description or ""),
        parameters=dict(listed.input_schema),
        server=server,
    )


def _validator(schema: dict[str, Any]) -> Any:
    """Returns the validator of the draft that the schema names in $schema; of 2020-12 where it names none."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from referencing import Registry

    # With a registry of its own the validator fetches nothing that the schema refers to.
    return validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())


def _check_schema(schema: dict[str, Any]) -> None:
    """Raises ValueError for an invalid schema, and for a reference to something outside the schema.

    A validator follows only the references that a call's arguments need, so the first such call would end the run.
    """
    from jsonschema import SchemaError
    from referencing import Registry, Resource
    from referencing.jsonschema import DRAFT202012

    try:
        _validator(schema).check_schema(schema)
    except SchemaError as error:
        raise ValueError(error.message[:200]) from error
    whole = Resource.from_contents(schema, default_specification=DRAFT202012)
    _follow_references(whole, Registry().resolver_with_root(whole))


def _follow_references(schema: Any, resolver: Any) -> None:
    """Looks up every $ref of a `referencing.Resource` and of the schemas in it. Raises ValueError."""
    from referencing.exceptions import Unresolvable

    reference = schema.contents.get("$ref") if isinstance(schema.contents, dict) else None
    if reference is not None:
        try:
            resolver.lookup(reference)
        except Unresolvable as error:
            raise ValueError(f"it refers to {reference[:200]!r}, which is not in it") from error
    for part in schema.subresources():
        _follow_references(part, resolver.in_subresource(part))


def _broken(value: Any) -> Any:
    """Returns a JSON value with the tags in its texts broken."""
    return _each_text(value, lambda text: _TAG.sub(r"\1 ", text))


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a JSON value with all texts in it changed, names among them."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _each_text(each, change) for name, each in value.items()}
    return [_each_text(each, change) for each in value] if isinstance(value, list) else value


def _texts_in(value: Any) -> list[str]:
    """Returns all texts of a JSON value, names among them."""
    texts: list[str] = []
    _each_text(value, lambda text: texts.append(text) or text)
    return texts


def _texts(result: Any) -> list[str]:
    parts = list(map(_text, result.content))
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    if result.is_error:
        parts = [f"error: {part}" for part in parts or ["the call failed"]]
    return [part[:MAX_RESULT_CHARS] for part in parts]


def _text(part: Any) -> str:
    """Returns the text of a part of a result: its own, or that of a file in it."""
    text = getattr(part.resource if part.type == "resource" else part, "text", None)
    return f"({part.type}, which cannot be read here)" if text is None else text
