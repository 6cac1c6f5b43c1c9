"""The SQLite file of a service: its tables, its transactions, and how much of it an owner may have.

The file outlives a restart and a lost replica, and replicas on one machine share it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mempipe.answers.errors import ApiError
from mempipe.serve.state.reserve import Reserve
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
CREATE INDEX IF NOT EXISTS documents_of_owner ON documents (owner, created_at);
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
_BUSY_S = 10.0
"""Seconds that a transaction waits for those of its own process, and then for those of others."""
_MAX_WRITERS = 32
"""Transactions that wait at the same time; more of them wait longer."""
logger = logging.getLogger(__name__)
_BUSY = f"the database of the service was not free within {_BUSY_S:g} s; ask again later"


class Database:
    """The file. Every call opens it again in a thread, so that any number of tasks and processes may use it."""

    def __init__(self, path: Path, *, lifetime_s: float, max_owner_bytes: int, max_bytes: int) -> None:
        """A row lives `lifetime_s` seconds after its last use. The rows of one owner may have `max_owner_bytes`, those
        of all owners `max_bytes`. Raises ConfigError when the file cannot be made.
        """
        self._path = path
        self._turn = threading.Lock()  # without it, SQLite lets threads overtake each other for seconds
        self._owed: list[Callable[[sqlite3.Connection], None]] = []
        # Those who wait for their turn would otherwise take all threads of the process, which has six on two cores.
        self._writers = ThreadPoolExecutor(_MAX_WRITERS, thread_name_prefix="writes")
        self._reserve = Reserve(path.with_name("reserve"))
        self._lifetime_s = lifetime_s
        self._max_owner_bytes = max_owner_bytes
        self._max_bytes = max_bytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._connection = self._opened()
            except sqlite3.OperationalError as error:
                if not _is_full(error):
                    raise
                self._reserve.free()  # for the files next to the database
                self._connection = self._opened()
            self._reserve.fill()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"state is {str(path.parent)!r}, where no database can be kept: {error}") from error

    def _opened(self) -> sqlite3.Connection:
        """Makes the tables that are missing, and returns a connection that stays open: with one, SQLite keeps the files
        next to the database, for which a full disk has no room.
        """
        with self._connect() as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.executescript(_TABLES)
            connection.execute("BEGIN IMMEDIATE")  # replicas may start at the same time
            for table, columns in _ADDED.items():
                known = {row["name"] for row in connection.execute(f"PRAGMA table_info({table})")}
                for name in columns.keys() - known:
                    kind, value = columns[name]
                    connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")
                    connection.execute(f"UPDATE {table} SET {name}={value}")
            connection.executescript(_INDEXES)
        kept = sqlite3.connect(self._path, check_same_thread=False)
        kept.execute("SELECT COUNT(*) FROM sessions").fetchone()
        return kept

    def now(self) -> float:
        """Returns the time in Unix seconds."""
        return time.time()

    def end_of_life(self) -> float:
        """Returns when a row expires that is used now."""
        return self.now() + self._lifetime_s

    async def run(self, work: Callable[[sqlite3.Connection], T], *, frees: bool = False) -> T:
        """Does the work in one transaction, in a thread: what has expired is deleted before, and nobody writes from its
        first read to its end. Raises ApiError 503 when the disk is full or others write for too long.
        """
        return await asyncio.get_running_loop().run_in_executor(self._writers, partial(self.run_now, work, frees=frees))

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Does work that writes nothing, in one transaction and a thread; it waits for nobody who writes."""

        def read() -> T:
            with _refusals(), self.open("BEGIN") as connection:
                return work(connection)

        return await asyncio.to_thread(read)

    def run_now(self, work: Callable[[sqlite3.Connection], T], *, frees: bool) -> T:
        """Does the work in one transaction; work that `frees` something may use the reserve of the disk."""
        with _refusals():
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

    async def settle(self, work: Callable[[sqlite3.Connection], None]) -> None:
        """Does what `settle_now` does, in a thread."""
        await asyncio.get_running_loop().run_in_executor(self._writers, self.settle_now, work)

    def settle_now(self, work: Callable[[sqlite3.Connection], None]) -> None:
        """Does work that ends something and refuses nothing, and keeps it for the next transaction of this process
        where it cannot be done now: nobody else would do it before the row expires.
        """
        try:
            self.run_now(work, frees=True)
        except ApiError as error:
            logger.warning("the end of a request is written later: %s", error)
            self._owed.append(work)

    def _once(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if not self._turn.acquire(timeout=_BUSY_S):
            raise ApiError(503, _BUSY)
        try:
            with self.open() as connection:
                owed = [*self._owed]
                for each in owed:
                    each(connection)
                self._delete_expired(connection)
                result = work(connection)
            del self._owed[: len(owed)]
            return result
        finally:
            self._turn.release()

    @contextmanager
    def open(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """Opens the file for one transaction, which begins before the first read: a row that another process or thread
        changes after it was read must not be overwritten.
        """
        with self._connect() as connection:
            connection.execute(begin)
            yield connection

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self._path, timeout=_BUSY_S)
        try:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA foreign_keys=ON")
            with connection:
                yield connection
        finally:
            connection.close()

    def find(self, connection: sqlite3.Connection, table: str, columns: str, row_id: str, owner: str) -> dict[str, Any]:
        """Returns the columns of a row that has not expired. Raises ApiError 404."""
        query = f"SELECT {columns} FROM {table} WHERE id=? AND owner=? AND expires_at>?"
        row = connection.execute(query, (row_id, owner, self.now())).fetchone()
        if row is None:
            raise _missing(table, row_id)
        return dict(row)

    async def of_owner(
        self, table: str, columns: str, owner: str, *, limit: int, after: str | None, newest_first: bool
    ) -> list[dict[str, Any]]:
        """Returns the columns of at most `limit` of the owner's rows, in the order of their creation: those after the
        row `after`. Raises ApiError 400 when there is no such row.
        """

        def read(connection: sqlite3.Connection) -> list[dict[str, Any]]:
            then, way = ("<", "DESC") if newest_first else (">", "ASC")
            where, arguments = "owner=? AND expires_at>?", [owner, self.now()]
            if after is not None:
                try:
                    last = self.find(connection, table, "id, created_at", after, owner)
                except ApiError as error:
                    raise ApiError(400, f"{error}; leave after out to begin again", param="after") from error
                where, arguments = f"{where} AND (created_at, id) {then} (?,?)", [*arguments, last["created_at"], after]
            query = f"SELECT {columns} FROM {table} WHERE {where} ORDER BY created_at {way}, id {way} LIMIT ?"
            return [dict(row) for row in connection.execute(query, (*arguments, limit))]

        return await self.read(read)

    async def delete(self, table: str, row_id: str, owner: str) -> None:
        """Raises ApiError 404."""

        def delete(connection: sqlite3.Connection) -> None:
            changed = connection.execute(f"DELETE FROM {table} WHERE id=? AND owner=?", (row_id, owner))
            if not changed.rowcount:
                raise _missing(table, row_id)

        await self.run(delete, frees=True)

    def check_room(self, connection: sqlite3.Connection, table: str, owner: str, added: int, *, most: int) -> None:
        """Raises ApiError 429 when the owner has `most` rows, and as `check_bytes` does."""
        count = _count(connection, table, owner)
        if count >= most:
            raise ApiError(429, f"there are {count} {table}, the most that one key may have; delete some")
        self.check_bytes(connection, owner, added)

    def make_room(self, connection: sqlite3.Connection, table: str, owner: str, added: int, *, most: int) -> None:
        """Deletes the owner's oldest finished rows until there are fewer than `most` rows and room for `added` bytes.
        Raises ApiError 429 when too many rows are unfinished, and as `check_bytes` does.
        """
        count, used, oldest = _count(connection, table, owner), self._bytes_of(connection, owner), list[tuple[int]]()
        finished = "AND status IS NOT NULL" if table == "replies" else ""
        query = f"SELECT rowid, num_bytes FROM {table} WHERE owner=? {finished} ORDER BY expires_at, rowid"
        for row in connection.execute(query, (owner,)):
            if count < most and used + added <= self._max_owner_bytes:
                break
            oldest.append((row["rowid"],))
            count, used = count - 1, used - row["num_bytes"]
        connection.executemany(f"DELETE FROM {table} WHERE rowid=?", oldest)
        if count >= most:
            raise ApiError(429, f"{count} requests of this key with an Idempotency-Key are unfinished; ask again later")
        self.check_bytes(connection, owner, added)

    def check_bytes(self, connection: sqlite3.Connection, owner: str, added: int) -> None:
        """Raises ApiError 429 when the owner would keep too much, 503 when all would or the disk is full."""
        self.check_owner(connection, owner, added)
        if (used := self._bytes_of(connection, None)) + added > self._max_bytes:
            raise ApiError(503, f"the service keeps {used} bytes and may keep {self._max_bytes} (max_stored_bytes)")
        self._check_disk(added)

    def check_owner(self, connection: sqlite3.Connection, owner: str, added: int) -> None:
        """Raises ApiError 429 when the owner would keep too much."""
        if (used := self._bytes_of(connection, owner)) + added > self._max_owner_bytes:
            limit = f"{self._max_owner_bytes} (max_key_bytes)"
            reason = f"this key keeps {used} bytes and may keep {limit}; delete documents, sessions or responses"
            raise ApiError(429, reason)

    def _check_disk(self, added: int) -> None:
        if shutil.disk_usage(self._path.parent).free < _LEAST_FREE + added:
            raise ApiError(503, _FULL)

    def _bytes_of(self, connection: sqlite3.Connection, owner: str | None) -> int:
        """Returns the bytes that an owner keeps, None for all owners."""
        where, arguments = ("WHERE owner=?", (owner,)) if owner is not None else ("", ())
        queries = [f"SELECT SUM(num_bytes) FROM {table} {where}" for table in _COUNTED]
        return sum(connection.execute(query, arguments).fetchone()[0] or 0 for query in queries)

    def _delete_expired(self, connection: sqlite3.Connection) -> None:
        now = self.now()
        for table in _COUNTED:
            connection.execute(f"DELETE FROM {table} WHERE expires_at<=?", (now,))


def _count(connection: sqlite3.Connection, table: str, owner: str) -> int:
    return connection.execute(f"SELECT COUNT(*) FROM {table} WHERE owner=?", (owner,)).fetchone()[0]


@contextmanager
def _refusals() -> Iterator[None]:
    """Turns what SQLite says of a full disk, or of others that write all the time, into ApiError 503."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if _is_full(error):
            raise ApiError(503, _FULL) from error
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:  # its other bytes say why
            raise ApiError(503, _BUSY) from error
        raise


def _is_full(error: sqlite3.OperationalError) -> bool:
    """Returns whether the error says that the disk is full."""
    return error.sqlite_errorcode in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)


def _missing(table: str, row_id: str) -> ApiError:
    kind = table.removesuffix("s")
    return ApiError(404, f"there is no {kind} {row_id[:80]!r}, or it has expired", param=kind)
