"""How Serve passes requests to the replicas of a deployment, from its HTTP proxy and from handles.

Serve sends a replica `max_ongoing_requests` at a time, and further ones wait where they came from. Two tasks for each
replica then look for a place and wait between two attempts, for half a second in the end, also when a place was found
and another request took it: a queue passed four requests a second, however idle the replica was. With Ray 2.60, 400
requests at once to a service with four places took 40 to 61 s, and with these limits half a second.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

# `ray.serve.request_router` has the parts of Serve's default router, but not the router itself.
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.request_router import PendingRequest, RunningReplica

ROUTER = {"max_backoff_s": 0.025}
"""For every deployment: a waiting request is tried again after 25 ms."""
WITHOUT_REPLICA_S = 10.0
"""Seconds that a request waits for the first replica, or for the one that takes a dead one's place."""


class BoundedRouter(PowerOfTwoChoicesRequestRouter):
    """Serve's own router, which refuses a request with 503 after a while without any replica. Serve would let it wait
    until there is one.

    Serve sends the class to its proxies, pickled by value. One that was started without `mempipe.serve.http.front`
    knows no wishes, and may have no mempipe.
    """

    def initialize_state(self, **settings: Any) -> None:
        """Takes `max_wait_s`, the longest time that a request may ask for (`Prefer: wait=N`)."""
        self._max_wait_s: float = settings["max_wait_s"]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        if self.curr_replicas:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        waits = sys.modules.get("mempipe.serve.http.waits")
        wished = None if waits is None else waits.WISHED.get()
        wait_s = WITHOUT_REPLICA_S if wished is None else min(wished, self._max_wait_s)
        try:
            async with asyncio.timeout(wait_s):
                return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except TimeoutError:
            raise DeploymentUnavailableError(self._deployment_id) from None


def sheds(max_in_flight: int, *, max_wait_s: float) -> dict[str, Any]:
    """Returns the options of a deployment that itself turns away what exceeds `max_in_flight`. What is too much even
    for that, or waits too long for a replica, is refused by Serve with 503 (`mempipe.serve.http.front` says so in the
    API's form)."""
    router = {"request_router_class": f"{__name__}:BoundedRouter", "request_router_kwargs": {"max_wait_s": max_wait_s}}
    return {
        "max_ongoing_requests": 4 * max_in_flight,
        "max_queued_requests": 4 * max_in_flight,
        "request_router_config": ROUTER | router,
    }
