"""FastAPI dependencies of the routes (`Annotated[..., Depends]`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from fastapi import Depends, Request

from mempipe.answers.answering import Answering
from mempipe.answers.api import CorpusReply
from mempipe.answers.errors import ApiError
from mempipe.serve.requests.answer_jobs import AnswerJobs
from mempipe.serve.state.store import Store


class HealthCheck(Protocol):
    """Asks the parts of a service whether they are ready."""

    async def __call__(self) -> dict[str, Any]:
        """Returns the state of each part, ready to answer. Raises ApiError 503 when one is not."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one service. `make_app` leaves them in `app.state.parts`."""

    answering: Answering
    jobs: AnswerJobs
    store: Store
    health: HealthCheck
    include_reasoning: bool
    corpus: CorpusReply


async def _parts(request: Request) -> Parts:
    return request.app.state.parts


async def _owner(request: Request) -> str:
    return request.state.owner


async def _request_id(request: Request) -> str:
    return request.state.request_id


PartsOfApp = Annotated[Parts, Depends(_parts)]
Owner = Annotated[str, Depends(_owner)]
"""The name of the caller's key (`mempipe.serve.http.keys.Access`)."""
RequestId = Annotated[str, Depends(_request_id)]
"""The id of the request (`mempipe.serve.requests.journal.Journal`)."""


def no_body(instead: str) -> Callable[[Request], Awaitable[None]]:
    """Returns a dependency that refuses a body, which the route would not read; `instead` says what to do."""

    async def refuse(request: Request) -> None:
        if (await request.body()).strip() not in (b"", b"{}", b"null"):
            raise ApiError(400, f"POST {request.url.path} takes no body; {instead}")

    return refuse
