"""What this machine can do at all: the rate of its matrix products and of its memory."""

from __future__ import annotations

import time

import numpy as np
import torch

SECONDS = 1.0


def product_rate(tokens: int, width: int, inner: int, *, dtype: torch.dtype = torch.float32) -> float:
    """Returns the operations per second of plain products [tokens, width] x [width, inner] with torch's threads."""
    left, right = torch.rand(tokens, width, dtype=dtype), torch.rand(width, inner, dtype=dtype)
    out = torch.empty(tokens, inner, dtype=dtype)
    torch.mm(left, right, out=out)
    count, started = 0, time.perf_counter()
    while (took := time.perf_counter() - started) < SECONDS:
        torch.mm(left, right, out=out)
        count += 1
    return 2 * tokens * width * inner * count / took


def copy_seconds(num_bytes: int) -> float:
    """Returns the seconds of one copy of so many bytes from memory to memory, the best of several."""
    source = np.ones(num_bytes, dtype=np.uint8)
    target = np.empty_like(source)
    best, until = float("inf"), time.perf_counter() + SECONDS
    while best == float("inf") or time.perf_counter() < until:
        started = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - started)
    return best
