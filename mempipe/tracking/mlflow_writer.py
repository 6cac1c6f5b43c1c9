"""Writes one MLflow run, or finds the one that a run resumes."""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mempipe.credentials import without_passwords
from mempipe.storage.files import write_text
from mempipe.tracking.config import TrackingConfig
from mempipe.tracking.mlflow_database import database_file, file_identity, forget_metrics, is_database, sqlite_uri
from mempipe.tracking.traces import Wording, build_trace
from mempipe.types import Group

_PARAMS_PER_CALL = 100
_MAX_PARAM_CHARS = 500
_MAX_NAME_CHARS = 250
_RUN_ID_FILE = "mlflow_run_id"
_TRAINED_AGAIN = "mempipe.trained_again"
_NO_PLACE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Errors of a file that is not there, or whose place this machine cannot write, as a folder of the server's machine."""

_logger = logging.getLogger(__name__)

MetricEntry = tuple[str, float, int, int]  # key, value, unix milliseconds, step


class StoreGone(OSError):
    """The database file was removed or replaced while a run wrote to it."""


class MlflowRun:
    """One MLflow run, as a `MetricsStore` that a `BackgroundWriter` writes."""

    entry = "values"
    entries_per_call = 1000

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
        self.name = f"MLflow at {without_passwords(self.uri)}"
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
        self._config_file = ""
        self._identity: tuple[int, int] | None = None  # of the database file

    def check(self) -> None:
        """Raises StoreGone when the database file is another one than the run was begun in; sqlite continues writing to
        a file that was removed.
        """
        if self._identity is not None and (found := file_identity(self.uri)) != self._identity:
            what = "was removed" if found is None else "was replaced by another file"
            raise StoreGone(f"the database {database_file(self.uri)} {what} while the run continued")

    def connect(self) -> None:
        """Finds or makes experiment and run, and records parameters."""
        if self._client is None:
            _quiet_mlflow()
            from mlflow import MlflowClient

            self._client = MlflowClient(tracking_uri=self.uri)
        self._experiment_id = self._experiment()
        self._identity = file_identity(self.uri)
        resumed = self._resumed_run()
        run_id = resumed or self._new_run()
        if resumed is None:
            self._log_params(run_id)
            self._log_history(run_id)
        self._config_file = "config.yaml" if resumed is None else f"config-resumed-{self._started}.yaml"
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
        self,
        group: Group,
        *,
        step: int,
        wording: Wording,
        metadata: Mapping[str, str] | None = None,
        asking: str = "",
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
                asking=asking,
            )
            client.start_trace(info)
            client.log_spans(self._experiment_id, spans)

    def log_config(self) -> None:
        """Writes the config as a file. `connect` does not: a server may take metrics and no files."""
        self._client.log_dict(self.run_id, dict(self._run_config), self._config_file)

    def log_artifact(self, path: Path, artifact_folder: str | None) -> None:
        self._client.log_artifact(self.run_id, str(path), artifact_folder)

    def terminate(self, status: str) -> None:
        self._client.set_terminated(self.run_id, status)

    def is_temporary(self, error: Exception) -> bool:
        from mlflow.exceptions import MlflowException
        from requests import HTTPError
        from sqlalchemy.exc import OperationalError

        if isinstance(error, MlflowException):
            return _is_temporary(error.get_http_status_code())
        if isinstance(error, HTTPError):  # of a file; it is an OSError
            return error.response is None or _is_temporary(error.response.status_code)
        if isinstance(error, OperationalError):  # of `forget_metrics`: another run locks the database, or it is full
            return True
        return isinstance(error, OSError) and not isinstance(error, _NO_PLACE)

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
        for start in range(0, len(entries), self.entries_per_call):
            self._log_entries(run_id, entries[start : start + self.entries_per_call])

    def _log_entries(self, run_id: str | None, entries: Sequence[MetricEntry]) -> None:
        from mlflow.entities import Metric

        self._client.log_batch(run_id, metrics=[Metric(*entry) for entry in entries], synchronous=True)

    def _log_params(self, run_id: str) -> None:
        """Records the settings as parameters. A resumed run keeps its own, which MLflow does not let change."""
        from mlflow.entities import Param

        params = [Param(key, value) for key, value in _flatten(self._run_config).items()]
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


def _is_temporary(status: int) -> bool:
    """Returns whether a server that answers with this status of HTTP may take the same request later."""
    return status >= 500 or status in (401, 403, 408, 429)


def mlflow_name(name: str) -> str:
    """Returns the name of a metric or a parameter as MLflow takes it. One that it refuses is never written, and a
    parameter is written before everything else. A slash parts it, and no part may be empty or a folder's dots."""
    parts = re.sub(r"[^\w\-. :/]", "_", name)[:_MAX_NAME_CHARS].split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"


def _local_uri(folder: str | Path) -> str:
    return sqlite_uri(Path(folder).resolve().parent / "mlflow.db")


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
        elif len(text := str(value)) < _MAX_PARAM_CHARS and len(key) <= _MAX_NAME_CHARS:
            flat[mlflow_name(key)] = text
    return flat
