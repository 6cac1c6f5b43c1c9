"""Nothing of a run stays in the temporary folder, however it ends."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mempipe.environment import SHARED_TEMP
from mempipe.settings import ConfigError
from mempipe.storage import scratch
from mempipe.storage.files import in_turn
from mempipe.storage.scratch import KEPT_BYTES, scratch_folder


@pytest.fixture
def shared(tmp_path, monkeypatch) -> Iterator[Path]:
    """The temporary folder of the machine, with a path as short as a real one, beside that of pytest."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="mp-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setenv("TMPDIR", folder)
        for name in ("RAY_TMPDIR", SHARED_TEMP, "MEMPIPE_DEBUG"):
            monkeypatch.delenv(name, raising=False)
        yield Path(folder)
        tempfile.tempdir = None


def child(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_what_a_process_and_its_children_leave_goes_with_the_run(shared):
    with scratch_folder() as folder:
        assert folder.parent == shared and tempfile.gettempdir() == str(folder)
        tempfile.mkdtemp()
        child("import tempfile; tempfile.mkstemp(); tempfile.mkdtemp()")
        assert len(list(folder.glob("tmp*"))) == 3
    assert list(shared.iterdir()) == []
    assert os.environ["TMPDIR"] == tempfile.gettempdir() == str(shared) and SHARED_TEMP not in os.environ


def test_the_folder_of_a_process_that_was_killed_goes_at_the_next_start(shared):
    work = "with scratch_folder(): tempfile.mkdtemp(); os.kill(os.getpid(), 9)"
    assert child(f"import os, tempfile; from mempipe.storage.scratch import *\n{work}").returncode == -9
    assert len(list(shared.iterdir())) == 1
    with scratch_folder() as folder:
        assert list(shared.iterdir()) == [folder]
    assert list(shared.iterdir()) == []


def test_the_shared_memory_of_a_process_that_was_killed_is_free_after_the_next_call(shared, monkeypatch):
    """An engine that is killed while it loads leaves a copy of all weights there."""
    monkeypatch.setattr(scratch, "SHARED_MEMORY", shared)
    work = f"scratch.SHARED_MEMORY = Path({str(shared)!r})\nwith scratch.memory_folder(1): os.kill(os.getpid(), 9)"
    assert child(f"import os\nfrom pathlib import Path\nfrom mempipe.storage import scratch\n{work}").returncode == -9
    assert len(list(shared.iterdir())) == 1
    with scratch.memory_folder(1) as first, scratch.memory_folder(1) as second:
        assert sorted(shared.iterdir()) == sorted([first, second])
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize(("free", "where"), [(200, "memory"), (199, "temporary")])
def test_weights_go_through_the_disk_where_shared_memory_has_no_room_for_two_copies(shared, monkeypatch, free, where):
    """In a container /dev/shm has 64 MB, and the weights of a real model more."""
    memory = shared / "memory"
    memory.mkdir()
    monkeypatch.setattr(scratch, "SHARED_MEMORY", memory)
    usage = shutil.disk_usage(memory)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    with scratch.memory_folder(100) as folder:
        assert folder.parent == {"memory": memory, "temporary": shared}[where]
    assert not folder.exists()


def test_the_folder_of_a_living_process_and_other_peoples_folders_stay(shared):
    (shared / f"mempipe-{os.getuid()}-someone").mkdir()
    with scratch_folder() as first:
        (first / "file").touch()
        with scratch_folder() as second:
            assert second.parent == shared  # a run within a run
        child("from mempipe.storage.scratch import scratch_folder\nwith scratch_folder(): pass")
        scratch.remove_abandoned(shared)
        assert (first / "file").exists()
    assert [file.name for file in shared.iterdir()] == [f"mempipe-{os.getuid()}-someone"]


def test_the_path_of_a_socket_is_never_too_long(shared, monkeypatch):
    long = shared / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with scratch_folder() as folder:
        assert folder.parent == Path("/tmp")
        assert len(f"{folder}/ray/session_2026-11-24_10-30-11_123456_4194304/sockets/plasma_store") <= 107
    assert not folder.exists()


def test_the_logs_of_a_run_that_failed_are_kept_and_bounded(shared, tmp_path):
    for text in ("first", "second"):
        with pytest.raises(RuntimeError, match="a role died"), scratch_folder(logs=tmp_path / "logs") as folder:
            logs = folder / "ray" / "session_2026-11-24" / "logs"
            logs.mkdir(parents=True)
            (logs / f"{text}.err").write_bytes(b"x" * KEPT_BYTES + text.encode())
            (logs / "empty.out").touch()
            raise RuntimeError("a role died")
    (kept,) = (tmp_path / "logs").iterdir()
    assert kept.name == "second.err" and kept.stat().st_size == KEPT_BYTES and kept.read_bytes().endswith(b"second")
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("error", [ConfigError("data.train is missing"), KeyboardInterrupt(), None])
def test_no_logs_are_kept_where_nothing_broke(shared, tmp_path, error):
    def work() -> None:
        with scratch_folder(logs=tmp_path / "logs") as folder:
            (folder / "ray" / "session_2026-11-24" / "logs").mkdir(parents=True)
            (folder / "ray" / "session_2026-11-24" / "logs" / "raylet.out").write_text("a line")
            if error is not None:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(type(error)):
            work()
    assert not (tmp_path / "logs").exists() and list(shared.iterdir()) == []


def test_runs_take_turns_although_each_has_a_temporary_folder_of_its_own(shared):
    with scratch_folder(), in_turn("load"):
        assert [file.name for file in shared.iterdir() if file.is_file()] == [f"mempipe-{os.getuid()}-load.lock"]
    assert list(shared.iterdir()) == []


def test_for_debugging_the_folder_stays(shared, monkeypatch):
    monkeypatch.setenv("MEMPIPE_DEBUG", "1")
    with scratch_folder() as folder:
        pass
    scratch.remove_abandoned(shared)
    assert folder.exists()


def test_a_user_without_a_name_has_a_folder_on_a_machine_with_gpus(shared, monkeypatch):
    """As in a container that was started with `--user 54321`."""
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidiactl" or exists(path))
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with scratch_folder():
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{shared}/torchinductor_{os.getuid()}"
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
