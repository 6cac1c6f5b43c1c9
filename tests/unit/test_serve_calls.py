"""How the agent reaches its engines and retrievers, and what stands before it: faults, deadlines, cancelled calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from faulty_server import faulty, says
from faulty_server import hangs as never
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from leases import Deployment
from ray import serve
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import RayServeException
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import Receive, Scope, Send

from mempipe.direct.messages import GenerateCall
from mempipe.direct.server import DirectServer
from mempipe.engines.config import EndpointConfig, SamplingConfig
from mempipe.engines.endpoint import Endpoint
from mempipe.engines.generator import EngineDead
from mempipe.serve.http import front
from mempipe.serve.http.front import Front, middlewares
from mempipe.serve.replicas.agent_replica import engines_of
from mempipe.serve.replicas.generator_replica import GeneratorReplica
from mempipe.serve.requests.calls import EndpointEngine, RoleUnavailable, ServedEngine, call, through_serve
from mempipe.settings import ConfigError
from mempipe.types import Completion


class Response:
    """What a Serve handle gives back: awaitable, and cancelled on its own."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer
        self.cancelled = False

    def __await__(self):
        return self._wait().__await__()

    async def _wait(self) -> Any:
        result = self._answer()
        return await result if asyncio.iscoroutine(result) else result

    def cancel(self) -> None:
        self.cancelled = True


class Method:
    """A handle's method that does one thing after the other."""

    def __init__(self, *answers: Callable[[], Any]) -> None:
        self._answers = list(answers)
        self.responses: list[Response] = []

    def remote(self) -> Response:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        self.responses.append(Response(answer))
        return self.responses[-1]


def raises(error: Exception) -> Callable[[], Any]:
    def answer() -> Any:
        raise error

    return answer


async def hangs() -> None:
    await asyncio.sleep(60)


async def test_a_call_whose_replica_died_is_made_again():
    reset = AioRpcError(StatusCode.INTERNAL, Metadata(), Metadata(), details="RST_STREAM")  # where calls go by gRPC
    method = Method(raises(ActorDiedError()), raises(EngineDead("gone")), raises(reset), lambda: "answer")
    assert await call(partial(through_serve, method), role="generator", timeout_s=10) == "answer"
    assert len(method.responses) == 4


async def test_what_a_replica_raises_comes_without_rays_internals():
    def of_ray(error: Exception) -> Exception:
        return RayTaskError("search", "\x1b[36mray::Replica\x1b[39m (pid=7, ip=10.0.0.7)", error).as_instanceof_cause()

    refusing = Method(raises(of_ray(ValueError("partition 'x' is none of the index's 3"))))
    with pytest.raises(ValueError, match=r"^partition 'x' is none of the index's 3$"):
        await call(partial(through_serve, refusing), role="retriever", timeout_s=1)
    for error in (of_ray(EngineDead("the engine ended")), ActorDiedError()):
        with pytest.raises(RoleUnavailable) as lost:
            await call(partial(through_serve, Method(raises(error))), role="generator", timeout_s=0.2)
        assert "ray::" not in str(lost.value) and "\n" not in str(lost.value)


async def test_after_the_deadline_the_role_is_unavailable():
    method = Method(raises(ActorDiedError()))
    with pytest.raises(RoleUnavailable, match=r"no generator answered within 0.3 s"):
        await call(partial(through_serve, method), role="generator", timeout_s=0.3)
    stuck = Method(hangs)
    with pytest.raises(RoleUnavailable, match="no retriever"):
        await call(partial(through_serve, stuck), role="retriever", timeout_s=0.1)
    assert stuck.responses[0].cancelled


async def test_an_error_of_the_request_passes_at_once():
    method = Method(raises(ValueError("no such partition")))
    with pytest.raises(ValueError, match="no such partition"):
        await call(partial(through_serve, method), role="retriever", timeout_s=10)
    assert len(method.responses) == 1


async def test_a_cancelled_call_is_cancelled_at_its_replica():
    method = Method(hangs)
    task = asyncio.create_task(call(partial(through_serve, method), role="generator", timeout_s=60))
    while not method.responses:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert method.responses[0].cancelled


