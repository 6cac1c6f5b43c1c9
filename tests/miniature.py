"""The main job in miniature: its overrides, its command, and a folder that another process works in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.processes import ROOT

QUICKSTART = ROOT / "jobs" / "configs" / "quickstart.yaml"
MINIATURE = [
    "world.num_train_worlds=4",
    "world.num_train_questions=60",
    "world.num_validation_questions=12",
    "algorithm.groups_per_step=4",
    "algorithm.group_size=3",
    "algorithm.updates_per_step=2",
    "num_steps=4",
]
SHORT_WARM_START = ["warm_start.num_clean_trajectories=400", "warm_start.num_noisy_trajectories=50"]
"""Enough for trajectories of several turns."""
FEW_PROCESSES = ["learner.num_ranks=1", "algorithm.kl_coef=0"]
"""One learner rank and no reference model, for runs that are about something else."""


@contextmanager
def locked_elsewhere(folder: Path) -> Iterator[None]:
    """While another process is at work in the folder."""
    code = (
        "import pathlib, sys; from mempipe.runs import lock; "
        "lock(pathlib.Path(sys.argv[1])); print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        try:
            yield
        finally:
            other.kill()


def train_command(output: Path, overrides: Sequence[str] = (), *, config: Path = QUICKSTART) -> list[str]:
    """The `mempipe train` command of a miniature run."""
    return [
        sys.executable,
        "-m",
        "mempipe.cli",
        "train",
        str(config),
        *MINIATURE,
        *SHORT_WARM_START,
        f"output={output}",
        *overrides,
    ]
