"""The gateway as an OpenAI API: for a client in this process, and at a port for programs in other processes."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, NoReturn

import httpx
import uvicorn
from openai import APIStatusError, AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mempipe.agents.program import responses
from mempipe.agents.program.chat_completions import events
from mempipe.agents.program.gateway import AttemptOver, Gateway
from mempipe.agents.program.rendering import Refused
from mempipe.text import replace_surrogates

_AT_LIMIT = "attempt_over"
"""The code of an error that ends the attempt, not the run."""


@asynccontextmanager
async def client_of(gateway: Gateway) -> AsyncIterator[AsyncOpenAI]:
    """Yields a client of the gateway. Nothing listens on a port: requests and replies stay in this process."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(_app(gateway, key="none")), trust_env=False) as http:
        connection: Any = http  # the client takes httpx in all of its versions; the newest are annotated with httpx2
        yield AsyncOpenAI(api_key="none", base_url="http://policy/v1", http_client=connection, max_retries=0)


@asynccontextmanager
async def listening(gateway: Gateway) -> AsyncIterator[tuple[str, str]]:
    """Yields the base URL at which this machine's programs reach the gateway, and the key that they must send."""
    key = secrets.token_urlsafe(24)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        config = uvicorn.Config(_app(gateway, key=key), lifespan="off", log_config=None, access_log=False, ws="none")
        server = _Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1", key
        finally:
            server.should_exit = server.force_exit = True
            await serving


def is_of_limit(error: BaseException | None) -> bool:
    """Returns whether the error, or one that led to it, is the gateway's reply that the attempt is over. Of errors that
    were raised together (asyncio.TaskGroup) all must be: the others could be the program's own.
    """
    while error is not None:
        if isinstance(error, APIStatusError) and error.code == _AT_LIMIT:
            return True
        if isinstance(error, BaseExceptionGroup) and all(map(is_of_limit, error.exceptions)):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the signals of the process are not the server's


def _app(gateway: Gateway, *, key: str) -> Starlette:
    earlier: dict[str, responses.Messages] = {}

    route = partial(_route, gateway, key)

    async def complete(body: Any) -> Response:
        with _refusing():
            request = gateway.read(body)
        completion = await gateway.complete(request)
        if not request.streams:
            return JSONResponse(completion)
        return Response("".join(events(completion, with_usage=request.streams_usage)), media_type="text/event-stream")

    async def respond(body: Any) -> Response:
        with _refusing():
            asked, messages = responses.chat_request(body, earlier, gateway.calls)
            request = gateway.read(asked)
        completion = await gateway.complete(request)
        made = responses.response(completion, body)
        earlier[made["id"]] = [*messages, completion["choices"][0]["message"]]
        if not body.get("stream"):
            return JSONResponse(made)
        return Response("".join(responses.events(made)), media_type="text/event-stream")

    async def search(body: Any) -> Response:
        query = body.get("query") if isinstance(body, dict) else None
        if not isinstance(query, str):
            raise Refused('expected {"query": a text}')
        return JSONResponse({"passages": await gateway.search(query)})

    async def memory(_: None) -> Response:
        return JSONResponse({"memory": gateway.first_memory, "max_tokens": gateway.renderer.budget.memory_tokens})

    async def user(_: None) -> Response:
        return JSONResponse({"user": gateway.user})

    async def models(_: None) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "mempipe"}]})

    async def elsewhere(request: Request) -> Response:
        return _error(
            404,
            f"the gateway has no {request.url.path}; it takes chat.completions.create, responses.create, "
            "models.list, /v1/search, /v1/memory and /v1/user",
        )

    routes = [
        route("/v1/chat/completions", "POST", complete),
        route("/v1/responses", "POST", respond),
        route("/v1/search", "POST", search),
        route("/v1/memory", "GET", memory),
        route("/v1/user", "GET", user),
        route("/v1/models", "GET", models),
        Route("/{path:path}", elsewhere, methods=["GET", "POST", "DELETE"]),
    ]
    return Starlette(routes=routes)


def _route(gateway: Gateway, key: str, path: str, method: str, answer: Callable[[Any], Awaitable[Response]]) -> Route:
    """Returns the route of a path. A request needs the key; what fails in its answer is an error of the API."""

    async def endpoint(request: Request) -> Response:
        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), f"Bearer {key}".encode()):
            return _error(401, "the key is not that of this attempt; it is in OPENAI_API_KEY")
        try:
            body = _body(await request.body()) if method == "POST" else None
            return await _unless_gone(request, answer(body))
        except AttemptOver as over:
            return _error(400, str(over), code=_AT_LIMIT)
        except (Refused, json.JSONDecodeError, UnicodeDecodeError) as refused:
            return _error(400, str(refused))
        except RecursionError:
            return _error(400, "the body is nested too deeply")
        except Exception as error:
            gateway.fail(error)
            return _error(503, "the policy cannot be asked now")

    return Route(path, endpoint, methods=[method])


def _body(data: bytes) -> Any:
    """Returns the body of a request, with U+FFFD for each half of a character: a JavaScript program may cut a text
    inside an emoji, and UTF-8 cannot hold that.
    """
    text = json.dumps(json.loads(data), ensure_ascii=False)
    return json.loads(replace_surrogates(text), parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise Refused(f"the body has the number {name}, which JSON does not have")


@contextmanager
def _refusing() -> Iterator[None]:
    """Refuses a request with a value of another type than its field has."""
    try:
        yield
    except TypeError as error:
        raise Refused(f"the body is not a request: {error}") from error


async def _unless_gone(request: Request, answer: Awaitable[Response]) -> Response:
    """Waits for the answer, and cancels it when the client has given up the request: it would be trained on, although
    the program has never read it.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return answering.result() if answering.done() else Response(status_code=499)
    finally:
        answering.cancel()
        leaving.cancel()


def _error(status: int, message: str, *, code: str | None = None) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "code": code}
    return JSONResponse({"error": error}, status_code=status)
