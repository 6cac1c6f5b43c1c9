"""Strangers who trouble a service that they have no key of.

    python -m tools.strangers ATTACK HOST PORT [--number N] [--at-once N] [--seconds S] [--addresses N]

Keeps `--at-once` connections busy from `--addresses` addresses of the loopback network (127.0.1.1, ...), until
`--number` are through or `--seconds` are over, which count from the first connection. Prints a JSON object that counts
how they ended: the status of the first answer, `closed` without one, or `open` at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

NICENESS = 19
"""What the attack itself computes shall not slow the service down on a small machine."""
DRIP_S = 1.0
ANSWER_TIMEOUT_S = 20.0
READ_S = 0.5
"""At the end, what has arrived is still read: this process may not have run for seconds on a busy machine."""
Sends = Iterator[bytes | float]
"""Bytes to send, and seconds to wait."""

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "HEAD", "CONNECT", "mempipe")
PATHS = (
    "/",
    "/v1/answer",
    "/v1/chat/completions",
    "/v1/sessions",
    "/v1/documents/1/pieces",
    "/v1/../v1/models",
    "/mcp",
)
PATHS += ("/docs", "/openapi.json", "/-/routes", "/nowhere", "/%2e%2e/%00", "//v1/answer", "*", "http://x/v1/answer")


def post(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: x", *headers, "", ""]).encode()


def slow_header(draw: random.Random) -> Sends:
    yield b"POST /v1/answer HTTP/1.1\r\nhost: x\r\nx-slow: "
    while True:
        yield DRIP_S
        yield b"x"


def slow_body(draw: random.Random) -> Sends:
    yield post("/v1/answer", "content-length: 100000")
    while True:
        yield b"x"
        yield DRIP_S


def left_open(draw: random.Random) -> Sends:
    yield 3600.0


def kept_alive(draw: random.Random) -> Sends:
    while True:
        yield b"GET /-/healthz HTTP/1.1\r\nhost: x\r\n\r\n"
        yield DRIP_S


def random_bytes(draw: random.Random) -> Sends:
    yield draw.randbytes(draw.randint(1, 4096))


def huge_header(draw: random.Random) -> Sends:
    yield b"GET / HTTP/1.1\r\nhost: x\r\nx: "
    for _ in range(64):
        yield b"y" * 2**16


def trailers(draw: random.Random) -> Sends:
    yield post("/v1/answer", "transfer-encoding: chunked") + b"0\r\n"
    for number in itertools.count():
        yield b"".join(b"x%d: %s\r\n" % (number, b"y" * 50) for _ in range(500))


def pipelined(draw: random.Random) -> Sends:
    for _ in range(1000):
        yield b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" * 500


def web_socket(draw: random.Random) -> Sends:
    key = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="
    yield post("/v1/answer", "connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13", key)


def request(draw: random.Random) -> Sends:
    """Yields one request with a wrong key, a wrong length or nonsense."""
    secret = "".join(draw.choices("0123456789abcdef", k=55))
    body = draw.choice((b"", b"{", b'{"question": "who?"}', draw.randbytes(draw.randint(1, 2000))))
    headers = [f"content-length: {draw.choice((len(body), len(body), len(body) + 5, -1, 10**12))}"]
    headers += draw.choice(([], ["authorization: Basic x"], [f"authorization: Bearer mp-{secret[:12]}-{secret[12:]}"]))
    headers += draw.choice(([], [f"x-request-id: {secret}"], ["expect: 100-continue"], [f"host: {secret}"]))
    first = f"{draw.choice(METHODS)} {draw.choice(PATHS)} HTTP/{draw.choice(('1.1', '1.1', '1.0', '9'))}"
    yield "\r\n".join([first, "host: x", "connection: close", *headers, "", ""]).encode() + body


ATTACKS: dict[str, Callable[[random.Random], Sends]] = {
    "slow-header": slow_header,
    "slow-body": slow_body,
    "left-open": left_open,
    "kept-alive": kept_alive,
    "random-bytes": random_bytes,
    "huge-header": huge_header,
    "trailers": trailers,
    "pipelined": pipelined,
    "web-socket": web_socket,
    "request": request,
}


async def trouble(
    attack: str,
    address: tuple[str, int],
    source: str,
    draw: random.Random,
    outcomes: Counter[str],
    begun: asyncio.Event,
) -> None:
    """Opens a connection, sets `begun`, sends what the attack says, and counts how it ended."""
    outcome, answer = "closed", bytearray()
    try:
        reader, writer = await asyncio.open_connection(*address, local_addr=(source, 0))
    except OSError as error:
        outcomes[type(error).__name__] += 1
        await asyncio.sleep(0.1)
        return
    except asyncio.CancelledError:
        outcomes["unconnected"] += 1
        raise
    finally:
        begun.set()

    async def read() -> None:
        while received := await reader.read(2**16):
            answer.extend(received[: 2**10 - len(answer)])

    reading = asyncio.ensure_future(read())
    try:
        for each in ATTACKS[attack](draw):
            if isinstance(each, bytes):
                writer.write(each)
                await writer.drain()
            else:
                await asyncio.wait({reading}, timeout=each)
            if reading.done():
                break
        await asyncio.wait_for(reading, ANSWER_TIMEOUT_S)
    except TimeoutError:
        outcome = "unanswered"
    except OSError:
        pass
    except asyncio.CancelledError:
        outcome = "open"
        raise
    finally:
        status = re.search(rb"HTTP/1\.[01] ([2-5][0-9]{2})", answer)
        outcomes[status[1].decode() if status else outcome] += 1
        reading.cancel()
        writer.transport.abort()


async def attacked(asked: argparse.Namespace) -> Counter[str]:
    """Keeps so many connections busy until all are through or the time is over."""
    outcomes, numbers = Counter[str](), itertools.count()
    begun, over = asyncio.Event(), asyncio.Event()

    async def one_after_the_other(place: int) -> None:
        of = place % asked.addresses
        source, draw = f"127.0.{1 + of // 250}.{1 + of % 250}", random.Random(place)
        while not over.is_set() and next(numbers) < asked.number:
            await trouble(asked.attack, (asked.host, asked.port), source, draw, outcomes, begun)

    tasks = [asyncio.create_task(one_after_the_other(place)) for place in range(min(asked.at_once, asked.number))]
    await begun.wait()
    await asyncio.wait(tasks, timeout=asked.seconds)
    over.set()
    _, busy = await asyncio.wait(tasks, timeout=READ_S)
    for task in busy:
        task.cancel()
    await asyncio.wait(tasks)
    return outcomes


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("attack", choices=ATTACKS)
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--number", type=int, default=10**9)
    parser.add_argument("--at-once", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--addresses", type=int, default=1)
    os.nice(NICENESS)
    print(json.dumps(asyncio.run(attacked(parser.parse_args(argv)))))


if __name__ == "__main__":
    main()
