"""An engine as a Ray Serve deployment."""

from __future__ import annotations

from collections.abc import AsyncIterator

import ray

from mempipe.config import RunConfig
from mempipe.direct.messages import GenerateCall
from mempipe.direct.server import Address, DirectServer
from mempipe.engines.config import SamplingConfig
from mempipe.engines.generator import Generator
from mempipe.faults import InfrastructureFault
from mempipe.serve.replicas.own_port import listen_at_node
from mempipe.serve.replicas.prometheus import EngineMetrics
from mempipe.serve.served_run import weights_version
from mempipe.types import Completion


class WrongWeights(InfrastructureFault):
    """The files of the weights were exchanged under a running service."""


class GeneratorReplica:
    """One vLLM engine. Serve starts another one in its place when it dies."""

    async def __init__(self, config: RunConfig, version: str) -> None:
        """Starts the engine. Raises WrongWeights when the files no longer hold the weights of `version`."""
        listen_at_node()
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
        self._metrics = EngineMetrics()
        self._calls = DirectServer(self._generate, GenerateCall, host=ray.util.get_node_ip_address())

    async def version(self) -> str:
        return self._version

    async def lease(self) -> AsyncIterator[Address]:
        """Yields where to sample by direct calls (`mempipe.direct`)."""
        async for address in self._calls.lease():
            yield address

    async def _generate(self, call: GenerateCall) -> Completion:
        """Samples one completion. The engine drops it when the call is cancelled."""
        completion = await self._engine.generate(
            call.token_ids,
            max_tokens=call.max_tokens,
            sampling=SamplingConfig.model_validate(call.sampling),
            stop_token_ids=call.stop_token_ids,
            seed=call.seed,
        )
        self._metrics.count(self._engine.take_load())
        return completion

    async def check_health(self) -> None:
        """Raises when Serve should put a fresh replica in this one's place."""
        self._engine.check_alive()

    async def __del__(self) -> None:
        await self._engine.shutdown()
