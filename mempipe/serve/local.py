"""Ray Serve on this machine alone, for as long as a command runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ray import serve

from mempipe.actors.launch import connected


@contextmanager
def local_serve(name: str, *, host: str, port: int) -> Iterator[str]:
    """Starts a local Ray cluster with Serve's HTTP proxy until the end of the block; yields its address."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with connected("", name=name):
        try:
            serve.start(http_options={"host": host, "port": port})
            yield f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        finally:
            serve.shutdown()
