"""Everything that a service keeps for its clients, in one SQLite file."""

from __future__ import annotations

from pathlib import Path

from mempipe.serve.state.database import Database
from mempipe.serve.state.documents import Documents
from mempipe.serve.state.replies import Replies
from mempipe.serve.state.responses import Responses
from mempipe.serve.state.sessions import Sessions


class Store:
    """Sessions, documents, responses and replies, each with the methods of its class."""

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
        self.database = Database(path, lifetime_s=lifetime_s, max_owner_bytes=max_owner_bytes, max_bytes=max_bytes)
        self.sessions = Sessions(self.database, max_items=max_items)
        self.documents = Documents(self.database, max_items=max_items, max_bytes=max_document_bytes)
        self.responses = Responses(self.database, max_items=max_items)
        self.replies = Replies(self.database, max_replies=max_replies)
