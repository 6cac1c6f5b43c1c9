"""The main job in miniature: its overrides, the real command as a subprocess, and what runs of it leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
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
MARK = "MEMPIPE_TEST_RUN"


class Marked:
    """Processes are told apart by an environment variable, which children inherit whoever their parent is later."""

    def __init__(self, extra: Mapping[str, str] | None = None) -> None:
        self._mark = uuid.uuid4().hex
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self.environment = {
            **os.environ,
            MARK: self._mark,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **(extra or {}),
        }
        for name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI"):  # mlflow sets its own for every child of this process
            self.environment.pop(name, None)

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_marked(process)]

    def survivors(self, *, within_s: float) -> list[str]:
        """Command lines of the processes that are still there after `within_s` seconds; returns as soon as there are
        none.
        """
        deadline = time.monotonic() + within_s
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [" ".join(process.cmdline()) for process in found if process.is_running()]

    def end(self) -> None:
        """Ends them all."""
        for process in self.processes():
            process.kill()

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            return False


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


def start_train(command: Sequence[str], output: Path, *, marked: Marked) -> subprocess.Popen[str]:
    """The command, running; its output has no terminal."""
    return subprocess.Popen(
        command,
        env=marked.environment,
        cwd=output,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
