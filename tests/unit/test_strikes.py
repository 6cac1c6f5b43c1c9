"""The suite of faults itself: it strikes where it says, it notices what did not hold, and a seed is always the same."""

from __future__ import annotations

import itertools
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hour
import pytest
from aftermath import check_words, sentence
from campaign import Campaign
from hour import plans
from journal import Journal
from watched import Missed, Watched, at

from tools.processes import Running

WORK = """
import pathlib, sys, time
from mempipe.beacons import reached
done = pathlib.Path("done")
for step in range(int(done.read_text()) if done.exists() else 0, 6):
    reached("collect", step=step)
    reached("learnt", step=step)
    pathlib.Path("half").write_text(str(step + 1))
    pathlib.Path("half").replace(done)
    time.sleep({pause})
if {traceback}:
    print("Traceback (most recent call last):", flush=True)
"""


class StandIn(Watched):
    """Watches a few lines of Python in the place of `mempipe`."""

    code = ""

    def start(self, arguments) -> None:
        self.running = Running([sys.executable, "-c", self.code, *arguments], marked=self.marked, cwd=self.cwd)


def campaign(watched: Watched, journal: Journal) -> Campaign:
    return Campaign(
        watched=watched, journal=journal, arguments=[], going_on=["--resume"], folder=watched.output, factor=1.0
    )


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[StandIn]:
    with StandIn(tmp_path) as watched:
        watched.code = WORK.format(pause=0, traceback=False)
        yield watched


def test_a_command_is_struck_at_the_beacon_and_goes_on(watched):
    journal = Journal()
    run = campaign(watched, journal)
    run.begin()
    run.strike(["driver"], at("collect", step=3))
    assert (watched.output / "done").read_text() in "3456", "steps 0 to 2 were done at the strike"
    run.finish()
    assert journal.misses == [] and journal.faults[0].what == "driver killed"
    assert [each.details["step"] for each in watched.passed() if each.name == "learnt"] == [0, 1, 2, 3, 4, 5]


def test_no_place_of_a_plan_is_passed_unseen(watched):
    journal = Journal()
    run = campaign(watched, journal)
    run.begin()
    run.strikes([(["driver"], at("collect", step=step)) for step in (1, 2, 3)])
    run.finish()
    assert journal.misses == [] and len(journal.faults) == 6


def test_a_place_that_is_not_reached_is_a_miss(watched):
    journal = Journal()
    run = campaign(watched, journal)
    run.begin()
    run.strike(["driver"], at("collect", step=7))
    assert "had ended before" in journal.misses[0]


def test_a_process_that_is_stopped_is_let_go_on(watched):
    journal = Journal()
    run = campaign(watched, journal)
    run.begin()
    started = time.monotonic()
    run.freeze("driver", at("collect", step=2), seconds=0.3)
    assert time.monotonic() - started > 0.3
    run.finish()
    assert journal.misses == []


def test_words_that_nobody_should_read_are_a_miss(watched):
    watched.code = WORK.format(pause=0, traceback=True)
    journal = Journal()
    run = campaign(watched, journal)
    run.begin()
    run.finish()
    assert len(journal.misses) == 1 and "traceback" in journal.misses[0]


def test_a_signal_that_ends_a_command_without_a_sentence_is_a_miss(watched):
    journal = Journal()
    run = campaign(watched, journal)
    run.begin()
    run.strike(["driver"], at("collect", step=1), number=signal.SIGTERM)
    assert "it ended with -15" in journal.misses[0]


def test_a_command_says_once_why_it_ended():
    assert sentence("done\nerror: the disk is full\n(MEMPIPE_DEBUG=1 shows where)\n") == "error: the disk is full"
    with pytest.raises(Missed, match="2 sentences"):
        sentence("error: one\nerror: two\n")
    with pytest.raises(Missed, match="0 sentences"):
        sentence("done\n")
    with pytest.raises(Missed, match="500 characters"):
        check_words("x" * 500)


def test_faults_at_random_end_with_the_work_done_and_none_missed(monkeypatch, tmp_path):
    def begun(what: hour.Plan, watched: Watched, journal: Journal, start: Path) -> Campaign:
        run = campaign(watched, journal)
        run.begin()
        return run

    monkeypatch.setattr(StandIn, "code", WORK.format(pause=0.05, traceback=False))
    monkeypatch.setattr(hour, "Watched", StandIn)
    monkeypatch.setattr(hour, "begin", begun)
    monkeypatch.setattr(hour, "NUM_STEPS", 100)
    journal = Journal(lets_end=True)
    ways = ("kill", "freeze", "kill", "kill", "kill", "kill", "kill", "kill")
    faults = [
        hour.Plan(number=i, job="training", is_first=not i, way=way, role="driver", place="collect", seconds=0.1)
        for i, way in enumerate(ways)
    ]
    hour.block(faults, journal, tmp_path, until=time.time() + 600)
    assert journal.misses == []
    assert "driver frozen" in journal.table() and "0 missed" in journal.table()
    assert journal.faults[-1].what == "what it leaves behind"


def test_a_seed_draws_the_same_faults_every_time():
    first, again = ([*itertools.islice(plans("7"), 200)] for _ in range(2))
    assert first == again and first != [*itertools.islice(plans("8"), 200)]
    assert {each.job for each in first} == {"training", "index", "evaluation", "sweep", "chain", "mutations"}
    assert [each.number for each in first] == [*range(1, 201)]
