"""Checksums of files, and stamps that record their comparison. A comparison reads every byte, which takes a minute for
a large index. So a folder gets a stamp (`.verified.json`) that says which files were compared, with their size, their
inode and when they were last changed. While these stay the same, the next process that opens the folder does not read
the files again. A copied folder is compared once in its new place.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from mempipe.settings import ConfigError
from mempipe.storage.files import sha256
from mempipe.storage.json_files import read_object, write_object

STAMP, CHECKSUMS = ".verified.json", "checksums.json"
SAMPLED_BLOCKS, BLOCK_BYTES = 256, 2**16
NUM_THREADS = 8
SETTLED_NS = 2 * 10**9
"""A file that changed less than this before its stamp may change again without a difference in its times, whose steps
are up to two seconds on some file systems."""
TOLD_BYTES = 4 * 2**30
"""From this size on it is said that files are compared, since it takes more than seconds."""


class FileRecord(BaseModel):
    """One file's size and sha256.

    A `sampled` hash is of the size and of 256 blocks spread over the file: an adopted file is not read through.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int
    sha256: str
    sampled: bool = False


def record_of(file: Path, *, sampled: bool = False) -> FileRecord:
    size = file.stat().st_size
    if not sampled:
        return FileRecord(bytes=size, sha256=sha256(file))
    with file.open("rb") as opened:
        digest = hashlib.sha256(str(size).encode())
        for i in range(SAMPLED_BLOCKS):
            opened.seek(max(size - BLOCK_BYTES, 0) * i // (SAMPLED_BLOCKS - 1))
            digest.update(opened.read(BLOCK_BYTES))
        return FileRecord(bytes=size, sha256=digest.hexdigest(), sampled=True)


def changed_files(folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """Returns the names of the files that are not what their record says; it reads every byte."""

    def is_changed(name: str) -> bool:
        return record_of(folder / name, sampled=files[name].sampled) != files[name]

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return [name for name, changed in zip(files, threads.map(is_changed, files), strict=True) if changed]


def verify_once(folder: Path, files: Mapping[str, FileRecord], *, refuse: Callable[[str], Exception]) -> None:
    """Compares the files with their records unless the folder's stamp says that this was done since they last changed.

    Processes compare one after the other, so that only the first reads. Raises the error that `refuse` returns for the
    name of a changed file.
    """
    if _is_stamped(folder, files):
        return
    with _alone(folder):
        if _is_stamped(folder, files):
            return
        if (size := sum(record.bytes for record in files.values())) >= TOLD_BYTES:
            logging.getLogger(__name__).warning("comparing the checksums of %s (%.0f GB), once", folder, size / 1e9)
        stamp = _stamp(folder, files)  # before they are read: a change after that must show
        if changed := changed_files(folder, files):
            raise refuse(changed[0])
        _write(folder, stamp)


def write_checksums(folder: Path) -> None:
    """Writes the checksum of every file of the folder into a file of the same folder, for `check_folder`."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name not in (CHECKSUMS, STAMP))
    write_object(folder / CHECKSUMS, {"files": {file.name: record_of(file).model_dump() for file in files}})


def check_folder(folder: Path, *, advice: str) -> None:
    """Compares the files with what `write_checksums` kept, unless that was done since they last changed. Does nothing
    for a folder without checksums.

    Raises ConfigError, which ends in `advice` (what the user does), for a file that is missing or was changed.
    """
    if not (folder / CHECKSUMS).is_file():
        return
    kept = read_object(folder / CHECKSUMS, advice=advice)
    try:
        files = {name: FileRecord.model_validate(record) for name, record in kept["files"].items()}
    except (KeyError, AttributeError, ValidationError) as error:
        raise ConfigError(f"{folder / CHECKSUMS} is damaged: it holds no checksums; {advice}") from error
    if missing := sorted(name for name in files if not (folder / name).is_file()):
        raise ConfigError(f"{folder} lacks {missing[0]}; {advice}")
    verify_once(
        folder,
        files,
        refuse=lambda name: ConfigError(
            f"{folder / name} was changed since it was written; {advice}, or, if you changed it yourself, delete "
            f"{folder / CHECKSUMS}"
        ),
    )


def _is_stamped(folder: Path, files: Mapping[str, FileRecord]) -> bool:
    for stamp in _stamp_files(folder):
        with suppress(ConfigError, OSError, KeyError, TypeError, ValueError):  # none, or damaged
            kept, now = read_object(stamp, advice=""), _stamp(folder, files)
            last_change = max((times["changed_ns"] for times in now["files"].values()), default=0)
            if kept["files"] == now["files"] and last_change + SETTLED_NS < int(kept["time_ns"]):
                return True
    return False


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lets one process at a time into the block for this folder; leaves no file behind."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: then several processes read the same
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _stamp(folder: Path, files: Mapping[str, FileRecord]) -> dict:
    return {
        "time_ns": time.time_ns(),
        "files": {
            name: {
                "sha256": record.sha256,
                "bytes": (status := (folder / name).stat()).st_size,
                "inode": status.st_ino,
                "modified_ns": status.st_mtime_ns,
                "changed_ns": status.st_ctime_ns,
            }
            for name, record in files.items()
        },
    }


def _stamp_files(folder: Path) -> list[Path]:
    """Returns where the stamp may lie: in the folder or, where that cannot be written, in the user's cache."""
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
    places = [folder / STAMP]
    with suppress(RuntimeError):  # a user without a name and without HOME, as in some containers, has no cache
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        places.append(cache / "mempipe" / "verified" / f"{name}.json")
    return places


def _write(folder: Path, stamp: dict) -> None:
    for file in _stamp_files(folder):
        with suppress(OSError):
            write_object(file, stamp)
            return
    logging.getLogger(__name__).warning(
        "neither %s nor this user's cache can be written, so every process that opens that folder compares checksums",
        folder,
    )
