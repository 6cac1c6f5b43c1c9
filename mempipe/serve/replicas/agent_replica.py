"""The agents and their routes as a Ray Serve deployment. It imports neither an engine nor an index, and starts fast."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from mempipe.answers.answering import Answering, nowhere
from mempipe.answers.errors import ApiError
from mempipe.engines.endpoint import Endpoint
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.faults import InfrastructureFault, retry_pauses
from mempipe.serve.agent_app import make_app
from mempipe.serve.config import AgentServiceConfig
from mempipe.serve.http.keys import WatchedKeys
from mempipe.serve.replicas.own_port import listen_at_node
from mempipe.serve.replicas.prometheus import PrometheusMetrics
from mempipe.serve.replicas.traces import SampledTraces
from mempipe.serve.requests import journal
from mempipe.serve.requests.calls import EndpointEngine, ServedEngine, ServedRetriever
from mempipe.serve.served_run import resolve, searched_by
from mempipe.serve.state.store import Store
from mempipe.settings import ConfigError
from mempipe.types import SearchResult

READY_TIMEOUT_S = 5.0
ENGINES_TIMEOUT_S = 60.0
logger = logging.getLogger(__name__)


class AgentReplica:
    """The routes and the agents of the service. It holds neither weights nor index."""

    def __init__(self, config: AgentServiceConfig, retriever: DeploymentHandle | None) -> None:
        self._traces: SampledTraces | None = None
        listen_at_node()
        _log_as_serve_does()
        self._config = config
        self._served = served = resolve(config)
        timeout_s = served.main.retrieval.timeout_s
        self._retriever = ServedRetriever(retriever, timeout_s=timeout_s) if retriever is not None else None
        self._tokenizer = load_tokenizer(served.main.model.path)
        self._engine: ServedEngine | EndpointEngine | None = None
        if config.trace_share:
            self._traces = SampledTraces(served, share=config.trace_share, decode=self._tokenizer.decode)
        self._searched = searched_by(served)
        self._keys = WatchedKeys(config.keys)
        self._answering = Answering(
            served.name,
            served.agents,
            tokenizer=self._tokenizer,
            engine=self._current_engine,
            search=self._search,
            sampling=served.sampling,
            max_turns=config.max_turns,
            timeout_s=config.timeout_s,
            partition=self._searched.partition,
            record=self._traces.record if self._traces else nowhere,
            shows_user_errors=not self._keys.are_needed,  # only the machine's own users ask it then
        )
        self._store = Store(
            served.state / "service.sqlite",
            lifetime_s=config.session_hours * 3600,
            max_document_bytes=config.max_document_bytes,
            max_owner_bytes=config.max_key_bytes,
            max_bytes=config.max_stored_bytes,
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return make_app(
            self._answering,
            self._store,
            self._config,
            keys=self._keys,
            metrics=PrometheusMetrics(),
            health=self._health,
            searched=self._searched,
        )

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Takes the engines of the application `generator` once they answer; requests in flight keep theirs."""
        config, main = self._config, self._served.main
        if config.endpoint is not None:
            stop_texts = main.agent_spec.stop_texts
            endpoint = Endpoint(config.endpoint, tokenizer=self._tokenizer, stop_texts=stop_texts)
            self._engine = EndpointEngine(endpoint=endpoint, version=config.endpoint.model)
            return
        handle = await engines_of(user_config["generator"], timeout_s=ENGINES_TIMEOUT_S)
        self._engine = ServedEngine(
            handle,
            version=await handle.version.remote(),
            stop_token_ids=sorted(self._tokenizer.stop_token_ids),
            timeout_s=main.generation.timeout_s,
        )

    def __del__(self) -> None:
        if self._traces is not None:
            self._traces.close()

    def _current_engine(self) -> ServedEngine | EndpointEngine:
        assert self._engine is not None, "Serve calls reconfigure before any request"
        return self._engine

    async def _search(self, query: str, *, num_passages: int, partition: str) -> SearchResult:
        assert self._retriever is not None, "an agent that searches has an index"
        return await self._retriever.search(query, num_passages=num_passages, partition=partition)

    async def _health(self) -> dict[str, Any]:
        """Returns the state of engine and retriever. Raises ApiError 503."""
        detail: dict[str, Any] = {}
        try:
            detail["generator"] = await self._current_engine().check(timeout_s=READY_TIMEOUT_S)
            if self._retriever is not None:
                detail["index"] = await self._retriever.snapshot(timeout_s=READY_TIMEOUT_S)
        except InfrastructureFault as fault:
            raise ApiError(503, f"not ready: {fault}") from fault
        except Exception as error:  # whatever keeps a part from answering, the service is not ready
            logger.exception("the service is not ready")
            raise ApiError(503, "not ready; the log says why") from error
        return detail


async def engines_of(application: str, *, timeout_s: float) -> DeploymentHandle:
    """Returns the handle of an application of engines. Serve deploys it at the same time as the agents and may take
    longer.

    Raises ConfigError when there is none after `timeout_s`.
    """
    deadline, pauses = time.monotonic() + timeout_s, retry_pauses(longest_s=2.0)
    while True:
        try:
            return serve.get_app_handle(application)
        except RayServeException as error:
            if time.monotonic() > deadline:
                message = f"user_config.generator is {application!r}, and Serve has no such application"
                raise ConfigError(message) from error
        await asyncio.sleep(next(pauses))


def _log_as_serve_does() -> None:
    """Sends the service's log records where Serve's own go: JSON lines with the id of the request. The records of the
    requests themselves go to the file alone, not to the worker's stderr as well."""
    logger = logging.getLogger("mempipe.serve")
    logger.handlers = logging.getLogger("ray.serve").handlers
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.addFilter(lambda record: record.name != journal.logger.name)
    logger.setLevel(logging.INFO)
    logger.propagate = False
