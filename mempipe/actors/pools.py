"""Typed pools in front of the engine and retriever actors that route, retry and give up (promise 8).

Infrastructure faults never reach the policy: Ray restarts a dead actor, and a call that died or failed with it is
repeated until the deadline, on another actor if there is one. Then the call raises `RoleUnavailable`, and the group is
tried again or the run ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from ray.exceptions import ActorDiedError, RayActorError

from mempipe.actors.batched_calls import BatchedClient
from mempipe.actors.handles import Handle
from mempipe.actors.lost import RoleLost, one_line
from mempipe.engines.config import GenerationConfig, SamplingConfig
from mempipe.faults import InfrastructureFault, RoleUnavailable, retry_pauses
from mempipe.retrieval.config import RetrievalConfig
from mempipe.types import Completion, SearchResult

REST_S = 30.0
"""Cool-down: a replica that died or failed gets no calls for this long while another one is available. Longer than the
restart of one actor (4 to 10 s seen on two cores)."""


class Pool:
    """Replicas of one role: each call goes to the one with the fewest calls in flight."""

    def __init__(self, replicas: Sequence[Handle], *, role: str, timeout_s: float) -> None:
        self._lines = [BatchedClient(replica) for replica in replicas]
        self.num_retries = 0
        self._role = role
        self._timeout_s = timeout_s
        self._under_way = [0] * len(self._lines)
        self._rests_until = [0.0] * len(self._lines)
        self._gone = [False] * len(self._lines)

    async def call(self, *arguments: Any) -> Any:
        """Returns the answer of one replica to a request. A replica that died or failed is given time to recover; other
        errors pass through.

        Raises RoleUnavailable after the deadline, and RoleLost as soon as no replica is left that could recover.
        """
        deadline = time.monotonic() + self._timeout_s
        pauses = retry_pauses()
        while True:
            i = min(range(len(self._lines)), key=self._load)
            self._under_way[i] += 1
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0.001)):
                    return await self._lines[i].ask(*arguments)
            except TimeoutError as error:
                raise RoleUnavailable(f"no {self._role} answered within {self._timeout_s:g} s") from error
            except (RayActorError, InfrastructureFault) as error:
                self.num_retries += 1
                self._rests_until[i] = time.monotonic() + REST_S
                if isinstance(error, ActorDiedError):  # Ray does not restart it; one that restarts is "unavailable"
                    self._gone[i] = True
                    if all(self._gone):
                        raise RoleLost(f"every {self._role} died: {one_line(error)}") from error
                pause = next(pauses)
                if time.monotonic() + pause > deadline:
                    raise RoleUnavailable(
                        f"{self._role} failed and did not recover within {self._timeout_s:g} s: {one_line(error)}"
                    ) from error
            finally:
                self._under_way[i] -= 1
            await asyncio.sleep(pause)

    def _load(self, i: int) -> tuple[bool, bool, int]:
        """Returns the key that sorts replicas: few calls first, then those that failed lately, dead ones last."""
        return self._gone[i], self._rests_until[i] > time.monotonic(), self._under_way[i]


class GeneratorPool(Pool):
    """The engines as the agents' `generate` (mempipe.request_seeds.SeededGenerateFn)."""

    def __init__(
        self,
        replicas: Sequence[Handle],
        *,
        config: GenerationConfig,
        sampling: SamplingConfig,
        stop_token_ids: Sequence[int],
    ) -> None:
        super().__init__(replicas, role="generator", timeout_s=config.timeout_s)
        self._sampling = sampling
        self._stop_token_ids = list(stop_token_ids)

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int | None = None) -> Completion:
        return await self.call("generate", token_ids, max_tokens, self._sampling, self._stop_token_ids, seed)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Returns the log-probs of `token_ids[1:]`, each given all ids before it, under the served weights."""
        return await self.call("score", token_ids)


class RetrieverPool(Pool):
    """The retrievers as the agents' `search` (mempipe.agents.protocol.SearchFn)."""

    def __init__(self, replicas: Sequence[Handle], *, config: RetrievalConfig) -> None:
        super().__init__(replicas, role="retriever", timeout_s=config.timeout_s)

    async def search(self, query: str, *, num_passages: int, partition: str) -> SearchResult:
        """Raises LookupError when there is no retriever, besides what `call` raises."""
        if not self._lines:
            raise LookupError(
                "the agent searches, but there is no retriever: set retrieval.index or retrieval.url, and give the "
                "AgentSpec of your own agent searches=True, so that a missing index is refused before the start"
            )
        return await self.call(query, num_passages, partition)
