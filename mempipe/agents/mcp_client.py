"""Connections to MCP servers (Model Context Protocol), by HTTP or to a process that is started here.

A server over HTTP is asked through a connection per call. A started one serves all calls of an event loop; it ends with
the loop, or when it hangs or dies, and the next call starts it again. With `per_attempt`, each attempt has a started
server for itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

import anyio
from pydantic import Field, model_validator

from mempipe.faults import InfrastructureFault
from mempipe.settings import ConfigError, Section, check_url

if TYPE_CHECKING:
    import httpx2
    from mcp import Client, StdioServerParameters

T = TypeVar("T")
_REFUSALS = (401, 403, 408, 413, 429)
"""Statuses below 500 that do not belong to the protocol; others may be an older server's answer to a newer client."""
_MAX_REFUSAL_BYTES = 64 * 1024


class McpServer(Section):
    """A server of tools: one over streamable HTTP at `url`, or one that `command` starts."""

    url: str = ""
    """Its address, e.g. http://127.0.0.1:8000/mcp."""
    command: str = ""
    """In place of `url`: a program that is started as the server, over standard input and output. It runs with the
    rights of mempipe."""
    args: list[str] = []
    """The arguments of `command`."""
    tools: list[str] = []
    """The tools that the policy may call; empty: all of them."""
    timeout_s: float = Field(30.0, gt=0)
    """Deadline of one call, and of the start of `command` with its first call."""
    per_attempt: bool = False
    """Each attempt that calls the server starts `command` for itself: for a server with a state, e.g. notes."""
    api_key_env: str = ""
    """The environment variable that holds the server's key: it is sent as bearer token, or passed on to `command`;
    empty: none."""

    @model_validator(mode="after")
    def _is_one_server(self) -> McpServer:
        if bool(self.url) == bool(self.command):
            both = f"url {self.url!r} and command {self.command!r}" if self.url else "neither url nor command"
            raise ValueError(f"agent.mcp_servers has {both}; a server has one of them")
        if self.args and self.url:
            raise ValueError(f"agent.mcp_servers.args is {self.args!r} for the url {self.url!r}; they are of a command")
        if self.per_attempt and self.url:
            raise ValueError(
                f"agent.mcp_servers.per_attempt is true for the url {self.url!r}; it is for a command: over HTTP the "
                "protocol has no sessions since 2026-07-28"
            )
        if self.url:
            check_url("agent.mcp_servers.url", self.url, example="http://host:8000/mcp")
        return self

    @property
    def place(self) -> str:
        """Returns the address or the command line, for messages."""
        return self.url or shlex.join([self.command, *self.args])[:200]

    @property
    def key(self) -> str:
        """Returns the server's key, "" for none."""
        return os.environ.get(self.api_key_env, "") if self.api_key_env else ""


class McpUnavailable(InfrastructureFault):
    """A server of tools does not answer."""


async def with_client(
    server: McpServer, work: Callable[[Client], Awaitable[T]], *, session: Session | None = None
) -> T:
    """Does the work with a client of the server, within its timeout. `session`: with the server of one attempt. Raises
    McpUnavailable.
    """
    with _unavailable(server):
        if server.command:
            return await (session or Session.of_loop(server)).do(work)
        with anyio.fail_after(server.timeout_s):
            async with _connected(server) as client:
                return await work(client)


@asynccontextmanager
async def attempt_session(server: McpServer) -> AsyncIterator[Session]:
    """Yields a session for one attempt. Its first call starts the server, which ends in the background."""
    session = Session(server)
    try:
        yield session
    finally:
        session.end()


@asynccontextmanager
async def _connected(server: McpServer) -> AsyncIterator[Client]:
    """Yields a client of the server at `url`."""
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    headers = {"authorization": f"Bearer {server.key}"} if server.key else {}
    hooks = {"response": [_raise_refusal]}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=server.timeout_s, event_hooks=hooks) as http,
        Client(streamable_http_client(server.url, http_client=http), read_timeout_seconds=server.timeout_s) as client,
    ):
        yield client


