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
        """Reserves the space again, if the disk has it."""
        if self._path.exists():
            return
        try:
            self._path.write_bytes(bytes(NUM_BYTES))
        except OSError:
            self._path.unlink(missing_ok=True)

    def free(self) -> None:
        """Frees the space for others."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
