"""Keeps sessions, and documents that come in pieces, in one SQLite file.

They outlive a restart and a lost replica. Replicas on one machine share the file. So do the responses of the Responses
API, and the replies to requests with an Idempotency-Key.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil

from mempipe.answers.errors import ApiError
from mempipe.serve.requests.reserve import Reserve
from mempipe.settings import ConfigError

T = TypeVar("T")
_TABLES = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, memory TEXT NOT NULL, num_questions INTEGER NOT NULL,
    created_at REAL NOT NULL, expires_at REAL NOT NULL, busy_until REAL NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS documents (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, num_bytes INTEGER NOT NULL, created_at REAL NOT NULL,
    expires_at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS pieces (
    document TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE, start INTEGER NOT NULL, content BLOB NOT NULL,
    PRIMARY KEY (document, start)
);
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, body TEXT NOT NULL, memory TEXT NOT NULL, num_bytes INTEGER NOT NULL,
    created_at REAL NOT NULL, expires_at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS replies (
    owner TEXT NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL, holder TEXT NOT NULL, status INTEGER, headers TEXT,
    body BLOB, num_bytes INTEGER NOT NULL, expires_at REAL NOT NULL, PRIMARY KEY (owner, key)
);
"""
_ADDED = {
    "sessions": {
        "holder": ("TEXT NOT NULL DEFAULT ''", "''"),
        "num_bytes": ("INTEGER NOT NULL DEFAULT 0", "LENGTH(CAST(memory AS BLOB))"),
        "metadata": ("TEXT NOT NULL DEFAULT ''", "''"),
    },
    "responses": {"items": ("TEXT NOT NULL DEFAULT ''", "''")},
}
"""Columns that the tables of an earlier version lack: their types, and their values for the rows of that version."""
_INDEXES = """
CREATE INDEX IF NOT EXISTS sessions_of_owner ON sessions (owner, created_at);
CREATE INDEX IF NOT EXISTS sessions_by_end ON sessions (expires_at);
CREATE INDEX IF NOT EXISTS documents_by_end ON documents (expires_at);
CREATE INDEX IF NOT EXISTS responses_by_end ON responses (expires_at);
CREATE INDEX IF NOT EXISTS replies_by_end ON replies (expires_at);
CREATE INDEX IF NOT EXISTS sessions_bytes ON sessions (owner, num_bytes);
CREATE INDEX IF NOT EXISTS documents_bytes ON documents (owner, num_bytes);
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (owner, expires_at, num_bytes);
CREATE INDEX IF NOT EXISTS replies_by_age ON replies (owner, expires_at, status, num_bytes);
"""
_COUNTED = ("sessions", "documents", "responses", "replies")
"""Tables whose `num_bytes` an owner keeps."""
_LEAST_FREE = 64 * 2**20
"""Bytes of the disk that stay free: what comes from outside must not fill it."""
_FULL = "the disk of the service is full; delete documents, sessions or responses"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A conversation: the memory that its next question starts from. Times are Unix seconds."""

    id: str
    memory: str
    num_questions: int
    created_at: float
    expires_at: float
    metadata: str = ""
    """Notes of a client, as JSON; "" for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDocument:
    """A long text that an agent may read."""

    id: str
    num_bytes: int
    created_at: float
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReply:
    """A whole answer as it was sent, for a request that is sent again."""

    status: int
    headers: list[list[str]]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response of the Responses API as JSON, the memory that the next one starts from, and its input items as JSON
    ("" for none)."""

    id: str
    body: str
    memory: str
    items: str = ""


class Store:
    """The file. Every call opens it again in a thread, so that any number of tasks and processes may use it."""

    def __init__(
        self,
        path: Path,
        *,
        lifetime_s: float,
        max_items: int = 1000,
        max_replies: int = 10_000,
        max_document_bytes: int = 2**26,
        max_owner_bytes: int = 2**28,
        max_bytes: int = 2**33,
    ) -> None:
        """A session or document lives `lifetime_s` seconds after its last use; an owner may have `max_items` of each,
        as many responses, and `max_replies` replies. Memories, documents, responses and replies of an owner may have
        `max_owner_bytes`, those of all owners `max_bytes`. Raises ConfigError when the file cannot be made.
        """
        self._path = path
        self._reserve = Reserve(path.with_name("reserve"))
        self._max_owner_bytes = max_owner_bytes
        self._max_bytes = max_bytes
        self._lifetime_s = lifetime_s
        self._max_items = max_items
        self._max_replies = max_replies
        self._max_document_bytes = max_document_bytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as database:
                database.execute("PRAGMA journal_mode=WAL")
                database.executescript(_TABLES)
                database.execute("BEGIN IMMEDIATE")  # replicas may start at the same time
                for table, columns in _ADDED.items():
                    known = {row["name"] for row in database.execute(f"PRAGMA table_info({table})")}
                    for name in columns.keys() - known:
                        kind, value = columns[name]
                        database.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")
                        database.execute(f"UPDATE {table} SET {name}={value}")
                database.executescript(_INDEXES)
            self._reserve.fill()
            # With one connection open SQLite keeps the files next to the database, for which a full disk has no room.
            self._connection = sqlite3.connect(path, check_same_thread=False)
            self._connection.execute("SELECT COUNT(*) FROM sessions").fetchone()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"state is {str(path.parent)!r}, where no database can be kept: {error}") from error

    async def create_session(self, owner: str, *, memory: str = "", metadata: str = "") -> Session:
        """Creates a session with a memory. Raises ApiError 429 when the owner has too many or keeps too much."""

        def create(database: sqlite3.Connection) -> Session:
            num_bytes = len(memory.encode()) + len(metadata.encode())
            self._check_room(database, "sessions", owner, num_bytes)
            now = time.time()
            session = Session(
                id=f"session-{secrets.token_hex(12)}",
                memory=memory,
                num_questions=0,
                created_at=now,
                expires_at=now + self._lifetime_s,
                metadata=metadata,
            )
            database.execute(
                "INSERT INTO sessions (id, owner, memory, metadata, num_bytes, num_questions, created_at, expires_at) "
                "VALUES (?,?,?,?,?,?,?,?)",
                (session.id, owner, memory, metadata, num_bytes, 0, now, session.expires_at),
            )
            return session

        return await self._run(create)

    async def sessions(
        self, owner: str, *, limit: int, after: str | None = None, newest_first: bool = False
    ) -> list[Session]:
        """Returns at most `limit` of the owner's sessions, in the order of their creation: those after the session
        `after`. Raises ApiError 400 when there is no such session.
        """

        def read(database: sqlite3.Connection) -> list[Session]:
            then, way = ("<", "DESC") if newest_first else (">", "ASC")
            where, arguments = "owner=? AND expires_at>?", [owner, time.time()]
            if after is not None:
                try:
                    last = _session(database, after, owner)
                except ApiError as error:
                    raise ApiError(400, f"{error}; leave after out to begin again", param="after") from error
                where, arguments = f"{where} AND (created_at, id) {then} (?,?)", [*arguments, last.created_at, last.id]
            query = f"SELECT {_SESSION} FROM sessions WHERE {where} ORDER BY created_at {way}, id {way} LIMIT ?"
            return [Session(**row) for row in database.execute(query, (*arguments, limit))]

        return await self._run(read)

    async def change_session(
        self,
        session_id: str,
        owner: str,
        *,
        metadata: str | None = None,
        noted: Callable[[str], str] = lambda memory: memory,
    ) -> Session:
        """Changes a session between two questions: its metadata, and its memory, which `noted` turns into the new one.

        Raises ApiError 404, 409 when a question of it is in flight, 429 and 503 when there is no room.
        """

        def change(database: sqlite3.Connection) -> Session:
            before = _session(database, session_id, owner)
            held = database.execute("SELECT holder, busy_until FROM sessions WHERE id=?", (session_id,)).fetchone()
            if held["busy_until"] >= time.time() and not _is_gone(held["holder"]):
                raise ApiError(409, f"session {session_id} is working on a question", param="session")
            changed = replace(
                before,
                memory=noted(before.memory),
                metadata=before.metadata if metadata is None else metadata,
                expires_at=time.time() + self._lifetime_s,
            )
            num_bytes, num_before = (len(f"{each.memory}{each.metadata}".encode()) for each in (changed, before))
            self._check_bytes(database, owner, num_bytes - num_before)
            database.execute(
                "UPDATE sessions SET memory=?, metadata=?, num_bytes=?, expires_at=? WHERE id=?",
                (changed.memory, changed.metadata, num_bytes, changed.expires_at, session_id),
            )
            return changed

        return await self._run(change)

    async def session(self, session_id: str, owner: str) -> Session:
        """Raises ApiError 404."""
        return await self._run(lambda database: _session(database, session_id, owner))

    async def delete_session(self, session_id: str, owner: str) -> None:
        """Raises ApiError 404."""
        await self._delete("sessions", session_id, owner)

    async def claim(self, session_id: str, owner: str, *, for_s: float) -> Session:
        """Claims the session for one question for at most `for_s` seconds, and no longer than this process lives.

        Raises ApiError 404, 409 when another question of it is in flight, and 429 when the owner keeps too much: the
        new memory is stored in any case, because the question has been answered then.
        """

        def claim(database: sqlite3.Connection) -> Session:
            session, now = _session(database, session_id, owner), time.time()
            self._check_owner(database, owner, 0)
            held = database.execute("SELECT holder FROM sessions WHERE id=?", (session_id,)).fetchone()
            changed = database.execute(
                "UPDATE sessions SET busy_until=?, holder=? WHERE id=? AND (busy_until<? OR (? AND holder=?))",
                (now + for_s, _this_process(), session_id, now, _is_gone(held["holder"]), held["holder"]),
            )
            if not changed.rowcount:
                raise ApiError(409, f"session {session_id} is working on another question", param="session")
            return session

        return await self._run(claim, frees=True)

    async def release(self, session_id: str, memory: str | None) -> None:
        """Ends a claim; `memory` is the session's new one, or None when the question was not answered."""
        await asyncio.to_thread(self.release_now, session_id, memory)

    def release_now(self, session_id: str, memory: str | None) -> None:
        """Ends a claim, for callers outside the event loop."""

        def release(database: sqlite3.Connection) -> None:
            database.execute("UPDATE sessions SET busy_until=0 WHERE id=?", (session_id,))
            if memory is not None:
                database.execute(
                    "UPDATE sessions SET memory=?, num_bytes=?+LENGTH(CAST(metadata AS BLOB)), "
                    "num_questions=num_questions+1, expires_at=? WHERE id=?",
                    (memory, len(memory.encode()), time.time() + self._lifetime_s, session_id),
                )

        self._run_now(release, frees=True)

    async def create_document(self, owner: str) -> StoredDocument:
        """Creates an empty document. Raises ApiError 429 when the owner has too many."""

        def create(database: sqlite3.Connection) -> StoredDocument:
            self._check_room(database, "documents", owner, 0)
            now = time.time()
            document = StoredDocument(
                id=f"doc-{secrets.token_hex(12)}", num_bytes=0, created_at=now, expires_at=now + self._lifetime_s
            )
            database.execute(
                "INSERT INTO documents (id, owner, num_bytes, created_at, expires_at) VALUES (?,?,?,?,?)",
                (document.id, owner, 0, now, document.expires_at),
            )
            return document

        return await self._run(create)

    async def append(self, document_id: str, owner: str, piece: bytes, *, start: int | None) -> StoredDocument:
        """Adds a piece at the end.

        `start`, where it is given, is the byte that the piece begins at, so that a piece that is sent again is not
        added again. Raises ApiError 404, 409 for another start, 413 for a document that is too long.
        """

        def append(database: sqlite3.Connection) -> StoredDocument:
            document = _document(database, document_id, owner)
            if start is not None and start != document.num_bytes:
                sent = _piece_at(database, document_id, start)
                if sent == piece:
                    return document
                raise ApiError(409, f"document {document_id} has {document.num_bytes} bytes; a piece starts there")
            size = document.num_bytes + len(piece)
            if size > self._max_document_bytes:
                raise ApiError(413, f"the document would have {size} bytes, more than {self._max_document_bytes}")
            self._check_bytes(database, owner, len(piece))
            if piece:
                database.execute("INSERT INTO pieces VALUES (?,?,?)", (document_id, document.num_bytes, piece))
            expires_at = time.time() + self._lifetime_s
            database.execute(
                "UPDATE documents SET num_bytes=?, expires_at=? WHERE id=?", (size, expires_at, document_id)
            )
            return _document(database, document_id, owner)

        return await self._run(append)

    async def document(self, document_id: str, owner: str) -> StoredDocument:
        """Raises ApiError 404."""
        return await self._run(lambda database: _document(database, document_id, owner))

    async def text(self, document_id: str, owner: str) -> str:
        """Returns the whole document. Raises ApiError 404, and 400 when it is not UTF-8.

        Memory holds it once: pieces are decoded as they are read.
        """

        def read(database: sqlite3.Connection) -> str:
            document = _document(database, document_id, owner)
            decoder, text, num_read = codecs.getincrementaldecoder("utf-8")(), "", 0
            pieces = database.execute("SELECT content FROM pieces WHERE document=? ORDER BY start", (document_id,))
            try:
                for row in pieces:
                    num_read += len(row["content"])
                    text += decoder.decode(row["content"])  # CPython lengthens it in place; a join would need both
                decoder.decode(b"", final=True)
            except UnicodeDecodeError as error:  # its `object` ends where the pieces that were read do
                byte = num_read - len(error.object) + error.start
                reason = f"document {document.id} is not UTF-8: byte {byte}"
                raise ApiError(400, reason, param="document") from error
            return text

        return await self._run(read)

    async def delete_document(self, document_id: str, owner: str) -> None:
        """Raises ApiError 404."""
        await self._delete("documents", document_id, owner)

    async def keep_response(self, response: StoredResponse, owner: str) -> bool:
        """Keeps a response and returns whether there was room for it. Clients rarely delete one, so the owner's oldest
        ones make room.
        """
        num_bytes = len(f"{response.body}{response.memory}{response.items}".encode())

        def keep(database: sqlite3.Connection) -> None:
            now = time.time()
            self._make_room(database, "responses", owner, num_bytes, most=self._max_items)
            database.execute(
                "INSERT INTO responses (id, owner, body, memory, items, num_bytes, created_at, expires_at) "
                "VALUES (?,?,?,?,?,?,?,?)",
                (
                    response.id,
                    owner,
                    response.body,
                    response.memory,
                    response.items,
                    num_bytes,
                    now,
                    now + self._lifetime_s,
                ),
            )

        try:
            await self._run(keep)
        except ApiError:
            return False
        return True

    async def response(self, response_id: str, owner: str) -> StoredResponse:
        """Raises ApiError 404."""
        columns = "id, body, memory, items"
        return StoredResponse(
            **await self._run(lambda database: _row(database, "responses", columns, response_id, owner))
        )

    async def delete_response(self, response_id: str, owner: str) -> None:
        """Raises ApiError 404."""
        await self._delete("responses", response_id, owner)

    async def begin_reply(self, owner: str, key: str, digest: str) -> StoredReply | None:
        """Returns the reply that was given to a request with this key, or None for the first one, which is noted as
        in progress. `digest` tells requests apart.

        Raises ApiError 400 when another request had the key, 409 while the first one is in progress, 429 and 503 when
        there is no room to note it.
        """

        def begin(database: sqlite3.Connection) -> StoredReply | None:
            row = database.execute(
                "SELECT * FROM replies WHERE owner=? AND key=? AND expires_at>?", (owner, key, time.time())
            ).fetchone()
            if row is not None and row["digest"] != digest:
                raise ApiError(400, "another request was sent with this Idempotency-Key; use a new key")
            if row is not None and row["status"] is not None:
                return StoredReply(status=row["status"], headers=json.loads(row["headers"]), body=row["body"])
            if row is not None and not _is_gone(row["holder"]):
                raise ApiError(409, "the first request with this Idempotency-Key is in progress; ask again later")
            database.execute("DELETE FROM replies WHERE owner=? AND key=?", (owner, key))
            holder = _this_process()
            num_bytes = sum(map(len, (key, digest, holder)))
            self._make_room(database, "replies", owner, num_bytes, most=self._max_replies)
            database.execute(
                "INSERT INTO replies (owner, key, digest, holder, num_bytes, expires_at) VALUES (?,?,?,?,?,?)",
                (owner, key, digest, holder, num_bytes, time.time() + self._lifetime_s),
            )
            return None

        return await self._run(begin)

    async def end_reply(self, owner: str, key: str, reply: StoredReply | None) -> None:
        """Keeps the reply of the first request with a key, if there is room for it; the owner's oldest ones make room.
        None forgets that there was a request.
        """

        def keep(database: sqlite3.Connection) -> None:
            assert reply is not None
            headers = json.dumps(reply.headers)
            added = len(headers) + len(reply.body)
            self._make_room(database, "replies", owner, added, most=self._max_replies + 1)  # its row is there
            database.execute(
                "UPDATE replies SET status=?, headers=?, body=?, num_bytes=num_bytes+? WHERE owner=? AND key=?",
                (reply.status, headers, reply.body, added, owner, key),
            )

        def forget(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM replies WHERE owner=? AND key=?", (owner, key))

        if reply is not None:
            with suppress(ApiError):  # the answer goes out all the same
                await self._run(keep)
                return
        await self._run(forget, frees=True)

    async def _delete(self, table: str, item_id: str, owner: str) -> None:
        def delete(database: sqlite3.Connection) -> None:
            changed = database.execute(f"DELETE FROM {table} WHERE id=? AND owner=?", (item_id, owner))
            if not changed.rowcount:
                raise _missing(table, item_id)

        await self._run(delete, frees=True)

    def _check_room(self, database: sqlite3.Connection, table: str, owner: str, added: int) -> None:
        """Deletes what has expired. Raises ApiError 429 when the owner has as many as allowed, and as `_check_bytes`
        does.
        """
        database.execute(f"DELETE FROM {table} WHERE expires_at<=?", (time.time(),))
        count = _count(database, table, owner)
        if count >= self._max_items:
            raise ApiError(429, f"there are {count} {table}, the most that one key may have; delete some")
        self._check_bytes(database, owner, added)

    def _make_room(self, database: sqlite3.Connection, table: str, owner: str, added: int, *, most: int) -> None:
        """Deletes what has expired, and the owner's oldest finished rows until there are fewer than `most` rows and
        room for `added` bytes. Raises ApiError 429 when too many rows are unfinished, and as `_check_bytes` does.
        """
        database.execute(f"DELETE FROM {table} WHERE expires_at<=?", (time.time(),))
        count, used, oldest = _count(database, table, owner), self._bytes_of(database, owner), list[tuple[int]]()
        finished = "AND status IS NOT NULL" if table == "replies" else ""
        query = f"SELECT rowid, num_bytes FROM {table} WHERE owner=? {finished} ORDER BY expires_at, rowid"
        for row in database.execute(query, (owner,)):
            if count < most and used + added <= self._max_owner_bytes:
                break
            oldest.append((row["rowid"],))
            count, used = count - 1, used - row["num_bytes"]
        database.executemany(f"DELETE FROM {table} WHERE rowid=?", oldest)
        if count >= most:
            raise ApiError(429, f"{count} requests of this key with an Idempotency-Key are unfinished; ask again later")
        self._check_bytes(database, owner, added)

    def _check_bytes(self, database: sqlite3.Connection, owner: str, added: int) -> None:
        """Raises ApiError 429 when the owner would keep too much, 503 when all would or the disk is full."""
        self._check_owner(database, owner, added)
        if (used := self._bytes_of(database, None)) + added > self._max_bytes:
            raise ApiError(503, f"the service keeps {used} bytes and may keep {self._max_bytes} (max_stored_bytes)")
        self._check_disk(added)

    def _check_owner(self, database: sqlite3.Connection, owner: str, added: int) -> None:
        """Raises ApiError 429 when the owner would keep too much."""
        if (used := self._bytes_of(database, owner)) + added > self._max_owner_bytes:
            limit = f"{self._max_owner_bytes} (max_key_bytes)"
            reason = f"this key keeps {used} bytes and may keep {limit}; delete documents, sessions or responses"
            raise ApiError(429, reason)

    def _check_disk(self, added: int) -> None:
        if shutil.disk_usage(self._path.parent).free < _LEAST_FREE + added:
            raise ApiError(503, _FULL)

    def _bytes_of(self, database: sqlite3.Connection, owner: str | None) -> int:
        """Returns the bytes that an owner keeps, None for all owners."""
        where, arguments = ("WHERE owner=?", (owner,)) if owner is not None else ("", ())
        queries = [f"SELECT SUM(num_bytes) FROM {table} {where}" for table in _COUNTED]
        return sum(database.execute(query, arguments).fetchone()[0] or 0 for query in queries)

    async def _run(self, work: Callable[[sqlite3.Connection], T], *, frees: bool = False) -> T:
        """Does the work in one transaction, in a thread. Raises ApiError 503 when the disk is full."""
        return await asyncio.to_thread(self._run_now, work, frees=frees)

    def _run_now(self, work: Callable[[sqlite3.Connection], T], *, frees: bool) -> T:
        """Does the work in one transaction; work that `frees` something may use the reserve of the disk."""
        try:
            try:
                return self._once(work)
            except sqlite3.OperationalError as error:
                if not (frees and _is_full(error)):
                    raise
                self._reserve.free()
                try:
                    return self._once(work)
                finally:
                    self._reserve.fill()
        except sqlite3.OperationalError as error:
            if not _is_full(error):
                raise
            raise ApiError(503, _FULL) from error

    def _once(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._open() as database:
            return work(database)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        database = sqlite3.connect(self._path, timeout=10.0, isolation_level="IMMEDIATE")
        try:
            database.row_factory = sqlite3.Row
            database.execute("PRAGMA foreign_keys=ON")
            with database:
                yield database
        finally:
            database.close()


_SESSION = "id, memory, num_questions, created_at, expires_at, metadata"
_DOCUMENT = "id, num_bytes, created_at, expires_at"


def _session(database: sqlite3.Connection, session_id: str, owner: str) -> Session:
    return Session(**_row(database, "sessions", _SESSION, session_id, owner))


def _document(database: sqlite3.Connection, document_id: str, owner: str) -> StoredDocument:
    return StoredDocument(**_row(database, "documents", _DOCUMENT, document_id, owner))


def _row(database: sqlite3.Connection, table: str, columns: str, item_id: str, owner: str) -> dict[str, Any]:
    query = f"SELECT {columns} FROM {table} WHERE id=? AND owner=? AND expires_at>?"
    row = database.execute(query, (item_id, owner, time.time())).fetchone()
    if row is None:
        raise _missing(table, item_id)
    return dict(row)


def _count(database: sqlite3.Connection, table: str, owner: str) -> int:
    return database.execute(f"SELECT COUNT(*) FROM {table} WHERE owner=?", (owner,)).fetchone()[0]


def _piece_at(database: sqlite3.Connection, document_id: str, start: int) -> bytes | None:
    query = "SELECT content FROM pieces WHERE document=? AND start=?"
    row = database.execute(query, (document_id, start)).fetchone()
    return row["content"] if row else None


def _is_full(error: sqlite3.OperationalError) -> bool:
    """Returns whether the error says that the disk is full."""
    return error.sqlite_errorcode in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)


def _this_process() -> str:
    """Returns what tells this process from others, earlier ones with its id too."""
    return f"{os.getpid()}:{psutil.Process().create_time()}"


def _is_gone(holder: str) -> bool:
    """Returns whether the process that `holder` names has ended; an empty one is not known."""
    pid, _, created = holder.partition(":")
    try:
        return bool(pid) and str(psutil.Process(int(pid)).create_time()) != created
    except psutil.NoSuchProcess:
        return True


def _missing(table: str, item_id: str) -> ApiError:
    kind = table.removesuffix("s")
    return ApiError(404, f"there is no {kind} {item_id[:80]!r}, or it has expired", param=kind)
