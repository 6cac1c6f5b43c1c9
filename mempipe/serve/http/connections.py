"""Limits of connections, before there is a request: uvicorn itself waits for ever for one to come.

Serve's proxy takes its protocol by a name of uvicorn's, which `install` gives another meaning.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, ClassVar

import uvicorn.config
from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER_TIMEOUT_S = 10.0
"""Seconds in which the header of a request has to arrive: of the first one from the beginning of the connection, of the
others from their first byte. In between uvicorn closes a connection after a few seconds.
"""
MAX_HEADER_BYTES = 2**16
MAX_PER_ADDRESS = 512
"""Connections of one address. A proxy before the service is one address for all its clients."""
MAX_CONNECTIONS = 8192
NAME = "mempipe.serve.http.connections:GuardedProtocol"
_Protocol: Any = AutoHTTPProtocol


class GuardedProtocol(_Protocol):
    """uvicorn's protocol with limits; what exceeds one is closed without an answer."""

    per_address: ClassVar[Counter[str]] = Counter()
    """Open connections of this process."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._deadline: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._address = (transport.get_extra_info("peername") or ("",))[0]
        self.per_address[self._address] += 1
        if self.per_address[self._address] > MAX_PER_ADDRESS or self.per_address.total() > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.per_address[self._address] -= 1
        if self.per_address[self._address] <= 0:
            del self.per_address[self._address]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_waiting = self._has_no_request()
        super().data_received(data)
        if not self._has_no_request():
            self._stop_waiting()
        elif was_waiting:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self.transport.abort()
            elif self._deadline is None:
                self._expect_header()

    def _has_no_request(self) -> bool:
        """Returns whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _expect_header(self) -> None:
        self._deadline = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        self._header_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def install() -> None:
    """Makes the HTTP servers that start in this process from now on guarded ones."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = NAME
