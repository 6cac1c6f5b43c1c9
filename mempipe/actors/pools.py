"""The engines as Ray actors, and typed pools in front of them that route, retry and give up (promise 8).

Infrastructure faults never reach the policy: Ray restarts a dead actor and its calls are repeated, elsewhere if there is another,
until the deadline; then the call raises `RoleUnavailable`, and the group is tried again or the run ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import ray
from ray.exceptions import RayActorError

from mempipe.actors.handles import Handle
from mempipe.config import GenerationConfig, ModelConfig, RetrievalConfig, SamplingConfig
from mempipe.engines.generation import EngineDead, Generator
from mempipe.engines.retrieval import BatchingRetriever, Retriever
from mempipe.engines.weights import WeightHandle
from mempipe.types import Completion, SearchResult

T = TypeVar("T")

RETRY_PAUSE_S = 0.5
REST_S = 30.0  # for which calls go elsewhere after a replica died, if there is another
Transfer = Literal["mempipe_shm", "nccl"]
"""How weights reach an engine: as bytes through the object store, or from GPU to GPU."""


class RoleUnavailable(RuntimeError):
    """An engine or a retriever did not answer within its deadline, restarts included."""


class WeightStore:
    """Holds a reference to the newest weights, so that an engine that starts late or again catches up on its own."""

    def __init__(self) -> None:
        self._newest: tuple[list[ray.ObjectRef], int] | None = None

    def put(self, weights: list[ray.ObjectRef], policy_version: int) -> None:
        """`weights` is a list of one reference, which keeps Ray from fetching what it points to."""
        self._newest = (weights, policy_version)

    def newest(self) -> tuple[list[ray.ObjectRef], int] | None:
        return self._newest


class GeneratorActor:
    """One vLLM engine. When the engine's process dies the actor exits, so that Ray starts both anew."""

    def __init__(
        self, *, model: ModelConfig, config: GenerationConfig, context_tokens: int, seed: int, store: Handle, transfer: Transfer
    ) -> None:
        self._engine = Generator(model, config, max_model_len=context_tokens, seed=seed, transfer=transfer)
        self._store = store
        self._started = asyncio.Lock()
        self._ready = False

    async def ready(self) -> int:
        """Loads the engine and, after a restart, the newest weights. Returns the policy version."""
        async with self._started:
            if not self._ready:
                await self._engine.start()
                newest = await self._store.newest.remote()
                if newest is not None:
                    (reference,), policy_version = newest
                    await self._engine.load_weights(await reference, policy_version=policy_version)
                self._ready = True
        return self._engine.policy_version

    async def generate(
        self, token_ids: Sequence[int], max_tokens: int, sampling: SamplingConfig, stop_token_ids: Sequence[int]
    ) -> Completion:
        if not self._ready:
            await self.ready()
        try:
            return await self._engine.generate(token_ids, max_tokens=max_tokens, sampling=sampling, stop_token_ids=stop_token_ids)
        except EngineDead:
            ray.actor.exit_actor()
            raise

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of `token_ids[1:]` given what precedes them, under the served weights."""
        return await self._engine.score(token_ids)

    async def shutdown(self) -> None:
        """Ends the engine's processes; the actor itself is killed afterwards."""
        await self._engine.shutdown()

    async def connect(self, init_info: dict[str, Any]) -> None:
        """The rendezvous of a transfer between GPUs."""
        await self._engine.connect(init_info)

    async def load_weights(self, weights: np.ndarray | WeightHandle, policy_version: int) -> float:
        """Takes version `policy_version` between two completions; returns the seconds it took."""
        started = time.perf_counter()
        await self._engine.load_weights(weights, policy_version=policy_version)
        return time.perf_counter() - started


class RetrieverActor:
    """One copy of the index; searches of all trajectories that reach it share batches."""

    def __init__(self, config: RetrievalConfig) -> None:
        self._retriever = BatchingRetriever(Retriever(config.index), config)

    async def ready(self) -> str:
        """The snapshot that is served."""
        return self._retriever.snapshot

    async def search(self, query: str, num_passages: int, partition: str) -> SearchResult:
        return await self._retriever.search(query, num_passages=num_passages, partition=partition)


class Pool:
    """Replicas of one role: each call goes to the one with the fewest calls under way."""

    def __init__(self, replicas: Sequence[Handle], *, role: str, timeout_s: float) -> None:
        self.replicas = list(replicas)
        self.num_retries = 0
        self._role = role
        self._timeout_s = timeout_s
        self._under_way = [0] * len(self.replicas)
        self._rests_until = [0.0] * len(self.replicas)

    async def call(self, submit: Callable[[Handle], Awaitable[T]]) -> T:
        """The answer of one replica. A replica that died is given time to come back; other errors pass through.

        Raises RoleUnavailable after the deadline.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            i = min(range(len(self.replicas)), key=self._load)
            self._under_way[i] += 1
            try:
                return await asyncio.wait_for(_awaited(submit(self.replicas[i])), max(deadline - time.monotonic(), 0.001))
            except TimeoutError as error:
                raise RoleUnavailable(f"no {self._role} answered within {self._timeout_s:g} s") from error
            except RayActorError as error:
                self.num_retries += 1
                self._rests_until[i] = time.monotonic() + REST_S
                if time.monotonic() + RETRY_PAUSE_S > deadline:
                    raise RoleUnavailable(f"{self._role} died and did not come back within {self._timeout_s:g} s: {error}") from error
                await asyncio.sleep(RETRY_PAUSE_S)
            finally:
                self._under_way[i] -= 1

    def _load(self, i: int) -> tuple[bool, int]:
        """Replicas that died lately come last, then those with many calls."""
        return self._rests_until[i] > time.monotonic(), self._under_way[i]


async def _awaited(reference: Awaitable[T]) -> T:
    return await reference


class GeneratorPool(Pool):
    """The engines as the agents' `generate` (mempipe.agents.protocol.GenerateFn)."""

    def __init__(
        self, replicas: Sequence[Handle], *, config: GenerationConfig, sampling: SamplingConfig, stop_token_ids: Sequence[int]
    ) -> None:
        super().__init__(replicas, role="generator", timeout_s=config.timeout_s)
        self._sampling = sampling
        self._stop_token_ids = list(stop_token_ids)

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        return await self.call(lambda replica: replica.generate.remote(token_ids, max_tokens, self._sampling, self._stop_token_ids))


class RetrieverPool(Pool):
    """The retrievers as the agents' `search` (mempipe.agents.protocol.SearchFn)."""

    def __init__(self, replicas: Sequence[Handle], *, config: RetrievalConfig) -> None:
        super().__init__(replicas, role="retriever", timeout_s=config.timeout_s)

    async def search(self, query: str, *, num_passages: int, partition: str) -> SearchResult:
        return await self.call(lambda replica: replica.search.remote(query, num_passages, partition))
