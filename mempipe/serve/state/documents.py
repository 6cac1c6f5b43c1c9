"""Documents that come in pieces."""

from __future__ import annotations

import codecs
import secrets
import sqlite3
from contextlib import suppress
from dataclasses import dataclass

from mempipe.answers.errors import ApiError
from mempipe.serve.state.database import Database

_COLUMNS = "id, num_bytes, created_at, expires_at"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDocument:
    """A long text that an agent may read."""

    id: str
    num_bytes: int
    created_at: float
    expires_at: float


class Documents:
    """The documents of a service."""

    def __init__(self, database: Database, *, max_items: int, max_bytes: int) -> None:
        """An owner may have `max_items` of them, each of at most `max_bytes`."""
        self._database = database
        self._max_items = max_items
        self._max_bytes = max_bytes

    async def create(self, owner: str) -> StoredDocument:
        """Creates an empty document. Raises ApiError 429 when the owner has too many."""

        def create(connection: sqlite3.Connection) -> StoredDocument:
            self._database.check_room(connection, "documents", owner, 0, most=self._max_items)
            document = StoredDocument(
                id=f"doc-{secrets.token_hex(12)}",
                num_bytes=0,
                created_at=self._database.now(),
                expires_at=self._database.end_of_life(),
            )
            connection.execute(
                "INSERT INTO documents (id, owner, num_bytes, created_at, expires_at) VALUES (?,?,?,?,?)",
                (document.id, owner, 0, document.created_at, document.expires_at),
            )
            return document

        return await self._database.run(create)

    async def append(self, document_id: str, owner: str, piece: bytes, *, start: int | None) -> StoredDocument:
        """Adds a piece at the end.

        `start`, where it is given, is the byte that the piece begins at, so that a piece that is sent again is not
        added again. Raises ApiError 404, 409 for another start, 413 for a document that is too long.
        """

        def append(connection: sqlite3.Connection) -> StoredDocument:
            document = self._find(connection, document_id, owner)
            if start is not None and start != document.num_bytes:
                sent = _piece_at(connection, document_id, start)
                if sent == piece:
                    return document
                raise ApiError(409, f"document {document_id} has {document.num_bytes} bytes; a piece starts there")
            size = document.num_bytes + len(piece)
            if size > self._max_bytes:
                raise ApiError(413, f"the document would have {size} bytes, more than {self._max_bytes}")
            self._database.check_bytes(connection, owner, len(piece))
            if piece:
                connection.execute("INSERT INTO pieces VALUES (?,?,?)", (document_id, document.num_bytes, piece))
            expires_at = self._database.end_of_life()
            connection.execute(
                "UPDATE documents SET num_bytes=?, expires_at=? WHERE id=?", (size, expires_at, document_id)
            )
            return self._find(connection, document_id, owner)

        return await self._database.run(append)

    async def get(self, document_id: str, owner: str) -> StoredDocument:
        """Raises ApiError 404."""
        return await self._database.read(lambda connection: self._find(connection, document_id, owner))

    async def of_owner(
        self, owner: str, *, limit: int, after: str | None = None, newest_first: bool = False
    ) -> list[StoredDocument]:
        """Returns at most `limit` of the owner's documents, in the order of their creation: those after the document
        `after`. Raises ApiError 400 when there is no such document.
        """
        rows = await self._database.of_owner(
            "documents", _COLUMNS, owner, limit=limit, after=after, newest_first=newest_first
        )
        return [StoredDocument(**row) for row in rows]

    async def text(self, document_id: str, owner: str) -> str:
        """Returns the whole document, which lives on from now. Raises ApiError 404, and 400 when it is not UTF-8.

        Memory holds it once: pieces are decoded as they are read.
        """

        def use(connection: sqlite3.Connection) -> None:
            expires_at = self._database.end_of_life()
            connection.execute(
                "UPDATE documents SET expires_at=? WHERE id=? AND owner=?", (expires_at, document_id, owner)
            )

        def read(connection: sqlite3.Connection) -> str:
            document = self._find(connection, document_id, owner)
            decoder, text, num_read = codecs.getincrementaldecoder("utf-8")(), "", 0
            pieces = connection.execute("SELECT content FROM pieces WHERE document=? ORDER BY start", (document_id,))
            try:
                for row in pieces:
                    num_read += len(row["content"])
                    text += decoder.decode(row["content"])  # CPython lengthens it in place; a join would need both
                decoder.decode(b"", final=True)
            except UnicodeDecodeError as error:  # its `object` ends where the pieces that were read do
                byte = num_read - len(error.object) + error.start
                reason = f"document {document.id} is not UTF-8: byte {byte}"
                raise ApiError(400, reason, param="document") from error
            return text.removeprefix("\ufeff")  # the mark with which Windows begins a file of UTF-8

        with suppress(ApiError):  # what cannot be noted can be read
            await self._database.run(use, frees=True)
        return await self._database.read(read)

    async def delete(self, document_id: str, owner: str) -> None:
        """Raises ApiError 404."""
        await self._database.delete("documents", document_id, owner)

    def _find(self, connection: sqlite3.Connection, document_id: str, owner: str) -> StoredDocument:
        return StoredDocument(**self._database.find(connection, "documents", _COLUMNS, document_id, owner))


def _piece_at(connection: sqlite3.Connection, document_id: str, start: int) -> bytes | None:
    query = "SELECT content FROM pieces WHERE document=? AND start=?"
    row = connection.execute(query, (document_id, start)).fetchone()
    return row["content"] if row else None
