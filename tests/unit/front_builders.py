"""Serve's proxy in front of a service, over real sockets and without Ray."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
import uvicorn.config
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from mempipe.serve.http.front import middlewares

ASKED: list[str] = []


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    ASKED.append(scope["path"])
    await PlainTextResponse((await receive())["body"])(scope, receive, send)


@contextmanager
def served(app: Any, root_path: str = "") -> Iterator[tuple[str, int]]:
    """The application as Serve's proxy runs it: by uvicorn, behind what `middlewares` returns."""
    protocols = dict(uvicorn.config.HTTP_PROTOCOLS)
    for middleware in middlewares():
        app = middleware.cls(app, **middleware.kwargs)
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as bound:
        server = uvicorn.Server(uvicorn.Config(app, root_path=root_path, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        try:
            yield bound.getsockname()
        finally:
            server.force_exit = server.should_exit = True
            thread.join(10)
            uvicorn.config.HTTP_PROTOCOLS.update(protocols)


def head(path: str = "/v1/answer", length: int = 100, **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {length}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()


def status_of(connection: socket.socket) -> int | None:
    """Status of what the server answers; None when it closes the connection instead."""
    connection.settimeout(60)
    try:
        answer = connection.recv(4096)
    except ConnectionResetError:
        return None
    return int(answer.split()[1]) if answer else None


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
