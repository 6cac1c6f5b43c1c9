"""The processes that hold rows: a row whose holder has ended is free again."""

from __future__ import annotations

import functools
import os

import psutil


def this_process() -> str:
    """Returns what tells this process from others, earlier ones with its id too."""
    return _of_this(os.getpid())


@functools.cache
def _of_this(pid: int) -> str:
    return f"{pid}:{_began(pid)}"


def _began(pid: int) -> float:
    """Returns the second at which a process began, counted from the start of the machine: a clock that is set moves
    both. Raises NoSuchProcess."""
    return round(psutil.Process(pid).create_time() - psutil.boot_time(), 2)


def is_gone(holder: str) -> bool:
    """Returns whether the process that `holder` names has ended; an empty one is not known."""
    if holder == this_process():
        return False
    pid, _, began = holder.partition(":")
    try:
        return bool(pid) and str(_began(int(pid))) != began
    except psutil.NoSuchProcess:
        return True