async def test_an_engine_is_told_what_the_agent_asks_of_it():
    """The arguments pass a real connection between the agent's end and the replica's."""
    asked: list[dict[str, Any]] = []

    class Engine:
        async def generate(self, token_ids: list[int], **arguments: Any) -> Completion:
            asked.append({"token_ids": token_ids, **arguments})
            return Completion(token_ids=[2], logprobs=[-0.5], finish_reason="stop", policy_version=0)

        def take_load(self) -> None:
            pass

    replica: Any = SimpleNamespace(_engine=Engine(), _metrics=SimpleNamespace(count=lambda load: None))
    generate = partial(GeneratorReplica._generate, replica)
    handle: Any = Deployment(DirectServer(generate, GenerateCall, host="127.0.0.1"))
    engine = ServedEngine(handle, version="v1", stop_token_ids=[2], timeout_s=10)
    sampling = SamplingConfig(temperature=0.7, top_p=0.9, top_k=5)
    for seed in (7, None):
        assert (await engine.generate([1], max_tokens=5, sampling=sampling, seed=seed)).token_ids == [2]
    expected = {"token_ids": [1], "max_tokens": 5, "sampling": sampling, "stop_token_ids": [2]}
    assert asked == [expected | {"seed": 7}, expected | {"seed": None}]


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://front")


async def test_a_request_whose_replica_died_is_503_with_retry_after():
    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    async with client_of(Front(nothing)) as client:
        answer = await client.post("/v1/answer")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "ask again" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("has_body", "status"), [(True, 503), (False, 408)])
async def test_a_body_that_went_to_a_dead_replica_is_503_and_one_that_never_came_408(has_body, status):
    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        if has_body:
            while (await receive()).get("more_body"):
                pass
        await JSONResponse("late", 408)(scope, receive, send)

    async with client_of(Front(late)) as client:
        answer = await client.post("/v1/answer", json={"question": "who ?"})
    assert (answer.status_code, answer.headers.get("retry-after")) == (status, "1" if has_body else None)


async def test_serves_own_503_says_when_to_come_back_and_other_answers_stay(monkeypatch):
    monkeypatch.setattr(front, "evenly_spread", lambda: 4)
    for status, headers, expected in (
        (503, {}, "4"),
        (503, {"retry-after": "7"}, "7"),
        (500, {}, None),
        (200, {}, None),
    ):
        app = PlainTextResponse("x", status, headers)
        async with client_of(Front(app)) as client:
            answer = await client.get("/")
        assert (answer.status_code, answer.headers.get("retry-after"), answer.text) == (status, expected, "x")


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", "/v1/answer", "/prefix/v1/models"])
async def test_before_its_application_is_there_the_service_says_that_it_is_starting(monkeypatch, path):
    """In Serve's own words there is no such path, so clients would not come back."""
    monkeypatch.setattr(front, "evenly_spread", lambda: 4)
    of_serve = f"Path '{path}' not found. Ping http://.../-/routes for available routes."
    async with client_of(Front(PlainTextResponse(of_serve, 404))) as client:
        answer = await client.get(path)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "4")
    assert answer.json()["error"]["message"] == "the service is starting or ending; ask again later"
    async with client_of(Front(PlainTextResponse("Not Found", 404))) as client:  # of another application
        answer = await client.get(path)
    assert (answer.status_code, answer.text) == (404, "Not Found")


async def test_serve_finds_the_middleware_by_its_path():
    app: Any = JSONResponse("ok")
    for middleware in reversed(middlewares()):
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    async with client_of(app) as client:
        assert (await client.get("/")).json() == "ok"


async def test_an_endpoint_is_ready_when_its_server_has_the_model():
    served = says({"data": [{"id": "m"}]})
    async with faulty([served, says({"data": []}), never]) as (url, _):
        client = Endpoint(EndpointConfig(url=url, model="m"))
        engine = EndpointEngine(endpoint=client, version="m")
        try:
            assert await engine.check(timeout_s=10) == "m"
            with pytest.raises(RoleUnavailable, match=r"endpoint.model is 'm'"):
                await engine.check(timeout_s=10)
            with pytest.raises(RoleUnavailable, match=r"did not answer within 0.2 s"):
                await engine.check(timeout_s=0.2)
        finally:
            await client.close()


async def test_the_agents_wait_for_engines_that_are_deployed_beside_them(monkeypatch):
    known = iter([False, True])

    def get_app_handle(name: str) -> str:
        if not next(known, False):
            raise RayServeException(f"Application {name!r} does not exist.")
        return f"handle of {name}"

    monkeypatch.setattr(serve, "get_app_handle", get_app_handle)
    assert await engines_of("generator", timeout_s=10) == "handle of generator"
    with pytest.raises(ConfigError, match=r"user_config.generator is 'generatr', and Serve has no such application"):
        await engines_of("generatr", timeout_s=0.1)


async def test_a_request_id_that_serve_cannot_read_is_left_out():
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(dict(scope["headers"]).get(b"x-request-id"))
        await PlainTextResponse("ok")(scope, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=Front(app)), base_url="http://x") as client:
        for value in (b"abc", b"\xff\xfe"):
            assert (await client.get("/", headers={b"x-request-id": value})).status_code == 200
    assert seen == [b"abc", None]
