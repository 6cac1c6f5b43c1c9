"""Measures the memory of the machine that each role holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

import psutil
import ray
from ray.exceptions import RayError

from mempipe.actors.handles import Handle
from mempipe.engines.gpus import GIB

MEASURING_S = 60.0


def held_gib(*, children: bool = True) -> float:
    """Returns the GiB that this process, and those that it started, hold alone.

    Pages that several processes share, such as the object store's, do not count.
    """
    process = psutil.Process()
    processes = [process, *process.children(recursive=True)] if children else [process]
    return sum(map(_unshared_bytes, processes)) / GIB


def memory_metrics(roles: Mapping[str, Iterable[Handle]]) -> dict[str, float]:
    """Returns the GiB of the largest actor of every role, and of the calling process. A role without an answer is
    skipped: a missing measurement must not end a run."""
    asked = {
        role: [actor.__ray_call__.remote(lambda _: held_gib()) for actor in actors] for role, actors in roles.items()
    }
    held = {"run": held_gib(children=False)}  # a local cluster's processes are children of the run's own
    for role, answers in asked.items():
        with suppress(RayError):
            held |= {role: max(ray.get(answers, timeout=MEASURING_S))} if answers else {}
    return {f"memory/{role}_gib": gib for role, gib in held.items()}


def _unshared_bytes(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().uss
    except psutil.Error:  # it has just ended, or this user has no permission
        return 0
