"""The attacks that the service's tests run: they happen, however little of the machine they get."""

from __future__ import annotations

import argparse
import asyncio

from tools.strangers import attacked


async def refused(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(2**10)
    writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
    writer.close()


async def test_an_attack_whose_time_is_over_at_once_was_one_all_the_same():
    """A process of the lowest priority may run for the first time when its seconds are over."""
    async with await asyncio.start_server(refused, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        asked = argparse.Namespace(
            attack="slow-body", host="127.0.0.1", port=port, number=10**9, at_once=3, seconds=0.0, addresses=1
        )
        assert await attacked(asked) == {"403": 3}
