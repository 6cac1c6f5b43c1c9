"""`metrics.jsonl`: one JSON object a line, `{"step": 3, "time": 1700000000.5, "reward": 0.25, …}`, appended as a run
continues.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mempipe.storage.files import whole_file

METRICS_FILE = "metrics.jsonl"
REPLACED_FILE = "metrics.replaced.jsonl"
MAX_NAMED_LINES = 5
"""The most line numbers in one message."""

Row = dict[str, float]

_logger = logging.getLogger(__name__)


class MetricsFile:
    """Appends whole lines. A row that the disk does not take waits in memory, and every later call tries to write it
    again.

    The file is opened for each row, so that a file system that went away and came back has every row.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS_FILE
        self.failure: OSError | None = None
        """Says why rows are waiting; None when none is."""
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()
        self._write()  # a folder that cannot be written is known at once

    @property
    def num_waiting(self) -> int:
        """Returns the number of rows that are not in the file yet."""
        return len(self._waiting)

    def append(self, values: Mapping[str, float], *, step: int, time_s: float) -> None:
        row: dict[str, float | None] = {"step": step, "time": round(time_s, 3)}
        row |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self._lock:
            self._waiting.append(json.dumps(row).encode() + b"\n")
            self._write()

    def flush(self) -> None:
        """Writes the waiting rows to the disk, if it accepts them."""
        with self._lock:
            self._write(durable=True)

    def restart_at(self, step: int) -> tuple[int, int]:
        """Moves the rows of later steps, and lines that are not rows, to `metrics.replaced.jsonl` next to the file;
        returns the number of both. Raises OSError when the disk does not allow it; then every row is where it was.
        """
        with self._lock:
            self._write()
            self._waiting = [line for line in self._waiting if _is_before(line, step)]
            lines = self.path.read_bytes().splitlines() if self.path.exists() else []
            replaced = [line for line in lines if not _is_before(line, step)]
            if replaced:
                _append(self.path.with_name(REPLACED_FILE), _joined(replaced), durable=True)
                with whole_file(self.path) as partial:
                    partial.write_bytes(_joined(line for line in lines if _is_before(line, step)))
        num_rows = sum(_row(line) is not None for line in replaced)
        return num_rows, len(replaced) - num_rows

    def _write(self, *, durable: bool = False) -> None:
        try:
            _append(self.path, b"".join(self._waiting), durable=durable)
        except OSError as error:
            self.failure = error
        else:
            self._waiting, self.failure = [], None


def read_metrics(path: str | Path) -> list[Row]:
    """Reads the rows of a `metrics.jsonl`, one per step in order of steps. Of a value that a step has twice the last
    one counts.

    Values that were not finite are NaN. Lines that are not rows are skipped with a warning that names them.
    """
    rows, bad_lines = read_rows(path)
    if bad_lines:
        _logger.warning("%s", describe_bad_lines(path, bad_lines))
    merged: dict[int, Row] = {}
    for row in rows:
        merged.setdefault(int(row["step"]), {}).update(row)
    return [merged[step] for step in sorted(merged)]


def read_rows(path: str | Path) -> tuple[list[Row], list[int]]:
    """Returns the rows in the order of the file, and the numbers (from 1) of the lines that are not rows: half a line,
    bytes that are not UTF-8, JSON that is not an object of numbers with a step.
    """
    rows, bad_lines = [], []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        if (row := _row(line)) is not None:
            rows.append(row)
        elif line.strip():
            bad_lines.append(number)
    return rows, bad_lines


def describe_bad_lines(path: str | Path, numbers: Sequence[int]) -> str:
    """Says which lines of the file are skipped."""
    named = ", ".join(str(number) for number in numbers[:MAX_NAMED_LINES])
    more = f" and {len(numbers) - MAX_NAMED_LINES} more" if len(numbers) > MAX_NAMED_LINES else ""
    one = len(numbers) == 1
    subject = f"line {named} of {path} is not a row" if one else f"lines {named}{more} of {path} are not rows"
    return f"{subject} of metrics and {'was' if one else 'were'} skipped; all other rows are used"


def _row(line: bytes) -> Row | None:
    """Returns the row that a line holds; None when it holds none."""
    try:
        row = json.loads(line.decode("utf-8"))
        if not isinstance(row, dict) or not all(_is_number(value) for value in row.values()):
            return None
        row = {name: math.nan if value is None else float(value) for name, value in row.items()}
        return row | {"step": int(row["step"])}
    except (ValueError, KeyError, OverflowError, RecursionError):
        return None


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _is_before(line: bytes, step: int) -> bool:
    """Returns whether the line is a row of `step` or of an earlier one."""
    row = _row(line)
    return row is not None and row["step"] <= step


def _joined(lines: Iterable[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _append(path: Path, data: bytes, *, durable: bool) -> None:
    """Adds the bytes to the file, or none of them when the disk does not take them all. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if data and size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data  # a crash cut the last line; it must not swallow the next one
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except BaseException:
            os.ftruncate(descriptor, size)
            raise
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
