"""The temporary folder of a run, which is removed with everything that the run and its processes left in it. vLLM
leaves sockets and rendezvous files in the temporary folder, Ray a folder for every cluster. A run puts all of them into
one folder, which is removed at its end; after a kill -9 the next start of any run removes it. Weights on their way to
an engine have such a folder in shared memory.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mempipe.environment import SHARED_TEMP
from mempipe.settings import ConfigError

SHARED_MEMORY = Path("/dev/shm")
RAY = "ray"
"""The part of the folder for Ray, which lets everybody write there; nobody else can enter the folder itself."""
KEPT_BYTES = 64 * 1024
"""Bytes kept of the end of each log of a failed run."""
_OWNER = ".owner"  # locked for as long as the owner lives
_LONGEST_SOCKET = 107  # bytes of a path, which the kernel sets
_SOCKET_OF_RAY = f"/{RAY}/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_REMOVAL_S = 10.0


@contextmanager
def scratch_folder(*, logs: Path | None = None) -> Iterator[Path]:
    """Makes an empty folder the temporary folder of this process, and of those that it starts, until the end of the
    block; then removes it with all that is in it.

    When the block fails, the ends of Ray's logs are kept in `logs`, in place of older ones. With MEMPIPE_DEBUG in the
    environment the folder stays.
    """
    shared = Path(os.environ.get("RAY_TMPDIR") or os.environ.get(SHARED_TEMP) or tempfile.gettempdir())
    if len(os.fsencode(shared / f"{_prefix()}12345678")) + len(_SOCKET_OF_RAY) > _LONGEST_SOCKET:
        shared = Path("/tmp")
    folder, owner = _owned_folder(shared)
    try:
        with _as_temporary_folder(folder):
            yield folder
    except Exception as error:
        if logs is not None and not isinstance(error, ConfigError):
            _keep_logs(folder, logs)
        raise
    finally:
        if os.environ.get("MEMPIPE_DEBUG"):
            (folder / _OWNER).unlink(missing_ok=True)
        else:
            _remove(folder)
        os.close(owner)


@contextmanager
def memory_folder(num_bytes: int) -> Iterator[Path]:
    """Makes an empty folder for `num_bytes` until the end of the block: in shared memory, or in the temporary folder
    where shared memory has no room.

    What a killed process left there holds memory of the machine; the next call of any process removes it.
    """
    folder, owner = _owned_folder(SHARED_MEMORY if _has_room(num_bytes) else Path(tempfile.gettempdir()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.close(owner)


def _has_room(num_bytes: int) -> bool:
    """Returns whether shared memory has room for twice as many bytes, since another engine may write there at the same
    time. A container has 64 MB of it unless it is started with more."""
    if not SHARED_MEMORY.is_dir():
        return False
    remove_abandoned(SHARED_MEMORY)
    return shutil.disk_usage(SHARED_MEMORY).free >= 2 * num_bytes


def _prefix() -> str:
    return f"mempipe-{os.getuid()}-"


def _owned_folder(shared: Path) -> tuple[Path, int]:
    """Makes a new folder in `shared`; returns it, and the descriptor that keeps it from being removed as abandoned."""
    remove_abandoned(shared)
    folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=shared))
    return folder, _own(folder)


@contextmanager
def _as_temporary_folder(folder: Path) -> Iterator[None]:
    shared, default, before = tempfile.gettempdir(), tempfile.tempdir, dict(os.environ)
    changes = {"TMPDIR": str(folder), SHARED_TEMP: before.get(SHARED_TEMP, shared)}
    if os.path.exists("/dev/nvidiactl"):  # kernels are compiled for minutes, and kept for the next run
        # Named after the number of the user, who has no name in a container that runs under another number.
        cache = f"{shared}/torchinductor_{os.getuid()}"
        changes["TORCHINDUCTOR_CACHE_DIR"] = before.get("TORCHINDUCTOR_CACHE_DIR", cache)
    os.environ.update(changes)
    tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = default
        for name in changes:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


def logs_of_serve() -> Path:
    """Returns the folder in which the services of this process's cluster log."""
    return Path(tempfile.gettempdir()) / RAY / "session_latest" / "logs" / "serve"


def remove_abandoned(shared: Path) -> None:
    """Removes the folders of this user in `shared` whose owners are dead."""
    for file in shared.glob(f"{_prefix()}*/{_OWNER}"):
        with suppress(OSError):  # another start removes it, or it is not ours
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(file.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


def _own(folder: Path) -> int:
    """Marks the folder as that of a living process, for as long as the returned descriptor is open."""
    unfinished = folder / f"{_OWNER}.unfinished"
    descriptor = os.open(unfinished, os.O_CREAT | os.O_RDONLY, 0o600)
    with suppress(OSError):  # a file system without locks: the folder of a dead owner is never removed
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        unfinished.rename(folder / _OWNER)  # now that it is locked
    return descriptor


def _keep_logs(folder: Path, logs: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        for file in folder.glob(f"{RAY}/session_2*/logs/*"):
            if file.is_file() and (size := file.stat().st_size):
                with file.open("rb") as opened:
                    opened.seek(max(0, size - KEPT_BYTES))
                    (logs / file.name).write_bytes(opened.read(KEPT_BYTES))


def _remove(folder: Path) -> None:
    """Removes the folder; processes that are ending may still write there for a moment."""
    deadline = time.monotonic() + _REMOVAL_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            time.sleep(0.1)
