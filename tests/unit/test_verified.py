"""The files of an index are compared with their checksums once per change, and never answer with a changed byte."""

from __future__ import annotations

import json
import os
import pwd
import shutil
from pathlib import Path

import pytest

from mempipe.retrieval.build import build_index
from mempipe.retrieval.manifest import open_manifest
from mempipe.retrieval.retriever import Retriever
from mempipe.settings import ConfigError
from mempipe.storage import checksums
from mempipe.storage.checksums import STAMP
from mempipe.types import Passage


@pytest.fixture
def index(tmp_path: Path) -> Path:
    passages = [Passage(id=str(i), title=f"Title {i}", text=f"words number{i}") for i in range(50)]
    build_index(passages, tmp_path / "index", lexical=True)
    return tmp_path / "index"


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the number of files each time files are compared. Files count as settled at once."""
    calls: list[int] = []
    compare = checksums.changed_files

    def counting(folder: Path, files: dict) -> list[str]:
        calls.append(len(files))
        return compare(folder, files)

    monkeypatch.setattr(checksums, "changed_files", counting)
    monkeypatch.setattr(checksums, "SETTLED_NS", 0)
    return calls


def test_files_are_compared_when_they_are_first_opened_and_not_again(index, compared):
    for _ in range(3):
        Retriever(index)
    assert len(compared) == 1


def test_any_touched_file_is_compared_again(index, compared):
    for file in ["passages/00000000.arrow", "vectors/00000.faiss", "lexical/weights.npy"]:
        open_manifest(index)
        before = len(compared)
        os.utime(index / file)
        open_manifest(index)
        assert len(compared) == before + 1


def test_a_byte_that_was_changed_is_noticed_though_the_time_of_the_change_was_set_back(index, compared):
    open_manifest(index)
    file = index / "vectors" / "00000.faiss"
    status, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    with file.open("r+b") as opened:
        opened.write(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ConfigError, match=r"index .*index: vectors/00000.faiss was changed since it was built"):
        open_manifest(index)


def test_a_copy_is_compared_where_it_lies(index, compared, tmp_path):
    open_manifest(index)
    shutil.copytree(index, tmp_path / "copy")
    assert (tmp_path / "copy" / STAMP).exists()
    open_manifest(tmp_path / "copy")
    assert len(compared) == 2


def test_a_file_that_changed_a_moment_ago_is_not_trusted_yet(index, compared, monkeypatch):
    monkeypatch.setattr(checksums, "SETTLED_NS", 2 * 10**9)
    open_manifest(index)
    open_manifest(index)
    assert len(compared) == 2


def test_a_damaged_stamp_only_costs_another_comparison(index, compared):
    open_manifest(index)
    for damage in ("", "[]", '{"files": 3}', (index / STAMP).read_text().replace("inode", "knode", 1)):
        before = len(compared)
        (index / STAMP).write_text(damage)
        open_manifest(index)
        assert len(compared) == before + 1


def test_an_index_that_cannot_be_written_is_stamped_in_the_users_cache(index, compared, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write = checksums.write_object

    def refuse(path: Path, values: dict) -> None:
        if path.parent == index:
            raise PermissionError(13, "Permission denied")
        write(path, values)

    monkeypatch.setattr(checksums, "write_object", refuse)
    open_manifest(index)
    open_manifest(index)
    assert len(compared) == 1 and not (index / STAMP).exists()


def test_a_user_without_a_name_and_a_home_has_no_cache(index, compared, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    open_manifest(index)
    open_manifest(index)
    assert len(compared) == 1


def test_no_digit_of_the_manifest_can_change(index):
    file = index / "manifest.json"
    values = json.loads(file.read_text())
    values["passages"]["skipped"] = {"empty": 3}
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"manifest.json is damaged: its values do not fit its checksum.*build it"):
        open_manifest(index)
