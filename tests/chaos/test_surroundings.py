"""What a run stands on goes away: its disk is full, its mount is gone, its questions, its MLflow database."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import commands
import pytest
from aftermath import check_record
from machine import may_mount, small_disk
from starting_point import GROUPS_PER_STEP
from watched import Missed, Watched, at

pytestmark = [pytest.mark.chaos, pytest.mark.ray]

NUM_STEPS = 8
SMALL = ["learner.num_ranks=1", "algorithm.kl_coef=0"]
BLOCK = 1 << 16


@pytest.mark.skipif(not may_mount(), reason="this user may not mount a disk")
def test_a_full_disk_and_a_mount_that_goes_away_cost_nothing_that_was_saved(start, tmp_path, journal):
    with small_disk(tmp_path / "disk", megabytes=512) as disk:
        (tmp_path / "mount").mkdir()
        mounted = ["mount", "--bind", str(disk), str(tmp_path / "mount")]
        away = ["umount", "-l", str(tmp_path / "mount")]
        subprocess.run(mounted, check=True)
        try:
            with Watched(tmp_path / "mount") as watched:
                run = commands.training(watched, journal, start, num_steps=NUM_STEPS, overrides=SMALL)
                watched.cwd = tmp_path  # a process at work on the mount would keep it
                run.begin()
                filler = disk / "filler"
                for place in (at("checkpoint"), at("collect")):
                    run.disturb(
                        "disk full", place, lambda: _fill(filler), undo=filler.unlink, ends=True, says="No space left"
                    )
                run.disturb(
                    "mount of the run away",
                    at("learn"),
                    lambda: subprocess.run(away, check=True),
                    undo=lambda: subprocess.run(mounted, check=True),
                    ends=True,
                )
                run.finish()
        finally:
            subprocess.run(away, check=False)


def _fill(file: Path) -> None:
    """Writes until the disk has no byte left."""
    with file.open("wb", buffering=0) as filler:
        block = bytes(BLOCK)
        while block:
            try:
                filler.write(block)
            except OSError:
                block = block[: len(block) // 2]


def test_questions_that_are_away_when_a_rank_dies_cost_nothing_that_was_saved(train, start, tmp_path, watched):
    own = tmp_path / "start"
    shutil.copytree(start, own)
    run = train(NUM_STEPS, SMALL, started_from=own)

    def lose() -> None:
        (own / "world").rename(own / "away")
        watched.strike("rank")

    def give_back() -> None:
        (own / "away").rename(own / "world")

    run.disturb("rank killed, questions away", at("learn", step=3), lose, undo=give_back, ends=False, for_s=40)
    run.finish()


def test_the_loss_of_mlflow_is_said_and_costs_no_step(train, watched):
    run = train(NUM_STEPS, SMALL)

    def lose() -> None:
        for file in watched.output.glob("mlflow.db*"):
            file.unlink()

    run.disturb("MLflow's database deleted", at("learn", step=3), lose, ends=False)
    run.check = lambda: check_record(run.folder, num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP)
    run.finish()
    with run.journal.fault("what is said of the loss of MLflow", "the terminal"):
        said = [line for line in watched.ended[-1][1].splitlines() if "MLflow" in line]
        if not said:
            raise Missed("nothing was said")


def test_a_damaged_line_of_the_record_is_passed_over(train, watched):
    run = train(NUM_STEPS, SMALL)

    def damage() -> None:
        watched.driver.kill()
        with (run.folder / "metrics.jsonl").open("ab") as record:
            record.write(b"\xff\xfe{half a line")

    run.disturb("driver killed, half a line in metrics.jsonl", at("learnt", step=3), damage, ends=True, says=None)
    run.finish()
