"""`metrics.jsonl` on disks that are full, away or damaged, and where a run begins again at an earlier step."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest

from mempipe.tracking import metrics_file
from mempipe.tracking.config import TrackingConfig
from mempipe.tracking.losses import LOSSES_FILE, read_losses
from mempipe.tracking.metrics_file import MetricsFile, describe_bad_lines, read_metrics, read_rows
from mempipe.tracking.tracker import Tracker

BAD_LINES = [
    b'{"step": 1, "em": "\xff"}',  # not UTF-8
    b'{"step": 1, "em": 0.',  # half a line
    b'[{"step": 1}]',
    b"3",
    b"null",
    b'{"em": 0.1}',
    b'{"step": null, "em": 0.1}',
    b'{"step": "1", "em": 0.1}',
    b'{"step": 1, "em": [0.1]}',
    b'{"step": Infinity, "em": 0.1}',
    b'{"step": 1, "em": 1' + b"0" * 400 + b"}",
    b"[" * 100_000,
    b"\x00\x00\x00",
]


def make_tracker(folder: Path, said: list[str] | None = None) -> Tracker:
    tell = [].append if said is None else said.append
    return Tracker(TrackingConfig(enabled=False), folder=folder, run_name="a", run_config={}, tell=tell)


def log(tracker: Tracker, *steps: int) -> None:
    for step in steps:
        tracker.log_metrics({"em": step / 10}, step=step)


def steps(folder: Path) -> list[int]:
    """The step of every line."""
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_line_that_is_no_row_is_left_out_with_its_file_and_number(tmp_path, caplog, line):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "em": 0.1}\n' + line + b'\n{"step": 2, "em": null}\n\n')
    first, second = read_metrics(file)
    assert first == {"step": 1, "em": 0.1} and second["step"] == 2 and math.isnan(second["em"])
    (warning,) = [record.message for record in caplog.records]
    assert warning == f"line 2 of {file} is not a row of metrics and was skipped; all other rows are used"


def test_one_warning_names_the_first_lines_of_many():
    assert describe_bad_lines("m", [1, 2]).startswith("lines 1, 2 of m are not rows of metrics and were skipped")
    assert "lines 1, 2, 3, 4, 5 and 4 more of m" in describe_bad_lines("m", range(1, 10))


def test_a_file_of_any_damage_is_read(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(os.urandom(4096))
    assert read_metrics(file) == []
    file.write_bytes(b"")
    assert read_metrics(file) == []


def test_a_run_that_begins_again_makes_each_step_once(tmp_path):
    tracker = make_tracker(tmp_path)
    log(tracker, 0, 1, 2, 3)
    tracker.finish()
    said: list[str] = []
    again = make_tracker(tmp_path, said)
    again.restart_at(2)
    log(again, 3, 4)
    assert steps(tmp_path) == [0, 1, 2, 3, 4]
    replaced = (tmp_path / "metrics.replaced.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in replaced] == [3]
    file = tmp_path / "metrics.jsonl"
    moved = f"rows of later steps (1) were moved from {file} to metrics.replaced.jsonl next to it"
    assert said == [f"the run continues after step 2: {moved}"]


def test_what_was_set_aside_twice_is_there_twice(tmp_path):
    tracker = make_tracker(tmp_path)
    for _ in range(2):
        log(tracker, 1)
        tracker.restart_at(0)
    log(tracker, 1)
    assert steps(tmp_path) == [1] and len((tmp_path / "metrics.replaced.jsonl").read_text().splitlines()) == 2


def test_a_run_that_begins_again_sets_damaged_lines_aside(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "em": 0.1}\n\xff\xfe\n{"step": 2, "e')
    said: list[str] = []
    tracker = make_tracker(tmp_path, said)
    tracker.restart_at(1)
    log(tracker, 2)
    assert read_rows(file)[1] == [] and steps(tmp_path) == [1, 2]
    assert (tmp_path / "metrics.replaced.jsonl").read_bytes() == b'\xff\xfe\n{"step": 2, "e\n'
    (sentence,) = said
    assert sentence.startswith("lines that are not rows of metrics (2) were moved")


def test_nothing_is_said_and_written_where_there_is_nothing_to_set_aside(tmp_path):
    said: list[str] = []
    tracker = make_tracker(tmp_path, said)
    tracker.restart_at(0)
    log(tracker, 0, 1)
    tracker.restart_at(1)
    assert said == [] and [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.fixture
def disk(monkeypatch):
    """A disk with room for so many bytes; writing what does not fit fails after a part of it, as on a real one."""

    class Disk:
        room = 10**9

    def write(descriptor: int, data: memoryview) -> int:
        if not Disk.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os_write(descriptor, data[: Disk.room])
        Disk.room -= written
        return written

    os_write = os.write
    monkeypatch.setattr(metrics_file.os, "write", write)
    return Disk


def test_a_full_disk_costs_no_step_and_is_said_at_once_with_the_path(tmp_path, disk):
    said: list[str] = []
    tracker = make_tracker(tmp_path, said)
    log(tracker, 1)
    disk.room = 5
    log(tracker, 2, 3)
    assert steps(tmp_path) == [1]  # no half line
    file = tmp_path / "metrics.jsonl"
    assert said == [
        f"{file} cannot be written: No space left on device; its rows wait in memory and are tried again while the "
        "work continues"
    ]
    assert not tracker.flush() and tracker.losses() == [f"{file} lacks 2 rows: No space left on device"]
    disk.room = 10**9
    log(tracker, 4)
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert said[1:] == [f"{file} is written again, with all rows that waited"] and tracker.losses() == []
    assert tracker.flush() and read_losses(tmp_path) == []


def test_rows_that_no_disk_took_are_named_at_the_end_and_in_the_folder(tmp_path, disk):
    said: list[str] = []
    tracker = make_tracker(tmp_path, said)
    disk.room = 0
    log(tracker, 1, 2)
    summary = tracker.finish("FAILED")
    (loss,) = summary.losses
    assert loss == f"{tmp_path / 'metrics.jsonl'} lacks 2 rows: No space left on device" == said[-1]
    assert json.loads((tmp_path / LOSSES_FILE).read_text()) == [loss]


def test_what_one_start_lost_stays_known_to_the_next(tmp_path, disk):
    tracker = make_tracker(tmp_path)
    disk.room = 0
    log(tracker, 1)
    (loss,) = tracker.finish().losses
    disk.room = 10**9
    assert make_tracker(tmp_path).finish().losses == (loss,)


def test_a_folder_that_is_away_for_a_while_has_every_row_afterwards(tmp_path):
    folder, away = tmp_path / "run", tmp_path / "away"
    said: list[str] = []
    tracker = make_tracker(folder, said)
    log(tracker, 1)
    folder.rename(away)
    log(tracker, 2)
    assert not folder.exists()
    assert str(folder) in said[0] and "No such file or directory" in said[0]
    away.rename(folder)
    log(tracker, 3)
    assert steps(folder) == [1, 2, 3]


def test_rows_that_wait_are_set_aside_too(tmp_path, disk):
    file = MetricsFile(tmp_path)
    disk.room = 0
    for step in range(4):
        file.append({}, step=step, time_s=0.0)
    file.restart_at(1)
    disk.room = 10**9
    file.flush()
    assert steps(tmp_path) == [0, 1]


def test_sentences_of_losses_that_are_damaged_are_none(tmp_path):
    for text in ("", "{}", "[1]", "\udcff"):
        (tmp_path / LOSSES_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
        assert read_losses(tmp_path) == []
