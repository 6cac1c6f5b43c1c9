"""The agent service as an ASGI application, without Ray: the routes of docs/serving.md (`mempipe.serve.routes`),
and the limits before them.

Every refusal has the error format of the OpenAI API, at /mcp that of JSON-RPC. 429 and 503 carry Retry-After and mean
"the same request later".
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from mempipe.answers.answering import Answering
from mempipe.answers.api import CorpusReply
from mempipe.answers.errors import ApiError, sentence
from mempipe.serve.config import AgentServiceConfig
from mempipe.serve.http.errors import FAILED, Refusal, refuse
from mempipe.serve.http.gate import Gate
from mempipe.serve.http.heads import Heads
from mempipe.serve.http.keys import API, Access, KeyRing
from mempipe.serve.http.paths import path_of
from mempipe.serve.http.probes import SharedHealth
from mempipe.serve.requests.answer_jobs import AnswerJobs
from mempipe.serve.requests.idempotency import Idempotency
from mempipe.serve.requests.journal import Journal, Metrics, NoMetrics
from mempipe.serve.routes import answers, chat, completions, documents, operations, page, responses, sessions
from mempipe.serve.routes import corpus as corpora
from mempipe.serve.routes.documented import leave_out_422
from mempipe.serve.routes.mcp import add_mcp
from mempipe.serve.routes.parts import HealthCheck, Parts
from mempipe.serve.state.store import Store

AGENT = (answers, chat, completions, responses, sessions, documents, corpora)
ROUTERS = [each.router for each in (*AGENT, operations, page)]
_ABSENT = {
    re.compile(r"POST /v1/responses/compact"): "the agent's memory keeps a conversation short, so none is compacted",
    re.compile(r"POST /v1/responses/[^/]+/cancel"): "a response is cancelled by closing its connection",
    re.compile(r"(GET|DELETE) /v1/chat/completions.*|POST /v1/chat/completions/.*"): "no chat completion is stored; "
    "/v1/responses are, unless they are sent with `store: false`",
    re.compile(r"DELETE /v1/models/.*"): "the model is that of `mempipe serve`, and no request deletes it",
}
"""Requests of the OpenAI API that have no meaning here, and why."""
_PIECES = re.compile(r"/v1/documents/[^/]+/pieces")
SLACK_S = 30.0
"""Seconds beyond `timeout_s` that the gate waits: an answer has its own limit, whose refusal says more."""


async def always_ready() -> dict[str, Any]:
    """Returns the health of a service whose parts are all in its own process."""
    return {}


def make_app(
    answering: Answering,
    store: Store,
    config: AgentServiceConfig,
    *,
    keys: KeyRing,
    metrics: Metrics | None = None,
    health: HealthCheck = always_ready,
    searched: CorpusReply | None = None,
) -> FastAPI:
    """Returns the application that answers with `answering`; `searched` describes its corpus. A request passes Heads,
    Journal, Access, Gate, Idempotency, then its route.
    """
    metrics = metrics or NoMetrics()
    jobs = AnswerJobs(answering, store, metrics, claim_s=config.timeout_s + SLACK_S)
    # FastAPI's own documentation page would be fetched from elsewhere; `mempipe.serve.routes.page` has another one.
    app = FastAPI(title="mempipe agent", docs_url=None, redoc_url=None)
    app.state.parts = Parts(
        answering=answering,
        jobs=jobs,
        store=store,
        health=SharedHealth(health),
        include_reasoning=config.include_reasoning,
        corpus=searched or CorpusReply(),
    )
    app.add_middleware(Idempotency, replies=store.replies)
    _add_limits(app, config, keys)
    app.add_middleware(Journal, metrics=metrics)
    app.add_middleware(Heads)
    _add_error_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    add_mcp(app, app.state.parts, max_body_bytes=config.max_body_bytes)
    leave_out_422(app)
    return app


def _add_limits(app: FastAPI, config: AgentServiceConfig, keys: KeyRing) -> None:
    """Adds the gate, and Access before it: the middleware that is added last comes first."""
    app.add_middleware(
        Gate,
        max_body_bytes=config.max_body_bytes,
        max_in_flight=config.max_in_flight,
        timeout_s=config.timeout_s + SLACK_S,
        refuse=refuse,
        takes_bodies=API,
        takes_bytes=_PIECES,
        max_waiting=2 * config.max_in_flight,
        max_wait_s=config.max_wait_s,
        are_several=keys.are_several,
    )
    app.add_middleware(Access, keys=keys, per_minute=config.requests_per_minute, at_once=config.requests_at_once)


def _add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _broken)


async def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return Refusal(error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problems = error.errors()[:3]
    message = "; ".join(sentence(each["loc"][1:], each) for each in problems)
    where = () if problems[0]["type"] == "json_invalid" else problems[0]["loc"][1:]  # of JSON a place, not a field
    return Refusal(ApiError(400, message, param=".".join(map(str, where)) or None))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    url = f"{request.method[:20]} {request.scope['path'][:200]}"  # a URL that begins with // names a host
    absent = next(
        (why for pattern, why in _ABSENT.items() if pattern.fullmatch(f"{request.method} {path_of(request.scope)}")),
        None,
    )
    if absent and error.status_code in (404, 405):
        return Refusal(ApiError(404, f"there is no {url!r}: {absent}", code="unknown_url"))
    if error.status_code == 404:
        message = f"there is no {url!r}; /docs shows what there is"
        return Refusal(ApiError(404, message, code="unknown_url"))
    if error.status_code == 405:
        methods = _methods_of(request)
        answer = refuse(405, f"{url!r} is not possible; this path takes {methods}")
        answer.headers["allow"] = methods
        return answer
    return refuse(error.status_code, str(error.detail))


def _methods_of(request: Request) -> str:
    """Returns the methods that a path takes; the error of Starlette names those of the first route alone."""
    routes = [each for each in request.app.routes if isinstance(each, Route)]
    matching = [each for each in routes if each.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in matching for method in route.methods or ()}))


async def _broken(request: Request, error: Exception) -> JSONResponse:
    return refuse(500, FAILED)
