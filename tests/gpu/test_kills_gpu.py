"""Engines and ranks that are killed in a run on GPUs: what goes from GPU to GPU meets the same faults as bytes do.

The strikes are those of `make chaos`. With MEMPIPE_REHEARSE=1 the same run is struck on CPUs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import commands
import pytest
from journal import Journal
from miniature import FEW_PROCESSES
from shapes import GPU, needs_gpus, played_anywhere
from watched import Watched, at

pytestmark = [pytest.mark.gpu, played_anywhere]

PLAN = [
    (["engine"], at("evaluate", label="untrained", groups=0)),
    (["here"], at("engine.generate")),
    (["engine"], at("learn", step=1)),
    (["here"], at("rank.update", update=1)),
    (["here"], at("engine.load_weights")),
    (["rank"], at("sync", version=4)),
    (["engine"], at("sync.check", version=5)),
]


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param("colocated", id="weights by ipc"),
        pytest.param("separate", id="weights by nccl", marks=needs_gpus(2)),
    ],
)
def test_engines_and_ranks_may_die_in_every_phase(tmp_path: Path, placement: str):
    journal = Journal(f"{placement}: ", out=sys.stderr)
    settings = [*FEW_PROCESSES, f"placement={placement}", *(["model.dtype=bfloat16"] if GPU else [])]
    with Watched(tmp_path / "out") as watched:
        run = commands.training(watched, journal, None, num_steps=6, overrides=settings)
        run.begin()
        run.strikes(PLAN)
        run.finish()
    assert not journal.misses, journal.table()
