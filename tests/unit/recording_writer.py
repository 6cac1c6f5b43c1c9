"""Writers of a user, as `tracking.writers: [tests.unit.recording_writer:NAME]` names them. They write lines to a file
in the run's folder.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from mempipe.tracking.metrics_writer import MetricsWriter

RELEASED = threading.Event()
"""A `Stuck` writer waits for it."""


class Recording(MetricsWriter):
    def open(self) -> bool:
        is_new = not (self.run.folder / "calls.jsonl").exists()
        self._add("open", self.run.name, self.run.settings["algorithm"]["group_size"])
        return is_new

    def log_metrics(self, values, *, step, time_s):
        self._add("log", step, dict(values))

    def restart_at(self, step):
        self._add("restart", step)

    def close(self, status):
        self._add("close", status)

    def _add(self, *call: Any) -> None:
        with (self.run.folder / "calls.jsonl").open("a") as file:
            file.write(json.dumps(call) + "\n")


class Flaky(Recording):
    """Is away for the first call of every method."""

    def __init__(self, run):
        super().__init__(run)
        self._called: set[str] = set()

    def _add(self, *call: Any) -> None:
        if call[0] not in self._called:
            self._called.add(call[0])
            raise OSError("the disk is away")
        super()._add(*call)


class Picky(Recording):
    """Takes no second step."""

    def log_metrics(self, values, *, step, time_s):
        if step == 2:
            raise ValueError("no step 2 here")
        super().log_metrics(values, step=step, time_s=time_s)


class Stuck(Recording):
    def open(self) -> bool:
        return True

    def log_metrics(self, values, *, step, time_s):
        RELEASED.wait()


class Broken(Recording):
    def __init__(self, run):
        raise KeyError("no such account")
