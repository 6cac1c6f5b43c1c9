"""The record of a run: every metric in `metrics.jsonl`, and parameters, metrics, traces and files in MLflow.

The file is written at once and always. MLflow is written by a background thread, so that a slow, dead or wrong server
neither slows nor stops training: what was not accepted yet is kept in memory and tried again until `Tracker.finish`
gives up. One tracker per run; its methods may be called from several threads.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsFloat

from mempipe.beacons import reached
from mempipe.tracking.config import TrackingConfig
from mempipe.tracking.mlflow_writer import (
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

_RESERVED = ("step", "time")


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
    ) -> None:
        """`run_config` holds plain values (numbers, strings, lists, dicts). `resume_run_id` continues that MLflow run
        (`last_run_id(folder)`)."""
        self._config = config
        self._wording = wording or Wording()
        self._finished = False
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = _MetricsFile(folder / "metrics.jsonl")
        self._writer: MlflowWriter | None = None
        if config.enabled:
            run_config = without_credentials(run_config)
            store = MlflowRun(
                config, folder=folder, run_name=run_name, run_config=run_config, resume_run_id=resume_run_id
            )
            self._writer = MlflowWriter(store)

    def log_metrics(self, metrics: Mapping[str, SupportsFloat | None], step: float) -> None:
        """Records numbers of one step. None means "not measured" and is left out. Raises ValueError for what is no
        number.
        """
        assert not self._finished, "log_metrics after finish"
        reached("tracker.metrics", step=int(step))
        step, now = int(step), time.time()
        values = {name: _as_float(name, value) for name, value in metrics.items() if value is not None}
        self._file.append(values, step=step, time_s=now)
        if self._writer:
            self._writer.add_metrics(
                [(_metric_key(name), value, int(now * 1000), step) for name, value in values.items()]
            )

    def log_trajectories(self, groups: Sequence[Group], step: int) -> None:
        """Records a random sample of `tracking.traces_per_step` trajectories as MLflow traces, one span per turn."""
        assert not self._finished, "log_trajectories after finish"
        if not self._writer:
            return
        for group in sample_groups(groups, num_trajectories=self._config.traces_per_step, seed=int(step)):
            self._writer.add_call(
                lambda store, group=group: store.log_trace(group, step=int(step), wording=self._wording)
            )

    def log_artifact(self, path: str | Path, artifact_folder: str | None = None) -> None:
        """Copies a file to the run's artifacts. The file must stay until `finish`."""
        assert not self._finished, "log_artifact after finish"
        if self._writer:
            self._writer.add_call(lambda store: store.log_artifact(Path(path), artifact_folder))

    def run_id(self, timeout_s: float = 0.0) -> str | None:
        """Returns the MLflow run after waiting at most `timeout_s` for it; None when there is none (yet)."""
        return self._writer.wait_for_run_id(timeout_s) if self._writer else None

    def flush(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s` until every metric is in MLflow; returns False when some are not. `metrics.jsonl`
        has them at once.
        """
        reached("tracker.flush")
        return self._writer.flush(timeout_s) if self._writer else True

    def finish(
        self, status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED", timeout_s: float = 60.0
    ) -> TrackingSummary:
        """Writes what is waiting, closes the MLflow run and says what is missing. Returns after `timeout_s` at the
        latest.
        """
        assert not self._finished, "finish was called twice"
        reached("tracker.finish")
        self._finished = True
        self._file.close()
        if not self._writer:
            return TrackingSummary(run_id=None, num_failed_calls=0, num_refused=0, num_unwritten=0)
        self._writer.add_call(lambda store: store.terminate(status))
        return self._writer.finish(timeout_s)


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Reads the rows of a `metrics.jsonl`, one per step in order of steps. Of a step written twice (by a resumed run)
    the last value counts.

    Values that were not finite are NaN. A line that a crash left half written is skipped.
    """
    rows: dict[int, dict[str, float]] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        step = int(row["step"])
        rows.setdefault(step, {}).update({name: math.nan if value is None else value for name, value in row.items()})
    return [rows[step] for step in sorted(rows)]


class _MetricsFile:
    """Appends JSON lines, one per call, whole lines only."""

    def __init__(self, path: Path) -> None:
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()
        if torn:  # a crash cut the last line; it must not swallow the next one
            self._file.write("\n")

    def append(self, values: Mapping[str, float], *, step: int, time_s: float) -> None:
        row: dict[str, float | None] = {"step": step, "time": round(time_s, 3)}
        row |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self._lock:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _metric_key(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def _as_float(name: str, value: SupportsFloat) -> float:
    if name in _RESERVED:
        raise ValueError(f"metric name {name!r} is taken; choose another than {', '.join(_RESERVED)}")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric {name} is {value!r}, expected a number") from error
