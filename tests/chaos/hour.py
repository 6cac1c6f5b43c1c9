"""`make chaos HOURS=1`: faults at random, for hours: which part of which command, when, and how is drawn from a seed.

    make chaos HOURS=1 SEED=7               an hour of faults
    make chaos HOURS=1 SEED=7 ONLY=23       the 23rd of them alone, to look into a miss

Commands are used for many faults each. Every fault is a line: what was done where, after how many seconds the work went
on, and what a person was told. The last lines are a table and the misses; with a miss the exit code is 1.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import commands
from campaign import Campaign
from journal import Journal
from machine import speed_factor
from mutations import check_mutations
from starting_point import starting_point
from watched import Absent, Over, Place, Watched

from tools.guard import leave_nothing_behind

JOBS = {"training": 12, "index": 4, "evaluation": 4, "sweep": 2, "chain": 2, "mutations": 1}
"""How many faults one command of each kind is used for."""
WEIGHTS = {"training": 6, "index": 1, "evaluation": 2, "sweep": 1, "chain": 1, "mutations": 3}
NUM_STEPS = 60
NUM_MUTATIONS = 400
"""Of files, in one block of them."""
ENDING = 6
"""A training with so few steps left is let end."""
OVERRIDES = (
    ("learner.num_ranks=2", "generation.num_replicas=2"),
    ("learner.num_ranks=1", "algorithm.kl_coef=0"),
    ("learner.num_ranks=2", "ordered=true", "algorithm.max_off_policy_steps=0"),
)
"""What trainings are like, in turn."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What may be done to a kind of command: the roles that it has, and the beacons that it passes again and again."""

    roles: dict[str, int]
    """By their weights."""
    places: tuple[str, ...]


AIMS = {
    "training": Aim(
        roles={
            "here": 6,
            "engine": 3,
            "retriever": 3,
            "worker": 3,
            "admission": 2,
            "weight store": 2,
            "stream's own actors": 1,
            "idle worker": 1,
            "rank": 2,
            "driver": 2,
            "raylet": 1,
            "GCS": 1,
        },
        places=(
            "collect",
            "learn",
            "learn.update",
            "sync",
            "sync.check",
            "learnt",
            "checkpoint",
            "checkpoint.partial",
            "checkpoint.whole",
            "checkpoint.finished",
            "rank.update",
            "engine.generate",
            "engine.load_weights",
            "driver.play",
            "retriever.search",
            "admission.choose",
            "admission.consume",
            "store.put",
        ),
    ),
    "index": Aim(roles={"here": 2, "driver": 3, "encoder": 2, "GCS": 1}, places=("index.read", "index.encode")),
    "evaluation": Aim(
        roles={"engine": 2, "retriever": 2, "worker": 2, "driver": 2, "raylet": 1},
        places=("evaluation.group", "evaluation.part", "engine.generate", "retriever.search"),
    ),
    "sweep": Aim(roles={"here": 2, "driver": 1, "engine": 1, "raylet": 1}, places=("evaluation.group",)),
    "chain": Aim(roles={"driver": 2, "engine": 1, "retriever": 1}, places=("learnt", "collect")),
}
ENDED_BY_CLUSTER = ("raylet", "GCS")
BEFORE_ADMISSION = ("sync", "sync.check", "store.put", "engine.load_weights")
"""Places that a start passes before it makes an admission."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One fault as it was drawn."""

    number: int
    job: str
    is_first: bool
    """It begins a new command."""
    way: str
    role: str
    place: str
    seconds: float
    """Of a freeze; else how long after the beacon the strike comes."""


def plans(seed: str) -> Iterator[Plan]:
    """Yields the faults of a seed, without end and always the same."""
    number = 0
    for block in range(sys.maxsize):
        draw = random.Random(f"{seed}:block {block}")
        (job,) = draw.choices(list(WEIGHTS), weights=list(WEIGHTS.values())) if block else ("training",)
        for i in range(JOBS[job]):
            number += 1
            yield plan(seed, number, job, is_first=i == 0)


def by_command(seed: str, *, only: int | None = None) -> Iterator[list[Plan]]:
    """Yields the faults of each command in turn; with `only` the fault of that number alone."""
    faults: list[Plan] = []
    for each in plans(seed):
        if only is not None:
            if each.number == only:
                yield [each]
                return
            continue
        if each.is_first and faults:
            yield faults
            faults = []
        faults.append(each)


