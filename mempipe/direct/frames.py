"""Messages over a TCP connection: four bytes with the length, then the message."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from typing import Any, cast

MAX_BYTES = 256 * 2**20
"""Bytes of one message: a prompt of ten million ids takes a fifth of that."""
LENGTH = 4
PATIENCE_S = 15
"""Seconds after which the kernel ends a connection whose other machine does not answer. It answers for a process that
is busy, so this finds a machine or a network that is gone."""


class Frames(asyncio.Protocol, ABC):
    """One end of a connection that carries messages."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()

    @abstractmethod
    def received(self, message: bytes) -> None:
        """Is called with every whole message."""

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: bytes) -> None:
        assert self._transport is not None
        self._transport.write(len(message).to_bytes(LENGTH) + message)

    def close(self) -> None:
        """Ends the connection at once; unsent bytes are dropped."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is a transport too, but no subclass
        _watch(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= LENGTH and self.is_open:
            end = LENGTH + int.from_bytes(self._buffer[:LENGTH])
            if end - LENGTH > self.max_bytes:
                self.close()
            if not self.is_open or len(self._buffer) < end:
                return
            message = bytes(self._buffer[LENGTH:end])
            del self._buffer[:end]
            self.received(message)


def _watch(connection: Any) -> None:
    """Makes the kernel end a connection if the other machine no longer answers, also while nothing is sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", PATIENCE_S // 3),
        ("TCP_KEEPINTVL", PATIENCE_S // 3),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", PATIENCE_S * 1000),
    ):
        if option := getattr(socket, name, None):  # macOS has other names for some
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
