"""Writes one MLflow run from a separate thread: a server may be slow, dead or wrong, and nobody waits for it."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mempipe.credentials import without_passwords
from mempipe.storage.files import write_text
from mempipe.tracking.config import TrackingConfig
from mempipe.tracking.mlflow_database import database_file, file_identity, forget_metrics, is_database
from mempipe.tracking.traces import Wording, build_trace
from mempipe.types import Group

_METRICS_PER_CALL = 1000
_PARAMS_PER_CALL = 100
_MAX_PARAM_CHARS = 500
_MAX_RETRY_DELAY_S = 30.0
_FAILURES_OF_AN_OUTAGE = 3  # in a row; the first outage is said at its first failure
_RUN_ID_FILE = "mlflow_run_id"
_TRAINED_AGAIN = "mempipe.trained_again"

_logger = logging.getLogger(__name__)

MetricEntry = tuple[str, float, int, int]  # key, value, unix milliseconds, step


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingSummary:
    """Holds what became of a run's record. All counts are 0 when nothing went wrong."""

    run_id: str | None
    num_failed_calls: int  # calls that failed and were tried again
    num_refused: int  # entries that the server will never take
    num_unwritten: int  # entries still waiting when the deadline passed
    losses: tuple[str, ...] = ()  # a sentence for each thing that the record lacks


class StoreGone(OSError):
    """The database file was removed or replaced while a run wrote to it."""


class MlflowWriter:
    """Writes from a queue in a separate thread. Metrics go first and together; other calls go in order."""

    def __init__(self, store: MlflowRun, *, tell: Callable[[str], None] = _logger.warning) -> None:
        """`tell` takes a sentence about what MLflow does not take, at once and from the writer's thread."""
        self._store = store
        self._tell = tell
        self._metrics: deque[MetricEntry] = deque()
        self._calls: deque[Callable[[MlflowRun], None]] = deque()
        self._changed = threading.Condition()
        self._finishing = False
        self._gave_up = False
        self._had_metrics = False
        self._failing = 0  # calls that failed since the last one that was accepted
        self._outage_was_told = False
        self._failed = 0
        self._refused = 0
        self._last_failure = ""
        self._first_refusal = ""
        self._thread = threading.Thread(target=self._run, name="mlflow-writer", daemon=True)
        self._thread.start()

    def add_metrics(self, entries: Sequence[MetricEntry]) -> None:
        with self._changed:
            self._had_metrics = True
            self._metrics.extend(entries)
            self._changed.notify_all()

    def add_call(self, call: Callable[[MlflowRun], None]) -> None:
        with self._changed:
            self._calls.append(call)
            self._changed.notify_all()

    def restart_at(self, step: int, now_ms: int, *, note: bool) -> None:
        """Takes the metrics of later steps that were made before `now_ms` out of the run, since the steps are made
        again. With `note` a run on a server, which keeps them, says so.
        """
        self.add_call(  # metrics go before it, the old ones and perhaps new ones: their time tells them apart
            lambda store: store.forget_metrics(after_step=step, before_ms=now_ms, note=note)
        )

    @property
    def num_waiting(self) -> int:
        """entries that are not written yet, without metrics."""
        return len(self._calls)

    def losses(self) -> list[str]:
        """Returns a sentence for each kind of entry that MLflow lacks now."""
        with self._changed:
            uri, num_values, num_calls = without_passwords(self._store.uri), len(self._metrics), len(self._calls)
            losses = []
            if self._refused:
                losses.append(f"MLflow at {uri} refused {self._refused} entries; the first: {self._first_refusal}")
            if self._failing or (self._gave_up and num_values + num_calls):
                why = self._last_failure or "it did not take them in time"
                losses.append(f"MLflow at {uri} lacks {num_values} values and {num_calls} traces or files: {why}")
            return losses

    def wait_for_run_id(self, timeout_s: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._store.run_id is not None, timeout_s)
        return self._store.run_id

    def flush(self, timeout_s: float) -> bool:
        """Returns whether all metrics were written within `timeout_s`. Does not wait while the server is failing."""
        with self._changed:
            self._changed.wait_for(lambda: not self._metrics or self._failing > 0, timeout_s)
            return not self._metrics

    def finish(self, timeout_s: float) -> TrackingSummary:
        with self._changed:
            self._finishing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            self._gave_up = True
            unwritten = len(self._metrics) + len(self._calls)
            elsewhere = "; metrics.jsonl has every metric" if self._had_metrics else ""
            summary = TrackingSummary(
                run_id=self._store.run_id,
                num_failed_calls=self._failed,
                num_refused=self._refused,
                num_unwritten=unwritten,
            )
        if unwritten or self._refused:
            reason = f" ({self._last_failure})" if unwritten and self._last_failure else ""
            self._tell(
                f"MLflow at {without_passwords(self._store.uri)} is incomplete: {unwritten} entries not "
                f"written{reason}, {self._refused} refused, {self._failed} calls failed{elsewhere}"
            )
        return summary

    def _run(self) -> None:
        delay = 0.5
        while self._wait_for_work():
            try:
                self._write_some()
                self._note_success()
                delay = 0.5
            except Exception as error:  # the border to foreign code: whatever a server does, training continues
                self._note_failure(error)
                self._pause(delay)
                delay = min(2 * delay, _MAX_RETRY_DELAY_S)

    def _wait_for_work(self) -> bool:
        """Waits for something to write. Returns False when nothing is left and nothing comes, or `finish` gave up."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._finishing or self._store.run_id is None or self._metrics or self._calls
            )
            return not self._gave_up and (bool(self._metrics or self._calls) or not self._finishing)

    def _write_some(self) -> None:
        self._store.check()
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

    def _write(self, call: Callable[[MlflowRun], None], queue: deque[Any], num_entries: int) -> None:
        """Writes entries, which leave their queue when they are written or when trying again cannot help."""
        try:
            call(self._store)
        except Exception as error:
            if _is_temporary(error):
                raise
            if not self._refused:
                self._first_refusal = _one_line(error)
                self._tell(f"MLflow at {without_passwords(self._store.uri)} refuses an entry: {self._first_refusal}")
            self._refused += num_entries
        with self._changed:
            for _ in range(num_entries):
                queue.popleft()
            self._changed.notify_all()

    def _note_failure(self, error: Exception) -> None:
        with self._changed:
            self._failing += 1
            self._failed += 1
            self._last_failure = _one_line(error)
            self._changed.notify_all()
        is_outage = self._failed == 1 or self._failing >= _FAILURES_OF_AN_OUTAGE
        if is_outage and not self._outage_was_told and not self._gave_up:
            self._outage_was_told = True
            self._tell(
                f"MLflow at {without_passwords(self._store.uri)} does not take entries; they are tried again while the "
                f"work continues: {self._last_failure}"
            )

    def _note_success(self) -> None:
        with self._changed:
            self._failing = 0
        if self._outage_was_told:
            self._outage_was_told = False
            self._tell(f"MLflow at {without_passwords(self._store.uri)} takes entries again")

    def _pause(self, seconds: float) -> None:
        """Waits, until `finish` is called at most; after that, half a second at most."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._finishing, seconds):
                return
        time.sleep(min(seconds, 0.5))


