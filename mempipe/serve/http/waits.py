"""How long a client wants to wait for a place: `Prefer: wait=N` (RFC 7240)."""

from __future__ import annotations

import re
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import Scope

WISHED: ContextVar[float | None] = ContextVar("WISHED", default=None)
"""The seconds of the request that Serve's proxy works on, for its router (`mempipe.serve.routing`)."""
_WAIT = re.compile(r"""(?:^|[,;\s])wait\s*=\s*(["]?)([0-9]{1,6})\1(?:$|[,;\s])""", re.IGNORECASE)


def wished_wait(scope: Scope) -> float | None:
    """Returns the seconds that the client of a request names, None if it names none."""
    match = _WAIT.search(",".join(Headers(scope=scope).getlist("prefer")))
    return float(match[2]) if match else None
