"""One line for every fault as it is dealt with, and a table of all of them at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

from watched import Over


@dataclass(kw_only=True)
class Fault:
    """One fault: what was done where, and what came of it."""

    number: int
    what: str
    where: str
    seconds: float | None = None
    """Until the work went on; None for one that ends the work, or is no matter of time."""
    said: str = ""
    """What a person was told."""
    missed: str = ""
    """What should have held and did not."""

    @property
    def line(self) -> str:
        """Returns the fault and what came of it, on one line."""
        took = "" if self.seconds is None else f"  {self.seconds:5.1f} s"
        verdict = f"MISSED: {self.missed}" if self.missed else "ok"
        return f"{self.number:4d}  {self.what} at {self.where}{took}  {verdict}" + (
            f"  «{self.said}»" if self.said else ""
        )


@dataclass
class Journal:
    """The faults of one campaign, in their order."""

    title: str = ""
    lets_end: bool = False
    """A command may end before a fault, which is then none; else that is a miss."""
    out: TextIO = field(default_factory=lambda: sys.stdout)
    faults: list[Fault] = field(default_factory=list)

    @contextmanager
    def fault(self, what: str, where: str, *, number: int | None = None) -> Iterator[Fault]:
        """Records one fault; an AssertionError of the block (Missed is one) is its miss, and goes no further."""
        entry = Fault(number=self.num_faults + 1 if number is None else number, what=what, where=where)
        try:
            yield entry
        except Over as over:
            if self.lets_end:
                raise
            entry.missed = f"the command had ended before {over}"
        except AssertionError as miss:
            entry.missed = " ".join(str(miss).split())
        self.faults.append(entry)
        self.say(f"[{time.strftime('%H:%M:%S')}] {self.title}{entry.line}")

    def say(self, text: str) -> None:
        """Shows a text at once."""
        print(text, file=self.out, flush=True)

    @property
    def num_faults(self) -> int:
        """Counts faults; what is looked at when a command has ended has the number 0 and is none."""
        return sum(fault.number > 0 for fault in self.faults)

    @property
    def misses(self) -> list[str]:
        return [fault.line for fault in self.faults if fault.missed]

    def table(self) -> str:
        """Returns, for every kind of fault, how often it was dealt with, how often it was missed, and its times."""
        kinds: dict[str, list[Fault]] = {}
        for fault in self.faults:
            kinds.setdefault(fault.what, []).append(fault)
        lines = [f"{'fault':44} {'n':>4} {'missed':>6} {'median s':>9} {'most s':>7}"]
        for what, faults in sorted(kinds.items()):
            times = sorted(fault.seconds for fault in faults if fault.seconds is not None)
            median, most = (f"{times[len(times) // 2]:.1f}", f"{times[-1]:.1f}") if times else ("", "")
            missed = sum(bool(fault.missed) for fault in faults)
            lines.append(f"{what[:44]:44} {len(faults):4d} {missed:6d} {median:>9} {most:>7}")
        num_checks = len(self.faults) - self.num_faults
        lines.append(f"{self.num_faults} faults, {num_checks} looks at what was left, {len(self.misses)} missed")
        return "\n".join(lines)
