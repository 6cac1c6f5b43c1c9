"""The engine and the retriever of one agent, inside this process, for as long as the agent is loaded."""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mempipe.agents.protocol import SearchFn, Tokenizer
from mempipe.answers.answering import Engine
from mempipe.config import RunConfig
from mempipe.engines.config import EndpointConfig, SamplingConfig
from mempipe.environment import QUIET_ENGINE, VLLM_LOG_LEVEL
from mempipe.rollout import find_nothing
from mempipe.types import Completion

if TYPE_CHECKING:
    from mempipe.engines.generator import Generator
    from mempipe.retrieval.retriever import Searcher


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRoles:
    """All that plays an agent. It is used from the event loop that started it."""

    tokenizer: Tokenizer
    engine: Engine
    search: SearchFn


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngine:
    """An engine of this process as `mempipe.answers.answering.Engine`."""

    generator: Generator
    version: str
    stop_token_ids: list[int]

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, sampling: SamplingConfig, seed: int | None = None
    ) -> Completion:
        return await self.generator.generate(
            token_ids, max_tokens=max_tokens, sampling=sampling, stop_token_ids=self.stop_token_ids, seed=seed
        )

    async def gives_logprobs(self) -> bool:
        return True


@asynccontextmanager
async def started(config: RunConfig, endpoint: EndpointConfig | None) -> AsyncIterator[AgentRoles]:
    """Starts what the agent of `config` needs: an engine, or the client of `endpoint`, and a retriever if it searches.
    Ends both at the end of the block.

    The index is opened first, because that takes less time than an engine. Raises ConfigError for an index, a service
    or an endpoint that cannot be used.
    """
    from mempipe.engines.tokenizer import load_tokenizer

    async with AsyncExitStack() as stack:
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model.path)
        search = await stack.enter_async_context(_retriever(config)) if config.agent_spec.searches else find_nothing
        make = _engine(config, tokenizer) if endpoint is None else _endpoint(config, endpoint, tokenizer)
        yield AgentRoles(tokenizer=tokenizer, engine=await stack.enter_async_context(make), search=search)


@asynccontextmanager
async def _retriever(config: RunConfig) -> AsyncIterator[SearchFn]:
    from mempipe.retrieval.retriever import BatchingRetriever

    with ExitStack() as closing:
        retriever = BatchingRetriever(await asyncio.to_thread(_opened, config, closing), config.retrieval)
        closing.callback(retriever.close)
        yield retriever.search


def _opened(config: RunConfig, closing: ExitStack) -> Searcher:
    """Opens the index of `config`, or connects to its retrieval service until `closing` ends."""
    retrieval = config.retrieval
    if retrieval.url:
        from mempipe.retrieval.remote import RemoteRetriever

        client = RemoteRetriever(retrieval.url, retrieval)
        closing.callback(client.close)
        return client
    from mempipe.retrieval.retriever import Retriever

    return Retriever(retrieval.index, mode=retrieval.mode, encoder_path=retrieval.encoder_path)


@asynccontextmanager
async def _engine(config: RunConfig, tokenizer: Tokenizer) -> AsyncIterator[Engine]:
    for name, value in QUIET_ENGINE.items():  # before torch and vLLM are imported
        os.environ.setdefault(name, value)
    # vLLM reads the variable when it makes an engine, and warns that it has no Triton when it is imported.
    logging.getLogger("vllm").setLevel(os.environ[VLLM_LOG_LEVEL].upper())
    from mempipe.engines.generator import Generator
    from mempipe.serve.served_run import weights_version

    generator = Generator(
        config.model,
        config.generation,
        max_model_len=config.budget.context_tokens,
        seed=config.seed,
        stop_texts=config.agent_spec.stop_texts,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # vLLM's own calls of torch
        await generator.start()
    try:
        yield LocalEngine(
            generator=generator,
            version=weights_version(config.model.path),
            stop_token_ids=sorted(tokenizer.stop_token_ids),
        )
    finally:
        await generator.shutdown()


@asynccontextmanager
async def _endpoint(config: RunConfig, endpoint: EndpointConfig, tokenizer: Tokenizer) -> AsyncIterator[Engine]:
    from mempipe.engines.endpoint import Endpoint
    from mempipe.serve.requests.calls import EndpointEngine

    client = Endpoint(endpoint, tokenizer=tokenizer, stop_texts=config.agent_spec.stop_texts)
    try:
        await client.check(context_tokens=config.budget.context_tokens)
        yield EndpointEngine(endpoint=client, version=endpoint.model)
    finally:
        await client.close()
