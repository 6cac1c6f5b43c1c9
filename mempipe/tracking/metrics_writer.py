"""Writers of a training run's metrics next to MLflow: their base class, and how one becomes a `MetricsStore`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The run that a writer records."""

    name: str
    folder: Path
    """Exists. It may be a mount that is away for a while: a writer makes folders inside it, and never the folder."""
    experiment: str
    """`tracking.experiment`."""
    settings: Mapping[str, Any]
    """All settings as plain values, without passwords."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRow:
    """Numbers of one step. A step may have several rows, with other names each."""

    values: Mapping[str, float]
    step: int
    time_s: float
    """Unix seconds."""


class MetricsWriter(ABC):
    """Takes the metrics of one run. It is made and called in a separate thread, so it may be slow. A call that raises
    OSError is made again later; after another exception the row is skipped, and the run's terminal and report say so.
    """

    def __init__(self, run: RecordedRun) -> None:
        self.run = run

    def open(self) -> bool:
        """Is called once before all other methods, again only if it failed. Returns whether this record of the run is
        new; then it gets the metrics of earlier starts of the run first."""
        return False

    @abstractmethod
    def log_metrics(self, values: Mapping[str, float], *, step: int, time_s: float) -> None:
        """Writes numbers of one step, which may be NaN or infinite; `time_s` in Unix seconds."""

    def restart_at(self, step: int) -> None:
        """Prepares for the run to continue after `step`: later steps are made again."""
        return

    def close(self, status: Status) -> None:
        """Is called last, if the run ends in an orderly way."""
        return


class WriterStore:
    """A `MetricsWriter` as a `BackgroundWriter` needs it."""

    entry = "rows of metrics"
    entries_per_call = 1
    """So that a row that was written is not written again with one that failed."""

    def __init__(
        self,
        name: str,
        make: Callable[[RecordedRun], MetricsWriter],
        run: RecordedRun,
        *,
        history: Callable[[], Sequence[MetricsRow]],
    ) -> None:
        """`history` returns the rows of earlier starts of the run."""
        self.name = name
        self.run_id: str | None = None
        self._make = make
        self._run = run
        self._history = history
        self._writer: MetricsWriter | None = None
        self._earlier: deque[MetricsRow] | None = None

    def check(self) -> None:
        """Writers find out themselves when their store is gone."""

    def connect(self) -> None:
        if self._writer is None:
            self._writer = self._make(self._run)
        if self._earlier is None:
            self._earlier = deque(self._history() if self._writer.open() else ())
        while self._earlier:
            self._log(self._earlier[0])
            self._earlier.popleft()
        self.run_id = self._run.name

    def log_metrics(self, entries: Sequence[MetricsRow]) -> None:
        for row in entries:
            self._log(row)

    def restart_at(self, step: int) -> None:
        self._opened.restart_at(step)

    def close(self, status: Status) -> None:
        self._opened.close(status)

    def is_temporary(self, error: Exception) -> bool:
        return isinstance(error, OSError)

    @property
    def _opened(self) -> MetricsWriter:
        assert self._writer is not None, "a writer is opened before it is used"
        return self._writer

    def _log(self, row: MetricsRow) -> None:
        self._opened.log_metrics(row.values, step=row.step, time_s=row.time_s)
