"""Refusals of calls of the Model Context Protocol (MCP), as JSON-RPC errors."""

from __future__ import annotations

from typing import Any

from mempipe.answers.errors import ApiError

PATH = "/mcp"
_INVALID_REQUEST = -32600
_INTERNAL_ERROR = -32603


def is_call(path: str) -> bool:
    """Returns whether a request to `path` is a call of the protocol."""
    return path == PATH or path.startswith(f"{PATH}/")


def rpc_error(error: ApiError, *, retry_after_s: int | None) -> dict[str, Any]:
    """Returns the body of a refusal. Its id is null, as the protocol has it for a request that the server did not read.

    Clients show message and data of an error, but neither its HTTP status nor its headers. So `data` holds the status,
    the seconds after which the same call may be made again, and the code that a program may look at.
    """
    known = {"status": error.status, "retry_after_s": retry_after_s, "code": error.code}
    return {
        "jsonrpc": "2.0",
        "id": None,
        "error": {
            "code": _INVALID_REQUEST if error.status < 500 else _INTERNAL_ERROR,
            "message": str(error),
            "data": {name: value for name, value in known.items() if value is not None},
        },
    }
