"""The processes that hold rows: a row whose holder has ended is free again."""

from __future__ import annotations

import functools
import os

import psutil


def this_process() -> str:
    """Returns what tells this process from others, earlier ones with its id too."""
    return f"{os.getpid()}:{_created(os.getpid())}"


@functools.cache
def _created(pid: int) -> float:
    """Returns the time at which this process began, as it was at first: a clock that is set moves it."""
    return psutil.Process(pid).create_time()


def is_gone(holder: str) -> bool:
    """Returns whether the process that `holder` names has ended; an empty one is not known."""
    if holder == this_process():
        return False
    pid, _, created = holder.partition(":")
    try:
        return bool(pid) and str(psutil.Process(int(pid)).create_time()) != created
    except psutil.NoSuchProcess:
        return True
