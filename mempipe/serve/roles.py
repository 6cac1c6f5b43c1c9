"""Engines and retrievers as Ray Serve deployments, and how the agent calls them.

Infrastructure faults never reach the policy: a call whose replica died is made again, at another one or at the one
that takes its place, until the deadline (promise 8).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from mempipe.config import RunConfig
from mempipe.engines.config import SamplingConfig
from mempipe.engines.endpoint import Endpoint
from mempipe.engines.generator import Generator
from mempipe.faults import InfrastructureFault, retry_pauses
from mempipe.retrieval.config import RetrievalConfig
from mempipe.retrieval.remote import RemoteRetriever
from mempipe.retrieval.retriever import BatchingRetriever, Retriever
from mempipe.serve.served_run import weights_version
from mempipe.types import Completion, SearchResult


class RoleUnavailable(InfrastructureFault):
    """No replica of an engine or a retriever answered within the deadline, restarts included."""


class WrongWeights(InfrastructureFault):
    """The files of the weights were exchanged under a running service."""


class GeneratorReplica:
    """One vLLM engine. Serve starts another one in its place when it dies."""

    async def __init__(self, config: RunConfig, version: str) -> None:
        """`version` is that of the weights to be served. Raises WrongWeights when the files are others by now."""
        if (found := weights_version(config.model.path)) != version:
            raise WrongWeights(
                f"{config.model.path} holds weights {found}, not {version}; deploy them as another model"
            )
        self._version = version
        self._engine = Generator(
            config.model,
            config.generation,
            max_model_len=config.budget.context_tokens,
            seed=config.seed,
            stop_texts=config.agent_spec.stop_texts,
        )
        await self._engine.start()

    async def version(self) -> str:
        return self._version

    async def generate(
        self, token_ids: Sequence[int], max_tokens: int, sampling: SamplingConfig, stop_token_ids: Sequence[int]
    ) -> Completion:
        """One completion. The engine stops to work on it when the call is cancelled."""
        return await self._engine.generate(
            token_ids, max_tokens=max_tokens, sampling=sampling, stop_token_ids=stop_token_ids
        )

    async def check_health(self) -> None:
        """Raises when Serve should put a fresh replica in this one's place."""
        self._engine.check_alive()

    async def __del__(self) -> None:
        await self._engine.shutdown()


class RetrieverReplica:
    """One copy of the index, or one client of a retrieval service; the searches that reach it share batches."""

    def __init__(self, config: RetrievalConfig) -> None:
        if config.url:
            retriever = RemoteRetriever(config.url, config)
        else:
            retriever = Retriever(config.index, mode=config.mode, encoder_path=config.encoder_path)
        self._retriever = BatchingRetriever(retriever, config)

    async def snapshot(self) -> str:
        """The hash of the index."""
        return self._retriever.snapshot

    async def search(self, query: str, num_passages: int, partition: str) -> SearchResult:
        return await self._retriever.search(query, num_passages=num_passages, partition=partition)


async def call(method: DeploymentHandle, *arguments: Any, role: str, timeout_s: float) -> Any:
    """The answer of one replica to a call of `method` (`handle.generate`). Errors of the request itself pass through.

    Raises RoleUnavailable after the deadline.
    """
    deadline, pauses = time.monotonic() + timeout_s, retry_pauses(longest_s=2.0)
    while True:
        response = method.remote(*arguments)
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.001)):
                return await response
        except TimeoutError as error:
            response.cancel()
            raise RoleUnavailable(f"no {role} answered within {timeout_s:g} s") from error
        except asyncio.CancelledError:
            response.cancel()
            raise
        except (RayActorError, DeploymentUnavailableError, InfrastructureFault) as error:
            pause = next(pauses)
            if time.monotonic() + pause > deadline:
                raise RoleUnavailable(f"no {role} answered within {timeout_s:g} s: {error}") from error
        await asyncio.sleep(pause)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngine:
    """A generator application as `mempipe.serve.answering.Engine`."""

    handle: DeploymentHandle
    version: str
    stop_token_ids: list[int]
    timeout_s: float

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, sampling: SamplingConfig) -> Completion:
        return await call(
            self.handle.generate,
            list(token_ids),
            max_tokens,
            sampling,
            self.stop_token_ids,
            role="generator",
            timeout_s=self.timeout_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointEngine:
    """An OpenAI-compatible server as `mempipe.serve.answering.Engine`. Its version is the server's name of the model:
    it tells no more."""

    endpoint: Endpoint
    version: str

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, sampling: SamplingConfig) -> Completion:
        return await self.endpoint.generate(token_ids, max_tokens=max_tokens, sampling=sampling)
