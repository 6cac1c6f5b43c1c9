"""A `mempipe` command under fault: where its processes are (beacons), which of them is which role, and strikes at a
moment that is known exactly.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
from machine import Patience

from mempipe.beacons import RECORD, VARIABLE
from tools.processes import Marked, Running, command_line

ROLES = {
    "engine": "ray::.*GeneratorActor",
    "engine's own process": "VLLM::EngineCore",
    "retriever": "ray::.*RetrieverActor",
    "rank": "ray::.*LearnerActor",
    "admission": "ray::.*Admission",
    "weight store": "ray::.*WeightStore",
    "worker": r"ray::MapWorker\(.*GroupStage",
    "reference": r"ray::MapWorker\(.*ReferenceStage",
    "encoder": r"ray::MapWorker\(.*SegmentEncoder",
    "stream's own actors": "ray::(ActorLocationTracker|_StatsActor|_AutoscalingCoordinatorActor)",
    "idle worker": "ray::IDLE",
    "raylet": "/raylet/raylet ",
    "GCS": "/gcs/gcs_server ",
}
"""What the command line of each role's processes looks like."""
PROGRESS = (
    "warm_start",
    "evaluate",
    "learnt",
    "export",
    "report",
    "evaluation.group",
    "index.read",
    "index.encode",
    "chain",
)
"""Beacons that say the work itself has got on, as opposed to a start being made again."""
LOOK_EVERY_S = 0.02
LATE_S = 60.0
"""After so many seconds of one wait the stacks of all processes are kept: they say what the command waits for."""


class Missed(AssertionError):
    """What must hold under a fault does not."""


class Over(Exception):
    """The command has ended well before what was waited for."""


class Absent(Over):
    """There is no process of a role that a command may do without, so there is no fault."""


@dataclass(frozen=True)
class Place:
    """A beacon, and what its details have to be."""

    name: str
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{name} {value}" for name, value in self.details.items())])


def at(name: str, **details: Any) -> Place:
    """Returns a place: `at("collect", step=3)`."""
    return Place(name, details)


@dataclass(frozen=True, kw_only=True)
class Passed:
    """One process at one beacon."""

    pid: int
    name: str
    details: dict[str, Any]
    time: float
    held: bool
    """It waits there until it is let go."""

    @property
    def place(self) -> str:
        """Returns where it was, for a person."""
        return str(Place(self.name, self.details))

    def is_held_at(self, at: Place) -> bool:
        fits = all(self.details.get(key) == value for key, value in at.details.items())
        return self.held and self.name == at.name and fits


