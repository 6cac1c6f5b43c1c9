"""The agent service as an ASGI application, without Ray: its routes, as docs/serving.md describes them.

- POST /v1/answer answers a question, as JSON or as server-sent events.
- POST /v1/chat/completions and GET /v1/models are those of the OpenAI API; its clients work unchanged.
- /v1/sessions keeps a memory from one question to the next, /v1/documents takes long texts in pieces.
- / is a page to try it, /healthz and /readyz are for whoever watches.

Every refusal has the error format of the OpenAI API. 429 and 503 carry Retry-After and mean "the same request later".
"""

# No postponed annotations: FastAPI reads those of the routes.

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Query, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from mempipe.serve.answering import Answering, Emit, Plan, noted
from mempipe.serve.api import (
    AnswerReply,
    AnswerRequest,
    ChatChoice,
    ChatReply,
    ChatReplyMessage,
    ChatRequest,
    DeletedReply,
    DocumentReply,
    ModelReply,
    ModelsReply,
    Sampling,
    SessionReply,
    SessionsReply,
    StatusReply,
)
from mempipe.serve.config import AgentServiceConfig
from mempipe.serve.errors import ApiError, ErrorReply, error_body, error_reply, refuse, sentence
from mempipe.serve.gate import Gate, retry_header
from mempipe.serve.journal import Journal, Metrics, NoMetrics
from mempipe.serve.keys import Access, KeyRecord
from mempipe.serve.store import Store

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {"page.css": "text/css", "page.js": "text/javascript"}
PING_S = 10.0
"""Seconds of silence after which a stream says that it is alive."""
_FAILED = "the service failed; its log says why"
logger = logging.getLogger(__name__)
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class Health(Protocol):
    """Holds what the service knows about itself."""

    async def __call__(self) -> dict[str, Any]:
        """The state of each part, ready to answer. Raises ApiError 503 when one is not."""
        ...


async def always_ready() -> dict[str, Any]:
    """For a service whose parts are in its own process."""
    return {}


