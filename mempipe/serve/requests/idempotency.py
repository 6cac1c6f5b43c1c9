"""A POST that is sent again with the same Idempotency-Key gets the reply of the first one, and does nothing twice."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mempipe.answers.errors import ApiError
from mempipe.serve.http.errors import Refusal
from mempipe.serve.state.replies import Replies, StoredReply

HEADER = "idempotency-key"
REPLAYED = "idempotent-replayed"
"""Header of a reply that was given before."""
MAX_BYTES = 4 * 2**20
"""Longer replies are not kept."""
_KEY = re.compile(r"[!-~]{1,255}")
_NOT_KEPT = (401, 403, 408, 409, 429)
"""Refusals that say nothing of the request itself; those of 500 and above are not kept either."""
_failures: ContextVar[list[int]] = ContextVar("_failures")
"""Statuses of failures in the request that is being answered; its tasks share the list."""


def failed(status: int) -> None:
    """Notes a failure of the request that is being answered. The reply has another status: that of a stream is sent
    before, and that of a call of MCP is always 200.
    """
    _failures.get([]).append(status)


class Idempotency:
    """Middleware behind the gate, which has read the body. Streams are kept as a whole. A reply ends when it is kept:
    who has read it and sends the request again gets it.
    """

    def __init__(self, app: ASGIApp, *, replies: Replies) -> None:
        self._app = app
        self._replies = replies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = Headers(scope=scope).get(HEADER) if scope["type"] == "http" and scope["method"] == "POST" else None
        if key is None or "owner" not in scope.get("state", {}):
            await self._app(scope, receive, send)
            return
        owner, message = scope["state"]["owner"], await receive()
        asked = b"\0".join([scope["path"].encode(), scope.get("query_string", b""), message.get("body", b"")])
        try:
            if not _KEY.fullmatch(key):
                raise ApiError(400, "Idempotency-Key should be 1 to 255 printable characters without blanks")
            kept = await self._begin(owner, key, hashlib.sha256(asked).hexdigest())
        except ApiError as error:
            await Refusal(error)(scope, receive, send)
            return
        if kept is not None:
            response = Response(kept.body, kept.status)
            response.raw_headers = [(name.encode(), value.encode()) for name, value in kept.headers]
            response.headers[REPLAYED] = "true"
            await response(scope, receive, send)
            return
        unread = [message]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        recorder, failures = _Recorder(send), list[int]()
        context = _failures.set(failures)
        try:
            await self._app(scope, replay, recorder.send)
        finally:
            _failures.reset(context)
            await asyncio.shield(self._replies.end(owner, key, recorder.reply(failures)))
        await recorder.end()

    async def _begin(self, owner: str, key: str, digest: str) -> StoredReply | None:
        """Does what `Replies.begin` does. Its thread continues after the client has hung up, and then what it noted is
        removed: otherwise every repetition would wait for a request that nobody works on.
        """
        beginning = asyncio.ensure_future(self._replies.begin(owner, key, digest))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            with suppress(ApiError):
                if await beginning is None:
                    await self._replies.end(owner, key, None)
            raise


class _Recorder:
    """Passes a response on and notes it, and keeps its last message back until `end`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._status = 0
        self._headers: list[list[str]] = []
        self._body = bytearray()
        self._last: Message | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in message["headers"]]
        elif message["type"] == "http.response.body":
            if len(self._body) <= MAX_BYTES:
                self._body += message.get("body", b"")
            if not message.get("more_body", False):
                self._last = message
                return
        await self._send(message)

    async def end(self) -> None:
        """Sends the last message, if there was one."""
        if self._last is not None:
            await self._send(self._last)

    def reply(self, failures: Sequence[int]) -> StoredReply | None:
        """Returns the response, in which there were `failures`; None for one that is not to be kept."""
        is_final = all(status < 500 and status not in _NOT_KEPT for status in (self._status, *failures))
        if self._last is None or not is_final or len(self._body) > MAX_BYTES:
            return None
        return StoredReply(status=self._status, headers=self._headers, body=bytes(self._body))
