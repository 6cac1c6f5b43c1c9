"""Keeps sessions, and documents that come in pieces, in one SQLite file.

They outlive a restart and a lost replica. Replicas on one machine share the file.
"""

from __future__ import annotations

import asyncio
import codecs
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mempipe.serve.http.errors import ApiError
from mempipe.settings import ConfigError

T = TypeVar("T")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, memory TEXT NOT NULL, num_questions INTEGER NOT NULL,
    created_at REAL NOT NULL, expires_at REAL NOT NULL, busy_until REAL NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS sessions_of_owner ON sessions (owner, created_at);
CREATE TABLE IF NOT EXISTS documents (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, num_bytes INTEGER NOT NULL, created_at REAL NOT NULL,
    expires_at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS pieces (
    document TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE, start INTEGER NOT NULL, content BLOB NOT NULL,
    PRIMARY KEY (document, start)
);
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, body TEXT NOT NULL, memory TEXT NOT NULL, created_at REAL NOT NULL,
    expires_at REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_of_owner ON responses (owner, created_at);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A conversation: the memory that its next question starts from. Times are Unix seconds."""

    id: str
    memory: str
    num_questions: int
    created_at: float
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A long text that an agent may read."""

    id: str
    num_bytes: int
    created_at: float
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response of the Responses API as JSON, and the memory that the next one starts from."""

    id: str
    body: str
    memory: str


class Store:
    """The file. Every call opens it again in a thread, so that any number of tasks and processes may use it."""

    def __init__(
        self, path: Path, *, lifetime_s: float, max_items: int = 1000, max_document_bytes: int = 2**26
    ) -> None:
        """A session or document lives `lifetime_s` seconds after its last use; an owner may have `max_items` of each.
        Raises ConfigError when the file cannot be made."""
        self._path = path
        self._lifetime_s = lifetime_s
        self._max_items = max_items
        self._max_document_bytes = max_document_bytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as database:
                database.execute("PRAGMA journal_mode=WAL")
                database.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"state is {str(path.parent)!r}, where no database can be kept: {error}") from error

    async def create_session(self, owner: str, *, memory: str = "") -> Session:
        """Creates a session with a memory. Raises ApiError 429 when the owner has too many."""

        def create(database: sqlite3.Connection) -> Session:
            self._check_room(database, "sessions", owner)
            now = time.time()
            session = Session(
                id=f"session-{secrets.token_hex(12)}",
                memory=memory,
                num_questions=0,
                created_at=now,
                expires_at=now + self._lifetime_s,
            )
            database.execute(
                "INSERT INTO sessions (id, owner, memory, num_questions, created_at, expires_at) VALUES (?,?,?,?,?,?)",
                (session.id, owner, memory, 0, now, session.expires_at),
            )
            return session

        return await self._run(create)

    async def sessions(self, owner: str) -> list[Session]:
        """Returns the owner's sessions, oldest first."""
        query = f"SELECT {_SESSION} FROM sessions WHERE owner=? AND expires_at>? ORDER BY created_at, id"
        rows = await self._run(lambda database: database.execute(query, (owner, time.time())).fetchall())
        return [Session(**row) for row in rows]

    async def session(self, session_id: str, owner: str) -> Session:
        """Raises ApiError 404."""
        return await self._run(lambda database: _session(database, session_id, owner))

    async def delete_session(self, session_id: str, owner: str) -> None:
        """Raises ApiError 404."""
        await self._delete("sessions", session_id, owner)

    async def claim(self, session_id: str, owner: str, *, for_s: float) -> Session:
        """Claims the session for one question for at most `for_s` seconds.

        Raises ApiError 404, and 409 when another question of it is in flight.
        """

        def claim(database: sqlite3.Connection) -> Session:
            session, now = _session(database, session_id, owner), time.time()
            changed = database.execute(
                "UPDATE sessions SET busy_until=? WHERE id=? AND busy_until<?", (now + for_s, session_id, now)
            )
            if not changed.rowcount:
                raise ApiError(409, f"session {session_id} is working on another question", param="session")
            return session

        return await self._run(claim)

    async def release(self, session_id: str, memory: str | None) -> None:
        """Ends a claim; `memory` is the session's new one, or None when the question was not answered."""

        def release(database: sqlite3.Connection) -> None:
            database.execute("UPDATE sessions SET busy_until=0 WHERE id=?", (session_id,))
            if memory is not None:
                database.execute(
                    "UPDATE sessions SET memory=?, num_questions=num_questions+1, expires_at=? WHERE id=?",
                    (memory, time.time() + self._lifetime_s, session_id),
                )

        await self._run(release)

    async def create_document(self, owner: str) -> Document:
        """Creates an empty document. Raises ApiError 429 when the owner has too many."""

        def create(database: sqlite3.Connection) -> Document:
            self._check_room(database, "documents", owner)
            now = time.time()
            document = Document(
                id=f"doc-{secrets.token_hex(12)}", num_bytes=0, created_at=now, expires_at=now + self._lifetime_s
            )
            database.execute(
                "INSERT INTO documents (id, owner, num_bytes, created_at, expires_at) VALUES (?,?,?,?,?)",
                (document.id, owner, 0, now, document.expires_at),
            )
            return document

        return await self._run(create)

    async def append(self, document_id: str, owner: str, piece: bytes, *, start: int | None) -> Document:
        """Adds a piece at the end.

        `start`, where it is given, is the byte that the piece begins at, so that a piece that is sent again is not
        added again. Raises ApiError 404, 409 for another start, 413 for a document that is too long.
        """

        def append(database: sqlite3.Connection) -> Document:
            document = _document(database, document_id, owner)
            if start is not None and start != document.num_bytes:
                sent = _piece_at(database, document_id, start)
                if sent == piece:
                    return document
                raise ApiError(409, f"document {document_id} has {document.num_bytes} bytes; a piece starts there")
            size = document.num_bytes + len(piece)
            if size > self._max_document_bytes:
                raise ApiError(413, f"the document would have {size} bytes, more than {self._max_document_bytes}")
            if piece:
                database.execute("INSERT INTO pieces VALUES (?,?,?)", (document_id, document.num_bytes, piece))
            expires_at = time.time() + self._lifetime_s
            database.execute(
                "UPDATE documents SET num_bytes=?, expires_at=? WHERE id=?", (size, expires_at, document_id)
            )
            return _document(database, document_id, owner)

        return await self._run(append)

    async def document(self, document_id: str, owner: str) -> Document:
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

    async def keep_response(self, response: StoredResponse, owner: str) -> None:
        """Keeps a response. Clients rarely delete one, so the owner's oldest ones make room for it."""

        def keep(database: sqlite3.Connection) -> None:
            now = time.time()
            database.execute("DELETE FROM responses WHERE expires_at<=?", (now,))
            database.execute(
                "DELETE FROM responses WHERE id IN (SELECT id FROM responses WHERE owner=? "
                "ORDER BY created_at DESC, id LIMIT -1 OFFSET ?)",
                (owner, self._max_items - 1),
            )
            database.execute(
                "INSERT INTO responses (id, owner, body, memory, created_at, expires_at) VALUES (?,?,?,?,?,?)",
                (response.id, owner, response.body, response.memory, now, now + self._lifetime_s),
            )

        await self._run(keep)

    async def response(self, response_id: str, owner: str) -> StoredResponse:
        """Raises ApiError 404."""
        row = await self._run(lambda database: _row(database, "responses", "id, body, memory", response_id, owner))
        return StoredResponse(**row)

    async def delete_response(self, response_id: str, owner: str) -> None:
        """Raises ApiError 404."""
        await self._delete("responses", response_id, owner)

    async def _delete(self, table: str, item_id: str, owner: str) -> None:
        def delete(database: sqlite3.Connection) -> None:
            changed = database.execute(f"DELETE FROM {table} WHERE id=? AND owner=?", (item_id, owner))
            if not changed.rowcount:
                raise _missing(table, item_id)

        await self._run(delete)

    def _check_room(self, database: sqlite3.Connection, table: str, owner: str) -> None:
        """Deletes what has expired. Raises ApiError 429 when the owner has as many as allowed."""
        database.execute(f"DELETE FROM {table} WHERE expires_at<=?", (time.time(),))
        count = database.execute(f"SELECT COUNT(*) FROM {table} WHERE owner=?", (owner,)).fetchone()[0]
        if count >= self._max_items:
            raise ApiError(429, f"there are {count} {table}, the most that one key may have; delete some")

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Does the work in one transaction."""

        def run() -> T:
            with self._open() as database:
                return work(database)

        return await asyncio.to_thread(run)

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


_SESSION = "id, memory, num_questions, created_at, expires_at"
_DOCUMENT = "id, num_bytes, created_at, expires_at"


def _session(database: sqlite3.Connection, session_id: str, owner: str) -> Session:
    return Session(**_row(database, "sessions", _SESSION, session_id, owner))


def _document(database: sqlite3.Connection, document_id: str, owner: str) -> Document:
    return Document(**_row(database, "documents", _DOCUMENT, document_id, owner))


def _row(database: sqlite3.Connection, table: str, columns: str, item_id: str, owner: str) -> dict[str, Any]:
    query = f"SELECT {columns} FROM {table} WHERE id=? AND owner=? AND expires_at>?"
    row = database.execute(query, (item_id, owner, time.time())).fetchone()
    if row is None:
        raise _missing(table, item_id)
    return dict(row)


def _piece_at(database: sqlite3.Connection, document_id: str, start: int) -> bytes | None:
    query = "SELECT content FROM pieces WHERE document=? AND start=?"
    row = database.execute(query, (document_id, start)).fetchone()
    return row["content"] if row else None


def _missing(table: str, item_id: str) -> ApiError:
    kind = table.removesuffix("s")
    return ApiError(404, f"there is no {kind} {item_id[:80]!r}, or it has expired", param=kind)
