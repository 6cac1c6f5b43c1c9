"""Who may ask, and how much: API keys and the limits of each.

A key is `mp-ID-SECRET`. What is kept of it is one line, `NAME:ID:SALT:HASH`, in a file or in the variable
MEMPIPE_API_KEYS (lines apart by commas): the secret itself can be read nowhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mempipe.checks.machine import LOOPBACK
from mempipe.serve.http.errors import ApiError, error_reply
from mempipe.settings import ConfigError

VARIABLE = "MEMPIPE_API_KEYS"
NOBODY = "local"
"""The owner of what is asked where no keys are needed."""
_KEY = re.compile(r"mp-([0-9a-f]{12})-([0-9A-Za-z_-]{43})")
_LINE = re.compile(r"([\w.@-]{1,64}):([0-9a-f]{12}):([0-9a-f]{32}):([0-9a-f]{64})")
_SCRYPT = {"n": 2**13, "r": 8, "p": 1, "dklen": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """The record of a key: its secret can be checked, not read."""

    name: str
    id: str
    salt: str
    hash: str

    @classmethod
    def read(cls, line: str) -> KeyRecord:
        """Reads the record of one line. Raises ConfigError, which does not show the line."""
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ConfigError("a line of the API keys is not NAME:ID:SALT:HASH; `mempipe key NAME` makes one")
        name, key_id, salt, digest = match.groups()
        return cls(name=name, id=key_id, salt=salt, hash=digest)

    def line(self) -> str:
        return f"{self.name}:{self.id}:{self.salt}:{self.hash}"

    def is_of(self, secret: str) -> bool:
        """Returns whether the secret is this key's (tens of milliseconds, on purpose)."""
        return hmac.compare_digest(self.hash, _hash(secret, self.salt))


def new_key(name: str) -> tuple[str, KeyRecord]:
    """Makes a key and the record that is kept of it. Raises ConfigError for a name that cannot stand in a line."""
    if not re.fullmatch(r"[\w.@-]{1,64}", name):
        raise ConfigError(f"the name of a key is {name!r}; expected letters, digits and . _ @ -")
    key_id, secret, salt = secrets.token_hex(6), secrets.token_urlsafe(32), secrets.token_hex(16)
    return f"mp-{key_id}-{secret}", KeyRecord(name=name, id=key_id, salt=salt, hash=_hash(secret, salt))


def load_keys(file: str = "") -> list[KeyRecord]:
    """Reads the records of the file and of MEMPIPE_API_KEYS; # starts a comment. Raises ConfigError."""
    try:
        lines = Path(file).read_text().splitlines() if file else []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"keys is {file!r}, which cannot be read: {getattr(error, 'strerror', error)}") from error
    lines += os.environ.get(VARIABLE, "").split(",")
    records = [KeyRecord.read(line) for line in lines if line.strip() and not line.startswith("#")]
    if file and not records:
        raise ConfigError(f"keys is {file!r}, which holds no key; `mempipe key NAME >> {file}` adds one")
    ids = [record.id for record in records]
    if len(set(ids)) < len(ids):
        raise ConfigError("two lines of the API keys have the same id")
    return records


@dataclass(slots=True)
class Allowance:
    """Holds what one key may still ask of this replica: a bucket that fills at `per_minute` and holds a tenth of it."""

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
        if self.under_way >= self.at_once:
            raise ApiError(429, f"{self.under_way} requests of this key are in flight, the most that are allowed")
        now = time.monotonic()
        self.tokens = min(self.capacity, self.tokens + (now - self.filled_at) * self.per_minute / 60)
        self.filled_at = now
        if self.tokens < 1:
            raise ApiError(429, f"this key may make {self.per_minute} requests a minute; wait a little")
        self.tokens -= 1


class Access:
    """Lets requests to the API (/v1) in that name a known key, within its limits; notes the owner in
    `scope["state"]["owner"]`.

    Without keys only callers on this machine are served, and only under its own name: a page of another site cannot
    ask through a visitor's browser.
    """

    def __init__(self, app: ASGIApp, *, keys: list[KeyRecord], per_minute: int, at_once: int) -> None:
        self._app = app
        self._keys = {record.id: record for record in keys}
        self._limits = (per_minute, at_once)
        self._allowances: dict[str, Allowance] = {}
        self._verified: set[bytes] = set()
        self._pepper = secrets.token_bytes(32)  # so that what is remembered of a good key is worth nothing elsewhere

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        try:
            owner = await self._owner(scope)
            if not self._keys:
                await self._pass(owner, scope, receive, send)
                return
            allowance = self._allowances.setdefault(owner, Allowance(*self._limits))
            allowance.take()
        except ApiError as error:
            await error_reply(error)(scope, receive, send)
            return
        allowance.under_way += 1
        try:
            await self._pass(owner, scope, receive, send)
        finally:
            allowance.under_way -= 1

    async def _pass(self, owner: str, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "state": {**scope.get("state", {}), "owner": owner}}, receive, send)

    async def _owner(self, scope: Scope) -> str:
        """Returns the name of the caller's key. Raises ApiError 401 or 403."""
        headers = Headers(scope=scope)
        if not self._keys:
            client = (scope.get("client") or ("",))[0]
            host = headers.get("host", "").rsplit(":", 1)[0].strip("[]")
            if client not in LOOPBACK or host not in LOOPBACK:
                raise ApiError(403, "this service has no API keys and answers callers on its own machine only")
            return NOBODY
        kind, _, key = headers.get("authorization", "").partition(" ")
        match = _KEY.fullmatch(key.strip()) if kind.lower() == "bearer" else None
        record = self._keys.get(match[1]) if match else None
        if match is None or record is None or not await self._is_right(record, match[2]):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        return record.name

    async def _is_right(self, record: KeyRecord, secret: str) -> bool:
        mark = hmac.digest(self._pepper, f"{record.id}{secret}".encode(), "sha256")
        if mark not in self._verified and await asyncio.to_thread(record.is_of, secret):
            self._verified.add(mark)
        return mark in self._verified


def _hash(secret: str, salt: str) -> str:
    return hashlib.scrypt(secret.encode(), salt=bytes.fromhex(salt), **_SCRYPT).hex()
