"""Files that appear whole or not at all, and stay."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_whole(file: Path, write: Callable[[Path], Any]) -> None:
    """`write` makes a file that appears under its name when it is whole and on the disk."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        write(partial)
        sync(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Brings a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
