"""The record of a run: every metric in `metrics.jsonl`, and parameters, metrics, traces and files in MLflow.

The file is written at once and always. MLflow is written by a background thread, so that a slow, dead or wrong server neither
slows nor stops training: what was not accepted yet is kept in memory and tried again until `Tracker.finish` gives up.
One tracker per run; its methods may be called from several threads.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, SupportsFloat

from mempipe.config import TrackingConfig
from mempipe.tracing import Decode, build_trace, sample_groups
from mempipe.types import Group

_METRICS_PER_CALL = 1000
_PARAMS_PER_CALL = 100
_MAX_PARAM_CHARS = 500
_MAX_RETRY_DELAY_S = 30.0
_RUN_ID_FILE = "mlflow_run_id"
_RESERVED = ("step", "time")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingSummary:
    """What became of a run's MLflow record. All counts are 0 when nothing went wrong."""

    run_id: str | None
    num_failed_calls: int  # calls that failed and were tried again
    num_refused: int  # entries that the server will never take
    num_unwritten: int  # entries still waiting when the deadline passed


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
        decode: Decode | None = None,
    ) -> None:
        """`run_config` holds plain values (numbers, strings, lists, dicts). `resume_run_id` continues that MLflow run
        (`last_run_id(folder)`); `decode` turns token ids into text, so that traces show the exact prompts."""
        self._config = config
        self._decode = decode
        self._finished = False
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = _MetricsFile(folder / "metrics.jsonl")
        self._writer: _Writer | None = None
        if config.enabled:
            run_config = without_credentials(run_config)
            store = _Store(config, folder=folder, run_name=run_name, run_config=run_config, resume_run_id=resume_run_id)
            self._writer = _Writer(store)

    def log_metrics(self, metrics: Mapping[str, SupportsFloat | None], step: float) -> None:
        """Records numbers of one step. None means "not measured" and is left out. Raises ValueError for what is no number."""
        assert not self._finished, "log_metrics after finish"
        step, now = int(step), time.time()
        values = {name: _as_float(name, value) for name, value in metrics.items() if value is not None}
        self._file.append(values, step=step, time_s=now)
        if self._writer:
            self._writer.add_metrics([(_metric_key(name), value, int(now * 1000), step) for name, value in values.items()])

    def log_trajectories(self, groups: Sequence[Group], step: int) -> None:
        """Records a random sample of `tracking.traces_per_step` trajectories as MLflow traces, one span per turn."""
        assert not self._finished, "log_trajectories after finish"
        if not self._writer:
            return
        for group in sample_groups(groups, num_trajectories=self._config.traces_per_step, seed=int(step)):
            self._writer.add_call(lambda store, group=group: store.log_trace(group, step=int(step), decode=self._decode))

    def log_artifact(self, path: str | Path, artifact_folder: str | None = None) -> None:
        """Copies a file to the run's artifacts. The file must stay until `finish`."""
        assert not self._finished, "log_artifact after finish"
        if self._writer:
            self._writer.add_call(lambda store: store.log_artifact(Path(path), artifact_folder))

    def run_id(self, timeout_s: float = 0.0) -> str | None:
        """The MLflow run, waiting at most `timeout_s` for it; None when there is none (yet)."""
        return self._writer.wait_for_run_id(timeout_s) if self._writer else None

    def finish(self, status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED", timeout_s: float = 60.0) -> TrackingSummary:
        """Writes what is waiting, closes the MLflow run and says what is missing. Returns after `timeout_s` at the latest."""
        assert not self._finished, "finish was called twice"
        self._finished = True
        self._file.close()
        if not self._writer:
            return TrackingSummary(run_id=None, num_failed_calls=0, num_refused=0, num_unwritten=0)
        self._writer.add_call(lambda store: store.terminate(status))
        return self._writer.finish(timeout_s)


def last_run_id(folder: str | Path) -> str | None:
    """The MLflow run that the last tracker of this run folder made, to be continued."""
    try:
        return (Path(folder) / _RUN_ID_FILE).read_text().strip() or None
    except FileNotFoundError:
        return None


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The rows of a `metrics.jsonl`, one per step in order of steps. Of a step written twice (a resumed run) the last value counts.

    Values that were not finite are NaN. A line that a crash left half written is passed over.
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


def tracking_uri(config: TrackingConfig, folder: str | Path) -> str:
    """`tracking.uri`, else MLFLOW_TRACKING_URI, else one sqlite file for all runs beside this run's folder."""
    return config.uri or os.environ.get("MLFLOW_TRACKING_URI", "") or _local_uri(folder)


def without_credentials(value: Any) -> Any:
    """Nested plain values, with user and password taken out of every URI."""
    if isinstance(value, Mapping):
        return {name: without_credentials(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_credentials(item) for item in value]
    return _public(value) if isinstance(value, str) else value


def _local_uri(folder: str | Path) -> str:
    return f"sqlite:///{Path(folder).resolve().parent / 'mlflow.db'}"


class _MetricsFile:
    """JSON lines, one per call, whole lines only."""

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


MetricEntry = tuple[str, float, int, int]  # key, value, unix milliseconds, step


class _Store:
    """One MLflow run. Every method may fail and be called again; only the writer thread uses it."""

    def __init__(
        self, config: TrackingConfig, *, folder: Path, run_name: str, run_config: Mapping[str, Any], resume_run_id: str | None
    ) -> None:
        self.uri = tracking_uri(config, folder)
        self.run_id: str | None = None
        self._config = config
        self._folder = folder
        self._run_name = run_name
        self._run_config = run_config
        self._resume_run_id = resume_run_id
        self._token = uuid.uuid4().hex  # finds the run again when the answer to its creation was lost
        self._client: Any = None
        self._experiment_id = ""

    def connect(self) -> None:
        """Finds or makes experiment and run, and records parameters and config."""
        if self._client is None:
            _quiet_mlflow()
            from mlflow import MlflowClient

            self._client = MlflowClient(tracking_uri=self.uri)
        self._experiment_id = self._experiment()
        resumed = self._resumed_run()
        run_id = resumed or self._new_run()
        self._log_config(run_id, resumed=resumed is not None)
        (self._folder / _RUN_ID_FILE).write_text(run_id + "\n")
        self.run_id = run_id

    def log_metrics(self, entries: Sequence[MetricEntry]) -> None:
        from mlflow.entities import Metric

        self._client.log_batch(self.run_id, metrics=[Metric(*entry) for entry in entries], synchronous=True)

    def log_trace(self, group: Group, *, step: int, decode: Decode | None) -> None:
        from mlflow.tracing.client import TracingClient

        assert self.run_id is not None, "traces need a run"
        client = TracingClient(self.uri)
        for trajectory in group.trajectories:
            info, spans = build_trace(
                trajectory, group.question, step=step, run_id=self.run_id, experiment_id=self._experiment_id, decode=decode
            )
            client.start_trace(info)
            client.log_spans(self._experiment_id, spans)

    def log_artifact(self, path: Path, artifact_folder: str | None) -> None:
        self._client.log_artifact(self.run_id, str(path), artifact_folder)

    def terminate(self, status: str) -> None:
        self._client.set_terminated(self.run_id, status)

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._config.experiment)
        if found is not None:
            return found.experiment_id
        is_local = self.uri == _local_uri(self._folder)  # else the server knows where artifacts go
        location = (self._folder.resolve().parent / "mlartifacts").as_uri() if is_local else None
        return self._client.create_experiment(self._config.experiment, artifact_location=location)

    def _resumed_run(self) -> str | None:
        from mlflow.exceptions import MlflowException

        if self._resume_run_id is None:
            return None
        try:
            self._client.update_run(self._resume_run_id, status="RUNNING")
        except MlflowException as error:
            if error.get_http_status_code() not in (400, 404):  # malformed or unknown id
                raise
            _logger.warning("MLflow run %s is not in %s; starting a new one", self._resume_run_id, _public(self.uri))
            return None
        return self._resume_run_id

    def _new_run(self) -> str:
        made = self._client.search_runs([self._experiment_id], f"tags.`mempipe.token` = '{self._token}'", max_results=1)
        if made:
            return made[0].info.run_id
        tags = {"mempipe.token": self._token, "mempipe.folder": str(self._folder)}
        return self._client.create_run(self._experiment_id, run_name=self._run_name, tags=tags).info.run_id

    def _log_config(self, run_id: str, *, resumed: bool) -> None:
        """A resumed run keeps its parameters, which MLflow does not let change, and gets another config file."""
        from mlflow.entities import Param

        name = f"config-resumed-{int(time.time())}.yaml" if resumed else "config.yaml"
        self._client.log_dict(run_id, dict(self._run_config), name)
        params = [] if resumed else [Param(key, value) for key, value in _flatten(self._run_config).items()]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(run_id, params=params[start : start + _PARAMS_PER_CALL], synchronous=True)


class _Writer:
    """The queue and the thread that empties it. Metrics go first and together; other calls go in order."""

    def __init__(self, store: _Store) -> None:
        self._store = store
        self._metrics: deque[MetricEntry] = deque()
        self._calls: deque[Callable[[_Store], None]] = deque()
        self._changed = threading.Condition()
        self._finishing = False
        self._gave_up = False
        self._failed = 0
        self._refused = 0
        self._thread = threading.Thread(target=self._run, name="mlflow-writer", daemon=True)
        self._thread.start()

    def add_metrics(self, entries: Sequence[MetricEntry]) -> None:
        with self._changed:
            self._metrics.extend(entries)
            self._changed.notify_all()

    def add_call(self, call: Callable[[_Store], None]) -> None:
        with self._changed:
            self._calls.append(call)
            self._changed.notify_all()

    def wait_for_run_id(self, timeout_s: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._store.run_id is not None, timeout_s)
        return self._store.run_id

    def finish(self, timeout_s: float) -> TrackingSummary:
        with self._changed:
            self._finishing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            self._gave_up = True
            unwritten = len(self._metrics) + len(self._calls)
            summary = TrackingSummary(
                run_id=self._store.run_id, num_failed_calls=self._failed, num_refused=self._refused, num_unwritten=unwritten
            )
        if unwritten or self._refused:
            text = "MLflow at %s is incomplete: %d entries not written, %d refused, %d calls failed; metrics.jsonl has every metric"
            _logger.warning(text, _public(self._store.uri), unwritten, self._refused, self._failed)
        return summary

    def _run(self) -> None:
        delay = 0.5
        while self._wait_for_work():
            try:
                self._write_some()
                delay = 0.5
            except Exception as error:  # the border to foreign code: whatever a server does, training goes on
                self._note_failure(error)
                self._pause(delay)
                delay = min(2 * delay, _MAX_RETRY_DELAY_S)

    def _wait_for_work(self) -> bool:
        """False when there is nothing left to write and never will be, or `finish` gave up."""
        with self._changed:
            self._changed.wait_for(lambda: self._finishing or self._store.run_id is None or self._metrics or self._calls)
            return not self._gave_up and (bool(self._metrics or self._calls) or not self._finishing)

    def _write_some(self) -> None:
        if self._store.run_id is None:
            self._store.connect()
            with self._changed:
                self._changed.notify_all()
        with self._changed:
            entries = [self._metrics[i] for i in range(min(_METRICS_PER_CALL, len(self._metrics)))]
            call = None if entries or not self._calls else self._calls[0]
        if entries:
            self._write(lambda store: store.log_metrics(entries), self._metrics, len(entries))
        elif call is not None:
            self._write(call, self._calls, 1)

    def _write(self, call: Callable[[_Store], None], queue: deque[Any], num_entries: int) -> None:
        """Entries leave their queue when they are written, or when trying again cannot help."""
        try:
            call(self._store)
        except Exception as error:
            if _is_temporary(error):
                raise
            if not self._refused:
                _logger.warning("MLflow at %s refuses an entry: %s", _public(self._store.uri), _one_line(error))
            self._refused += num_entries
        with self._changed:
            for _ in range(num_entries):
                queue.popleft()

    def _note_failure(self, error: Exception) -> None:
        self._failed += 1
        if self._failed == 1:
            text = "MLflow at %s does not take entries; training goes on and they are tried again: %s"
            _logger.warning(text, _public(self._store.uri), _one_line(error))

    def _pause(self, seconds: float) -> None:
        """`finish` ends a long pause at once and leaves short ones only."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._finishing, seconds):
                return
        time.sleep(min(seconds, 0.5))


def _is_temporary(error: Exception) -> bool:
    """Whether the same call may succeed later: the server is away, busy or broken, rather than unwilling."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
        return status >= 500 or status in (401, 403, 408, 429)
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError | IsADirectoryError)


def _quiet_mlflow() -> None:
    """No usage statistics; failures are seen soon, since the writer tries again itself. Before the first import of mlflow."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["DO_NOT_TRACK"] = "true"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys with short texts; long values are in the config file only."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{key}.")
        elif len(text := str(value)) < _MAX_PARAM_CHARS and len(key) <= 250:
            flat[key] = text
    return flat


def _public(uri: str) -> str:
    """A URI without its user and password."""
    return re.sub(r"://[^/@\s]+@", "://***@", uri)


def _metric_key(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def _as_float(name: str, value: SupportsFloat) -> float:
    if name in _RESERVED:
        raise ValueError(f"metric name {name!r} is taken; choose another than {', '.join(_RESERVED)}")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric {name} is {value!r}, expected a number") from error


def _one_line(error: Exception) -> str:
    return _public(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
