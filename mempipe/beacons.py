"""Named points in the work of every role, at which a fault-injection test can act exactly and without guessing a delay.

Nothing happens at a beacon unless the environment variable MEMPIPE_BEACONS names a folder. Then every process that
passes one appends a line to `beacons.jsonl` there, and waits for as long as a file `hold-NAME` exists there, so that
the test can end this process or another one at a moment that it knows. A hold file with a JSON object in it holds only
a process whose details have those values: `hold-collect` with `{"step": 3}`.
"""

from __future__ import annotations

import json
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

VARIABLE = "MEMPIPE_BEACONS"
RECORD = "beacons.jsonl"
LOOK_EVERY_S = 0.01


def reached(name: str, **details: Any) -> None:
    """Records that this process has reached the point `name`, and waits there while a test holds it.

    `details` are what JSON can hold: the step, the update, the label of an evaluation.
    """
    if folder := _folder():
        _stop_by(folder, name, details)


@cache
def _folder() -> Path | None:
    """Returns the folder of the test that watches; None outside of such tests."""
    return Path(found) if (found := os.environ.get(VARIABLE)) else None


def _stop_by(folder: Path, name: str, details: dict[str, Any]) -> None:
    _record(folder, name, details, held=False)
    hold = folder / f"hold-{name}"
    if _holds(hold, details):
        _record(folder, name, details, held=True)
        while _holds(hold, details):
            time.sleep(LOOK_EVERY_S)


def _record(folder: Path, name: str, details: dict[str, Any], *, held: bool) -> None:
    entry = {"pid": os.getpid(), "name": name, "details": details, "time": time.time(), "held": held}
    line = json.dumps(entry) + "\n"
    descriptor = os.open(folder / RECORD, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())  # one call: lines of several processes do not mix
    finally:
        os.close(descriptor)


def _holds(file: Path, details: dict[str, Any]) -> bool:
    try:
        wanted = json.loads(file.read_text() or "{}")
    except FileNotFoundError:
        return False
    return all(details.get(name) == value for name, value in wanted.items())
