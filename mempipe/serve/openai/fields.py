"""Fields of the OpenAI API that have no meaning here: they are refused by name, or listed."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from mempipe.answers.errors import ApiError

MAX_LISTED = 50
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,80}")


def refuse_unsupported(request: BaseModel, idle: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ApiError 400 for a field of `idle` that asks for what the service cannot do.

    `idle` holds for each such field its values, besides null, that request nothing.
    """
    for name, values in idle.items():
        value = getattr(request, name)
        if value is None or value in values:
            continue
        expected = f"leave it out or send {values[-1]!r}" if values else "leave it out"
        message = f"{name} is {reprlib.repr(value)}, which this service cannot do; {expected}"
        raise ApiError(400, message, param=name, code="unsupported_value" if values else "unsupported_parameter")


def of_messages(field: str, messages: Sequence[BaseModel], unread: Collection[str]) -> list[str]:
    """Returns the names of keys that are sent with the messages in `field` and not read; `unread` are roles or
    types."""
    names = {name for message in messages for name in message.model_extra or {}} | set(unread)
    return [f"{field}.{name}" for name in sorted(names)]


def listed(names: Iterable[str]) -> list[str]:
    """Returns the names that a response header can hold, at most MAX_LISTED."""
    return [name for name in names if _HEADER_NAME.fullmatch(name)][:MAX_LISTED]
