"""Beacons: silent in a run, exact for a test of faults."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mempipe import beacons
from mempipe.beacons import RECORD, VARIABLE, reached


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    beacons._folder.cache_clear()
    yield tmp_path
    beacons._folder.cache_clear()


def test_a_beacon_does_nothing_without_a_test_that_watches(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    beacons._folder.cache_clear()
    reached("collect", step=3)
    assert list(tmp_path.iterdir()) == []


def test_a_beacon_says_who_was_where(folder):
    reached("collect", step=3)
    reached("sync")
    first, second = map(json.loads, (folder / RECORD).read_text().splitlines())
    assert (first["pid"], first["name"], first["details"]) == (os.getpid(), "collect", {"step": 3})
    assert (second["name"], second["details"]) == ("sync", {})


def test_a_process_waits_where_it_is_held_and_goes_on_when_it_is_let_go(folder):
    hold = folder / "hold-collect"
    hold.write_text('{"step": 3}')
    reached("collect", step=2)  # not this one
    held = threading.Thread(target=reached, args=("collect",), kwargs={"step": 3})
    held.start()
    while '"held": true' not in (folder / RECORD).read_text():
        assert held.is_alive()
    lines = [json.loads(line) for line in (folder / RECORD).read_text().splitlines()]
    assert [(line["details"]["step"], line["held"]) for line in lines] == [(2, False), (3, False), (3, True)]
    hold.unlink()
    held.join(5)
    assert not held.is_alive()
