"""A real HTTP server on loopback that gives what a test tells it to, faults included."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

Answer = Callable[[dict, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def faulty(answers: Sequence[Answer]) -> AsyncIterator[tuple[str, list[dict]]]:
    """A server that gives one answer after the other, the last one again and again; and what it was asked."""
    asked: list[dict] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            (int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length")), 0
        )
        body = await reader.readexactly(length)
        asked.append({"head": head, **(json.loads(body) if body else {})})
        try:
            await answers[min(len(asked), len(answers)) - 1](asked[-1], writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", asked
    finally:
        server.close()  # its context would wait for the connections, some of which hang on purpose


def says(
    body: object, *, status: int = 200, length: int | None = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """Answers with `body`, of which it claims `length` bytes."""

    async def answer(request: dict, writer: asyncio.StreamWriter) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        size = len(content) if length is None else length
        fields = {"Content-Length": str(size), "Connection": "close", **(headers or {})}
        lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in fields.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + content)
        await writer.drain()

    return answer


async def hangs(request: dict, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def drips(request: dict, writer: asyncio.StreamWriter) -> None:
    """A byte now and then: no single read times out."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not writer.is_closing():
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)


async def resets(request: dict, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
