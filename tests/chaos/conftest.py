"""What the chaos tests share: the starting point, and campaigns whose misses fail the test at its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import commands
import pytest
from campaign import Campaign
from journal import Journal
from starting_point import starting_point
from watched import Watched

Struck: TypeAlias = Callable[..., Campaign]


@pytest.fixture(scope="session")
def start() -> Path:
    return starting_point()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    """An empty folder whose commands are watched."""
    with Watched(tmp_path / "out") as watched:
        yield watched


@pytest.fixture
def journal(request: pytest.FixtureRequest) -> Iterator[Journal]:
    """The faults of one test; a miss among them fails it."""
    name = request.node.name.removeprefix("test_").replace("_", " ")
    journal = Journal(f"{name}: ", out=sys.stderr)  # tests run side by side, and pytest shows no other output of theirs
    yield journal
    journal.say(f"{name}\n{journal.table()}")
    if journal.misses:
        pytest.fail("\n".join(journal.misses), pytrace=False)


@pytest.fixture
def train(watched: Watched, journal: Journal, start: Path) -> Struck:
    """Begins a training from the starting point: `train(num_steps, overrides)`."""

    def begun(num_steps: int, overrides: Sequence[str] = (), *, started_from: Path = start) -> Campaign:
        campaign = commands.training(watched, journal, started_from, num_steps=num_steps, overrides=overrides)
        journal.say(f"{journal.title}this machine takes {campaign.factor:.1f} times as long as a quiet one")
        campaign.begin()
        return campaign

    return begun
