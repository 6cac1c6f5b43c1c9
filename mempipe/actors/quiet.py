"""Keeps Ray's messages about itself in its log files, so that a run's terminal shows the run only."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from mempipe.actors.handles import start_actor

_NOTES = (
    "so the task will be retried",
    "A worker died or was killed while executing a task",
    "Raylet is terminated",  # with the end of its log; `mempipe.actors.cluster` says so in a sentence
)


def quiet_loggers() -> None:
    """Raises the level of Ray's console loggers. Call before `ray.init`. Errors stay visible: they are raised where
    their result is fetched."""
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    for handler in logging.getLogger("ray.data").handlers:
        # Ray's own console handler only: the logger may have handlers of other libraries.
        if isinstance(handler, logging.StreamHandler) and type(handler).__module__.startswith("ray."):
            handler.setLevel(logging.CRITICAL)


@functools.cache  # once per process
def quiet_retries() -> None:
    """Drops Ray's lines about a dead worker whose task will be retried, and about a dead raylet, from the terminal;
    Ray's log files have them.

    Ray prints these lines for every unfinished group when a stream is closed early; `log_to_driver=False` does not
    cover them. Real losses are reported by mempipe.
    """
    from ray._private import worker

    show = worker.print_to_stdstream  # private: tried with Ray 2.60, whose version is pinned; AttributeError without it

    def show_others(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if lines := [line for line in data["lines"] if not any(note in line for note in _NOTES)]:
            show({**data, "lines": lines}, *args, **kwargs)

    worker.print_to_stdstream = show_others


def take_note_of_pool_arguments() -> None:
    """Triggers, with stderr redirected, Ray's warning about restartable actors with arguments in the object store; it
    does so once per process.

    Otherwise every Ray Data actor pool prints it as an error (ray-project/ray issue 57733), and no setting silences it.
    The actor that causes the note asks for a resource that no node has, so it never starts.
    """
    with _without_stderr():
        ray.kill(start_actor(_NeverPlaced, {"num_cpus": 0, "resources": {"none": 1}, "max_restarts": 1}, ray.put(None)))


class _NeverPlaced:
    def __init__(self, argument: None) -> None: ...


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Redirects the file descriptor of stderr, to which native code writes past `sys.stderr`."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(null)
        os.close(saved)
