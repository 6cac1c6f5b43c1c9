"""Shows a running job to a person: a bar with a few numbers on a terminal, plain lines elsewhere."""

from __future__ import annotations

import functools
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

from rich.console import Console as AnyConsole
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LINE_EVERY_S = 10.0
STALL_S = 120.0
T = TypeVar("T")
_OPEN: list[Progress] = []
"""The bars that are open now; the last one is at work."""


def say(text: str) -> None:
    """Prints a message about the progress of the job with the time of day, since starting takes minutes."""
    with unread_is_discarded():
        print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


@contextmanager
def unread_is_discarded() -> Iterator[None]:
    """Lets the block write to a pipe whose reader has ended, as `tee` does at Ctrl-C: that and all that follows is
    discarded. An error there would end a job before it has saved its work."""
    try:
        yield
    except BrokenPipeError:
        _discard_unread()


def _discard_unread() -> None:
    """Discards what will be written to those of standard output and error that nobody reads any more."""
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)
    discard_output([number for number, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)])


def discard_output(numbers: Sequence[int]) -> None:
    """Discards what will be written to these file descriptors."""
    if numbers:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in numbers:
            os.dup2(nowhere, number)
        os.close(nowhere)


class Console(AnyConsole):
    """The console of a job, which continues when the reader of its output has ended."""

    def on_broken_pipe(self) -> None:
        _discard_unread()


@contextmanager
def waiting(text: str, *, every_s: float = LINE_EVERY_S) -> Iterator[None]:
    """Prints `text`, and every `every_s` seconds how long the block has taken so far."""
    say(text)
    with _ticking(lambda seconds: say(f"{text}: {seconds:.0f} s so far"), every_s):
        yield


@contextmanager
def _ticking(tick: Callable[[float], None], every_s: float) -> Iterator[None]:
    """Calls `tick` every `every_s` seconds, with the seconds since the beginning of the block."""
    ended, started = threading.Event(), time.monotonic()

    def run() -> None:
        while not ended.wait(every_s):
            tick(time.monotonic() - started)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def watched(items: Iterator[T], *, waited_for: Callable[[], str], after_s: float = STALL_S) -> Generator[T, None, None]:
    """Yields the items. While the next one is late, prints `waited_for()` after `after_s` seconds and then at doubling
    intervals.
    """
    while True:
        came = threading.Event()
        watch = threading.Thread(target=_say_while_late, args=(came, waited_for, after_s), daemon=True)
        watch.start()
        try:
            item = next(items)
        except StopIteration:
            return
        finally:
            came.set()
            watch.join()
        yield item


def _say_while_late(came: threading.Event, waited_for: Callable[[], str], after_s: float) -> None:
    waited = 0.0
    while not came.wait(after_s):
        waited += after_s
        after_s *= 2
        say(f"no result for {waited:.0f} s; waiting for {waited_for()}")


@functools.cache
def _console() -> Console:
    """Returns the console of all bars, so that an inner bar is shown below the outer one and does not overwrite it. It
    prints the names of runs and sets as they are, brackets included."""
    return Console(markup=False, emoji=False)


class Progress:
    """`with Progress("train", total=40) as progress: progress.advance(reward=0.4, em=0.3)`.

    Where no terminal shows a bar it prints a line every few seconds, also while nothing comes.
    """

    def __init__(self, title: str, *, total: int | None, done: int = 0, every_s: float = LINE_EVERY_S) -> None:
        """`total` is None while the number of items is unknown."""
        self._title, self._total, self._done, self._before = title, total, done, done
        self._console = _console()
        self._started = time.monotonic()
        self._numbers = ""
        self._ticks = _ticking(lambda _: self._tick(), every_s)
        self._bar: Bar | None = None
        if sys.stdout.isatty():
            columns = (
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._bar = Bar(
                TextColumn("{task.description:16}", style="bold", markup=False),
                *columns,
                TextColumn("{task.fields[numbers]}"),
                console=self._console,
            )

    def __enter__(self) -> Progress:
        _OPEN.append(self)
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total, completed=self._done, numbers="")
        else:
            self._console.print(self._count())
            self._ticks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _OPEN.remove(self)
        if self._bar:
            self._bar.stop()
        else:
            self._ticks.__exit__(None, None, None)
        if self._total is None and kind is None:
            self._console.print(self._count())

    def advance(self, by: int = 1, /, **numbers: float) -> None:
        self._done += by
        self._numbers = "  ".join(f"{name} {_short(value)}" for name, value in numbers.items())
        if self._bar:
            self._bar.update(self._task, advance=by, numbers=self._numbers)
        elif self._done == self._total:
            self._print()

    def _tick(self) -> None:
        if _OPEN and _OPEN[-1] is self:  # otherwise an inner bar is active and prints its own lines
            self._print()

    def _print(self) -> None:
        self._console.print("  ".join(filter(None, (self._count(), self._time(), self._numbers))))

    def _time(self) -> str:
        """Returns the seconds so far, and an estimate of the seconds left once one item is done."""
        seconds, made = time.monotonic() - self._started, self._done - self._before
        text = f"{seconds:.0f} s"
        if self._total is not None and made > 0 and self._done < self._total:
            text += f", about {seconds / made * (self._total - self._done):.0f} s left"
        return text

    def _count(self) -> str:
        return f"{self._title}: {self._done}" + ("" if self._total is None else f"/{self._total}")

    def note(self, text: str) -> None:
        """Prints a line above the bar, where it stays."""
        (self._bar.console if self._bar else self._console).print(text)


def _short(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.0f}"
