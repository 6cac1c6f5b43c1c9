"""The retrieval service as an ASGI application, without Ray: the routes of the published search servers, with limits.

- POST /retrieve is Search-R1's and MEM1's. Their server fails for `return_scores` false, or mixes documents up when
there are exactly two queries; here it answers documents without scores. An empty query is answered, as there: their
clients post the searches of a whole batch at once, and one trajectory's empty search must not take the others' answers.
- POST /search and /batch_search are MemSearcher's. An empty query is refused with 400, as there.
- All three take a `partition` as well. A document of a partitioned corpus names its own. Fields that nobody knows are
ignored, as there.
- The published servers have no limits. This one has: the OpenAPI schema names them, and requests beyond them are
refused with 422 (413 for a large body, 415 for a compressed one, 408 for a slow one).
- 503 with Retry-After means "the same request later": too many requests in flight, a search that took too long, or one
that failed.
"""

# No postponed annotations: FastAPI reads those of the routes, and they name types that are made with the service's
# limits.

import asyncio
import logging
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, StrictBool
from starlette.exceptions import HTTPException

from mempipe.answers.errors import sentence
from mempipe.data.corpus import join_contents
from mempipe.faults import InfrastructureFault
from mempipe.retrieval.config import ServiceConfig
from mempipe.retrieval.retriever import BatchingRetriever, RetrievalTimeout, Retriever
from mempipe.serve.http.gate import Gate, problem
from mempipe.serve.http.retry_after import retry_header
from mempipe.types import Passage, SearchResult

SNAPSHOT_HEADER = "x-mempipe-snapshot"
MAX_FAILURES = 3
"""Searches that may fail one after the other, timeouts aside, before the service calls itself unhealthy."""
logger = logging.getLogger(__name__)


class RetrievalService:
    """An index with its batcher and their counters. For one event loop."""

    def __init__(self, retriever: Retriever, config: ServiceConfig) -> None:
        self.retriever = retriever
        self.config = config
        self._front = BatchingRetriever(retriever, config)
        self._num_failures = 0

    async def search(self, queries: Sequence[str], *, num_passages: int | None, partition: str) -> list[SearchResult]:
        """Returns one result per query.

        Raises HTTPException 422 for what the index cannot answer, RetrievalTimeout and RetrievalError.
        """
        count = self.config.num_passages if num_passages is None else num_passages
        try:
            results = await asyncio.gather(
                *(self._front.search(text, num_passages=count, partition=partition) for text in queries)
            )
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        except RetrievalTimeout:
            raise  # the load may be to blame, and a fresh start would only add to it
        except InfrastructureFault:
            self._num_failures += 1
            raise
        self._num_failures = 0
        return results

    def check_health(self) -> None:
        """Raises RuntimeError when search after search failed, so that whoever watches starts the service again."""
        if self._num_failures >= MAX_FAILURES:
            raise RuntimeError(f"the last {self._num_failures} searches failed; the log says why")


class Document(BaseModel):
    id: str
    contents: str = Field(description="The title in quotes, a newline, the text.")
    partition: str = Field("", description="Absent in a corpus without partitions.")


class ScoredDocument(BaseModel):
    document: Document
    score: float


class RetrieveAnswer(BaseModel):
    result: list[list[ScoredDocument]] | list[list[Document]]


class Health(BaseModel):
    status: str
    snapshot: str = Field(description="Hash of the index.")
    num_passages: int = Field(description="Passages of the index.")
    max_passages: int
    max_query_chars: int
    max_queries: int


class Problem(BaseModel):
    detail: str


RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "headers": {SNAPSHOT_HEADER: {"description": "Hash of the index that answered.", "schema": {"type": "string"}}}
    },
    400: {"model": Problem, "description": "The body cannot be read, or a query is empty where that is refused."},
    408: {"model": Problem, "description": "The body did not arrive in time."},
    413: {"model": Problem, "description": "The body is too large."},
    415: {"model": Problem, "description": "The body is compressed."},
    422: {
        "model": Problem,
        "description": "A field is missing, of another type or beyond a limit, or the index has no such partition.",
    },
    503: {
        "model": Problem,
        "description": (
            "Too many requests are in flight, or the search failed or took too long; the same request "
            "may be made again."
        ),
        "headers": {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}},
    },
}


