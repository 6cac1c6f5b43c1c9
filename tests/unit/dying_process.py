"""Does work in a process that dies right before one of the changes that it makes to a folder."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

CHANGES = ("rename", "replace", "unlink", "rmdir", "mkdir")
"""The functions of `os` that change a folder's entries."""


def killed_at(work: Callable[[], None], number: int) -> bool:
    """Does the work in a process of its own that dies right before change `number`; whether it came to that."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    done = itertools.count()

    def dying(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            if next(done) == number:
                os._exit(9)
            return change(*args, **kwargs)

        return changed

    for name in CHANGES:
        setattr(os, name, dying(getattr(os, name)))
    try:
        work()
    finally:
        os._exit(0)
