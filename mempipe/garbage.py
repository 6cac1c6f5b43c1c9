"""Garbage collections: put off while a process loads large libraries, and made where memory must be free."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

NUM_TRIES = 1000  # a millisecond apart


@contextmanager
def no_collections() -> Iterator[None]:
    """Puts garbage collections off until the end of the block.

    Imports make objects by the hundred thousand and hardly any garbage, and each collection looks at all objects that
    exist by then: a tenth of the CPU time in which an engine or a learner starts.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect_garbage() -> None:
    """Frees every reference cycle that nothing refers to, if other threads let it within a second.

    While another thread collects, `gc.collect` does nothing and says nothing. That collection began earlier, so it may
    take for needed what has become garbage since. A cycle that is made just before, and is gone, proves a collection.
    """
    for _ in range(NUM_TRIES):
        cycle = _Cycle()
        proof = weakref.ref(cycle)
        del cycle
        gc.collect()
        if proof() is None:
            return
        time.sleep(0.001)


class _Cycle:
    def __init__(self) -> None:
        self.itself = self
