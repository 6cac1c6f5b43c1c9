"""Refusals of a request as sentences."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

TOO_LONG = "context_length_exceeded"
"""The code of the OpenAI API for a question that is too long. Many clients look for it: they tell this fault from
others, shorten what they send, or count the question as failed.
"""


class ApiError(Exception):
    """Refuses a request with a status, a sentence, and the field or code that a program may look at."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


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
