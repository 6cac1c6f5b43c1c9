"""OpenAPI responses and security schemes shared by the routes: errors, event streams, API keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

from mempipe.openai_api.fields import listed
from mempipe.serve.http.errors import ErrorReply
from mempipe.serve.http.retry_after import retry_header

_MEANINGS = {
    400: "A field is missing, unknown, of another type or beyond a limit, or the body cannot be read.",
    401: "The API key is missing or wrong.",
    403: "There are no API keys, and the caller is on another machine.",
    404: "There is no such model, session, document or response.",
    408: "The body did not arrive in time.",
    409: "The session works on another question, or a piece begins at another byte.",
    413: "The body or the document is too large.",
    415: "The body is compressed.",
    429: "The key asks too often or too much at once, or stores too much.",
    503: "Too many requests are in flight, or engine or retriever cannot answer now; ask again later.",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns the documentation of refusals with these statuses."""
    retry = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
    return {
        status: {"model": ErrorReply, "description": _MEANINGS[status]}
        | ({"headers": retry} if retry_header(status) else {})
        for status in statuses
    }


BEARER = [Security(HTTPBearer(auto_error=False, description="An API key; `mempipe key NAME` makes one."))]
ALWAYS = refusals(400, 401, 403, 429)
"""Refusals of every route that wants a key."""
OF_A_BODY = refusals(408, 413, 415, 503)
"""Refusals of a route that the gate counts (`mempipe.serve.http.gate.Gate`)."""
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or a stream of events.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
IGNORED_HEADER = "x-mempipe-ignored"
LISTED: dict[int | str, dict[str, Any]] = {
    200: {
        "headers": {
            IGNORED_HEADER: {
                "description": "Names of fields that were sent and have no meaning here, separated by commas.",
                "schema": {"type": "string"},
            }
        }
    }
}
IGNORED = {200: STREAM[200] | LISTED[200]}


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """Returns the response header that lists fields without a meaning here; none without such a field."""
    named = ", ".join(listed(names))
    return {IGNORED_HEADER: named} if named else {}


ANSWERS = refusals(404, 409) | OF_A_BODY | STREAM


def leave_out_422(app: FastAPI) -> None:
    """Takes 422 out of the schema, where FastAPI puts it: the service refuses with 400 in its place."""
    schema = app.openapi()  # the application keeps it
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
