"""Files and folders appear atomically, whatever kills the writer; one process works at a time."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from dying_process import killed_at

from mempipe.settings import ConfigError
from mempipe.storage import files
from mempipe.storage.files import (
    in_turn,
    lock,
    recover_folder,
    recover_folders,
    remove_folder,
    whole_file,
    whole_folder,
    write_text,
)


@pytest.fixture(autouse=True)
def no_flush(monkeypatch) -> None:
    """A kill, unlike a power cut, loses nothing that was written."""
    monkeypatch.setattr(files, "sync", lambda path: None)


def fill(folder: Path, value: str) -> None:
    with whole_folder(folder) as partial:
        (partial / "parts").mkdir()
        for name in ("a", "b", "parts/c"):
            (partial / name).write_text(value)


def held(folder: Path) -> set[str]:
    """The values in the three files of a folder; one, unless two versions of it are mixed up."""
    return {(folder / name).read_text() for name in ("a", "b", "parts/c")}


@pytest.mark.parametrize("open_folder", [recover_folder, lambda path: recover_folders(path.parent)])
def test_a_kill_at_any_change_leaves_the_old_folder_or_the_new_one(tmp_path, open_folder):
    for number in itertools.count():
        folder = tmp_path / str(number) / "model"
        folder.parent.mkdir()
        fill(folder, "old")
        killed = killed_at(lambda folder=folder: fill(folder, "new"), number)
        open_folder(folder)
        assert held(folder) in ({"old"}, {"new"})
        fill(folder, "newer")
        fill(folder, "newest")
        assert held(folder) == {"newest"} and os.listdir(folder.parent) == ["model"]
        if not killed:
            break
    assert number > 8  # one kill at least before, between and after the renames, and for each file of the old folder


@pytest.mark.slow
def test_a_second_kill_while_the_leftovers_of_the_first_are_removed_costs_nothing(tmp_path):
    for first, second in itertools.product(range(13), range(0, 13, 3)):
        folder = tmp_path / f"{first}-{second}" / "model"
        folder.parent.mkdir()
        fill(folder, "old")
        killed_at(lambda folder=folder: fill(folder, "new"), first)
        killed_at(lambda folder=folder: fill(folder, "new"), second)
        recover_folder(folder)
        assert held(folder) in ({"old"}, {"new"})


def test_a_folder_that_was_removed_on_purpose_does_not_come_back(tmp_path):
    fill(tmp_path / "model", "old")
    (tmp_path / ".model.replaced").mkdir()  # what a kill left of an older one
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    recover_folder(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_kill_while_a_folder_is_removed_leaves_all_or_nothing_of_it(tmp_path):
    for number in itertools.count():
        folder = tmp_path / str(number) / "step"
        folder.parent.mkdir()
        fill(folder, "old")
        killed = killed_at(lambda folder=folder: remove_folder(folder), number)
        assert not folder.exists() or held(folder) == {"old"}
        if not killed:
            break


def test_a_folder_that_cannot_get_its_name_leaves_the_old_one(tmp_path, monkeypatch):
    folder, rename = tmp_path / "model", os.rename
    fill(folder, "old")

    def refuse(source: Any, target: Any, **_: Any) -> None:
        if str(source).endswith(".partial"):
            raise PermissionError("not that one")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError, match="not that one"):
        fill(folder, "new")
    assert held(folder) == {"old"} and os.listdir(tmp_path) == ["model"]


def test_several_threads_write_one_file_and_each_version_is_whole(tmp_path):
    file = tmp_path / "state.json"

    def write(number: int) -> None:
        for _ in range(50):
            write_text(file, str(number) * 1000)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    assert len(set(file.read_text())) == 1 and os.listdir(tmp_path) == ["state.json"]


def test_a_full_disk_is_said_with_the_file(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no full device")
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*metrics.json'"),
        whole_file(tmp_path / "metrics.json"),
        open("/dev/full", "w") as full,
    ):
        full.write("a")


def test_one_is_in_the_block_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    inside: list[int] = []

    def enter(number: int) -> int:
        with in_turn("load"):
            inside.append(number)
            most = len(inside)
            time.sleep(0.02)
            inside.remove(number)
        return most

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(enter, range(4))) == [1] * 4


def test_turns_of_another_name_do_not_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def enter() -> bool:
        with in_turn("other"):
            return True

    with ThreadPoolExecutor(1) as threads, in_turn("load"):
        assert threads.submit(enter).result(timeout=60)


def _locks(folder: Path) -> str:
    """Returns what a process says that locks the folder and ends."""
    code = f"import pathlib; from mempipe.storage import files; files.lock(pathlib.Path({str(folder)!r})); print(1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout + done.stderr


def test_a_folder_stays_locked_when_this_process_reads_its_lock_file(tmp_path):
    folder, copied = tmp_path / "run", tmp_path / "copy"
    lock(folder)
    shutil.copytree(folder, copied)
    assert f"another process is at work in {folder}" in _locks(folder)
    lock(folder)
    assert _locks(copied).strip() == "1"


def test_a_process_that_ends_unlocks(tmp_path):
    assert [_locks(tmp_path).strip() for _ in range(2)] == ["1"] * 2
    lock(tmp_path)


def test_a_folder_is_made_by_one_writer_at_a_time(tmp_path):
    path = tmp_path / "made"
    with whole_folder(path) as partial:
        (partial / "a").write_text("first")
        with pytest.raises(ConfigError, match=r"another process is making .*made; wait for it"), whole_folder(path):
            pass
        assert (partial / "a").read_text() == "first"
    assert (path / "a").read_text() == "first" and sorted(tmp_path.iterdir()) == [path]
    with whole_folder(path) as partial:
        (partial / "a").write_text("second")
    assert (path / "a").read_text() == "second"