async def _raise_refusal(response: httpx2.Response) -> None:
    """Raises the HTTP error of a refusal; the SDK does not say which status an answer had, and why."""
    import httpx2

    if response.status_code < 500 and response.status_code not in _REFUSALS:
        return
    body = b""
    async for part in response.aiter_bytes():
        body += part
        if len(body) > _MAX_REFUSAL_BYTES:
            break
    try:
        reason = f": {json.loads(body)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        reason = ""
    message = f"{response.status_code} {response.reason_phrase}{reason}"
    raise httpx2.HTTPStatusError(message, request=response.request, response=response)


class Session:
    """A connection to a server that this process has started. One task holds it, since the SDK wants it to be closed
    where it was opened."""

    _of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Session]] = WeakKeyDictionary()

    @classmethod
    def of_loop(cls, server: McpServer) -> Session:
        """Returns the session of the running event loop with the server, and makes one if there is none."""
        sessions, settings = cls._of_loop.setdefault(asyncio.get_running_loop(), {}), server.model_dump_json()
        if settings not in sessions:
            sessions[settings] = cls(server, forget=lambda: sessions.pop(settings, None))
        return sessions[settings]

    def __init__(self, server: McpServer, *, forget: Callable[[], object] = lambda: None) -> None:
        self._server = server
        self._forget = forget
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None  # the first call starts it

    async def do(self, work: Callable[[Client], Awaitable[T]]) -> T:
        """Does the work within the timeout. A server that fails is ended in the background; the next call outside an
        attempt's session starts another one. An error that the server itself returns does not end it."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        self._holder = self._holder or asyncio.create_task(self._hold())
        try:
            with anyio.fail_after(self._server.timeout_s):
                return await work(await asyncio.shield(self._client))
        except Exception as error:
            if not isinstance(error, MCPError) or error.error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                self.end()
            raise

    async def _hold(self) -> None:
        from mcp import Client

        try:
            async with Client(_parameters(self._server), read_timeout_seconds=self._server.timeout_s) as client:
                self._client.set_result(client)
                await self._over.wait()
        except Exception as error:
            if not self._client.done():
                self._client.set_exception(error)
                self._client.exception()  # asyncio reports an exception that no caller has looked at
        finally:
            self.end()

    def end(self) -> None:
        """Ends the session in the background, and leaves its place to another one."""
        if not self._over.is_set():
            self._over.set()
            self._forget()


def _parameters(server: McpServer) -> StdioServerParameters:
    """Returns how the SDK starts the server: with PATH, HOME and the like, and no other variable but its key."""
    from mcp import StdioServerParameters

    environment = {server.api_key_env: server.key} if server.key else {}
    return StdioServerParameters(command=server.command, args=server.args, env=environment)


@contextmanager
def _unavailable(server: McpServer) -> Iterator[None]:
    """Turns the errors of a server that does not answer into McpUnavailable. ConfigError passes."""
    import httpx2
    from mcp import MCPError

    try:
        yield
    except (OSError, MCPError, httpx2.HTTPError, httpx2.InvalidURL, ExceptionGroup) as error:
        # The SDK's tasks put into a group what they raise, also for an answer that is not one of the protocol.
        first = _first(error)
        if isinstance(first, ConfigError):
            raise first from error
        if isinstance(first, TimeoutError):
            raise McpUnavailable(f"{server.place} did not answer within {server.timeout_s:g} s") from error
        told = "refuses the call" if isinstance(first, httpx2.HTTPStatusError) else "does not answer"
        kind = "" if isinstance(first, httpx2.HTTPStatusError) else f"{type(first).__name__}: "
        raise McpUnavailable(f"{server.place} {told}: {kind}{' '.join(str(first).split())}"[:500]) from error


def _first(error: BaseException) -> BaseException:
    """Returns the first error of a group of them, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
