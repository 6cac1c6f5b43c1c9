"""Who may ask, and how much: API keys and the limits of each.

A key is `mp-ID-SECRET`. What is kept of it is one line, `NAME:ID:HASH`, in a file or in the variable MEMPIPE_API_KEYS
(lines apart by commas): the secret itself can be read nowhere. A secret is 32 random bytes, which nobody finds by
trying, so that a plain SHA-256 guards it as well as a slow hash would, and a wrong secret costs nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mempipe.answers.errors import ApiError
from mempipe.environment import LOOPBACK
from mempipe.serve.http.errors import Refusal
from mempipe.serve.http.paths import path_of
from mempipe.serve.http.retry_after import MAX_RETRY_AFTER_S, RETRY_AFTER_S
from mempipe.serve.mcp.errors import PATH
from mempipe.settings import ConfigError

VARIABLE = "MEMPIPE_API_KEYS"
API = ("/v1/", PATH)
"""Beginnings of the paths that want a key."""
NOBODY = "local"
"""The owner of requests if keys are not required."""
_KEY = re.compile(r"mp-([0-9a-f]{12})-([0-9A-Za-z_-]{43})")
_LINE = re.compile(r"([\w.@-]{1,64}):([0-9a-f]{12}):([0-9a-f]{64})")
_OLD_LINE = re.compile(r"[\w.@-]{1,64}:[0-9a-f]{12}:[0-9a-f]{32}:[0-9a-f]{64}")
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
"""Names of this machine in a Host header."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """The record of a key: its secret can be checked, not read."""

    name: str
    id: str
    hash: str

    @classmethod
    def read(cls, line: str) -> KeyRecord:
        """Reads the record of one line. Raises ConfigError, which does not show the line."""
        match = _LINE.fullmatch(line.strip())
        if match is None:
            kind = "is of an earlier version" if _OLD_LINE.fullmatch(line.strip()) else "is not NAME:ID:HASH"
            raise ConfigError(f"a line of the API keys {kind}; `mempipe key NAME` makes one")
        name, key_id, digest = match.groups()
        return cls(name=name, id=key_id, hash=digest)

    def line(self) -> str:
        return f"{self.name}:{self.id}:{self.hash}"

    def is_of(self, secret: str) -> bool:
        """Returns whether the secret is this key's, in a time that does not depend on it."""
        return hmac.compare_digest(self.hash, _hash(secret))


def new_key(name: str) -> tuple[str, KeyRecord]:
    """Makes a key and the record that is kept of it. Raises ConfigError for a name that cannot be part of a line."""
    if not re.fullmatch(r"[\w.@-]{1,64}", name):
        raise ConfigError(f"the name of a key is {name!r}; expected letters, digits and . _ @ -")
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    return f"mp-{key_id}-{secret}", KeyRecord(name=name, id=key_id, hash=_hash(secret))


def load_keys(file: str = "") -> list[KeyRecord]:
    """Reads the records of the file and of MEMPIPE_API_KEYS; # starts a comment. Raises ConfigError."""
    records = _read(file)
    if file and not records:
        add = f"mempipe key NAME >> {shlex.quote(str(file))}"
        raise ConfigError(f"keys is {file!r}, which holds no key; `{add}` adds one")
    return records


def _read(file: str) -> list[KeyRecord]:
    try:
        lines = Path(file).read_text().splitlines() if file else []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"keys is {file!r}, which cannot be read: {getattr(error, 'strerror', error)}") from error
    lines += os.environ.get(VARIABLE, "").split(",")
    records = [KeyRecord.read(line) for line in lines if line.strip() and not line.startswith("#")]
    ids, names = [record.id for record in records], [record.name for record in records]
    if len(set(ids)) < len(ids):
        raise ConfigError("two lines of the API keys have the same id")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two lines of the API keys have the name {name!r}, and would share sessions and documents; give each "
                "key another name"
            )
    return records


class KeyRing:
    """The keys that are good now. Without any, none is needed."""

    def __init__(self, records: Iterable[KeyRecord] = ()) -> None:
        self._records = {record.id: record for record in records}
        self.are_needed = bool(self._records)

    def are_several(self) -> bool:
        """Returns whether more than one key is good now."""
        return len(self._records) > 1

    def find(self, key_id: str) -> KeyRecord | None:
        """Returns the record of a key, None where there is none."""
        return self._records.get(key_id)


