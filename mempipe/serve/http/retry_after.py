"""When a refused request may be made again: the Retry-After header of 429 and 503.

That header counts whole seconds. The SDKs of OpenAI and `mempipe.http_client` prefer Retry-After-Ms.
"""

from __future__ import annotations

import math
import random

RETRY_AFTER_S = 1.0
"""The seconds of a refusal whose reason passes at once."""
SOONEST_S = 0.5
"""A client that comes again sooner uses up its attempts while nothing changes."""
MAX_RETRY_AFTER_S = 30.0
"""The SDK of OpenAI ignores a header of more than 60 s."""
ASSUMED_S = 1.0
"""How long a request has its place, as long as none has ended."""
LATEST_S = 1.0
"""How much later than its time a client comes that reads whole seconds."""
_REMEMBERED = 32
"""About how many of the latest answers the mean counts."""


def retry_header(status: int, seconds: float = RETRY_AFTER_S) -> dict[str, str] | None:
    """Returns the headers of a refusal that say when the same request may be made again; None where it would be refused
    again."""
    if status not in (429, 503):
        return None
    return {"Retry-After": str(math.ceil(seconds)), "Retry-After-Ms": str(math.ceil(1000 * seconds))}


def evenly_spread() -> float:
    """Returns random seconds, for refusals by a part that does not know how fast places become free."""
    return random.uniform(SOONEST_S, MAX_RETRY_AFTER_S / 3)


class Returns:
    """The times at which refused requests may come again, as many in a second as places become free.

    Clients with the same time come back together, and most of them are refused again. So each refusal takes the next
    time in a queue. A time that nobody uses passes. A queue longer than MAX_RETRY_AFTER_S begins again at its front,
    and so does one whose clients do not come: then all places have been free for longer than between two of its times.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._num_taken = 0
        self._mean_s = ASSUMED_S
        self._num_freed = 0
        self._last = 0.0
        self._idle_since = 0.0

    def taken(self, now: float) -> None:
        """Notes that a request has a place from second `now` on."""
        if not self._num_taken and now - self._idle_since > LATEST_S + 2 * self._mean_s / self._num_places:
            self._last = 0.0
        self._num_taken += 1

    def freed(self, now: float, seconds: float) -> None:
        """Notes that a request had a place for so long, until second `now`."""
        self._num_taken -= 1
        self._idle_since = now
        self._num_freed += 1
        self._mean_s += (seconds - self._mean_s) / min(self._num_freed, _REMEMBERED)

    def next_s(self, now: float) -> float:
        """Returns after how many seconds the request that is refused at second `now` may come again."""
        until_free = self._mean_s / self._num_places
        front = now + min(SOONEST_S + until_free, MAX_RETRY_AFTER_S)
        self._last = max(self._last + until_free, front)
        if self._last > now + MAX_RETRY_AFTER_S:
            self._last = front
        return self._last - now
