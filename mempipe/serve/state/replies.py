"""Replies to requests with an Idempotency-Key, for requests that are sent again."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass

from mempipe.answers.errors import ApiError
from mempipe.serve.state.database import Database
from mempipe.serve.state.holders import is_gone, this_process


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReply:
    """A whole answer as it was sent, for a request that is sent again."""

    status: int
    headers: list[list[str]]
    body: bytes


class Replies:
    """The replies of a service."""

    def __init__(self, database: Database, *, max_replies: int) -> None:
        """An owner may have `max_replies` of them; the oldest ones make room for new ones."""
        self._database = database
        self._max_replies = max_replies

    async def begin(self, owner: str, key: str, digest: str) -> StoredReply | None:
        """Returns the reply that was given to a request with this key, or None for the first one, which is noted as
        in progress. `digest` tells requests apart.

        Raises ApiError 400 when another request had the key, 409 while the first one is in progress, 429 and 503 when
        there is no room to note it.
        """

        def note(connection: sqlite3.Connection) -> StoredReply | None:
            row = connection.execute(
                "SELECT * FROM replies WHERE owner=? AND key=? AND expires_at>?", (owner, key, self._database.now())
            ).fetchone()
            if row is not None and row["digest"] != digest:
                raise ApiError(400, "another request was sent with this Idempotency-Key; use a new key")
            if row is not None and row["status"] is not None:
                return StoredReply(status=row["status"], headers=json.loads(row["headers"]), body=row["body"])
            if row is not None and not is_gone(row["holder"]):
                raise ApiError(409, "the first request with this Idempotency-Key is in progress; ask again later")
            connection.execute("DELETE FROM replies WHERE owner=? AND key=?", (owner, key))
            holder = this_process()
            num_bytes = sum(map(len, (key, digest, holder)))
            self._database.make_room(connection, "replies", owner, num_bytes, most=self._max_replies)
            connection.execute(
                "INSERT INTO replies (owner, key, digest, holder, num_bytes, expires_at) VALUES (?,?,?,?,?,?)",
                (owner, key, digest, holder, num_bytes, self._database.end_of_life()),
            )
            return None

        return await self._database.run(note)

    async def end(self, owner: str, key: str, reply: StoredReply | None) -> None:
        """Keeps the reply of the first request with a key, if there is room for it; the owner's oldest ones make room.
        None forgets that there was a request.
        """

        def keep(connection: sqlite3.Connection) -> None:
            assert reply is not None
            headers = json.dumps(reply.headers)
            added, most = len(headers) + len(reply.body), self._max_replies + 1  # its row is one of them
            self._database.make_room(connection, "replies", owner, added, most=most)
            connection.execute(
                "UPDATE replies SET status=?, headers=?, body=?, num_bytes=num_bytes+? WHERE owner=? AND key=?",
                (reply.status, headers, reply.body, added, owner, key),
            )

        def forget(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM replies WHERE owner=? AND key=?", (owner, key))

        def keep_or_forget(connection: sqlite3.Connection) -> None:
            connection.execute("SAVEPOINT before")
            try:
                keep(connection)
            except ApiError:  # there is no room, and the answer goes out all the same
                connection.execute("ROLLBACK TO before")
                forget(connection)

        await self._database.settle(forget if reply is None else keep_or_forget)