def make_app(
    answering: Answering,
    store: Store,
    config: AgentServiceConfig,
    *,
    keys: list[KeyRecord],
    metrics: Metrics | None = None,
    health: Health = always_ready,
) -> FastAPI:
    """The routes in front of `answering`."""
    counts = metrics or NoMetrics()
    # The documentation page would be fetched from elsewhere; /openapi.json says the same.
    app = FastAPI(title="mempipe agent", docs_url=None, redoc_url=None)
    app.add_middleware(
        Gate,
        max_body_bytes=config.max_body_bytes,
        max_in_flight=config.max_in_flight,
        timeout_s=config.timeout_s + 30,  # answers have a limit of their own, which says more
        refuse=refuse,
    )
    app.add_middleware(Access, keys=keys, per_minute=config.requests_per_minute, at_once=config.requests_at_once)
    app.add_middleware(Journal, metrics=counts)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _broken)
    bearer = [Security(HTTPBearer(auto_error=False, description="An API key; `mempipe key NAME` makes one."))]

    async def started(asked: AnswerRequest, request: Request, history: str | None = None) -> "_Answer":
        """The request's plan, with its session claimed and its document read. Raises ApiError."""
        owner: str = request.state.owner
        if asked.session is not None and history is not None:
            raise ApiError(400, "give a session or earlier messages, not both", param="session")
        text = asked.text or ""
        if asked.document is not None:
            text = await store.text(asked.document, owner)
        if asked.session is None:
            return _Answer(await answering.plan(asked, text=text, memory=history), request.state.request_id)
        session = await store.claim(asked.session, owner, for_s=config.timeout_s + 30)
        try:
            plan = await answering.plan(asked, text=text, memory=session.memory)
        except BaseException:
            await asyncio.shield(store.release(session.id, None))
            raise
        return _Answer(plan, request.state.request_id, session.id)

    async def run(job: _Answer, emit: Emit) -> AnswerReply:
        """The answer; the job's session is free afterwards, also when there is none."""
        memory = None
        try:
            reply, memory = await answering.answer(job.plan, request_id=job.request_id, session=job.session, emit=emit)
            counts.answered(reply)
            return reply
        finally:
            if job.session is not None:
                await asyncio.shield(store.release(job.session, memory))

    @app.post(
        "/v1/answer", response_model=AnswerReply, responses=ANSWERS | {200: STREAM}, dependencies=bearer, tags=["agent"]
    )
    async def answer(asked: AnswerRequest, request: Request) -> Any:
        """Answers a question with a trace of every turn.

        With `stream` the answer is a stream of events: started, message, search, passages, turn, and at the end
        answer or error.
        """
        job = await started(asked, request)
        if not asked.stream:
            return await run(job, _to_nobody)
        return _stream(events(lambda emit: run(job, emit)))

    @app.post(
        "/v1/chat/completions",
        response_model=ChatReply,
        responses=ANSWERS | {200: STREAM},
        dependencies=bearer,
        tags=["openai"],
    )
    async def chat(asked: ChatRequest, request: Request) -> Any:
        """A chat completion; the field `mempipe` holds the trace, in a stream each event."""
        job = await started(_asked_in(asked), request, _history(asked))
        if not asked.stream:
            return _chat_reply(await run(job, _to_nobody))
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        return _stream(_chunks(events(lambda emit: run(job, emit)), answering, job.request_id, with_usage=with_usage))

    @app.get("/v1/models", responses=REFUSALS, dependencies=bearer, tags=["openai"])
    async def models() -> ModelsReply:
        """The served model, its version and its agents."""
        return ModelsReply(data=[_model(answering)])

    @app.get("/v1/models/{model:path}", responses=REFUSALS | _with(404), dependencies=bearer, tags=["openai"])
    async def model(model: str) -> ModelReply:
        if model != answering.name:
            raise ApiError(404, f"this service has {answering.name!r}", param="model", code="model_not_found")
        return _model(answering)

    @app.post("/v1/sessions", responses=REFUSALS | _with(408, 413, 503), dependencies=bearer, tags=["sessions"])
    async def create_session(request: Request) -> SessionReply:
        """Begins a conversation: a memory that questions with this `session` start from and leave behind."""
        return _session(await store.create_session(request.state.owner))

    @app.get("/v1/sessions", responses=REFUSALS, dependencies=bearer, tags=["sessions"])
    async def sessions(request: Request) -> SessionsReply:
        return SessionsReply(data=[_session(each) for each in await store.sessions(request.state.owner)])

    @app.get("/v1/sessions/{session}", responses=REFUSALS | _with(404), dependencies=bearer, tags=["sessions"])
    async def session(session: str, request: Request) -> SessionReply:
        return _session(await store.session(session, request.state.owner))

    @app.delete("/v1/sessions/{session}", responses=REFUSALS | _with(404), dependencies=bearer, tags=["sessions"])
    async def delete_session(session: str, request: Request) -> DeletedReply:
        await store.delete_session(session, request.state.owner)
        return DeletedReply(id=session)

    @app.post("/v1/documents", responses=REFUSALS | _with(408, 413, 503), dependencies=bearer, tags=["documents"])
    async def create_document(request: Request) -> DocumentReply:
        """Begins a document, empty at first."""
        return _document(await store.create_document(request.state.owner))

    @app.post(
        "/v1/documents/{document}/pieces",
        responses=REFUSALS | _with(400, 404, 408, 409, 413, 503),
        dependencies=bearer,
        tags=["documents"],
        openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {}}}}},
    )
    async def append(
        document: str,
        request: Request,
        start: Annotated[int | None, Query(ge=0, le=2**40, description="The byte that the piece begins at.")] = None,
    ) -> DocumentReply:
        """Adds a piece of UTF-8 text, cut anywhere. With `start` a piece that is sent again is not added again."""
        return _document(await store.append(document, request.state.owner, await request.body(), start=start))

    @app.get("/v1/documents/{document}", responses=REFUSALS | _with(404), dependencies=bearer, tags=["documents"])
    async def document(document: str, request: Request) -> DocumentReply:
        return _document(await store.document(document, request.state.owner))

    @app.delete("/v1/documents/{document}", responses=REFUSALS | _with(404), dependencies=bearer, tags=["documents"])
    async def delete_document(document: str, request: Request) -> DeletedReply:
        await store.delete_document(document, request.state.owner)
        return DeletedReply(id=document)

    @app.get("/healthz", tags=["operations"])
    async def healthz() -> StatusReply:
        """Whether this process answers at all."""
        return StatusReply(status="ok")

    @app.get("/readyz", responses=_with(503), tags=["operations"])
    async def readyz() -> StatusReply:
        """Whether a question would be answered: engine and retriever are there."""
        detail = await health()
        return StatusReply(status="ok", model=answering.name, model_version=answering.engine().version, detail=detail)

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers=_PAGE_HEADERS)

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> FileResponse:
        if name not in PAGE_FILES:
            raise ApiError(404, f"there is no {name[:80]!r} here")
        return FileResponse(PAGE / name, media_type=PAGE_FILES[name], headers=_PAGE_HEADERS)

    _document_400_alone(app)
    return app


def _document_400_alone(app: FastAPI) -> None:
    """Takes 422 out of the schema, which FastAPI puts there: what it refuses is answered with 400 here."""
    schema = app.openapi()  # kept by the application
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)


@dataclasses.dataclass(frozen=True, slots=True)
class _Answer:
    """A question on its way."""

    plan: Plan
    request_id: str
    session: str | None = None


Event = tuple[str, dict[str, Any]]


async def events(work: Callable[[Emit], Awaitable[AnswerReply]]) -> AsyncIterator[Event | None]:
    """Yields what `work` tells while it works, then its answer or its error; None after a silence of PING_S.

    The work ends with whoever listens.
    """
    queue: asyncio.Queue[Event | None] = asyncio.Queue()

    async def working() -> None:
        try:
            reply = await work(lambda name, data: queue.put_nowait((name, data)))
            queue.put_nowait(("answer", reply.model_dump()))
        except ApiError as error:
            queue.put_nowait(("error", error_body(error)))
        except Exception:
            logger.exception("a question failed")
            queue.put_nowait(("error", error_body(ApiError(500, _FAILED))))
        finally:
            queue.put_nowait(None)

    task = asyncio.create_task(working())
    try:
        while True:
            try:
                async with asyncio.timeout(PING_S):
                    event = await queue.get()
            except TimeoutError:
                yield None
                continue
            if event is None:
                return
            yield event
    finally:
        task.cancel()
        await asyncio.wait({task})


