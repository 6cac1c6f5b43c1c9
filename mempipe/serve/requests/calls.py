"""How the agent calls engines and retrievers that are Ray Serve deployments.

Infrastructure faults never reach the policy: a call whose replica died is made again, at another one or at the one
that takes its place, until the deadline (promise 8).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from mempipe.direct.client import DirectClient
from mempipe.direct.messages import GenerateCall, SearchCall
from mempipe.engines.config import SamplingConfig
from mempipe.engines.endpoint import Endpoint
from mempipe.faults import InfrastructureFault, RoleUnavailable, retry_pauses
from mempipe.settings import ConfigError
from mempipe.types import Completion, SearchResult

T = TypeVar("T")
logger = logging.getLogger(__name__)


async def call(ask: Callable[[], Awaitable[T]], *, role: str, timeout_s: float) -> T:
    """Asks one replica, and again while replicas die or fail, and returns the answer.

    Raises RoleUnavailable after the deadline. Errors of the request itself pass through, as the replica raised them:
    Ray adds traces and addresses, which are for the log alone.
    """
    deadline, pauses = time.monotonic() + timeout_s, retry_pauses(longest_s=2.0)
    while True:
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.001)):
                return await ask()
        except TimeoutError as error:
            raise RoleUnavailable(f"no {role} answered within {timeout_s:g} s") from error
        except (RayActorError, DeploymentUnavailableError, grpc.RpcError) as error:
            fault = type(error).__name__
            logger.warning("a %s did not answer: %s", role, error)
        except (RayTaskError, InfrastructureFault) as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if not isinstance(cause, InfrastructureFault):
                raise cause from None
            fault = str(cause)
        pause = next(pauses)
        if time.monotonic() + pause > deadline:
            raise RoleUnavailable(f"no {role} answered within {timeout_s:g} s: {fault}")
        await asyncio.sleep(pause)


async def through_serve(method: DeploymentHandle) -> Any:
    """Calls a handle's method, and cancels the call at its replica when this one is cancelled."""
    response = method.remote()
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise


class ServedEngine:
    """A generator application as `mempipe.answers.answering.Engine`."""

    def __init__(
        self, handle: DeploymentHandle, *, version: str, stop_token_ids: Sequence[int], timeout_s: float
    ) -> None:
        self.version = version
        self._handle = handle
        self._calls = DirectClient(handle, Completion)
        self._stop_token_ids = list(stop_token_ids)
        self._timeout_s = timeout_s

    async def check(self, *, timeout_s: float) -> str:
        """Returns the version of the weights that answer. Raises RoleUnavailable."""
        return await call(partial(through_serve, self._handle.version), role="generator", timeout_s=timeout_s)

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, sampling: SamplingConfig, seed: int | None = None
    ) -> Completion:
        asked = GenerateCall(list(token_ids), max_tokens, sampling.model_dump(), self._stop_token_ids, seed)
        return await call(partial(self._calls.call, asked), role="generator", timeout_s=self._timeout_s)

    async def gives_logprobs(self) -> bool:
        return True

    async def close(self) -> None:
        """Gives its places at the replicas back, before the event loop of the calls ends."""
        await self._calls.close()


class ServedRetriever:
    """A retriever deployment as the agents' `search`."""

    def __init__(self, handle: DeploymentHandle, *, timeout_s: float) -> None:
        self._handle = handle
        self._calls = DirectClient(handle, SearchResult)
        self._timeout_s = timeout_s

    async def snapshot(self, *, timeout_s: float) -> str:
        """Returns the hash of the index that answers. Raises RoleUnavailable."""
        return await call(partial(through_serve, self._handle.snapshot), role="retriever", timeout_s=timeout_s)

    async def search(self, query: str, *, num_passages: int, partition: str) -> SearchResult:
        asked = SearchCall(query, num_passages, partition)
        return await call(partial(self._calls.call, asked), role="retriever", timeout_s=self._timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointEngine:
    """An OpenAI-compatible server as `mempipe.answers.answering.Engine`; its version is the name of its model."""

    endpoint: Endpoint
    version: str

    async def check(self, *, timeout_s: float) -> str:
        """Returns the name of the model. Raises RoleUnavailable when its server does not answer or has another one."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.endpoint.check()
        except TimeoutError as error:
            raise RoleUnavailable(f"the endpoint did not answer within {timeout_s:g} s") from error
        except ConfigError as error:
            raise RoleUnavailable(str(error)) from error
        return self.version

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, sampling: SamplingConfig, seed: int | None = None
    ) -> Completion:
        return await self.endpoint.generate(token_ids, max_tokens=max_tokens, sampling=sampling, seed=seed)

    async def gives_logprobs(self) -> bool:
        return await self.endpoint.gives_logprobs()
