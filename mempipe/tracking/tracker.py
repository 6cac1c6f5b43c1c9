"""The record of a run: every metric in `metrics.jsonl`, and parameters, metrics, traces and files in MLflow.

The file is written at once and always. MLflow is written by a background thread, so that a slow, dead or wrong server
neither slows nor stops training. What disk or server do not take is kept in memory, said once in the terminal, and
tried again until `Tracker.finish` gives up; losses are then reported again and kept as sentences in the run's folder.
One tracker per run; its methods may be called from several threads.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, SupportsFloat

from mempipe.beacons import reached
from mempipe.tracking.config import TrackingConfig
from mempipe.tracking.losses import read_losses, write_losses
from mempipe.tracking.metrics_file import REPLACED_FILE, MetricsFile, read_metrics, read_rows
from mempipe.tracking.mlflow_writer import (
    MetricEntry,
    MlflowRun,
    MlflowWriter,
    TrackingSummary,
    last_run_id,
    tracking_uri,
    without_credentials,
)
from mempipe.tracking.traces import Wording, sample_groups
from mempipe.types import Group

__all__ = ["Tracker", "TrackingSummary", "last_run_id", "read_metrics", "tracking_uri"]

FLUSH_TIMEOUT_S = 10.0
FINISH_TIMEOUT_S = 60.0
MAX_WAITING_TRACES = 256
"""Traces, files and notes that wait for a server that is away; further traces are skipped, so that memory stays
bounded. Metrics are small and all wait."""

_RESERVED = ("step", "time")

_logger = logging.getLogger(__name__)


class Tracker:
    """Records one run. Construction returns at once; the MLflow run is made in the background."""

    def __init__(
        self,
        config: TrackingConfig,
        *,
        folder: str | Path,
        run_name: str,
        run_config: Mapping[str, Any],
        resume_run_id: str | None = None,
        wording: Wording | None = None,
        tell: Callable[[str], None] = _logger.warning,
    ) -> None:
        """`run_config` holds plain values (numbers, strings, lists, dicts). `resume_run_id` continues that MLflow run
        (`last_run_id(folder)`). `tell` takes a sentence when something is not taken, at once and from any thread."""
        self._config = config
        self._wording = wording or Wording()
        self._tell = tell
        self._finished = False
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._earlier_losses = read_losses(self._folder)
        self._file = MetricsFile(self._folder)
        self._file_failed = False
        self._num_traces_left_out = 0
        self._started_ms = int(time.time() * 1000)
        self._writer: MlflowWriter | None = None
        if config.enabled:
            run_config = without_credentials(run_config)
            store = MlflowRun(
                config,
                folder=self._folder,
                run_name=run_name,
                run_config=run_config,
                resume_run_id=resume_run_id,
                history=self._history,
            )
            self._writer = MlflowWriter(store, tell=tell)

    def log_metrics(self, metrics: Mapping[str, SupportsFloat | None], step: float) -> None:
        """Records numbers of one step. None means "not measured" and is skipped. Raises ValueError for a value that is
        not a number.
        """
        assert not self._finished, "log_metrics after finish"
        reached("tracker.metrics", step=int(step))
        step, now_ms = int(step), int(time.time() * 1000)
        values = {name: _as_float(name, value) for name, value in metrics.items() if value is not None}
        self._file.append(values, step=step, time_s=now_ms / 1000)
        self._tell_of_file()
        if self._writer:
            self._writer.add_metrics([(_metric_key(name), value, now_ms, step) for name, value in values.items()])

    def log_trajectories(self, groups: Sequence[Group], step: int) -> None:
        """Records a random sample of `tracking.traces_per_step` trajectories as MLflow traces, one span per turn."""
        assert not self._finished, "log_trajectories after finish"
        if not self._writer:
            return
        for group in sample_groups(groups, num_trajectories=self._config.traces_per_step, seed=int(step)):
            if self._writer.num_waiting >= MAX_WAITING_TRACES:
                self._num_traces_left_out += 1
                continue
            self._writer.add_call(
                lambda store, group=group: store.log_trace(group, step=int(step), wording=self._wording)
            )

    def log_artifact(self, path: str | Path, artifact_folder: str | None = None) -> None:
        """Copies a file to the run's artifacts. The file must stay until `finish`."""
        assert not self._finished, "log_artifact after finish"
        if self._writer:
            path = Path(path).absolute()
            self._writer.add_call(lambda store: store.log_artifact(path, artifact_folder))

    def restart_at(self, step: int) -> None:
        """The run continues after `step`, and makes later steps again: their records are set aside, so that each step
        is listed once. A call where there is nothing to set aside changes nothing.
        """
        try:
            num_rows, num_bad_lines = self._file.restart_at(step)
        except OSError as error:
            self._tell(f"{self._file.path} keeps the rows of steps that are made again: {_reason(error)}")
            num_rows = num_bad_lines = 0
        moved = f"moved from {self._file.path} to {REPLACED_FILE} next to it"
        if num_rows:
            self._tell(f"the run continues after step {step}: rows of later steps ({num_rows}) were {moved}")
        if num_bad_lines:
            self._tell(f"lines that are not rows of metrics ({num_bad_lines}) were {moved}")
        if self._writer:
            self._writer.restart_at(step, int(time.time() * 1000), note=num_rows > 0)

    def run_id(self, timeout_s: float = 0.0) -> str | None:
        """Returns the MLflow run after waiting at most `timeout_s` for it; None when there is none (yet)."""
        return self._writer.wait_for_run_id(timeout_s) if self._writer else None

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Brings every row to the disk, waits at most `timeout_s` until every metric is in MLflow, and returns whether
        that was possible. What is not taken is said, and kept in the folder for the report; nothing is raised.
        """
        reached("tracker.flush")
        self._file.flush()
        self._tell_of_file()
        written = self._writer.flush(timeout_s) if self._writer else True
        self._keep_losses()
        return written and not self._file.failure

    def losses(self) -> list[str]:
        """Returns a sentence for each thing that the record lacks now, with those of earlier starts of the run."""
        losses = list(self._earlier_losses)
        if self._file.failure:
            losses.append(f"{self._file.path} lacks {self._file.num_waiting} rows: {_reason(self._file.failure)}")
        if self._num_traces_left_out:
            losses.append(f"{self._num_traces_left_out} traces were skipped while MLflow did not take entries")
        if self._writer:
            losses += self._writer.losses()
        return losses

    def finish(
        self, status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED", timeout_s: float = FINISH_TIMEOUT_S
    ) -> TrackingSummary:
        """Writes the waiting entries, closes the MLflow run and lists the missing ones. Returns after `timeout_s` at
        the latest, and raises nothing.
        """
        assert not self._finished, "finish was called twice"
        reached("tracker.finish")
        self._finished = True
        self._file.flush()
        if self._file.failure:
            self._tell(f"{self._file.path} lacks {self._file.num_waiting} rows: {_reason(self._file.failure)}")
        summary = TrackingSummary(run_id=None, num_failed_calls=0, num_refused=0, num_unwritten=0)
        if self._writer:
            self._writer.add_call(lambda store: store.terminate(status))
            summary = self._writer.finish(timeout_s)
        self._keep_losses()
        return replace(summary, losses=tuple(self.losses()))

    def _history(self) -> list[MetricEntry]:
        """Returns what metrics.jsonl has of earlier starts."""
        rows = read_rows(self._file.path)[0] if self._file.path.exists() else []
        entries = [
            (_metric_key(name), value, round(1000 * row.get("time", 0.0)), int(row["step"]))
            for row in rows
            for name, value in row.items()
            if name not in _RESERVED
        ]
        return [entry for entry in entries if entry[2] < self._started_ms]

    def _tell_of_file(self) -> None:
        """Says when the file begins not to take rows, and when it takes them again."""
        failure, self._file_failed, failed = self._file.failure, self._file.failure is not None, self._file_failed
        if failure and not failed:
            self._tell(
                f"{self._file.path} cannot be written: {_reason(failure)}; its rows wait in memory and are tried again "
                "while the work continues"
            )
        elif failed and not failure:
            self._tell(f"{self._file.path} is written again, with all rows that waited")

    def _keep_losses(self) -> None:
        write_losses(self._folder, self.losses())


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _metric_key(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def _as_float(name: str, value: SupportsFloat) -> float:
    if name in _RESERVED:
        raise ValueError(f"metric name {name!r} is taken; choose another than {', '.join(_RESERVED)}")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric {name} is {value!r}, expected a number") from error
