"""Refusals in the error format of the OpenAI API, and of JSON-RPC where a call of MCP is refused."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from mempipe.answers.errors import ApiError
from mempipe.serve.http.paths import path_of
from mempipe.serve.http.retry_after import RETRY_AFTER_S, retry_header
from mempipe.serve.mcp.errors import is_call, rpc_error

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


class Refusal(JSONResponse):
    """The whole answer of a refused request, with Retry-After where the same request may be made again.

    A 401 names the scheme of the keys, and says that the key is wrong where there was one (RFC 6750).
    """

    def __init__(self, error: ApiError, retry_after_s: float = RETRY_AFTER_S) -> None:
        super().__init__(error_body(error), error.status, retry_header(error.status, retry_after_s))
        self._error = error
        self._retry_after_s = retry_after_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.status_code == 401:
            wrong = ', error="invalid_token"' if "authorization" in Headers(scope=scope) else ""
            self.headers["WWW-Authenticate"] = f'Bearer realm="mempipe"{wrong}'
        if is_call(path_of(scope)):
            retry_after_s = math.ceil(self._retry_after_s) if "retry-after" in self.headers else None
            self.body = self.render(rpc_error(self._error, retry_after_s=retry_after_s))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def refuse(status: int, message: str, retry_after_s: float = RETRY_AFTER_S) -> Refusal:
    """Returns the answer of a refusal that needs one sentence (`mempipe.serve.http.gate.Refuse`)."""
    return Refusal(ApiError(status, message), retry_after_s)


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