def plan(seed: str, number: int, job: str, *, is_first: bool) -> Plan:
    """Draws one fault of a command of the kind `job`."""
    draw = random.Random(f"{seed}:{number}")
    if job == "mutations":
        return Plan(number=number, job=job, is_first=True, way="mutate", role="", place="", seconds=0.0)
    aim = AIMS[job]
    (role,) = draw.choices(list(aim.roles), weights=list(aim.roles.values()))
    place = draw.choice(aim.places)
    if role == "admission" and place in BEFORE_ADMISSION:
        place = "collect"
    way = "kill"
    if role == "driver":
        way = draw.choice(["kill", "kill", "SIGTERM", "SIGINT"])
    elif role not in ("here", "idle worker", "stream's own actors") and draw.random() < 0.25:
        way = "freeze"
    at_once = role == "here" or draw.random() < 0.5
    seconds = draw.uniform(2, 12) if way == "freeze" else 0.0 if at_once else draw.uniform(0, 1.5)
    return Plan(number=number, job=job, is_first=is_first, way=way, role=role, place=place, seconds=seconds)


def inflict(what: Plan, campaign: Campaign) -> None:
    """Does it. Raises Over when the command has ended well before."""
    place = Place(what.place)
    if what.way == "freeze":
        campaign.freeze(what.role, place, seconds=what.seconds, fault_number=what.number)
    elif what.role in ENDED_BY_CLUSTER:
        campaign.lose_cluster(what.role, place, later_s=what.seconds, fault_number=what.number)
    else:
        sent = signal.SIGKILL if what.way == "kill" else signal.Signals[what.way]
        campaign.strike([what.role], place, number=sent, later_s=what.seconds, fault_number=what.number)


def begin(what: Plan, watched: Watched, journal: Journal, start: Path) -> Campaign:
    """Begins the command that the fault, and those after it, are inflicted on."""
    name = f"{what.job}-{what.number}"
    if what.job == "training":
        overrides = [*OVERRIDES[what.number % len(OVERRIDES)], "data.num_epochs=2", "evaluation.every_steps=20"]
        campaign = commands.training(watched, journal, start, num_steps=NUM_STEPS, overrides=overrides, name=name)
    elif what.job == "index":
        campaign = commands.index_build(watched, journal, name=name)
    else:
        make = {"evaluation": commands.evaluation, "sweep": commands.sweep, "chain": commands.chain}[what.job]
        campaign = make(watched, journal, start, name=name)
    campaign.begin()
    return campaign


def block(faults: Sequence[Plan], journal: Journal, start: Path, *, until: float) -> None:
    """Inflicts the faults of one command, and looks at what it leaves when it has ended."""
    if faults[0].job == "mutations":
        mutate_files(faults[0], journal, start)
        return
    output = Path(tempfile.mkdtemp(prefix="mempipe-chaos-"))
    with Watched(output) as watched:
        campaign = begin(faults[0], watched, journal, start)
        try:
            for fault in faults:
                if time.time() > until or (fault.job == "training" and _steps_left(watched) < ENDING):
                    break
                with suppress(Absent):
                    inflict(fault, campaign)
        except Over:
            pass
        campaign.finish()
    shutil.rmtree(output, ignore_errors=True)


def mutate_files(what: Plan, journal: Journal, start: Path) -> None:
    """Damages files in many small ways and opens them, in this process."""
    with journal.fault(f"{NUM_MUTATIONS} files damaged", "every kind of file", number=what.number) as fault:
        fault.said = check_mutations(NUM_MUTATIONS, seed=what.number)


def _steps_left(watched: Watched) -> int:
    steps = [each.details["step"] for each in watched.passed() if each.name == "learnt"]
    return NUM_STEPS - max(steps, default=-1) - 1


def main() -> int:
    """Inflicts faults until the time is over; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", default="")
    parser.add_argument("--only", type=int, help="the number of one fault")
    asked = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` and nohup let children ignore Ctrl-C
    leave_nothing_behind()
    seed = asked.seed or str(random.SystemRandom().randrange(10_000))
    start, journal = starting_point(), Journal(lets_end=True)
    print(f"SEED={seed}; this machine takes {speed_factor():.1f} times as long as a quiet one", flush=True)
    until = time.time() + asked.hours * 3600
    try:
        for faults in by_command(seed, only=asked.only):
            if time.time() > until:
                break
            block(faults, journal, start, until=until)
    except KeyboardInterrupt:
        print("ended early; the faults so far:")
    print(journal.table())
    for line in journal.misses:
        print(f"missed: SEED={seed} {line}")
    return 1 if journal.misses else 0


if __name__ == "__main__":
    sys.exit(main())
