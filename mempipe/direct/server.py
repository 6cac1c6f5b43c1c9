"""The replica's end of direct calls.

Serve assigns a caller to a replica once, as a lease: a streaming call that is open while the caller keeps the
connection. So Serve counts the caller among the replica's ongoing requests, for its limit, its autoscaling and its
draining. The calls themselves go over the connection: Serve takes about two milliseconds of CPU for a call, a
connection a tenth.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from enum import IntEnum
from typing import Any, TypeAlias

import msgspec

from mempipe.direct.frames import MAX_BYTES, Frames
from mempipe.faults import InfrastructureFault

Address: TypeAlias = tuple[str, int, str]
"""Host, port, and the key of the lease, which is the first message of its connection."""
KEY_BYTES = 32
CONNECT_S = 10.0
"""Seconds in which a caller has to connect with its key."""
logger = logging.getLogger(__name__)


class Outcome(IntEnum):
    """The first byte of a reply; the rest is the result, or a message."""

    RESULT = 0
    FAULT = 1
    """An InfrastructureFault: another replica may answer."""
    INVALID = 2
    """A ValueError: the arguments are wrong at every replica."""
    FAILED = 3
    """Any other error, which the replica's log has."""


class DirectServer:
    """Answers direct calls with `function(arguments)`: one call at a time on each connection."""

    def __init__(self, function: Callable[[Any], Coroutine[Any, Any, Any]], arguments: type, *, host: str) -> None:
        """`arguments` is the type of the function's argument, and `host` the address to listen at."""
        self._function = function
        self._decoder = msgspec.msgpack.Decoder(arguments)
        self._host = host
        self._leases: dict[str, asyncio.Future[None]] = {}
        """By key, the end of every lease whose caller has not connected yet."""
        self._listening: asyncio.Task[asyncio.Server] | None = None

    async def lease(self) -> AsyncIterator[Address]:
        """Yields where to connect, and ends with the connection, or after CONNECT_S without one."""
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen())
        server = await asyncio.shield(self._listening)
        key, ended = secrets.token_hex(KEY_BYTES), asyncio.get_running_loop().create_future()
        self._leases[key] = ended
        late = asyncio.get_running_loop().call_later(CONNECT_S, self._end_unused, key)
        try:
            yield self._host, server.sockets[0].getsockname()[1], key
            await ended
        finally:
            late.cancel()
            self._leases.pop(key, None)

    def take(self, key: str) -> asyncio.Future[None] | None:
        """Returns what to resolve when the connection of lease `key` ends, None for an unknown or used key."""
        return self._leases.pop(key, None)

    def start(self, message: bytes, reply: Callable[[bytes], None]) -> asyncio.Task[None]:
        """Calls the function with a message's arguments, and `reply` with the outcome."""
        return asyncio.create_task(self._answer(message, reply))

    async def _listen(self) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(lambda: _Caller(self), self._host, 0)

    def _end_unused(self, key: str) -> None:
        if ended := self._leases.pop(key, None):
            ended.set_result(None)

    async def _answer(self, message: bytes, reply: Callable[[bytes], None]) -> None:
        try:
            outcome, content = (
                Outcome.RESULT,
                msgspec.msgpack.encode(await self._function(self._decoder.decode(message))),
            )
        except InfrastructureFault as fault:
            outcome, content = Outcome.FAULT, str(fault).encode()
        except ValueError as error:
            outcome, content = Outcome.INVALID, str(error).encode()
        except Exception as error:  # whatever a function raises is the caller's to know
            logger.error("a direct call failed:\n%s", traceback.format_exc())
            outcome, content = Outcome.FAILED, f"{type(error).__name__}: {error}".encode()
        reply(bytes([outcome]) + content)


class _Caller(Frames):
    """One connection at the replica: the key of a lease, then one call after the other."""

    def __init__(self, server: DirectServer) -> None:
        super().__init__(max_bytes=2 * KEY_BYTES)
        self._server = server
        self._ended: asyncio.Future[None] | None = None
        self._call: asyncio.Task[None] | None = None
        self._late = asyncio.get_running_loop().call_later(CONNECT_S, self.close)

    def received(self, message: bytes) -> None:
        if self._ended is None:
            self._late.cancel()
            self._ended = self._server.take(message.decode("ascii", "replace"))
            self.max_bytes = MAX_BYTES
            if self._ended is None:
                self.close()
        else:
            self._call = self._server.start(message, self._reply)

    def _reply(self, message: bytes) -> None:
        if self.is_open:
            self.send(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        if self._call is not None:
            self._call.cancel()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
