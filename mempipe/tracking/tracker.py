"""The record of a run: every metric in `metrics.jsonl`, and parameters, metrics, traces and files in MLflow. A training
may have further writers of metrics.

The file is written at once and always. MLflow and each other writer have a background thread, so that a slow, dead or
wrong one neither slows nor stops training. What disk or server do not take is kept in memory, said once in the
terminal, and tried again until `Tracker.finish` gives up; losses are then reported again and kept as sentences in the
run's folder. One tracker per run; its methods may be called from several threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

from mempipe.beacons import reached
from mempipe.credentials import without_credentials
from mempipe.tracking.background import BackgroundWriter, TrackingSummary
from mempipe.tracking.config import TrackingConfig
from mempipe.tracking.losses import read_losses, write_losses
from mempipe.tracking.metrics_file import REPLACED_FILE, MetricsFile, read_metrics, read_rows
from mempipe.tracking.metrics_writer import MetricsRow, RecordedRun, Status, WriterStore
from mempipe.tracking.mlflow_writer import MetricEntry, MlflowRun, last_run_id, mlflow_name, tracking_uri
from mempipe.tracking.traces import Wording, sample_groups
from mempipe.tracking.writers import writer_class
from mempipe.types import Group

__all__ = ["Tracker", "TrackingSummary", "last_run_id", "read_metrics", "tracking_uri"]

FLUSH_TIMEOUT_S = 10.0
FINISH_TIMEOUT_S = 60.0
LEAST_WAIT_S = 1.0
"""A writer gets this long to finish even if those before it have used the time up."""
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
        further: Sequence[str] = (),
        wording: Wording | None = None,
        tell: Callable[[str], None] = _logger.warning,
    ) -> None:
        """`run_config` holds plain values (numbers, strings, lists, dicts). `resume_run_id` continues that MLflow run
        (`last_run_id(folder)`). `further` names writers of metrics next to MLflow. `tell` takes a sentence when
        something is not taken, at once and from any thread."""
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
        run_config = without_credentials(run_config)
        self._writer: BackgroundWriter[MlflowRun] | None = None
        if config.uses_mlflow:
            store = MlflowRun(
                config,
                folder=self._folder,
                run_name=run_name,
                run_config=run_config,
                resume_run_id=resume_run_id,
                history=self._history,
            )
            self._writer = BackgroundWriter(store, tell=tell)
            self._writer.add_call(lambda store: store.log_config())
        run = RecordedRun(name=run_name, folder=self._folder, experiment=config.experiment, settings=run_config)
        self._further = [
            BackgroundWriter(
                WriterStore(
                    f"writer {name}",
                    lambda run, name=name: writer_class(name)(run),
                    run,
                    history=self._earlier_rows,
                ),
                tell=tell,
            )
            for name in further
        ]

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
            self._writer.add_metrics([(mlflow_name(name), value, now_ms, step) for name, value in values.items()])
        for writer in self._further:
            writer.add_metrics([MetricsRow(values=values, step=step, time_s=now_ms / 1000)])

    def log_trajectories(self, groups: Sequence[Group], step: int) -> None:
        """Records a random sample of `tracking.traces_per_step` trajectories as MLflow traces, one span per turn."""
        assert not self._finished, "log_trajectories after finish"
        if not self._writer:
            return
        for group in sample_groups(groups, num_trajectories=self._config.traces_per_step, seed=int(step)):
            if self._writer.num_waiting > MAX_WAITING_TRACES:  # the config is one more
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
        """Sets the records of the steps after `step` aside, since the run makes these steps again: so each step is
        listed once. A call where there is nothing to set aside changes nothing.
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
            now_ms, note = int(time.time() * 1000), num_rows > 0
            self._writer.add_call(  # metrics go before it, old ones and perhaps new ones: their time tells them apart
                lambda store: store.forget_metrics(after_step=step, before_ms=now_ms, note=note)
            )
        for writer in self._further:
            writer.add_call(lambda store: store.restart_at(step), in_order=True)

    def run_id(self, timeout_s: float = 0.0) -> str | None:
        """Returns the MLflow run after waiting at most `timeout_s` for it; None when there is none (yet)."""
        return self._writer.wait_for_run_id(timeout_s) if self._writer else None

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Brings every row to the disk, waits at most `timeout_s` until every writer has every metric, and returns
        whether that was possible. What is not taken is said, and kept in the folder for the report; nothing is raised.
        """
        reached("tracker.flush")
        self._file.flush()
        self._tell_of_file()
        deadline = time.monotonic() + timeout_s
        written = all([writer.flush(max(deadline - time.monotonic(), 0.0)) for writer in self._writers()])
        self._keep_losses()
        return written and not self._file.failure

    def losses(self) -> list[str]:
        """Returns a sentence for each thing that the record lacks now, with those of earlier starts of the run."""
        losses = list(self._earlier_losses)
        if self._file.failure:
            losses.append(f"{self._file.path} lacks {self._file.num_waiting} rows: {_reason(self._file.failure)}")
        if self._num_traces_left_out:
            losses.append(f"{self._num_traces_left_out} traces were skipped while MLflow did not take entries")
        return losses + [loss for writer in self._writers() for loss in writer.losses()]

    def finish(self, status: Status = "FINISHED", timeout_s: float = FINISH_TIMEOUT_S) -> TrackingSummary:
        """Writes the waiting entries, closes the MLflow run and the other writers, and lists the missing entries.
        Returns about `timeout_s` later at the latest, and raises nothing.
        """
        assert not self._finished, "finish was called twice"
        reached("tracker.finish")
        self._finished = True
        self._file.flush()
        if self._file.failure:
            self._tell(f"{self._file.path} lacks {self._file.num_waiting} rows: {_reason(self._file.failure)}")
        deadline = time.monotonic() + timeout_s
        if self._writer:
            self._writer.add_call(lambda store: store.terminate(status))
        for writer in self._further:
            writer.add_call(lambda store: store.close(status), in_order=True)
        ends = [
            writer.finish(max(deadline - time.monotonic(), min(timeout_s, LEAST_WAIT_S))) for writer in self._writers()
        ]
        self._keep_losses()
        return TrackingSummary(
            run_id=ends[0].run_id if self._writer else None,
            num_failed_calls=sum(end.num_failed_calls for end in ends),
            num_refused=sum(end.num_refused for end in ends),
            num_unwritten=sum(end.num_unwritten for end in ends),
            losses=tuple(self.losses()),
        )

    def _writers(self) -> list[BackgroundWriter[Any]]:
        return [*([self._writer] if self._writer else []), *self._further]

    def _earlier_rows(self) -> list[MetricsRow]:
        """Returns what metrics.jsonl has of earlier starts."""
        rows = read_rows(self._file.path)[0] if self._file.path.exists() else []
        return [
            MetricsRow(
                values={name: value for name, value in row.items() if name not in _RESERVED},
                step=int(row["step"]),
                time_s=row.get("time", 0.0),
            )
            for row in rows
            if round(1000 * row.get("time", 0.0)) < self._started_ms
        ]

    def _history(self) -> list[MetricEntry]:
        return [
            (mlflow_name(name), value, round(1000 * row.time_s), row.step)
            for row in self._earlier_rows()
            for name, value in row.values.items()
        ]

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


def _as_float(name: str, value: SupportsFloat) -> float:
    if name in _RESERVED:
        raise ValueError(f"metric name {name!r} is taken; choose another than {', '.join(_RESERVED)}")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric {name} is {value!r}, expected a number") from error