class MlflowRun:
    """One MLflow run. Every method may fail and be called again; only the writer thread uses it."""

    def __init__(
        self,
        config: TrackingConfig,
        *,
        folder: Path,
        run_name: str,
        run_config: Mapping[str, Any],
        resume_run_id: str | None,
        history: Callable[[], Sequence[MetricEntry]] = list,
    ) -> None:
        """`history` returns the metrics that a new run receives at once, because they are from before this start."""
        self.uri = tracking_uri(config, folder)
        self.run_id: str | None = None
        self._config = config
        self._folder = folder
        self._run_name = run_name
        self._run_config = run_config
        self._resume_run_id = resume_run_id
        self._started = int(time.time())
        self._token = uuid.uuid4().hex  # finds the run again when the answer to its creation was lost
        self._history = history
        self._client: Any = None
        self._experiment_id = ""
        self._identity: tuple[int, int] | None = None  # of the database file

    def check(self) -> None:
        """Raises StoreGone when the database file is another one than the run was begun in; sqlite continues writing to
        a file that was removed.
        """
        if self._identity is not None and (found := file_identity(self.uri)) != self._identity:
            what = "was removed" if found is None else "was replaced by another file"
            raise StoreGone(f"the database {database_file(self.uri)} {what} while the run continued")

    def connect(self) -> None:
        """Finds or makes experiment and run, and records parameters and config."""
        if self._client is None:
            _quiet_mlflow()
            from mlflow import MlflowClient

            self._client = MlflowClient(tracking_uri=self.uri)
        self._experiment_id = self._experiment()
        self._identity = file_identity(self.uri)
        resumed = self._resumed_run()
        run_id = resumed or self._new_run()
        self._log_config(run_id, resumed=resumed is not None)
        if resumed is None:
            self._log_history(run_id)
        write_text(self._folder / _RUN_ID_FILE, run_id + "\n", make_folder=False)  # it may be a mount that is away
        self.run_id = run_id

    def log_metrics(self, entries: Sequence[MetricEntry]) -> None:
        self._log_entries(self.run_id, entries)

    def forget_metrics(self, *, after_step: int, before_ms: int, note: bool) -> None:
        """Takes the values of steps after `after_step` that were made before `before_ms` out of the run.

        Only a database can do so. A server keeps both values of a step that is made again, and the later one counts;
        with `note` the run's tag `mempipe.trained_again` says it.
        """
        assert self.run_id is not None, "only a run that was begun has metrics"
        if is_database(self.uri):
            forget_metrics(self.uri, self.run_id, after_step=after_step, before_ms=before_ms)
        elif note:
            began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(before_ms / 1000))
            text = f"steps after {after_step}, from {began} on; the later value of a step counts"
            self._client.set_tag(self.run_id, _TRAINED_AGAIN, text)

    def log_trace(
        self, group: Group, *, step: int, wording: Wording, metadata: Mapping[str, str] | None = None
    ) -> None:
        from mlflow.tracing.client import TracingClient

        assert self.run_id is not None, "traces need a run"
        client = TracingClient(self.uri)
        for trajectory in group.trajectories:
            info, spans = build_trace(
                trajectory,
                group.question,
                step=step,
                run_id=self.run_id,
                experiment_id=self._experiment_id,
                wording=wording,
                metadata=metadata,
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
            text = "MLflow run %s is not in %s; starting a new one, with the metrics that the run's folder has"
            _logger.warning(text, self._resume_run_id, without_passwords(self.uri))
            return None
        return self._resume_run_id

    def _new_run(self) -> str:
        made = self._client.search_runs([self._experiment_id], f"tags.`mempipe.token` = '{self._token}'", max_results=1)
        if made:
            return made[0].info.run_id
        tags = {"mempipe.token": self._token, "mempipe.folder": str(self._folder)}
        if self._config.parent_run_id:
            tags["mlflow.parentRunId"] = self._config.parent_run_id
        return self._client.create_run(self._experiment_id, run_name=self._run_name, tags=tags).info.run_id

    def _log_history(self, run_id: str) -> None:
        entries = self._history()
        for start in range(0, len(entries), _METRICS_PER_CALL):
            self._log_entries(run_id, entries[start : start + _METRICS_PER_CALL])

    def _log_entries(self, run_id: str | None, entries: Sequence[MetricEntry]) -> None:
        from mlflow.entities import Metric

        self._client.log_batch(run_id, metrics=[Metric(*entry) for entry in entries], synchronous=True)

    def _log_config(self, run_id: str, *, resumed: bool) -> None:
        """Records parameters and config. A resumed run keeps its parameters, which MLflow does not let change, and gets
        another config file.
        """
        from mlflow.entities import Param

        name = f"config-resumed-{self._started}.yaml" if resumed else "config.yaml"
        self._client.log_dict(run_id, dict(self._run_config), name)
        params = [] if resumed else [Param(key, value) for key, value in _flatten(self._run_config).items()]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(run_id, params=params[start : start + _PARAMS_PER_CALL], synchronous=True)


def last_run_id(folder: str | Path) -> str | None:
    """Returns the MLflow run that the last tracker of this run folder made, to be continued."""
    try:
        return (Path(folder) / _RUN_ID_FILE).read_text(encoding="utf-8", errors="replace").strip() or None
    except FileNotFoundError:
        return None


def tracking_uri(config: TrackingConfig, folder: str | Path) -> str:
    """Returns `tracking.uri`, else MLFLOW_TRACKING_URI, else one sqlite file for all runs next to this run's folder."""
    return config.uri or os.environ.get("MLFLOW_TRACKING_URI", "") or _local_uri(folder)


def without_credentials(value: Any) -> Any:
    """Returns nested plain values without the user and password of any URI."""
    if isinstance(value, Mapping):
        return {name: without_credentials(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_credentials(item) for item in value]
    return without_passwords(value) if isinstance(value, str) else value


def _local_uri(folder: str | Path) -> str:
    return f"sqlite:///{Path(folder).resolve().parent / 'mlflow.db'}"


def _is_temporary(error: Exception) -> bool:
    """Returns whether the same call may succeed later: the server is away, busy or broken, rather than unwilling."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
        return status >= 500 or status in (401, 403, 408, 429)
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError | IsADirectoryError)


def _quiet_mlflow() -> None:
    """Turns usage statistics off, and MLflow's notes about its tables, and its own retries, since the writer tries
    again itself. Call it before the first import of mlflow.

    A database that takes nothing would be a traceback in the terminal for every try; the writer says it in one line.
    """
    logging.getLogger("mlflow.store.db.utils").addFilter(_has_no_trace)
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["DO_NOT_TRACK"] = "true"
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")


def _has_no_trace(record: logging.LogRecord) -> bool:
    return not record.exc_info


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns dotted keys with short texts; long values are in the config file only."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{key}.")
        elif len(text := str(value)) < _MAX_PARAM_CHARS and len(key) <= 250:
            flat[key] = text
    return flat


def _one_line(error: Exception) -> str:
    """Returns kind and message of an error, without the statement that a database adds to it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    text = re.sub(r"\(raised as a result of [^)]*\) ", "", text.partition(" [SQL:")[0])  # advice to who wrote MLflow
    return without_passwords(text)[:300]
