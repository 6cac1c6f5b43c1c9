"""The ways in which clients ask an agent service, each with what tells whether its reply is whole."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

TIMEOUT_S = 120.0


class NotAnswered(Exception):
    """A request was refused or lost; the text is its status, or the kind of the error."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A reply of /v1/answer, or one that holds as much."""

    start: str
    """The memory that the agent started from."""
    body: dict[str, Any]


@dataclass
class Asking:
    """Asks one question in one of the ways of `WAYS`. Each returns its replies and raises NotAnswered."""

    url: str
    text: str
    partition: str
    broken: list[str] = field(default_factory=list)
    """Sentences about replies that contradict each other."""
    told: list[dict[str, Any]] = field(default_factory=list)
    """Results of the tool `ask`, which have no turns."""

    def answer(self) -> Iterator[Reply]:
        yield Reply(start="", body=self._sent("/v1/answer", self._question))

    def stream(self) -> Iterator[Reply]:
        """Compares the turns that the stream told with those of its last event."""
        turns, last = list[Any](), None
        for name, data in self._events({**self._question, "stream": True}):
            if name == "restarted":
                turns.clear()
            elif name == "turn":
                turns.append(data["memory_after"])
            elif name == "error":
                raise NotAnswered(f"event {data['error']['message']}")
            elif name == "answer":
                last = data
        if last is None:
            raise NotAnswered("stream without an answer")
        if turns != [turn["memory_after"] for turn in last["turns"]]:
            self.broken.append(f"a stream told other turns than its answer has: {self.text!r}")
        yield Reply(start="", body=last)

    def session(self) -> Iterator[Reply]:
        """Asks three times; each question starts from the memory that the last one left."""
        session, memory = self._sent("/v1/sessions", None)["id"], ""
        for _ in range(3):
            reply = self._sent("/v1/answer", {**self._question, "session": session})
            yield Reply(start=memory, body=reply)
            memory = reply["memory"]
        kept = self._read(f"/v1/sessions/{session}")
        if (kept["num_questions"], kept["memory"]) != (3, memory):
            self.broken.append(f"a session of three questions has {kept['num_questions']}, or another memory")

    def chain(self) -> Iterator[Reply]:
        """Asks twice; the second response resumes from the first one, which is read again before."""
        options: dict[str, Any] = {"input": self.text, "mempipe": {"partition": self.partition}}
        first = self._sent("/v1/responses", options)
        yield Reply(start="", body=first["mempipe"])
        if self._read(f"/v1/responses/{first['id']}")["output"] != first["output"]:
            self.broken.append(f"a response is stored with another output: {self.text!r}")
        second = self._sent("/v1/responses", {**options, "previous_response_id": first["id"]})
        yield Reply(start=first["mempipe"]["memory"], body=second["mempipe"])

    def twice(self) -> Iterator[Reply]:
        """Sends a POST again with its Idempotency-Key."""
        headers = {"idempotency-key": secrets.token_hex()}
        first, second = (self._post("/v1/answer", self._question, headers=headers) for _ in range(2))
        if first.content != second.content or second.headers.get("idempotent-replayed") != "true":
            self.broken.append(f"a repeated request was executed again: {self.text!r}")
        yield Reply(start="", body=first.json())

    def tool(self) -> Iterator[Reply]:
        """Calls the tool `ask` with the client of the MCP SDK."""
        try:
            self.told.append(anyio.run(self._called))
        except (MCPError, httpx2.HTTPError, ExceptionGroup) as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            raise NotAnswered(f"MCP {error}") from error
        yield from ()

    @property
    def _question(self) -> dict[str, Any]:
        return {"question": self.text, "partition": self.partition}

    async def _called(self) -> dict[str, Any]:
        async with (
            httpx2.AsyncClient(timeout=TIMEOUT_S) as http,
            Client(streamable_http_client(f"{self.url}/mcp", http_client=http)) as client,
        ):
            result = await client.call_tool("ask", self._question)
        if result.is_error:
            raise NotAnswered(f"tool: {result.content}")
        return result.structured_content or {}

    def _events(self, body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        try:
            with httpx.stream("POST", f"{self.url}/v1/answer", json=body, timeout=TIMEOUT_S) as answer:
                if answer.status_code != 200:
                    raise NotAnswered(str(answer.status_code))
                name = ""
                for line in answer.iter_lines():
                    if line.startswith("event: "):
                        name = line.removeprefix("event: ")
                    elif line.startswith("data: "):
                        yield name, json.loads(line.removeprefix("data: "))
        except httpx.TransportError as error:
            raise NotAnswered(type(error).__name__) from error

    def _sent(self, path: str, body: object) -> Any:
        return self._post(path, body).json()

    def _post(self, path: str, body: object, *, headers: dict[str, str] | None = None) -> httpx.Response:
        return self._asked("POST", path, json=body, headers=headers)

    def _read(self, path: str) -> Any:
        return self._asked("GET", path).json()

    def _asked(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            answer = httpx.request(method, f"{self.url}{path}", timeout=TIMEOUT_S, **more)
        except httpx.TransportError as error:
            raise NotAnswered(type(error).__name__) from error
        if answer.status_code != 200:
            raise NotAnswered(str(answer.status_code))
        return answer


WAYS: tuple[Callable[[Asking], Iterator[Reply]], ...] = (
    Asking.answer,
    Asking.stream,
    Asking.session,
    Asking.answer,
    Asking.stream,
    Asking.chain,
    Asking.twice,
    Asking.tool,
)
"""What clients do in turn."""
