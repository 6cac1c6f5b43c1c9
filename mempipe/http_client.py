"""The one HTTP client of services outside the process: searches and completions go through it.

A call is repeated after transient failures, until its deadline or its last attempt; then it raises a fault of
`mempipe.faults`. Every request must be safe to repeat: a request without an answer may have reached the service.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, stop_before_delay

from mempipe.faults import ServiceFault, ServiceTimeout, retry_pauses

_CONNECT_S = 10.0
_MAX_REASON_CHARS = 300

SHORTEST_S = 0.05
"""Seconds that a further attempt has at least: one that has none would hide why the attempts before it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The deadline and the number of attempts of a call."""

    timeout_s: float
    """Deadline of one call: all attempts, the pauses between them, and the wait for a free connection."""
    setting: str
    """The setting that `timeout_s` comes from; messages name it."""
    num_attempts: int = 20
    """A service that answers errors at once is left alone after this many."""

    @property
    def attempt_s(self) -> float:
        """Returns the deadline of one attempt, so that an attempt that hangs leaves time for others."""
        return self.timeout_s / 3


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Returns the authorities that are trusted. Reading their file takes 15 ms, so all clients share what it holds."""
    return httpx.create_ssl_context(trust_env=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """A reply of status 200."""

    headers: Mapping[str, str]
    content: bytes

    def json(self) -> Any:
        """Returns the parsed content. Raises ValueError when it is not JSON."""
        try:
            return json.loads(self.content)
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error


class HttpClient:
    """Connections to one service. Any number of calls may be in flight, `max_concurrency` of them with the service."""

    def __init__(
        self, url: str, policy: RetryPolicy, *, max_answer_bytes: int, max_concurrency: int = 1, key: str = ""
    ) -> None:
        """`key` is sent as a bearer token, and replaced by *** wherever the service repeats it."""
        self.url = url.rstrip("/")
        self._policy = policy
        self._max_answer_bytes = max_answer_bytes
        self._key = key
        self._places = asyncio.Semaphore(max_concurrency)
        # The key and the request are for this host only: no redirects, and no proxy or password of the environment.
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=max_concurrency),
            follow_redirects=False,
            trust_env=False,
            verify=_certificates(),
        )

    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, deadline: float | None = None
    ) -> HttpAnswer:
        """Returns the answer. `deadline` (of `time.monotonic`) replaces the policy's, for calls that share one.

        Raises ServiceTimeout when the deadline or the attempts are used up, and ServiceFault at once for a status that
        a retry cannot change and for an answer that is too long.
        """
        if deadline is None:
            deadline = time.monotonic() + self._policy.timeout_s
        pauses = retry_pauses()

        def pause(state: RetryCallState) -> float:
            assert state.outcome is not None, "an attempt has failed"
            failure = state.outcome.exception()
            return max(next(pauses), failure.retry_after_s if isinstance(failure, _Passing) else 0.0)

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Passing),
            stop=stop_after_attempt(self._policy.num_attempts)
            | stop_before_delay(deadline - time.monotonic() - SHORTEST_S),
            wait=pause,
            reraise=True,
        )
        try:
            return await retrying(self._attempt, method, f"{self.url}/{path}", body, deadline)
        except _Passing as failure:
            num_attempts = retrying.statistics["attempt_number"]
            raise ServiceTimeout(
                f"{self.url}/{path} gave no answer within {self._policy.setting} {self._policy.timeout_s:g} s and "
                f"{self._policy.num_attempts} attempts; attempt {num_attempts}: {failure}"
            ) from failure

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.aclose()

    async def _attempt(self, method: str, url: str, body: Mapping[str, Any] | None, deadline: float) -> HttpAnswer:
        left = max(deadline - time.monotonic(), 0.0)
        try:
            async with (
                asyncio.timeout(left),
                self._places,
                asyncio.timeout(self._policy.attempt_s),
                self._client.stream(method, url, json=body) as response,
            ):
                content = await self._read(response)
        except TimeoutError as error:
            raise _Passing(f"no answer within {min(left, self._policy.attempt_s):g} s") from error
        except (httpx.RequestError, httpx.StreamError) as error:
            raise _Passing(f"{type(error).__name__}: {self._public(str(error))}") from error
        if response.status_code == 200:
            return HttpAnswer(headers=response.headers, content=content)
        reason = f"status {response.status_code}: {self._public(content.decode(errors='replace'))}"
        if may_pass(response.status_code):
            raise _Passing(reason, retry_after_s=retry_after_s(response.headers))
        raise ServiceFault(f"{url} answered {reason}")

    async def _read(self, response: httpx.Response) -> bytes:
        content = bytearray()
        async for piece in response.aiter_bytes():
            content += piece
            if len(content) > self._max_answer_bytes:
                raise ServiceFault(f"{response.url}: the answer has more than {self._max_answer_bytes} bytes")
        return bytes(content)

    def _public(self, text: str) -> str:
        """Returns the service's message on one short line, without the key, which some services repeat when they refuse
        it."""
        text = text.replace(self._key, "***") if self._key else text
        return " ".join(text.split())[:_MAX_REASON_CHARS]


def may_pass(status: int) -> bool:
    """Returns whether the same request may be answered later: a time-out, a conflict, too many requests, or an error of
    the server (500 is also what Ray Serve's proxy answers for a replica that died). A server that does not know the
    method (501) or the version of HTTP (505) will not know it later."""
    return status in (408, 409, 429) or (status >= 500 and status not in (501, 505))


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Returns the seconds that Retry-After-Ms asks for, or else Retry-After, as a number or a date; 0 when neither can
    be read."""
    for seconds in (_number(headers.get("retry-after-ms", "")) / 1000, _number(headers.get("retry-after", ""))):
        if math.isfinite(seconds):
            return max(seconds, 0.0)
    try:
        return max(parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return 0.0


def _number(text: str) -> float:
    """Returns the number that a text is; NaN for another one."""
    try:
        return float(text)
    except ValueError:
        return math.nan


class _Passing(Exception):
    """A transient failure: the call is retried."""

    def __init__(self, reason: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s