def _stream(source: AsyncIterator[Event | None]) -> StreamingResponse:
    """Server-sent events. A chat's have no names, as clients of the OpenAI API expect."""

    async def lines() -> AsyncIterator[str]:
        async for event in source:
            if event is None:
                yield ": working\n\n"
            else:
                name, data = event
                text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
                yield (f"event: {name}\n" if name else "") + f"data: {text}\n\n"

    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)


async def _chunks(
    source: AsyncIterator[Event | None], answering: Answering, request_id: str, *, with_usage: bool
) -> AsyncIterator[Any]:
    """The events of an answer as chunks of a chat completion; the answer's text is the only content."""
    version = answering.engine().version
    head = {"id": request_id, "object": "chat.completion.chunk", "created": 0, "model": answering.name}

    def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return "", {**head, "system_fingerprint": version, "choices": [choice], **more}

    async for event in source:
        if event is None:
            yield None
            continue
        name, data = event
        if name == "started":
            version = data["model_version"]
            yield chunk({"role": "assistant", "content": ""}, mempipe={"event": name, **data})
        elif name == "answer":
            reply = AnswerReply.model_validate(data)
            head["created"] = reply.created
            yield chunk({"content": reply.answer or ""})
            yield chunk({}, _finish_reason(reply), mempipe={"event": name, **data})
            if with_usage:
                yield "", {**head, "system_fingerprint": version, "choices": [], "usage": data["usage"]}
        elif name == "error":
            yield "", data
            return
        else:
            yield chunk({}, mempipe={"event": name, **data})
    yield "", "[DONE]"


def _asked_in(chat: ChatRequest) -> AnswerRequest:
    """The last message of a chat as a request for an answer."""
    sampling = Sampling(temperature=chat.temperature, top_p=chat.top_p)
    question = chat.messages[-1].content
    return AnswerRequest(question=question, model=chat.model, sampling=sampling, **dict(chat.mempipe))


def _history(chat: ChatRequest) -> str | None:
    """Returns what was said before, as a memory; None where nothing was."""
    memory, question = "", ""
    for message in chat.messages[:-1]:
        if message.role == "user":
            memory, question = noted(memory, question, None) if question else memory, message.content
        else:
            memory, question = noted(memory, question, message.content), ""
    return (noted(memory, question, None) if question else memory) or None


def _chat_reply(reply: AnswerReply) -> ChatReply:
    choice = ChatChoice(message=ChatReplyMessage(content=reply.answer or ""), finish_reason=_finish_reason(reply))
    return ChatReply(
        id=reply.id,
        created=reply.created,
        model=reply.model,
        system_fingerprint=reply.model_version,
        choices=[choice],
        usage=reply.usage,
        mempipe=reply,
    )


def _finish_reason(reply: AnswerReply) -> Any:
    return "length" if reply.end_reason in ("length", "max_turns", "context_limit") else "stop"


def _model(answering: Answering) -> ModelReply:
    version = answering.engine().version
    return ModelReply(id=answering.name, created=0, version=version, agents=list(answering.agents))


def _session(session: Any) -> SessionReply:
    return SessionReply(**dataclasses.asdict(session))


def _document(document: Any) -> DocumentReply:
    return DocumentReply(**dataclasses.asdict(document))


def _to_nobody(name: str, data: dict[str, Any]) -> None:
    pass


async def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error_reply(error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problems = error.errors()[:3]
    message = "; ".join(sentence(each["loc"][1:], each) for each in problems)
    return error_reply(ApiError(400, message, param=".".join(map(str, problems[0]["loc"][1:])) or None))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return refuse(error.status_code, str(error.detail))


async def _broken(request: Request, error: Exception) -> JSONResponse:
    return refuse(500, _FAILED)


_MEANINGS = {
    400: "A field is missing, unknown, of another type or beyond a limit, or the body cannot be read.",
    401: "The API key is missing or wrong.",
    403: "There are no API keys, and the caller is on another machine.",
    404: "There is no such model, session or document.",
    408: "The body did not arrive in time.",
    409: "The session works on another question, or a piece begins at another byte.",
    413: "The body or the document is too large.",
    429: "The key asks too often or too much at once.",
    503: "Too many requests are under way, or engine or retriever cannot answer now; ask again later.",
}


def _with(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The documentation of these refusals."""
    retry = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
    return {
        status: {"model": ErrorReply, "description": _MEANINGS[status]}
        | ({"headers": retry} if retry_header(status) else {})
        for status in statuses
    }


REFUSALS = _with(400, 401, 403, 429)
ANSWERS = REFUSALS | _with(404, 408, 409, 413, 503)
STREAM: dict[str, Any] = {
    "description": "The answer, or a stream of events.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}
