"""Keeps a little of the disk for what must work when the disk is full: deletes, and the ends of questions."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

NUM_BYTES = 4 * 2**20


class Reserve:
    """A file that takes up room until it is needed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fill(self) -> None:
        """Reserves the space again, or as much of it as the disk has: a delete has taken some for the log of SQLite."""
        with suppress(OSError), self._path.open("ab", buffering=0) as file:
            while missing := max(NUM_BYTES - file.tell(), 0):
                file.write(bytes(missing))

    def free(self) -> None:
        """Frees the space for others."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
