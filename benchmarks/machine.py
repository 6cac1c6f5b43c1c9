"""What this machine can do at all: the rate of its matrix products and of its memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

SECONDS = 1.0


def product_rate(tokens: int, width: int, inner: int, *, dtype: torch.dtype = torch.float32) -> float:
    """Returns the operations per second of plain products [tokens, width] x [width, inner] with torch's threads: the
    best of several, as other work on the machine takes nothing from what it can do."""
    left, right = torch.rand(tokens, width, dtype=dtype), torch.rand(width, inner, dtype=dtype)
    out = torch.empty(tokens, inner, dtype=dtype)
    return 2 * tokens * width * inner / _least_seconds(lambda: torch.mm(left, right, out=out))


def copy_seconds(num_bytes: int) -> float:
    """Returns the seconds of one copy of so many bytes from memory to memory, the best of several."""
    source = np.ones(num_bytes, dtype=np.uint8)
    target = np.empty_like(source)
    return _least_seconds(lambda: np.copyto(target, source))


def _least_seconds(work: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of the calls that `SECONDS` allow, two at least."""
    work()
    least, until = float("inf"), time.perf_counter() + SECONDS
    while least == float("inf") or time.perf_counter() < until:
        started = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - started)
    return least
