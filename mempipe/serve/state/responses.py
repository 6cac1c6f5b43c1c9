"""Responses of the Responses API, from which later requests continue."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from mempipe.answers.errors import ApiError
from mempipe.serve.state.database import Database

_COLUMNS = "id, body, memory, items"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response of the Responses API as JSON, the memory that the next one starts from, and its input items as JSON
    ("" for none)."""

    id: str
    body: str
    memory: str
    items: str = ""


class Responses:
    """The responses of a service."""

    def __init__(self, database: Database, *, max_items: int) -> None:
        """An owner may have `max_items` of them; the oldest ones make room for new ones."""
        self._database = database
        self._max_items = max_items

    async def keep(self, response: StoredResponse, owner: str) -> bool:
        """Keeps a response and returns whether there was room for it. Clients rarely delete one, so the owner's oldest
        ones make room.
        """
        num_bytes = len(f"{response.body}{response.memory}{response.items}".encode())

        def insert(connection: sqlite3.Connection) -> None:
            self._database.make_room(connection, "responses", owner, num_bytes, most=self._max_items)
            connection.execute(
                "INSERT INTO responses (id, owner, body, memory, items, num_bytes, created_at, expires_at) "
                "VALUES (?,?,?,?,?,?,?,?)",
                (
                    response.id,
                    owner,
                    response.body,
                    response.memory,
                    response.items,
                    num_bytes,
                    self._database.now(),
                    self._database.end_of_life(),
                ),
            )

        try:
            await self._database.run(insert)
        except ApiError:
            return False
        return True

    async def get(self, response_id: str, owner: str) -> StoredResponse:
        """Raises ApiError 404."""

        def read(connection: sqlite3.Connection) -> StoredResponse:
            return StoredResponse(**self._database.find(connection, "responses", _COLUMNS, response_id, owner))

        return await self._database.read(read)

    async def delete(self, response_id: str, owner: str) -> None:
        """Raises ApiError 404."""
        await self._database.delete("responses", response_id, owner)
