"""When a refused request may be made again: the Retry-After header of 429 and 503."""

from __future__ import annotations

import math
import random

RETRY_AFTER_S = 1
"""The seconds of a refusal whose reason passes at once."""
MAX_RETRY_AFTER_S = 30
"""The SDK of OpenAI ignores a header of more than 60 s."""
_REMEMBERED = 32
"""About how many of the latest answers the mean counts."""


def retry_header(status: int, seconds: int = RETRY_AFTER_S) -> dict[str, str] | None:
    """Returns the Retry-After header of an answer with this status; None where it has none."""
    return {"Retry-After": str(seconds)} if status in (429, 503) else None


def evenly_spread() -> int:
    """Returns a random number of seconds, for refusals by a part that does not know how fast places become free."""
    return random.randint(1, MAX_RETRY_AFTER_S // 3)


class Returns:
    """The times at which refused requests may come again, as many in a second as places become free.

    Clients with the same time come back together, and most of them are refused again. So each refusal takes
    the next time in a queue. A time that nobody uses passes. A queue longer than MAX_RETRY_AFTER_S begins again at its
    front. Since the header counts whole seconds, no more come in one than there are places.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._mean_s = 0.0
        self._num_freed = 0
        self._last = 0.0

    def freed(self, seconds: float) -> None:
        """Notes that a request had a place for so long."""
        self._num_freed += 1
        self._mean_s += (seconds - self._mean_s) / min(self._num_freed, _REMEMBERED)

    def next_s(self, now: float) -> int:
        """Returns after how many seconds the request that is refused at second `now` may come again."""
        self._last = max(self._last, now) + max(self._mean_s, 1.0) / self._num_places
        if self._last > now + MAX_RETRY_AFTER_S:
            self._last = now
        return max(RETRY_AFTER_S, math.ceil(self._last - now))
