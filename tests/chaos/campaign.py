"""A command that is struck again and again: the strikes, and what must hold after each of them."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from aftermath import check_nothing_left, check_words, sentence
from journal import Fault, Journal
from machine import Patience, speed_factor
from watched import LOOK_EVERY_S, Absent, Missed, Over, Passed, Place, Watched

RECOVERY_S = 60.0
"""Seconds in which the work goes on after a fault, on a quiet machine."""
REACH_S = 120.0
"""Seconds in which a healthy command gets from any beacon to the next that a strike waits for."""
END_S = 60.0
GRACE_S = 40.0
"""Seconds in which a command is gone that was told to end: `grace_s`, and what Ray needs."""
CLUSTER_S = 30.0
"""Seconds in which a command notices that its cluster is gone, and says so."""
APPEARS_S = 20.0
TOLD = re.compile(r"restart \d|was lost|SIGTERM|SIGINT|interrupted|error: |set aside", re.IGNORECASE)


@dataclass(kw_only=True)
class Campaign:
    """One command and its continuations."""

    watched: Watched
    journal: Journal
    arguments: Sequence[str]
    """With which `mempipe` begins."""
    going_on: Sequence[str]
    """With which `mempipe` goes on after an interruption."""
    folder: Path
    """What the command makes."""
    check: Callable[[], None] = lambda: None
    """Looks at what is there after a good end; raises Missed."""
    factor: float = field(default_factory=speed_factor)

    def begin(self) -> None:
        self.watched.start(self.arguments)

    def go_on(self) -> None:
        """Starts the command again, as a person would after it ended."""
        self.watched.start(self.going_on)

    def strikes(self, plan: Sequence[tuple[Sequence[str], Place]]) -> None:
        """Kills processes of the roles at each place in turn; none of the places can be passed unseen."""
        nexts: list[Place | None] = [place for _, place in plan[1:]]
        for (roles, place), then in zip(plan, [*nexts, None], strict=True):
            self.strike(roles, place, then=then)

    def strike(
        self,
        roles: Sequence[str],
        place: Place,
        *,
        number: signal.Signals = signal.SIGKILL,
        then: Place | None = None,
        later_s: float = 0.0,
        fault_number: int | None = None,
    ) -> None:
        """Sends a signal to a process of each role when one is at the place, or so much later, and waits until the
        work goes on, or until a process is at the place `then`, where the next strike comes.

        The role "here" is the process at the beacon. When the driver was struck it has to end, and is started again.
        """
        what = f"{' + '.join(roles)} {'killed' if number == signal.SIGKILL else number.name}"
        with self.journal.fault(what, str(place), number=fault_number) as fault:
            before = self._before()
            with self._met(place, later_s, then) as found:
                since = time.time()
                for role in roles:
                    self._send(role, found, number)
            if "driver" in roles or ("here" in roles and found.pid == before.pid):
                self._ended(fault, before, number)
                self.go_on()
            self._recovered(fault, before, since, then)

    def freeze(self, role: str, place: Place, *, seconds: float, fault_number: int | None = None) -> None:
        """Stops a process of the role for some seconds, as a machine does that swaps or migrates, and lets it go on."""
        what, where = f"{role} frozen", f"{place} for {seconds:.0f} s"
        with self.journal.fault(what, where, number=fault_number) as fault:
            before = self._before()
            with self._met(place) as found:
                since = time.time()
                frozen = self._send(role, found, signal.SIGSTOP)
            time.sleep(seconds)
            for pid in frozen:
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).send_signal(signal.SIGCONT)
            self._recovered(fault, before, since)

    def lose_cluster(self, role: str, place: Place, *, later_s: float = 0.0, fault_number: int | None = None) -> None:
        """Kills a part of Ray itself: the work goes on, or ends in one sentence within half a minute."""
        with self.journal.fault(f"{role} killed", str(place), number=fault_number) as fault:
            before = self._before()
            with self._met(place, later_s) as found:
                since = time.time()
                self._send(role, found, signal.SIGKILL)
            self._ended(fault, before, signal.SIGKILL, says=True, may_finish=True, within=CLUSTER_S)
            fault.said = f"after {time.time() - since:.0f} s: {fault.said}"
            since = time.time()
            self.go_on()
            self._recovered(fault, before, since)

    def disturb(
        self,
        what: str,
        place: Place,
        do: Callable[[], object],
        *,
        undo: Callable[[], object] = lambda: None,
        ends: bool,
        says: str | None = "",
        for_s: float = 0.0,
    ) -> None:
        """Does something to the command's surroundings at a beacon, and undoes it.

        With `ends` the command has to end, in one sentence that holds `says` (None: it was killed and says nothing).
        Else it may end, in a sentence, within `for_s` seconds of this; what goes on by itself has to be well.
        """
        with self.journal.fault(what, str(place)) as fault:
            before = self._before()
            try:
                with self._met(place):
                    since = time.time()
                    do()
                if not ends:
                    self.watched.wait_a_while(for_s)
                if ends or not self.watched.lives:
                    self._ended(fault, before, signal.SIGKILL, says=says is not None, within=RECOVERY_S)
                    if says and says not in fault.said:
                        raise Missed(f"the sentence does not say {says!r}: {fault.said}")
            finally:
                undo()
            if not self.watched.lives:
                since = time.time()
                self.go_on()
            self._recovered(fault, before, since)

    def finish(self) -> None:
        """Waits for the command's end and checks all that it leaves."""
        with self.journal.fault("the end of the command", self.folder.name, number=0) as fault:
            self._before()  # which goes on after a miss
            code = self.watched.wait(seconds=(REACH_S + END_S) * self.factor)
            fault.said = self._told(0)
            if code != 0:
                raise Missed(f"it ended with {code}: {self.watched.last_words()}")
            check_words(self.watched.text)
        with self.journal.fault("what it leaves", self.folder.name, number=0):
            self.check()
        with self.journal.fault("what it leaves behind", self.folder.name, number=0):
            check_nothing_left(self.watched)

    @contextmanager
    def _met(self, place: Place, later_s: float = 0.0, then: Place | None = None) -> Iterator[Passed]:
        """Holds a process at the place for the block; with `later_s` the process goes on, and the block begins so much
        later. Says what the command wrote last if the place was reached late, which other work on the machine allows.
        """
        since = time.monotonic()
        with self.watched.held(place, seconds=REACH_S * self.factor, then=then) as found:
            if (took := time.monotonic() - since) > REACH_S:
                self.journal.say(f"{place} was reached after {took:.0f} s: {self.watched.last_words()}")
            if not later_s:
                yield found
        if later_s:
            self.watched.wait_a_while(later_s)
            yield found

    def _before(self) -> _Before:
        """Returns what there is before a fault. A command that has ended where it should have gone on is started again,
        so that the next fault can be tried."""
        if not self.watched.lives and not self.watched.has_ended_well:
            self.watched.marked.end()
            self.go_on()
        return _Before(
            pid=self.watched.driver.pid if self.watched.lives else 0,
            checkpoints=self._checkpoints(),
            progress=self.watched.progress(),
            length=len(self.watched.text),
        )

    def _send(self, role: str, place: Passed, number: signal.Signals) -> list[int]:
        """Sends the signal to a process of the role; one that is just being started is waited for."""
        if role == "here":
            with suppress(psutil.NoSuchProcess):
                psutil.Process(place.pid).send_signal(number)
                return [place.pid]
            raise Missed(f"the process at {place.place} ended by itself")
        patience = Patience(APPEARS_S * self.factor, own=self.watched.marked.processes)
        while not (struck := self.watched.strike(role, number)):
            if self.watched.has_ended_well:
                raise Over(f"{role} was struck")
            if role == "idle worker":  # Ray keeps some in reserve, or none
                raise Absent(f"{role} was struck")
            if patience.is_over():
                raise Missed(f"no process of the role {role} was there")
            time.sleep(LOOK_EVERY_S)
        return struck

    def _ended(
        self,
        fault: Fault,
        before: _Before,
        number: signal.Signals,
        *,
        says: bool = False,
        may_finish: bool = False,
        within: float = GRACE_S,
    ) -> None:
        """The command ends after the fault, and not as if all were well; with one sentence unless it was killed. With
        `may_finish` it may also have done all its work before it noticed the fault; Over is raised then."""
        code = self.watched.wait(seconds=within * self.factor)
        check_words(self.watched.text)
        if code == 0 and may_finish:
            raise Over("the cluster was missed")
        if code == 0 or (number != signal.SIGKILL and code == -number):
            raise Missed(f"it ended with {code}: {self.watched.last_words()}")
        if says or number != signal.SIGKILL:
            try:
                fault.said = sentence(self.watched.text)
            except Missed as missed:
                raise Missed(f"exit code {code}: {missed}") from missed
        if left := self.watched.marked.survivors():
            raise Missed(f"{len(left)} processes are left: {left[0][:100]}")
        self._check_kept(before)
        before.length = 0

    def _recovered(self, fault: Fault, before: _Before, since: float, then: Place | None = None) -> None:
        limit = RECOVERY_S * self.factor
        fault.seconds = self.watched.recovered(since, before.progress, seconds=limit, then=then)
        fault.said = fault.said or self._told(before.length)
        check_words(self.watched.text[before.length :])
        self._check_kept(before)

    def _checkpoints(self) -> list[str]:
        """Returns the names of the checkpoints, oldest first; it only looks, since the run may be writing one."""
        return sorted(path.name for path in (self.folder / "checkpoints").glob("step-*"))

    def _check_kept(self, before: _Before) -> None:
        """Raises Missed when the newest checkpoint of before the fault is gone without a newer one."""
        now = self._checkpoints()
        if before.checkpoints and (not now or now[-1] < before.checkpoints[-1]):
            raise Missed(
                f"checkpoint {before.checkpoints[-1]} was there before the fault; now there is {now[-1:] or 'none'}"
            )

    def _told(self, since: int) -> str:
        """Returns the first line that says something of a fault."""
        return next((line[:200] for line in self.watched.text[since:].splitlines() if TOLD.search(line)), "")


@dataclass(kw_only=True)
class _Before:
    """What there was before a fault."""

    pid: int
    checkpoints: list[str]
    progress: set[str]
    length: int
    """Characters of output."""
