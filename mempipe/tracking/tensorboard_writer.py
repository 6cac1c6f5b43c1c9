"""TensorBoard's event files in the run's folder."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from io import BytesIO
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from mempipe.tracking.metrics_writer import MetricsWriter, RecordedRun

FOLDER = "tensorboard"
_VERSION = "brain.Event:2"
"""From this version on a reader drops the steps that a later START event names (TensorBoard's `purge_step`)."""


class TensorBoardWriter(MetricsWriter):
    """Writes one event file for each start of the run."""

    def __init__(self, run: RecordedRun) -> None:
        super().__init__(run)
        folder, now = run.folder / FOLDER, time.time()  # readers take the files in the order of their names
        self._path = folder / f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._num_bytes = 0

    def open(self) -> bool:
        folder = self._path.parent
        folder.mkdir(exist_ok=True)
        others = (file for file in folder.glob("*tfevents*") if file != self._path)  # which is of a call that failed
        is_new = not any(file.stat().st_size for file in others)
        self._path.touch()
        self._append(Event(wall_time=time.time(), file_version=_VERSION))
        return is_new

    def log_metrics(self, values: Mapping[str, float], *, step: int, time_s: float) -> None:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._append(Event(wall_time=time_s, step=step, summary=summary))

    def restart_at(self, step: int) -> None:
        start = SessionLog(status=SessionLog.START)
        self._append(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def _append(self, event: Any) -> None:
        """Adds one whole record to the file. Part of one that the disk did not take is overwritten by the next one."""
        record = BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        with self._path.open("r+b") as file:
            file.seek(self._num_bytes)
            file.write(record.getvalue())
            file.truncate()
        self._num_bytes += len(record.getvalue())
