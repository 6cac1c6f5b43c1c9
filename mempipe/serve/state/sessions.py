"""Conversations: each has the memory that its next question starts from."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace

from mempipe.answers.errors import ApiError
from mempipe.serve.state.database import Database
from mempipe.serve.state.holders import is_gone, this_process

_COLUMNS = "id, memory, num_questions, created_at, expires_at, metadata"


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


class Sessions:
    """The sessions of a service. A question claims its session, and releases it with the new memory."""

    def __init__(self, database: Database, *, max_items: int) -> None:
        """An owner may have `max_items` of them."""
        self._database = database
        self._max_items = max_items

    async def create(self, owner: str, *, memory: str = "", metadata: str = "") -> Session:
        """Creates a session with a memory. Raises ApiError 429 when the owner has too many or keeps too much."""

        def create(connection: sqlite3.Connection) -> Session:
            num_bytes = len(memory.encode()) + len(metadata.encode())
            self._database.check_room(connection, "sessions", owner, num_bytes, most=self._max_items)
            session = Session(
                id=f"session-{secrets.token_hex(12)}",
                memory=memory,
                num_questions=0,
                created_at=self._database.now(),
                expires_at=self._database.end_of_life(),
                metadata=metadata,
            )
            connection.execute(
                "INSERT INTO sessions (id, owner, memory, metadata, num_bytes, num_questions, created_at, expires_at) "
                "VALUES (?,?,?,?,?,?,?,?)",
                (session.id, owner, memory, metadata, num_bytes, 0, session.created_at, session.expires_at),
            )
            return session

        return await self._database.run(create)

    async def of_owner(
        self, owner: str, *, limit: int, after: str | None = None, newest_first: bool = False
    ) -> list[Session]:
        """Returns at most `limit` of the owner's sessions, in the order of their creation: those after the session
        `after`. Raises ApiError 400 when there is no such session.
        """
        rows = await self._database.of_owner(
            "sessions", _COLUMNS, owner, limit=limit, after=after, newest_first=newest_first
        )
        return [Session(**row) for row in rows]

    async def change(
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

        def apply(connection: sqlite3.Connection) -> Session:
            before = self._find(connection, session_id, owner)
            held = connection.execute("SELECT holder, busy_until FROM sessions WHERE id=?", (session_id,)).fetchone()
            if held["busy_until"] >= self._database.now() and not is_gone(held["holder"]):
                raise ApiError(409, f"session {session_id} is working on a question", param="session")
            changed = replace(
                before,
                memory=noted(before.memory),
                metadata=before.metadata if metadata is None else metadata,
                expires_at=self._database.end_of_life(),
            )
            num_bytes, num_before = (len(f"{each.memory}{each.metadata}".encode()) for each in (changed, before))
            self._database.check_bytes(connection, owner, num_bytes - num_before)
            connection.execute(
                "UPDATE sessions SET memory=?, metadata=?, num_bytes=?, expires_at=? WHERE id=?",
                (changed.memory, changed.metadata, num_bytes, changed.expires_at, session_id),
            )
            return changed

        return await self._database.run(apply)

    async def get(self, session_id: str, owner: str) -> Session:
        """Raises ApiError 404."""
        return await self._database.read(lambda connection: self._find(connection, session_id, owner))

    async def delete(self, session_id: str, owner: str) -> None:
        """Raises ApiError 404."""
        await self._database.delete("sessions", session_id, owner)

    async def claim(self, session_id: str, owner: str, *, for_s: float) -> Session:
        """Claims the session for one question for at most `for_s` seconds, and no longer than this process lives. The
        session does not expire meanwhile.

        Raises ApiError 404, 409 when another question of it is in flight, and 429 when the owner keeps too much: the
        new memory is stored in any case, because the question has been answered then.
        """

        def claim(connection: sqlite3.Connection) -> Session:
            session, now = self._find(connection, session_id, owner), self._database.now()
            self._database.check_owner(connection, owner, 0)
            expires_at = max(self._database.end_of_life(), now + for_s)
            held = connection.execute("SELECT holder FROM sessions WHERE id=?", (session_id,)).fetchone()
            changed = connection.execute(
                "UPDATE sessions SET busy_until=?, holder=?, expires_at=? "
                "WHERE id=? AND (busy_until<? OR (? AND holder=?))",
                (now + for_s, this_process(), expires_at, session_id, now, is_gone(held["holder"]), held["holder"]),
            )
            if not changed.rowcount:
                raise ApiError(409, f"session {session_id} is working on another question", param="session")
            return replace(session, expires_at=expires_at)

        return await self._database.run(claim, frees=True)

    async def release(self, session_id: str, memory: str | None) -> None:
        """Ends a claim; `memory` is the session's new one, or None when the question was not answered."""
        await self._database.settle(self._releasing(session_id, memory))

    def release_now(self, session_id: str, memory: str | None) -> None:
        """Ends a claim, for callers outside the event loop."""
        self._database.settle_now(self._releasing(session_id, memory))

    def _releasing(self, session_id: str, memory: str | None) -> Callable[[sqlite3.Connection], None]:
        def release(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE sessions SET busy_until=0 WHERE id=?", (session_id,))
            if memory is not None:
                connection.execute(
                    "UPDATE sessions SET memory=?, num_bytes=?+LENGTH(CAST(metadata AS BLOB)), "
                    "num_questions=num_questions+1, expires_at=? WHERE id=?",
                    (memory, len(memory.encode()), self._database.end_of_life(), session_id),
                )

        return release

    def _find(self, connection: sqlite3.Connection, session_id: str, owner: str) -> Session:
        return Session(**self._database.find(connection, "sessions", _COLUMNS, session_id, owner))
