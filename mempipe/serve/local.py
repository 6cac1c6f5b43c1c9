"""Ray Serve on this machine alone, for as long as a command runs."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ray import serve
from ray.serve.schema import LoggingConfig

from mempipe.actors.cluster import connected
from mempipe.environment import SERVICE

NO_ACCESS_LOG = LoggingConfig(enable_access_log=False)
"""Metrics count the requests; the agent service has one record of each in its journal."""
START_AGAIN = "The service has ended; run the same command to start it again"


@contextmanager
def local_serve(name: str, *, host: str, port: int, finishes: bool = True) -> Iterator[str]:
    """Starts a local Ray cluster with Serve's HTTP proxy until the end of the block; yields its address, with a free
    port where `port` is 0. At the end it `finishes` the requests in flight. Variables of SERVICE that the user has set
    stay as they are."""
    port = port or free_port()
    for variable, value in SERVICE.items():
        os.environ.setdefault(variable, value)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with connected("", name=name, if_lost=START_AGAIN):
        serve.start(http_options={"host": host, "port": port}, logging_config=NO_ACCESS_LOG)
        yield f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        if finishes:
            _end_applications()


def free_port() -> int:
    """Returns a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def _end_applications() -> None:
    """Lets every application finish its requests, before Ray ends all that is left. What was deployed last asks the
    others, so it ends first.

    Serve's controller ends with its cluster: `serve.shutdown` would wait for an answer of an actor that it kills, and
    Ray tells the terminal of every answer that is lost so.
    """
    for name in reversed(serve.status().applications):
        with suppress(TimeoutError):
            serve.delete(name)
