"""One at a time."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from mempipe.files import in_turn


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
        assert threads.submit(enter).result(timeout=10)
