"""How the agent calls engines and retrievers that are Ray Serve deployments.

Infrastructure faults never reach the policy: a call whose replica died is made again, at another one or at the one
that takes its place, until the deadline (promise 8).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from mempipe.engines.config import SamplingConfig
from mempipe.engines.endpoint import Endpoint
from mempipe.faults import InfrastructureFault, RoleUnavailable, retry_pauses
from mempipe.settings import ConfigError
from mempipe.types import Completion

logger = logging.getLogger(__name__)


async def call(method: DeploymentHandle, *arguments: Any, role: str, timeout_s: float) -> Any:
    """Calls `method` (`handle.generate`) at one replica and returns its answer.

    Raises RoleUnavailable after the deadline. Errors of the request itself pass through, as the replica raised them:
    Ray adds traces and addresses, which are for the log alone.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngine:
    """A generator application as `mempipe.answers.answering.Engine`."""

    handle: DeploymentHandle
    version: str
    stop_token_ids: list[int]
    timeout_s: float

    async def check(self, *, timeout_s: float) -> str:
        """Returns the version of the weights that answer. Raises RoleUnavailable."""
        return await call(self.handle.version, role="generator", timeout_s=timeout_s)

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, sampling: SamplingConfig, seed: int | None = None
    ) -> Completion:
        return await call(
            self.handle.generate,
            list(token_ids),
            max_tokens,
            sampling,
            self.stop_token_ids,
            seed,
            role="generator",
            timeout_s=self.timeout_s,
        )

    async def gives_logprobs(self) -> bool:
        return True


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
