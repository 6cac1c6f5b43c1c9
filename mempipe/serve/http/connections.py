"""Limits of connections, before there is a request: uvicorn itself waits for ever for one to come.

Serve's proxy takes its protocol by a name of uvicorn's, which `install` gives another meaning.
"""

from __future__ import annotations

import asyncio
import logging
import re
import resource
from collections import Counter
from typing import Any, ClassVar

import uvicorn.config
from starlette.datastructures import Headers
from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from mempipe.answers.errors import ApiError
from mempipe.serve.http import refusals
from mempipe.serve.http.errors import Refusal

HEADER_TIMEOUT_S = 10.0
"""Seconds in which the header of a request has to arrive: of the first one from the beginning of the connection, of the
others from their first byte. In between Serve closes a connection after 90 s.
"""
STALL_TIMEOUT_S = 60.0
"""Seconds in which a client has to read some of an answer that waits for it."""
MAX_HEADER_BYTES = 2**16
MAX_PER_ADDRESS = 512
"""Connections of one address. A proxy before the service is one address for all its clients."""
MAX_CONNECTIONS = 8192
MAX_UNREAD_BYTES = 2**20
"""Bytes of a body that come after its request was refused; a client that sends them all can still read why."""
MAX_PIPELINED = 16
"""Requests of a connection that wait for the answers of earlier ones."""
MALFORMED = ApiError(400, "the request does not have the form of HTTP/1.1")
LONG_HEADER = ApiError(431, f"the header has more than {MAX_HEADER_BYTES} bytes")
NAME = "mempipe.serve.http.connections:GuardedProtocol"
_BEGINNING = re.compile(rb"[A-Z]{1,32}(?: |$)")
"""The method of a request."""
_END = re.compile(rb"\n\r?\n")
"""The end of a header, also of one whose lines end as the parser refuses."""
OTHER_PROTOCOL = "x-upgrade"
"""The header under which a request names another protocol, for which the connection stays with HTTP."""
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_Protocol: Any = HttpToolsProtocol


