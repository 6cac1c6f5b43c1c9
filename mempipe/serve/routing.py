"""How Serve passes requests to the replicas of a deployment, from its HTTP proxy and from handles.

Serve sends a replica `max_ongoing_requests` at a time, and further ones wait where they came from. Two tasks for each
replica then look for a place and wait between two attempts, for half a second in the end, also when a place was found
and another request took it: a queue passed four requests a second, however idle the replica was. With Ray 2.60, 400
requests at once to a service with four places took 40 to 61 s, and with these limits half a second.
"""

from __future__ import annotations

from typing import Any

ROUTER = {"max_backoff_s": 0.025}
"""For every deployment: a waiting request is tried again after 25 ms."""


def sheds(max_in_flight: int) -> dict[str, Any]:
    """Returns the options of a deployment that itself turns away what exceeds `max_in_flight`. What is too much even
    for that is refused by Serve with 503 (`mempipe.serve.http.front` says so in the API's form)."""
    return {"max_ongoing_requests": 4 * max_in_flight, "max_queued_requests": 4 * max_in_flight}