def make_app(service: RetrievalService) -> FastAPI:
    """Returns the application that searches with `service`.

    Its routes write their answers as they are and validate none against its model: one may hold 50,000 documents.
    """
    config = service.config
    # The documentation page would be fetched from elsewhere; /openapi.json says the same.
    app = FastAPI(title="mempipe retrieval", docs_url=None, redoc_url=None)
    app.add_middleware(Gate, max_body_bytes=config.max_body_bytes, max_in_flight=config.max_in_flight)
    app.add_exception_handler(RequestValidationError, _refused)
    app.add_exception_handler(InfrastructureFault, _not_now)
    _add_retrieve(app, service)
    _add_searches(app, service)
    _add_operations(app, service)
    return app


def _add_retrieve(app: FastAPI, service: RetrievalService) -> None:
    """Adds the route of Search-R1 and MEM1."""
    config = service.config
    Text = Annotated[str, Field(strict=True, max_length=config.max_query_chars)]
    Count = Annotated[int, Field(strict=True, ge=1, le=config.max_passages)]

    class Retrieve(BaseModel):
        queries: Annotated[list[Text], Field(max_length=config.max_queries)]
        topk: Count | None = Field(None, description=f"null: {config.num_passages}")
        return_scores: StrictBool = False
        partition: str = ""

    @app.post("/retrieve", response_model=RetrieveAnswer, responses=RESPONSES)
    async def retrieve(request: Retrieve) -> JSONResponse:
        results = await service.search(request.queries, num_passages=request.topk, partition=request.partition)
        found = [_scored_documents(result) if request.return_scores else _documents(result) for result in results]
        return _answer({"result": found}, service)


def _add_searches(app: FastAPI, service: RetrievalService) -> None:
    """Adds the routes of MemSearcher."""
    config = service.config
    Text = Annotated[str, Field(strict=True, max_length=config.max_query_chars)]
    Count = Annotated[int, Field(strict=True, ge=1, le=config.max_passages)]

    class Options(BaseModel):
        top_n: Count | None = Field(None, description=f"null: {config.num_passages}")
        return_score: StrictBool = False
        partition: str = ""

    class Search(Options):
        query: Text

    class BatchSearch(Options):
        query: Annotated[list[Text], Field(max_length=config.max_queries)]

    @app.post("/search", response_model=list[Document] | list[list[Document | float]], responses=RESPONSES)
    async def search(request: Search) -> JSONResponse:
        _refuse_empty([request.query])
        (result,) = await service.search([request.query], num_passages=request.top_n, partition=request.partition)
        documents = _documents(result)
        return _answer([documents, _scores(result)] if request.return_score else documents, service)

    @app.post(
        "/batch_search", response_model=list[list[Document]] | list[list[list[Document | float]]], responses=RESPONSES
    )
    async def batch_search(request: BatchSearch) -> JSONResponse:
        _refuse_empty(request.query)
        results = await service.search(request.query, num_passages=request.top_n, partition=request.partition)
        documents, scores = [_documents(result) for result in results], [_scores(result) for result in results]
        return _answer([documents, scores] if request.return_score else documents, service)


def _add_operations(app: FastAPI, service: RetrievalService) -> None:
    """Adds what says how the service is and what it holds."""
    limits = service.config.model_dump(include={"max_passages", "max_query_chars", "max_queries"})

    @app.get("/health", responses={503: RESPONSES[503]})
    async def health() -> Health:
        try:
            service.check_health()
        except RuntimeError as error:
            raise HTTPException(503, str(error), headers=retry_header(503)) from error
        retriever = service.retriever
        return Health(status="ok", snapshot=retriever.snapshot, num_passages=retriever.num_passages, **limits)

    @app.get("/partitions")
    async def partitions() -> list[str]:
        return service.retriever.partitions


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return problem(422, "; ".join(sentence(e["loc"][1:], e) for e in error.errors()[:3]))


async def _not_now(request: Request, error: Exception) -> JSONResponse:
    logger.warning("%s: %s", request.url.path, error)
    return problem(503, str(error))


def _answer(content: object, service: RetrievalService) -> JSONResponse:
    return JSONResponse(content, headers={SNAPSHOT_HEADER: service.retriever.snapshot})


def _refuse_empty(queries: Sequence[str]) -> None:
    if not all(query.strip() for query in queries):
        raise HTTPException(400, "a query is empty; each needs a text")


def _documents(result: SearchResult) -> list[dict[str, str]]:
    return [_document(passage) for passage in result.passages]


def _document(passage: Passage) -> dict[str, str]:
    document = {"id": passage.id, "contents": join_contents(passage.title, passage.text)}
    return document | {"partition": passage.partition} if passage.partition else document


def _scored_documents(result: SearchResult) -> list[dict[str, Any]]:
    return [{"document": _document(passage), "score": passage.score} for passage in result.passages]


def _scores(result: SearchResult) -> list[float]:
    return [passage.score for passage in result.passages]