class WatchedKeys(KeyRing):
    """The keys of a file and of MEMPIPE_API_KEYS. A change of the file holds from the next request on: added keys are
    accepted, removed ones are refused.
    """

    def __init__(self, file: str) -> None:
        """Raises ConfigError as `load_keys` does."""
        self._file = file
        self._state = self._state_of_file()
        super().__init__(load_keys(file))

    def find(self, key_id: str) -> KeyRecord | None:
        if self._file and (state := self._state_of_file()) != self._state:
            self._state = state
            try:
                self._records = {record.id: record for record in _read(self._file)}
                logger.warning("%d API keys were read again", len(self._records))
            except ConfigError as error:
                logger.error("the API keys stay as they are: %s", error)
        return super().find(key_id)

    def _state_of_file(self) -> tuple[int, int, int] | None:
        try:
            state = os.stat(self._file)
        except OSError:
            return None
        return state.st_ino, state.st_size, state.st_mtime_ns


@dataclass(slots=True)
class Allowance:
    """Token bucket and concurrency limit of one API key on this replica. Refills at `per_minute`; holds a tenth of it,
    at least 1: a client may send the requests of six seconds at once."""

    per_minute: int
    at_once: int
    under_way: int = 0
    tokens: float = field(init=False)
    filled_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.tokens, self.filled_at = self.capacity, time.monotonic()

    @property
    def capacity(self) -> float:
        return max(self.per_minute / 10, 1.0)

    def take(self) -> None:
        """Raises ApiError 429 when the key asks too often, or too much at once."""
        now = time.monotonic()
        self.tokens = min(self.capacity, self.tokens + (now - self.filled_at) * self.per_minute / 60)
        self.filled_at = now
        if self.under_way >= self.at_once:
            raise ApiError(429, f"{self.under_way} requests of this key are in flight, the most that are allowed")
        if self.tokens < 1:
            raise ApiError(429, f"this key may make {self.per_minute} requests a minute; wait a little")
        self.tokens -= 1

    @property
    def wait_s(self) -> float:
        """Returns after how many seconds a refused request may come again."""
        return min(max((1 - self.tokens) * 60 / self.per_minute, RETRY_AFTER_S), MAX_RETRY_AFTER_S)


class Access:
    """Lets requests to the API (/v1 and /mcp) in that name a known key, within its limits; notes the owner in
    `scope["state"]["owner"]`.

    Without keys it serves callers on this machine alone, under its own name (DNS rebinding), and no pages of another
    origin, which would ask through a visitor's browser.
    """

    def __init__(self, app: ASGIApp, *, keys: KeyRing, per_minute: int, at_once: int) -> None:
        self._app = app
        self._keys = keys
        self._limits = (per_minute, at_once)
        self._allowances: dict[str, Allowance] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not path_of(scope).startswith(API):
            await self._app(scope, receive, send)
            return
        try:
            owner = owner_of(scope, self._keys)
        except ApiError as error:
            await Refusal(error)(scope, receive, send)
            return
        if not self._keys.are_needed:
            await self._pass(owner, scope, receive, send)
            return
        allowance = self._allowances.setdefault(owner, Allowance(*self._limits))
        try:
            allowance.take()
        except ApiError as error:
            await Refusal(error, allowance.wait_s)(scope, receive, send)
            return
        allowance.under_way += 1
        try:
            await self._pass(owner, scope, receive, send)
        finally:
            allowance.under_way -= 1

    async def _pass(self, owner: str, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "state": {**scope.get("state", {}), "owner": owner}}, receive, send)


def owner_of(scope: Scope, keys: KeyRing) -> str:
    """Returns the name of the caller's key, NOBODY if no keys are needed. Raises ApiError 401 or 403."""
    headers = Headers(scope=scope)
    if not keys.are_needed:
        _check_is_local(scope, headers)
        return NOBODY
    kind, _, key = headers.get("authorization", "").partition(" ")
    match = _KEY.fullmatch(key.strip()) if kind.lower() == "bearer" else None
    record = keys.find(match[1]) if match else None
    # The secret is compared in any case, so that the time does not tell which ids there are.
    is_right = (record or _NO_RECORD).is_of(match[2] if match else "")
    if record is None or not is_right:
        raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
    return record.name


def _check_is_local(scope: Scope, headers: Headers) -> None:
    """Raises ApiError 403 for a caller on another machine, and for a page of another origin in a browser on this one.

    A browser names the page's origin in `Origin` whenever it posts, and where the page is from in `Sec-Fetch-Site`.
    """
    client, host = (scope.get("client") or ("",))[0], headers.get("host", "")
    if client not in LOOPBACK or not _HOST.fullmatch(host):
        raise ApiError(403, "this service has no API keys and answers callers on its own machine only")
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    if (origin is not None and origin.partition("://")[2] != host) or site not in ("none", "same-origin"):
        raise ApiError(403, "this service has no API keys and answers no pages of other sites")


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


_NO_RECORD = new_key("nobody")[1]
