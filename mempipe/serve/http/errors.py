"""Refusals as sentences, and the error format of the OpenAI API."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse

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


class ApiError(Exception):
    """Refuses a request with a status, a sentence, and the field or code that a program may look at."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


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


def sentence(where: Sequence[int | str], error: Any) -> str:
    """Returns the faults of a request, and their places; `error` is one of pydantic's.

    It skips most of the input, which may be large and may hold text that cannot be encoded.
    """
    name = ".".join(map(str, where)) or "the body"
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']}"
    if not where and isinstance(error["input"], bytes):
        return "the body was not sent as JSON; send it with the header content-type: application/json"
    if error["type"] == "string_pattern_mismatch":  # the one pattern of a request is a character that is not blank
        return f"{name} is blank"
    if error["type"] == "missing":
        return f"{name} is missing"
    if error["type"] == "extra_forbidden":
        return f"{name} is not a field"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{name} is {reprlib.repr(error['input'])}: {error['msg']}"


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
