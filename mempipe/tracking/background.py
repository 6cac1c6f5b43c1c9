"""Writes a store of metrics from a separate thread: a server may be slow, dead or wrong, and nobody waits for it."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, Generic, Protocol, TypeVar

from mempipe.credentials import without_passwords

_MAX_RETRY_DELAY_S = 30.0
_FAILURES_OF_AN_OUTAGE = 3  # in a row; the first outage is said at its first failure

_logger = logging.getLogger(__name__)


class MetricsStore(Protocol):
    """Takes metrics. Every method may fail and be called again; only the writer's thread uses it."""

    name: str
    """Kind and place, for messages: "MLflow at http://host:5000"."""
    entry: str
    """The kind of an entry, for messages: "values"."""
    entries_per_call: int
    """The most entries that one call of `log_metrics` gets."""
    run_id: str | None
    """The record of this run in the store; None until `connect` has made or found it."""

    def check(self) -> None:
        """Raises OSError when the store is not the one that was connected to."""

    def connect(self) -> None:
        """Makes or finds the record of this run."""

    def log_metrics(self, entries: Sequence[Any]) -> None:
        """Writes entries of the form that this store takes."""

    def is_temporary(self, error: Exception) -> bool:
        """Returns whether the same call may succeed later: the store is away, busy or broken, rather than
        unwilling."""
        ...


S = TypeVar("S", bound=MetricsStore)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingSummary:
    """Holds what became of a run's record. All counts are 0 when nothing went wrong."""

    run_id: str | None
    num_failed_calls: int  # calls that failed and were tried again
    num_refused: int  # entries that the server will never take
    num_unwritten: int  # entries still waiting when the deadline passed
    losses: tuple[str, ...] = ()  # a sentence for each thing that the record lacks


class BackgroundWriter(Generic[S]):
    """Writes to one store. Metrics go first, in order; other calls go in order when no metrics wait."""

    def __init__(self, store: S, *, tell: Callable[[str], None] = _logger.warning) -> None:
        """`tell` takes a sentence about what the store does not take, at once and from the writer's thread."""
        self._store = store
        self._tell = tell
        self._metrics: deque[Any] = deque()
        """Entries, and calls that keep their place among them."""
        self._calls: deque[Callable[[S], None]] = deque()
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
        self._thread = threading.Thread(target=self._run, name=f"writer of {store.name}", daemon=True)
        self._thread.start()

    def add_metrics(self, entries: Sequence[Any]) -> None:
        with self._changed:
            self._had_metrics = True
            self._metrics.extend(entries)
            self._changed.notify_all()

    def add_call(self, call: Callable[[S], None], *, in_order: bool = False) -> None:
        """Adds a call for when no metrics wait; with `in_order` for when those are written that were added before."""
        with self._changed:
            (self._metrics if in_order else self._calls).append(call)
            self._changed.notify_all()

    @property
    def num_waiting(self) -> int:
        """Returns the entries that are not written yet, without metrics."""
        return len(self._calls)

    def losses(self) -> list[str]:
        """Returns a sentence for each kind of entry that the store lacks now."""
        with self._changed:
            name, num_calls = self._store.name, len(self._calls)
            num_values = sum(not callable(entry) for entry in self._metrics)
            losses = []
            if self._refused:
                losses.append(f"{name} refused {self._refused} entries; the first: {self._first_refusal}")
            if self._failing or (self._gave_up and num_values + num_calls):
                why = self._last_failure or "it did not take them in time"
                others = f" and {num_calls} traces or files" if num_calls else ""
                losses.append(f"{name} lacks {num_values} {self._store.entry}{others}: {why}")
            return losses

    def wait_for_run_id(self, timeout_s: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._store.run_id is not None, timeout_s)
        return self._store.run_id

    def flush(self, timeout_s: float) -> bool:
        """Returns whether all metrics were written within `timeout_s`. Does not wait while the store is failing."""
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
                f"{self._store.name} is incomplete: {unwritten} entries not written{reason}, {self._refused} refused, "
                f"{self._failed} calls failed{elsewhere}"
            )
        return summary

    def _run(self) -> None:
        delay = 0.5
        while self._wait_for_work():
            try:
                self._write_some()
                self._note_success()
                delay = 0.5
            except Exception as error:  # the border to foreign code: whatever a store does, training continues
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
            before_a_call = takewhile(lambda entry: not callable(entry), self._metrics)
            entries = list(islice(before_a_call, self._store.entries_per_call))
            queue = self._metrics or self._calls
            call = None if entries or not queue else queue[0]
        if entries:
            self._write(lambda store: store.log_metrics(entries), self._metrics, len(entries))
        elif call is not None:
            self._write(call, queue, 1)

    def _write(self, call: Callable[[S], None], queue: deque[Any], num_entries: int) -> None:
        """Writes entries, which leave their queue when they are written or when trying again cannot help."""
        try:
            call(self._store)
        except Exception as error:
            if self._store.is_temporary(error):
                raise
            if not self._refused:
                self._first_refusal = _one_line(error)
                self._tell(f"{self._store.name} refuses an entry: {self._first_refusal}")
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
                f"{self._store.name} does not take entries; they are tried again while the work continues: "
                f"{self._last_failure}"
            )

    def _note_success(self) -> None:
        with self._changed:
            self._failing = 0
        if self._outage_was_told:
            self._outage_was_told = False
            self._tell(f"{self._store.name} takes entries again")

    def _pause(self, seconds: float) -> None:
        """Waits, until `finish` is called at most; after that, half a second at most."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._finishing, seconds):
                return
        time.sleep(min(seconds, 0.5))


def _one_line(error: Exception) -> str:
    """Returns kind and message of an error, without the statement that a database adds to it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    text = re.sub(r"\(raised as a result of [^)]*\) ", "", text.partition(" [SQL:")[0])  # advice to who wrote MLflow
    return without_passwords(text)[:300]
