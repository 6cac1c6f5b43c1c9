"""Garbage collections, put off while a process loads large libraries."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
