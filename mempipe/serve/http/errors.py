"""Refusals in the error format of the OpenAI API."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse

from mempipe.answers.errors import ApiError
from mempipe.serve.http.gate import retry_header

FAILED = "the service failed; its log says why"
"""Message to a client about a defect of the service."""


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    error: ErrorBody


def error_body(error: ApiError) -> dict[str, Any]:
    """Returns the error as clients of the OpenAI API expect it."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    body = ErrorBody(message=str(error), type=kind, param=error.param, code=error.code)
    return ErrorReply(error=body).model_dump()


def error_reply(error: ApiError) -> JSONResponse:
    """Returns the whole answer, with Retry-After where the same request may be made again."""
    challenge = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    return JSONResponse(error_body(error), error.status, challenge | (retry_header(error.status) or {}))


def refuse(status: int, message: str) -> JSONResponse:
    """Returns the answer of a refusal that needs one sentence (`mempipe.serve.http.gate.Refuse`)."""
    return error_reply(ApiError(status, message))


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
