"""Ray Serve on this machine alone, for as long as a command runs."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ray import serve
from ray.serve.schema import LoggingConfig

from mempipe.actors.cluster import connected
from mempipe.environment import SERVICE
from mempipe.stop import Interrupted

NO_ACCESS_LOG = LoggingConfig(enable_access_log=False)
"""Metrics count the requests; the agent service has one record of each in its journal."""
START_AGAIN = "The service has ended; run the same command to start it again"


@contextmanager
def local_serve(name: str, *, host: str, port: int, finishes: bool = True) -> Iterator[str]:
    """Starts a local Ray cluster with Serve's HTTP proxy until the end of the block; yields its address, with a free
    port where `port` is 0. At the end it `finishes` the requests in flight, those of the application `name`. Variables
    of SERVICE that the user has set stay as they are."""
    port = port or free_port()
    for variable, value in SERVICE.items():
        os.environ.setdefault(variable, value)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with connected("", name=name, metrics=True, if_lost=START_AGAIN):
        serve.start(http_options={"host": host, "port": port}, logging_config=NO_ACCESS_LOG)
        yield f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        if finishes:
            _finish(name)


def free_port() -> int:
    """Returns a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def _finish(application: str) -> None:
    """Lets an application finish its requests, as long as its replicas may take. The others are asked by it alone; Ray
    ends them with all that is left.

    Serve's controller ends with its cluster: `serve.shutdown` would wait for an answer of an actor that it kills, and
    Ray tells the terminal of every answer that is lost so.
    """
    while True:
        with suppress(TimeoutError):  # Serve's client waits for a minute
            serve.delete(application)
            return


def stop_at_signals(wake: threading.Event) -> threading.Event:
    """Returns the event that SIGINT or SIGTERM sets from now on, together with `wake`. The second such signal raises
    Interrupted, also while the requests in flight are finished.
    """
    stop = threading.Event()

    def end(number: int, _: object) -> None:
        if stop.is_set():
            raise Interrupted(number)
        stop.set()
        wake.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    return stop


def exit_now() -> None:
    """Ends this process after its service has ended: Python would unload its modules for seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