class GuardedProtocol(_Protocol):
    """uvicorn's protocol with limits; what exceeds one is closed without an answer, but for a long header.

    What the parser refuses gets an answer in the form of the API, unless an earlier request of the connection is being
    answered: the client would take the refusal for that answer.

    If MAX_CONNECTIONS are open, a new one takes the place of the one that has been without a request for longest. So
    connections that only wait keep nobody out.
    """

    per_address: ClassVar[Counter[str]] = Counter()
    """Open connections of this process."""
    idle: ClassVar[dict[GuardedProtocol, None]] = {}
    """Connections without a request; the one that has been so for longest is first."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.ws_protocol_class = None  # the service has no web sockets, and uvicorn would hand the connection over
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._extra_bytes = 0
        """Bytes of the request in progress beyond twice its body: header, sizes of chunks, trailers."""
        self._unread_bytes = 0
        self._header_bytes = 0
        """Bytes of the newest header: _extra_bytes knows none of one that arrived whole."""
        self._address = ""
        self._has_begun = False
        """Whether a message of the client has begun and not ended."""
        self._head = b""
        """The bytes of a request whose header has not ended yet."""
        self._num_hosts = 0
        self._cause: refusals.Cause = "malformed"
        self._fault = MALFORMED
        """The refusal of the connection if the parser ends, for the metrics and for the client."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._address = (transport.get_extra_info("peername") or ("",))[0]
        self.per_address[self._address] += 1
        if self.per_address[self._address] > MAX_PER_ADDRESS:
            self._refuse("connections_of_address")
            return
        if self.per_address.total() > max_connections():
            if not self.idle:
                self._refuse("connections")
                return
            longest = next(iter(self.idle))
            del self.idle[longest]
            longest._refuse("connections")
        self.idle[self] = None
        self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._go_on()
        self.idle.pop(self, None)
        self.per_address[self._address] -= 1
        if self.per_address[self._address] <= 0:
            del self.per_address[self._address]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        had_begun = self._has_begun
        self._extra_bytes += len(data)
        super().data_received(data if had_begun else self._with_whole_header(data))
        if self._extra_bytes > MAX_HEADER_BYTES:
            self._refuse("long_header", LONG_HEADER)
        elif self._unread_bytes > MAX_UNREAD_BYTES:
            self._refuse("large_body")
        elif not self._has_no_request():
            self._stop_waiting()
            self.idle.pop(self, None)
        elif had_begun and not self._has_begun:  # the rest of a request that was refused before
            self._stop_waiting()
            self._wait_for_next()
        elif self._deadline is None:
            self._expect_header()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_TIMEOUT_S, self._refuse, "slow_reader")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._go_on()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._cause = "pipelined"
            raise ValueError(f"{MAX_PIPELINED} requests wait for their answers")  # ends the parsing
        super().on_message_begin()
        self._extra_bytes = self._unread_bytes = self._header_bytes = self._num_hosts = 0
        self._has_begun = True

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._header_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value) + len(": \r\n")
        self._num_hosts += name.lower() == b"host"

    def on_headers_complete(self) -> None:
        if self._header_bytes > MAX_HEADER_BYTES:
            self._cause, self._fault = "long_header", LONG_HEADER
            raise self._fault  # ends the parsing
        if self._num_hosts > 1:  # a proxy in front may have checked another one than we would (RFC 9112)
            self._fault = ApiError(400, f"a request has one Host header; this one has {self._num_hosts}")
            raise self._fault
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = _without_chunks(self.cycle)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._extra_bytes -= 2 * len(body)
        if self._has_no_request():
            self._unread_bytes += len(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._has_begun = False
        self._extra_bytes = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._has_no_request() and not self.transport.is_closing():
            self.idle[self] = None

    def send_400_response(self, msg: str) -> None:
        """Refuses what ended the parsing; uvicorn's own answer is plain text."""
        self._refuse(self._cause, self._fault)

    def _with_whole_header(self, data: bytes) -> bytes:
        """Returns the first bytes of a request for the parser: none before its header has ended. The parser refuses at
        once what begins like no request.
        """
        data, self._head = self._head + data, b""
        if _END.search(data) or not _BEGINNING.match(data):
            return _without_upgrade(data)
        self._head = data
        return b""

    def _unsupported_upgrade_warning(self) -> None:
        """Writes no line to the log for an upgrade that the service does not have; its request is answered."""

    def _has_no_request(self) -> bool:
        """Returns whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_next(self) -> None:
        """Starts the time that a connection without a request may last, as uvicorn does after an answer."""
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _expect_header(self) -> None:
        self._deadline = self.loop.call_later(HEADER_TIMEOUT_S, self._refuse, "slow_header")

    def _refuse(self, cause: refusals.Cause, error: ApiError | None = None) -> None:
        """Closes the connection, with the error if there is one and no other answer is being written."""
        is_open = not self.transport.is_closing()
        if is_open:
            refusals.count(cause)
        if is_open and error is not None and self._has_no_request():
            self.transport.write(_answer(error))
            self.transport.close()
        else:
            self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _go_on(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


def _answer(error: ApiError) -> bytes:
    """Returns the whole answer of what has no request to answer, after which the connection ends."""
    refusal = Refusal(error)
    fields = b"".join(b"%s: %s\r\n" % pair for pair in refusal.raw_headers)
    return STATUS_LINE[error.status] + fields + b"connection: close\r\n\r\n" + bytes(refusal.body)


def _without_chunks(cycle: Any) -> Send:
    """Returns the `send` of an HTTP/1.0 request: its client does not know chunks, which uvicorn sends if it knows no
    length. The end of the connection is the end of the body."""
    send, has_length = cycle.send, False

    async def unchunked(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = "content-length" in Headers(raw=list(message.get("headers", [])))
        if not has_length:
            cycle.chunked_encoding = False
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return unchunked


def _without_upgrade(data: bytes) -> bytes:
    """Returns the first bytes of a request with its Upgrade header under another name: the parser takes the body of a
    request that asks for another protocol for that protocol. Java's HttpClient asks for HTTP/2 by default."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(f"\r\n{OTHER_PROTOCOL}:".encode(), head) + end + rest if end else data


def _is_no_refusal(record: logging.LogRecord) -> bool:
    return record.msg != "Invalid HTTP request received."


def max_connections() -> int:
    """Returns how many connections may be open: MAX_CONNECTIONS, or three quarters of this process's descriptors."""
    return min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4)


def install() -> None:
    """Makes the HTTP servers that start in this process from now on guarded ones.

    uvicorn logs what its parser refuses. Here it is counted: strangers fill no log.
    """
    logging.getLogger("uvicorn.error").addFilter(_is_no_refusal)
    uvicorn.config.HTTP_PROTOCOLS["auto"] = NAME
