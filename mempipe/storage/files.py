"""Files and folders that appear atomically and durably; a folder that one process locks at a time."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mempipe.environment import SHARED_TEMP
from mempipe.settings import ConfigError

LOCK_FILE = ".lock"


@contextmanager
def whole_file(path: Path, *, durable: bool = True, make_folder: bool = True) -> Iterator[Path]:
    """Writes a file atomically: yields a temporary path in the same folder and renames it to `path` when the block
    succeeds. Any number of threads, processes and machines may do so at the same time: the last one wins.

    With `durable` its bytes are on the disk before it gets its name, so that a power cut leaves the old file or the new
    one. The folder is made when it is missing, unless `make_folder` says otherwise: it may be a mount that is away. An
    OSError of a full disk names `path`.
    """
    if make_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        yield partial
        if durable:
            sync(partial)
        partial.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)  # the system does not say which file it could not write to
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, make_folder: bool = True) -> None:
    """Writes a small UTF-8 file as `whole_file` does."""
    with whole_file(path, make_folder=make_folder) as partial:
        partial.write_text(text, encoding="utf-8")


def check_new_folder(path: Path, *, setting: str) -> None:
    """Raises ConfigError, which names `setting`, unless a folder that is made next to `path` can get its name by a
    rename: it is not there yet, or empty, and no link, mount or working folder.
    """
    kinds = {
        "a link": path.is_symlink(),
        "the working folder or one above it": path.name in ("", ".."),
        "a mount": path.is_mount(),
    }
    for kind in (kind for kind, is_of_kind in kinds.items() if is_of_kind):
        raise ConfigError(
            f"{setting} is {str(path)!r}, {kind}, whose place a new folder cannot take; name a folder in it, such as "
            f"{str(path / 'new')!r}"
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{setting} is {str(path)!r}, which exists; remove it or choose another")


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder, next to `path`, to be filled.
    When the block ends without an error, it becomes `path`, replacing an old one.

    Raises ConfigError while another process fills one for the same `path`.
    """
    if partial_folder(path).exists():  # of a process that was killed, or of one that is alive
        os.close(_lock_partial(path))
    partial = start_folder(path)
    descriptor = _lock_partial(path)
    try:
        yield partial
        finish_folder(partial, path)
    except BaseException:
        discard_folder(path)
        raise
    finally:
        os.close(descriptor)  # last, so that no other process has begun a folder that this one removes


def _lock_partial(path: Path) -> int:
    """Returns the descriptor of the folder that becomes `path`, locked until it is closed. Raises ConfigError while
    another process holds the lock."""
    descriptor = os.open(partial_folder(path), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(f"another process is making {path}; wait for it, or choose another folder") from error
    except OSError:  # a file system without locks
        pass
    return descriptor


def start_folder(path: Path) -> Path:
    """Creates the empty folder next to `path` that `finish_folder` renames; for writers that are several processes."""
    recover_folder(path)
    # In this order: `recover_folder` takes a new folder next to a replaced one as complete.
    for left in (_replaced_folder(path), partial_folder(path)):  # by a process that was killed
        if left.exists():
            shutil.rmtree(left)
    partial = partial_folder(path)
    partial.mkdir(parents=True)
    return partial


def partial_folder(path: Path) -> Path:
    """Returns the folder that `start_folder` makes and `finish_folder` renames to `path`."""
    return path.with_name(f".{path.name}.partial")


def finish_folder(partial: Path, path: Path) -> None:
    """Makes the filled folder known as `path` after its files reached the disk. A folder of that name is removed.

    A kill leaves the old folder or the new one, if need be after `recover_folder`.
    """
    for file in partial.rglob("*"):
        sync(file)
    sync(partial)
    replaced = _replaced_folder(path)
    if path.exists():
        path.rename(replaced)
    try:
        partial.rename(path)
    except FileNotFoundError:
        if not path.exists():  # a reader that recovered the folder in between did the same
            raise
    except OSError:
        if replaced.exists():
            replaced.rename(path)
        raise
    sync(path.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def discard_folder(path: Path) -> None:
    """Removes what `start_folder` made for `path`, unless it is all there is: then `recover_folder` continues with
    it."""
    if path.exists() or not _replaced_folder(path).exists():
        shutil.rmtree(partial_folder(path), ignore_errors=True)


def recover_folder(path: Path) -> None:
    """Gives `path` its name when a writer was killed between the two renames of `finish_folder`.

    Only at that moment do the old and the new folder exist while `path` does not; the new one is complete then. Call
    this before you open a folder that `whole_folder` or `finish_folder` replaces.
    """
    if not path.exists() and _replaced_folder(path).exists():
        with suppress(FileNotFoundError):  # the writer is alive and was faster, or the folder was removed on purpose
            partial_folder(path).rename(path)


def recover_folders(parent: Path) -> None:
    """Does what `recover_folder` does for every folder in `parent`."""
    for replaced in parent.glob(".*.replaced"):
        recover_folder(parent / replaced.name.removeprefix(".").removesuffix(".replaced"))


def remove_folder(path: Path) -> None:
    """Removes a folder in such a way that a kill leaves all of it or nothing under its name.

    Also removes the rest of a folder that a killed process left next to it.
    """
    path.rename(path.with_name(f".{path.name}.removed"))
    for left in path.parent.glob(".*.removed"):
        shutil.rmtree(left, ignore_errors=True)


def _replaced_folder(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_local_path(name: str) -> bool:
    """Returns whether a name is meant as a path and not as OWNER/NAME on the Hugging Face hub, so that a mistyped
    folder is refused without asking the hub for it."""
    parent = Path(name).parent
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or (parent != Path() and parent.is_dir())


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextmanager
def in_turn(name: str) -> Iterator[None]:
    """Holds a lock shared by all processes of this user on this machine; others block until it is released. The last
    one leaves nothing behind.
    """
    file = Path(os.environ.get(SHARED_TEMP) or tempfile.gettempdir()) / f"mempipe-{os.getuid()}-{name}.lock"
    held = _locked(file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(held)


def _locked(file: Path) -> int:
    """Returns the descriptor of the file that has this name, locked for this process."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(file.stat(), os.fstat(descriptor)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has removed it


_held: dict[tuple[int, int], int] = {}
"""The descriptors of the lock files that this process holds, by device and inode; they stay open until it ends."""


def lock(folder: Path) -> None:
    """Keeps every other process out of `folder` until this process ends, however it ends. Makes the folder when it is
    missing. A second call in the same process changes nothing.

    Raises ConfigError when another process works there, and OSError when the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    status = os.fstat(descriptor)
    file = (status.st_dev, status.st_ino)
    if file in _held:
        os.close(descriptor)
        return
    _held[file] = descriptor
    try:
        # Not `lockf`: its lock would be lost as soon as anything in this process opened and closed the file.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(_held.pop(file))
        raise ConfigError(f"another process is at work in {folder}; wait for it, or use another `name`") from error
    except OSError as error:  # a file system without locks: running there is better than not running at all
        logging.getLogger(__name__).warning(
            "%s cannot be locked (%s); start nothing else in it", folder, error.strerror
        )
