"""The caller's end of direct calls: connections to the replicas that Serve assigns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from typing import Any

import msgspec

from mempipe.direct.frames import Frames
from mempipe.direct.server import CONNECT_S, Outcome
from mempipe.faults import InfrastructureFault

IDLE_S = 2.0
"""Seconds after which an unused connection ends: Serve stops a replica, or starts fewer, when its leases have ended."""
MAX_AGE_S = 10.0
"""Seconds after which a used connection ends too, so that a replica that is stopped is left, and a new one found."""


logger = logging.getLogger(__name__)


class ConnectionEnded(InfrastructureFault):
    """The connection to a replica ended during a call."""


class DirectClient:
    """Calls any replica of a deployment whose method `lease` is that of a `DirectServer`. It is used from one event
    loop."""

    def __init__(self, deployment: Any, result: type) -> None:
        """`deployment` is the handle of a Serve deployment, and `result` the type of what a call returns."""
        self._lease = deployment.options(stream=True).lease
        self._decoder = msgspec.msgpack.Decoder(result)
        self._idle: list[_Line] = []
        self._waiting: deque[asyncio.Future[_Line]] = deque()
        self._opening: set[asyncio.Task[None]] = set()
        self._held: set[asyncio.Task[None]] = set()
        self._sweep: asyncio.TimerHandle | None = None

    async def call(self, arguments: Any) -> Any:
        """Returns the result of one call; a call that is cancelled ends at the replica too.

        Raises InfrastructureFault for what another replica may do better, ValueError for arguments that none accepts,
        and RuntimeError for a replica's own error, which its log has.
        """
        line = await self._free_line()
        try:
            reply = await line.ask(msgspec.msgpack.encode(arguments))
        except BaseException:
            line.close()
            raise
        self._give_back(line)
        outcome, content = reply[0], reply[1:]
        if outcome == Outcome.RESULT:
            return self._decoder.decode(content)
        message = content.decode()
        if outcome == Outcome.FAULT:
            raise InfrastructureFault(message)
        raise ValueError(message) if outcome == Outcome.INVALID else RuntimeError(message)

    async def close(self) -> None:
        """Ends the unused connections, and waits until their leases have ended; no call should be running."""
        for line in self._idle:
            line.close()
        self._idle.clear()
        if self._held:
            await asyncio.wait(self._held, timeout=CONNECT_S)

    async def _free_line(self) -> _Line:
        while self._idle:
            line = self._idle.pop()  # the one that was used last, so that the others become idle
            if line.is_open:
                return line
        waiting: asyncio.Future[_Line] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._open_another()
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._give_back(waiting.result())
            with contextlib.suppress(ValueError):
                self._waiting.remove(waiting)
            while len(self._opening) > len(self._waiting):
                self._opening.pop().cancel()
            raise

    def _give_back(self, line: _Line) -> None:
        """Hands a line to the next call that waits, or keeps it for a while."""
        if not line.is_open or time.monotonic() > line.opened + MAX_AGE_S:
            line.close()
            if len(self._opening) < len(self._waiting):
                self._open_another()
            return
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(line)
                return
        line.used = time.monotonic()
        self._idle.append(line)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(IDLE_S / 2, self._close_idle)

    def _close_idle(self) -> None:
        now = time.monotonic()
        for line in self._idle:
            if now > line.used + IDLE_S or now > line.opened + MAX_AGE_S:
                line.close()
        self._idle = [line for line in self._idle if line.is_open]
        self._sweep = asyncio.get_running_loop().call_later(IDLE_S / 2, self._close_idle) if self._idle else None

    def _open_another(self) -> None:
        opening = asyncio.create_task(self._open())
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open(self) -> None:
        """Opens a line for the call that waits longest; what prevents it, that call raises."""
        try:
            line = await self._connected()
        except Exception as error:
            while self._waiting:
                waiting = self._waiting.popleft()
                if not waiting.done():
                    waiting.set_exception(error)
                    return
        else:
            self._give_back(line)

    async def _connected(self) -> _Line:
        """Returns a connection to a replica that Serve chooses. Raises ConnectionEnded, and Ray's errors."""
        lease: Any = self._lease.remote()
        try:
            host, port, key = await anext(aiter(lease))
            line = await _connect(host, port)
        except (asyncio.CancelledError, ConnectionEnded):
            lease.cancel()
            raise
        line.send(key.encode())
        held = asyncio.create_task(_hold(lease, line))
        self._held.add(held)
        held.add_done_callback(self._held.discard)
        return line


async def _connect(host: str, port: int) -> _Line:
    try:
        async with asyncio.timeout(CONNECT_S):
            _, line = await asyncio.get_running_loop().create_connection(_Line, host, port)
    except (OSError, TimeoutError) as error:
        raise ConnectionEnded(f"no connection to the replica at {host}:{port}: {error}") from error
    return line


async def _hold(lease: Any, line: _Line) -> None:
    """Reads a lease until it ends: with its connection, or because the replica died, which the connection to a machine
    that is gone does not know yet."""
    try:
        async for _ in lease:
            pass
    except Exception as error:
        logger.warning("a lease ended: %s", error)
    line.close()


class _Line(Frames):
    """One connection to a replica, which answers one call at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = self.used = time.monotonic()
        self._reply: asyncio.Future[bytes] | None = None

    async def ask(self, message: bytes) -> bytes:
        """Returns the reply to a message. Raises ConnectionEnded."""
        if not self.is_open:
            raise ConnectionEnded("the connection to the replica ended")
        self._reply = asyncio.get_running_loop().create_future()
        self.send(message)
        return await self._reply

    def received(self, message: bytes) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(ConnectionEnded("the connection to the replica ended"))
