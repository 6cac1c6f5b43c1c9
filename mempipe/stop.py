"""A request to end, by SIGTERM, SIGINT or SIGHUP, and the time that the process has left to save its work.

Kubernetes, Slurm and Ray send SIGTERM and kill the process some 30 seconds later. A terminal that closes, as that of a
lost ssh connection, sends SIGHUP. The first signal ends the run at the next point where no work is lost; a second
signal ends it at once. A process that was started with nohup ignores SIGHUP, and continues to do so.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mempipe.progress import discard_output, say

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAVING_SHARE = 0.4
"""Share of the time left that saving and the end of all roles may need: no work is begun that would take it."""


class Interrupted(KeyboardInterrupt):
    """The process was told to end. `exit_code` is what a shell reports for the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name} was received")
        self.exit_code = 128 + number


def is_sigterm(error: BaseException) -> bool:
    """Returns whether Ray's own handler of SIGTERM, which leaves the process, raised the error while Ray connected."""
    return isinstance(error, SystemExit) and error.code == signal.SIGTERM


@contextmanager
def keeps_sigterm_handler() -> Iterator[None]:
    """Puts the handler of SIGTERM back, after the block, that was there before it: Ray replaces it when it connects,
    and what Ray's handler raises inside a call of Ray leaves the process without a word. Python's default stays
    replaced, since it would end nothing that Ray has started."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before not in (signal.SIG_DFL, None) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def children_ignore_sighup() -> Iterator[None]:
    """Lets the processes that are started in the block, and all that these start, ignore SIGHUP. A terminal that closes
    sends it to them as well, and without them no work can be saved."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before if before is not None else signal.SIG_DFL)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Raises Interrupted inside the block at SIGTERM and SIGHUP, where Python would end the process without a message.
    Another handler stays in place."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
    taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    terminals = _terminals()
    received = 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = number
        _leave_closed(terminals)
        raise Interrupted(number)

    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    except Interrupted:
        raise
    except (SystemExit, KeyboardInterrupt) as error:  # a call of Ray raises its own KeyboardInterrupt
        if not received and not is_sigterm(error):
            raise
        raise Interrupted(received or signal.SIGTERM) from error
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _terminals() -> list[int]:
    """Returns which of the standard output and error is a terminal."""
    return [number for number in (1, 2) if os.isatty(number)]


def _leave_closed(terminals: list[int]) -> None:
    """Discards what will be written to a terminal that has closed: every line there would be an OSError, and the one
    that tells of a checkpoint would end the run before the checkpoint is written."""
    discard_output([number for number in terminals if not os.isatty(number)])


class StopRequest:
    """Handles the signals of one run and computes the time that is left."""

    def __init__(self, grace_s: float) -> None:
        """`grace_s` is the time in seconds between the first signal and the kill that follows it."""
        self._grace_s = grace_s
        self._number = 0
        self._terminals = _terminals()
        self._deadline = float("inf")
        self._held_back = 0

    @property
    def requested(self) -> bool:
        return bool(self._number)

    @property
    def seconds_left(self) -> float:
        """Returns the seconds until the process must have ended; infinite before a stop was requested."""
        return max(self._deadline - time.monotonic(), 0.0)

    def leaves_time_for(self, seconds: float) -> bool:
        """Returns whether work of `seconds` may begin, so that its result can still be saved."""
        return seconds <= (1 - SAVING_SHARE) * self.seconds_left

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handles the signals inside the block; an error that they cause there is raised as Interrupted. Python
        delivers signals to the main thread only: in another thread the block runs without a handler.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        numbers = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._take) for number in numbers}
        try:
            yield self
        except BaseException as error:
            if is_sigterm(error):  # while Ray connects
                raise Interrupted(signal.SIGTERM) from error
            if self._number and not isinstance(error, Interrupted):  # Ray raises its own KeyboardInterrupt
                raise Interrupted(self._number) from error
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Keeps the first signal from interrupting the block, which reads `leaves_time_for`; raises it at the end."""
        self._held_back += 1
        try:
            yield
        finally:
            self._held_back -= 1
        if self._number and not self._held_back:
            raise Interrupted(self._number)

    def _take(self, number: int, frame: FrameType | None) -> None:
        again = self.requested
        _leave_closed(self._terminals)
        if not again:
            self._number = number
            self._deadline = time.monotonic() + self._grace_s
            name = signal.Signals(number).name
            say(f"{name}: the run saves its work and ends within {self._grace_s:g} s (grace_s); once more ends it now")
        if again or not self._held_back:
            raise Interrupted(number)
