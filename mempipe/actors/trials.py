"""Runs commands as trials of Ray Tune: side by side, again where one died, on whichever node has room.

A trial works in a separate process with its own Ray driver and namespace on the same cluster: a training or an
evaluation reserves its GPUs itself (`mempipe.actors.reservation`) and names its actors. So a trial requests almost no
resources of Tune: resources in a placement group of Tune's are not available to the actors of the process inside.
Trials that are one evaluation each share such a process where they run one after another.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

from mempipe.progress import say

_CPUS = 0.01  # Tune refuses a trial without any resource
_TAIL_BYTES = 2000
_END_WITHIN_S = 60.0  # engines have 20 s to shut down; not tuned
_CANNOT_WORK = 2  # the exit code of a command whose input cannot work
_PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCommands:
    """The `mempipe` commands of one trial, one after another, and the file of their output."""

    name: str
    commands: list[list[str]]
    log: str
    in_series: bool = False
    """Its only command is an evaluation. It runs in the process of the trial before it, whose engines and retrievers
    stay where they fit."""


def run_trials(
    trials: Sequence[TrialCommands],
    *,
    folder: Path,
    at_once: int,
    max_failures: int,
    num_over: int,
    num_in_all: int,
) -> dict[str, str]:
    """Runs all trials on the connected cluster; returns why each failed one failed, by its name.

    They are a part of `num_in_all` trials; `num_over` of these have ended. The terminal shows this count.
    `folder` is where Tune keeps its own records; it is emptied. A trial that ends with an error, or is killed, starts
    again up to `max_failures` times; one whose input cannot work does not.
    """
    # Paths in configs are relative to where the user is; Ctrl-C ends the sweep as it ends every other command.
    os.environ |= {"RAY_CHDIR_TO_TRIAL_DIR": "0", "TUNE_DISABLE_SIGINT_HANDLER": "1"}
    os.environ |= {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "TUNE_PRINT_ALL_TRIAL_ERRORS": "0"}
    os.environ |= {"RAY_AIR_NEW_OUTPUT": "0"}  # its tables; `_Progress` says what happens
    # It warns about missing files of loggers that are off, and about half a second of its own on a busy machine.
    for name in ("ray.tune.analysis.experiment_analysis", "ray.tune.utils.util"):
        logging.getLogger(name).setLevel(logging.ERROR)
    shutil.rmtree(folder, ignore_errors=True)
    tuner = tune.Tuner(
        tune.with_resources(_Trial, {"cpu": _CPUS}),
        param_space={"trial": tune.grid_search([asdict(trial) for trial in trials])},
        tune_config=tune.TuneConfig(
            max_concurrent_trials=at_once,
            trial_name_creator=_name,
            trial_dirname_creator=_name,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name=folder.name,
            storage_path=str(folder.parent.resolve()),
            failure_config=tune.FailureConfig(max_failures=max_failures),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            callbacks=[_Progress(num_over, num_in_all)],
            verbose=0,
        ),
    )
    failed = {}
    for result in tuner.fit():
        metrics: dict[str, Any] = result.metrics or {}
        error = str(getattr(result.error, "cause", None) or result.error) if result.error else metrics.get("error", "")
        if error:
            failed[Path(result.path).name] = error
    return failed


class _Trial(tune.Trainable):
    """Runs one trial, then others: Tune gives the actor of a finished trial to the next one. An actor whose trial died
    ends."""

    def setup(self, config: dict[str, Any]) -> None:
        self._series: _Series | None = None
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._trial = TrialCommands(**new_config["trial"])
        return True

    def step(self) -> dict[str, Any]:
        return {"error": self._in_series() if self._trial.in_series else run_commands(self._trial), "done": True}

    def cleanup(self) -> None:
        if self._series is not None:
            self._series.end()

    def _in_series(self) -> str:
        if self._series is None:
            self._series = _Series(self._trial.log)
        ((command, config),) = self._trial.commands
        code = self._series.run(config, self._trial.log)
        if code:
            self._series = None
        return _error(command, code, self._trial.log)


class _Series:
    """A process that runs one evaluation after another (`mempipe.cli.series`)."""

    def __init__(self, log: str) -> None:
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mempipe.cli.series"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=os.environ | _same_cluster(),
                preexec_fn=_end_with_parent,
            )

    def run(self, config: str, log: str) -> int:
        """Returns the exit code of an evaluation; the process has ended if it is not 0."""
        answers, asked = self._process.stdout, self._process.stdin
        assert answers is not None and asked is not None, "both are pipes"
        with suppress(BrokenPipeError):
            print(json.dumps([config, log]), file=asked, flush=True)
        answer = answers.readline()
        code = int(answer) if answer else self._process.wait()
        if code:
            self.end()
        return code

    def end(self) -> None:
        """Ends the process, with its engines and retrievers."""
        try:
            self._process.communicate(timeout=_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run_commands(trial: TrialCommands) -> str:
    """Runs the commands of a trial, each as a separate process. Returns as `_error` does."""
    with open(trial.log, "ab") as log:
        for command in trial.commands:
            child = subprocess.Popen(
                [sys.executable, "-m", "mempipe.cli", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | _same_cluster(),
                preexec_fn=_end_with_parent,
            )
            if error := _error(command[0], child.wait(), trial.log):
                return error
    return ""


def _error(command: str, code: int, log: str) -> str:
    """Returns why a command whose input cannot work ended; "" for one that ended well. Raises RuntimeError for another
    exit code, so that Tune starts the trial again."""
    if not code:
        return ""
    error = f"mempipe {command} ended with {code}: {_last_line(log)}"
    if code != _CANNOT_WORK:
        raise RuntimeError(error)
    return error


def _same_cluster() -> dict[str, str]:
    """Returns the environment with which a driver connects to this cluster and has the files of the submitted job."""
    context = ray.get_runtime_context()
    variables = {"RAY_ADDRESS": context.gcs_address}
    if working_dir := context.runtime_env.get("working_dir"):
        job = {"runtime_env": {"working_dir": working_dir}, "metadata": {}}
        variables[RAY_JOB_CONFIG_JSON_ENV_VAR] = json.dumps(job)
    return variables


def _end_with_parent() -> None:
    """Makes Linux end this process when its parent ends: a killed trial must not continue."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _last_line(log: str) -> str:
    with open(log, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it wrote nothing"])[-1]


def _name(trial: Any) -> str:
    return trial.config["trial"]["name"]


class _Progress(tune.Callback):
    """Prints the progress of the trials."""

    def __init__(self, num_over: int, num_trials: int) -> None:
        self._num_over, self._num_trials = num_over, num_trials

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        say(f"{_name(trial)}: started")

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        say(f"{_name(trial)}: died and will start again")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._over(trial, (trial.last_result or {}).get("error") or "finished")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._over(trial, "failed")

    def _over(self, trial: Any, how: str) -> None:
        self._num_over += 1
        say(f"{_name(trial)}: {how} ({self._num_over} of {self._num_trials})")