@dataclass
class Watched:
    """Commands that work in one folder one after the other, as a run and its continuations do."""

    output: Path
    """Where the commands run and write."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables."""

    def __post_init__(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        self.cwd = self.output
        self.temporary = Path(tempfile.mkdtemp(prefix="c", dir="/tmp"))  # short: sockets have at most 107 bytes
        self.beacons = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))
        self.marked = Marked({VARIABLE: str(self.beacons), "TMPDIR": str(self.temporary), **self.extra})
        self.running: Running | None = None
        self.ended: list[tuple[int, str]] = []
        self._read = self._since = 0
        self._next: Place | None = None
        self._passed: list[Passed] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self.marked.end()
        for folder in (self.temporary, self.beacons):
            shutil.rmtree(folder, ignore_errors=True)

    def start(self, arguments: Sequence[str]) -> None:
        """Starts `mempipe` with these arguments."""
        self.running = Running([sys.executable, "-m", "mempipe.cli", *arguments], marked=self.marked, cwd=self.cwd)

    @property
    def driver(self) -> psutil.Process:
        assert self.running is not None, "nothing was started"
        return psutil.Process(self.running.process.pid)

    @property
    def lives(self) -> bool:
        return self.running is not None and self.running.process.poll() is None

    @property
    def has_ended_well(self) -> bool:
        return self.running is not None and self.running.process.poll() == 0

    @property
    def text(self) -> str:
        """Returns what the present command has written."""
        return self.running.stdout + self.running.stderr if self.running is not None else ""

    def passed(self) -> list[Passed]:
        """Returns every beacon so far, oldest first."""
        with suppress(FileNotFoundError), (self.beacons / RECORD).open() as file:
            file.seek(self._read)
            while (line := file.readline()).endswith("\n"):
                self._read = file.tell()
                self._passed.append(Passed(**json.loads(line)))
        return self._passed

    def until(self, condition: Callable[[], Any], *, seconds: float, what: str) -> Any:
        """Returns the first true value of `condition`.

        Raises Missed when the command fails before, and after `seconds`; Over when the command ends well before.
        """
        patience = Patience(seconds, own=self.marked.processes)
        late = time.monotonic() + LATE_S
        while not (value := condition()):
            if time.monotonic() > late:
                late += LATE_S
                print(f"waiting for {what}; stacks of all processes: {self.keep_stacks()}", flush=True)
            if not self.lives:
                if value := condition():  # it was passed in the last moment
                    return value
                if self.has_ended_well:
                    raise Over(what)
                raise Missed(f"the command ended before {what}: {self.last_words()}")
            if patience.is_over():
                raise Missed(f"{what}: not within {seconds:.0f} s; last beacon: {self.whereabouts()}")
            time.sleep(LOOK_EVERY_S)
        return value

    def whereabouts(self) -> str:
        """Returns the last beacon of the driver, for a person."""
        pid = self.running.process.pid if self.running is not None else 0
        return next((each.place for each in reversed(self.passed()) if each.pid == pid), "none")

    def last_words(self) -> str:
        """Returns the last lines of the command's output."""
        return " / ".join(self.text.strip().splitlines()[-3:])

    def keep_stacks(self) -> Path:
        """Writes the stack of every Python thread of the command's processes to a new file, which is kept."""
        number, path = tempfile.mkstemp(prefix="mempipe-chaos-stacks-", suffix=".txt")
        with os.fdopen(number, "w") as file:
            print(f"{self.whereabouts()}\n{self.text}", file=file)
            for process in self.marked.processes():
                print(f"\n==== {process.pid} {command_line(process)[:200]}", file=file, flush=True)
                spy = [str(Path(sys.executable).with_name("py-spy")), "dump", "--nonblocking", "--pid"]
                subprocess.run([*spy, str(process.pid)], stdout=file, stderr=subprocess.DEVNULL, check=False)
        return Path(path)

    def wait_a_while(self, seconds: float) -> None:
        """Waits for so many seconds, or until the command has ended."""
        deadline = time.monotonic() + seconds
        while self.lives and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)

    @contextmanager
    def held(self, at: Place, *, seconds: float, then: Place | None = None) -> Iterator[Passed]:
        """Lets the command run until a process is at the place, and keeps that process there for the block.

        A process that reaches `then` after the block is held there, for the next call: it cannot be missed.
        """
        if self._next != at:
            self._hold(at)
        since, self._next = self._since, None
        try:
            yield self.until(
                lambda: next((each for each in self.passed()[since:] if each.is_held_at(at)), None),
                seconds=seconds,
                what=f"beacon {at}",
            )
        finally:
            if then is not None:
                self._hold(then)
                self._next = then
            if then is None or then.name != at.name:
                self.release(at.name)

    def is_held_at(self, at: Place | None) -> bool:
        """Tells whether a process has reached a place for which `held` was told to hold it next."""
        return at is not None and at == self._next and any(each.is_held_at(at) for each in self.passed()[self._since :])

    def release(self, name: str = "*") -> None:
        """Lets processes go on that are held at the beacon, or at any."""
        for file in self.beacons.glob(f"hold-{name}"):
            file.unlink(missing_ok=True)

    def processes(self, role: str) -> list[psutil.Process]:
        """Returns the living processes of a role; "driver" is the command itself."""
        if role == "driver":
            return [self.driver] if self.lives else []
        wanted = re.compile(ROLES[role])
        return sorted((p for p in self.marked.processes() if wanted.search(command_line(p))), key=lambda p: p.pid)

    def strike(self, role: str, number: signal.Signals = signal.SIGKILL, *, which: int | None = 0) -> list[int]:
        """Sends a signal to one process of the role (`which` None: to all). Returns their ids; none may live."""
        struck = []
        found = self.processes(role)
        for process in found if which is None else found[which : which + 1]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                struck.append(process.pid)
        return struck

    def progress(self) -> set[str]:
        """Returns the places at which the work itself was seen."""
        return {each.place for each in self.passed() if each.name in PROGRESS}

    def recovered(self, since: float, before: set[str], *, seconds: float, then: Place | None = None) -> float | None:
        """Waits until the work has got further than `before`, or has ended well; returns the seconds from `since`.

        A process may be held at `then` before that: the next fault strikes while this one is mended, and the answer is
        None.
        """

        def got_on() -> float | None:
            news = [each for each in self.passed() if each.time > since and each.name in PROGRESS]
            fresh = next((each for each in news if each.place not in before), None)
            if fresh is not None:
                return fresh.time
            if self.has_ended_well:
                return time.time()
            return -1.0 if self.is_held_at(then) else None

        came = self.until(got_on, seconds=seconds, what="recovery")
        return None if came < 0 else came - since

    def wait(self, *, seconds: float) -> int:
        """Waits for the command's end; returns its exit code and keeps its output. Raises Missed after `seconds`."""
        assert self.running is not None, "nothing was started"
        patience = Patience(seconds, own=self.marked.processes)
        while self.lives:
            if patience.is_over():
                raise Missed(f"it did not end within {seconds:.0f} s; last beacon: {self.whereabouts()}")
            time.sleep(LOOK_EVERY_S)
        code = self.running.process.wait()
        self.ended.append((code, self.text))
        return code

    def _hold(self, at: Place) -> None:
        self._since = len(self.passed())
        partial = self.beacons / f".hold-{at.name}"
        partial.write_text(json.dumps(at.details))
        os.replace(partial, self.beacons / f"hold-{at.name}")
