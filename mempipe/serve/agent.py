"""The agent service on Ray Serve: an application of agents and retrievers, and one of engines for each set of weights
(`mempipe serve`, or `serve deploy jobs/configs/agent_service.yaml`).

New weights are another engine application, started beside the old one; the agents turn to it when it is ready, and
what is under way ends on the weights that it began with.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray.serve import Application, metrics
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp

from mempipe.checks.findings import refuse
from mempipe.checks.service import check_agent_service
from mempipe.engines.endpoint import Endpoint
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.environment import EVERY_PROCESS
from mempipe.loader import parse_section
from mempipe.serve import front
from mempipe.serve.agent_app import make_app
from mempipe.serve.answering import Answering, Engine
from mempipe.serve.api import AnswerReply
from mempipe.serve.config import AgentServiceConfig, Replicas
from mempipe.serve.errors import ApiError
from mempipe.serve.keys import load_keys
from mempipe.serve.local import local_serve
from mempipe.serve.roles import EndpointEngine, GeneratorReplica, RetrieverReplica, ServedEngine, call
from mempipe.serve.served_run import ServedRun, resolve, weights_version
from mempipe.serve.store import Store
from mempipe.settings import ConfigError
from mempipe.types import SearchResult

NAME = "agent"
HEALTH_CHECK_PERIOD_S = 2.0
READY_TIMEOUT_S = 5.0
SECONDS = [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0]
"""Bounds of the latency histograms."""


class AgentReplica:
    """The routes, and the agents behind them. Holds neither weights nor index."""

    def __init__(self, config: AgentServiceConfig, retriever: DeploymentHandle | None) -> None:
        _log_as_serve_does()
        self._config = config
        self._served = served = resolve(config)
        self._retriever = retriever
        self._tokenizer = load_tokenizer(served.main.model.path)
        self._engine: Engine | None = None
        self._answering = Answering(
            served.name,
            served.agents,
            tokenizer=self._tokenizer,
            engine=self._current_engine,
            search=self._search,
            sampling=served.sampling,
            max_turns=config.max_turns,
            timeout_s=config.timeout_s,
        )
        self._store = Store(
            served.state / "service.sqlite",
            lifetime_s=config.session_hours * 3600,
            max_document_bytes=config.max_document_bytes,
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return make_app(
            self._answering,
            self._store,
            self._config,
            keys=load_keys(self._config.keys),
            metrics=ServeMetrics(),
            health=self._health,
        )

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Turns to the engines of the application `generator`, once they answer; requests under way keep theirs."""
        config, main = self._config, self._served.main
        if config.endpoint is not None:
            stop_texts = main.agent_spec.stop_texts
            endpoint = Endpoint(config.endpoint, tokenizer=self._tokenizer, stop_texts=stop_texts)
            self._engine = EndpointEngine(endpoint=endpoint, version=config.endpoint.model)
            return
        handle = serve.get_app_handle(user_config["generator"])
        self._engine = ServedEngine(
            handle=handle,
            version=await handle.version.remote(),
            stop_token_ids=sorted(self._tokenizer.stop_token_ids),
            timeout_s=main.generation.timeout_s,
        )

    def _current_engine(self) -> Engine:
        assert self._engine is not None, "Serve calls reconfigure before any request"
        return self._engine

    async def _search(self, query: str, *, num_passages: int, partition: str) -> SearchResult:
        assert self._retriever is not None, "an agent that searches has an index"
        timeout_s = self._served.main.retrieval.timeout_s
        return await call(self._retriever.search, query, num_passages, partition, role="retriever", timeout_s=timeout_s)

    async def _health(self) -> dict[str, Any]:
        """The state of engine and retriever. Raises ApiError 503."""
        detail: dict[str, Any] = {}
        try:
            engine = self._current_engine()
            if isinstance(engine, ServedEngine):
                detail["generator"] = await call(engine.handle.version, role="generator", timeout_s=READY_TIMEOUT_S)
            if self._retriever is not None:
                detail["index"] = await call(self._retriever.snapshot, role="retriever", timeout_s=READY_TIMEOUT_S)
        except Exception as error:
            raise ApiError(503, f"not ready: {error}") from error
        return detail


def _log_as_serve_does() -> None:
    """Sends the service's records where Serve's own go: JSON lines, with the id of the request."""
    logger = logging.getLogger("mempipe.serve")
    logger.handlers = logging.getLogger("ray.serve").handlers
    logger.setLevel(logging.INFO)
    logger.propagate = False


class ServeMetrics:
    """Numbers for Prometheus, at the metrics port of every Ray node (`mempipe.serve.journal.Metrics`)."""

    def __init__(self) -> None:
        def counter(name: str, description: str, *tags: Any) -> metrics.Counter:
            names: Any = tags  # Ray's annotation is of a tuple of one
            return metrics.Counter(f"mempipe_{name}", description, names)

        def histogram(name: str, description: str, *tags: Any) -> metrics.Histogram:
            names: Any = tags
            return metrics.Histogram(f"mempipe_{name}", description, boundaries=SECONDS, tag_keys=names)

        self._requests = counter("requests", "Requests by path and status.", "path", "status")
        self._seconds = histogram("request_seconds", "Seconds from request to answer.", "path")
        self._answers = counter("answers", "Answers by agent and how they ended.", "agent", "end_reason")
        self._turns = counter("turns", "Turns of agents.", "agent")
        self._tokens = counter("tokens", "Tokens, by whether they were read or sampled.", "agent", "kind")
        self._stages = histogram("stage_seconds", "Seconds of one turn in engine and retriever.", "stage")
        self._memory = metrics.Gauge("mempipe_memory_share", "Share of the memory budget in use.", ("agent",))

    def requested(self, path: str, status: int, seconds: float) -> None:
        self._requests.inc(1, {"path": path, "status": str(status)})
        self._seconds.observe(seconds, {"path": path})

    def answered(self, reply: AnswerReply) -> None:
        agent = {"agent": reply.agent}
        self._answers.inc(1, {**agent, "end_reason": reply.end_reason})
        for kind, count in (("read", reply.usage.prompt_tokens), ("sampled", reply.usage.completion_tokens)):
            if count:
                self._tokens.inc(count, {**agent, "kind": kind})
        for turn in reply.turns:
            self._turns.inc(1, agent)
            self._stages.observe(turn.generate_seconds, {"stage": "generate"})
            self._stages.observe(turn.search_seconds, {"stage": "search"})
            if turn.memory_limit:
                self._memory.set(turn.memory_tokens / turn.memory_limit, agent)


def app(args: dict[str, Any]) -> Application:
    """The agents and retrievers of the settings in `args` (`AgentServiceConfig`), which ask the engines of the
    application `generator`. Raises ConfigError.

    `serve deploy jobs/configs/agent_service.yaml`; another application of engines is named by the user_config of the
    deployment `agent`.
    """
    args = dict(args)
    engines = args.pop("generator", "generator")
    config = parse_section(args, AgentServiceConfig)
    return _agents(config, resolve(config), engines)


def generator(args: dict[str, Any]) -> Application:
    """The engines of the settings in `args` (`AgentServiceConfig`; what is about agents is not looked at). Raises
    ConfigError."""
    config = parse_section(args, AgentServiceConfig)
    if config.endpoint is not None:
        raise ConfigError(f"endpoint is {config.endpoint.url!r}, which samples; there are no engines to start")
    return _engines(config, resolve(config))


def _agents(config: AgentServiceConfig, served: ServedRun, engines: str) -> Application:
    retrieval = served.main.retrieval
    retriever = None
    if served.searches:
        retriever = (
            _deployment(RetrieverReplica, "retriever", config.retriever_replicas)
            .options(ray_actor_options=_resources(retrieval.num_gpus), graceful_shutdown_timeout_s=retrieval.timeout_s)
            .bind(retrieval)
        )
    agent = _deployment(serve.ingress()(AgentReplica), NAME, config.agent_replicas).options(
        # Serve queues what is beyond this, without end and without a word to the caller; the service itself turns
        # requests away before.
        max_ongoing_requests=4 * config.max_in_flight,
        graceful_shutdown_timeout_s=config.timeout_s + 60,  # answers under way are finished first
        max_surge_percent=100,  # a new replica is there before the old one goes
        user_config={"generator": engines},
        logging_config=LoggingConfig(encoding="JSON", enable_access_log=False),
        ray_actor_options=_resources(0),
    )
    return agent.bind(config, retriever)


def _engines(config: AgentServiceConfig, served: ServedRun) -> Application:
    main = served.main
    on_gpus = main.generation.tensor_parallel if ray.cluster_resources().get("GPU") else 0
    engine = _deployment(GeneratorReplica, "generator", config.generator_replicas).options(
        max_ongoing_requests=main.generation.max_num_seqs,
        graceful_shutdown_timeout_s=main.generation.timeout_s,
        ray_actor_options=_resources(on_gpus),
    )
    return engine.bind(main, weights_version(main.model.path))


def _deployment(replica: Any, name: str, replicas: Replicas) -> Any:
    """A deployment with as many replicas as the settings say."""
    deployment: Any = serve.deployment(replica)
    options: dict[str, Any] = {"name": name, "health_check_period_s": HEALTH_CHECK_PERIOD_S}
    if replicas.min == replicas.max:
        return deployment.options(**options, num_replicas=replicas.min)
    limits = {"min_replicas": replicas.min, "max_replicas": replicas.max}
    load = {"target_ongoing_requests": replicas.target_ongoing_requests}
    return deployment.options(**options, autoscaling_config={**limits, **load})


def _resources(num_gpus: int) -> dict[str, Any]:
    return {"num_cpus": 0, "num_gpus": num_gpus, "runtime_env": {"env_vars": EVERY_PROCESS}}


class LocalService:
    """The service on a local Serve: its two applications, and how new weights take over."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._engines = ""

    def deploy(self) -> str:
        """Brings the service up, or up to what its files say now; returns the version of the weights.

        New weights are loaded beside the old ones, which go when nothing is under way on them. Raises ConfigError.
        """
        config = parse_section(self._settings, AgentServiceConfig)
        served = resolve(config)
        version = config.endpoint.model if config.endpoint else weights_version(served.main.model.path)
        engines, before = "generator-" + "".join(c if c.isalnum() else "-" for c in version), self._engines
        if engines == before:
            return version
        if config.endpoint is None:
            serve.run(_engines(config, served), name=engines, route_prefix=None)
        serve.run(_agents(config, served, engines), name=NAME, route_prefix="/")
        self._engines = engines
        if before and config.endpoint is None:
            _wait_until_drained(config.timeout_s + 60)
            serve.delete(before)
        return version


def _wait_until_drained(timeout_s: float) -> None:
    """Until no agent replica of before works on anything, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        states = serve.status().applications[NAME].deployments[NAME].replica_states
        if set(states) == {"RUNNING"}:
            return
        time.sleep(0.2)


@contextmanager
def served_agent(settings: dict[str, Any], *, host: str, port: int) -> Iterator[tuple[str, LocalService]]:
    """A local Ray cluster that answers questions, until the end of the block; gives its address and the service.

    Raises ConfigError before anything starts: for wrong settings, a port that is taken, a host that others reach
    without API keys, and when a cluster is meant.
    """
    config = parse_section(settings, AgentServiceConfig)
    resolve(config)
    refuse(check_agent_service(host=host, port=port, has_keys=bool(load_keys(config.keys))))
    os.environ[front.VARIABLE] = front.PATH  # of Serve's proxy, which Ray starts with this environment
    service = LocalService(settings)
    with local_serve(NAME, host=host, port=port) as url:
        service.deploy()
        yield url, service


def serve_agent(settings: dict[str, Any], *, host: str, port: int) -> None:
    """`mempipe serve`: serves until Ctrl-C or SIGTERM; SIGHUP loads new weights of the same run."""
    stop, wake = threading.Event(), threading.Event()
    source = settings.get("run") or settings.get("checkpoint")
    print(f"starting the service of {source} ...", flush=True)
    with served_agent(settings, host=host, port=port) as (url, service):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: (stop.set(), wake.set()))
        signal.signal(signal.SIGHUP, lambda *_: wake.set())
        print(
            f"serving {source} at {url} until Ctrl-C: a page to try it, and an OpenAI-compatible API at {url}/v1; try"
        )
        print(
            f"  curl {url}/v1/answer -H 'content-type: application/json' "
            """-d '{"question": "What is the capital of Peru?"}'""",
            flush=True,
        )
        while not stop.is_set():
            wake.wait()
            wake.clear()
            if not stop.is_set():
                try:
                    print(f"serving weights {service.deploy()}", flush=True)
                except (ConfigError, RuntimeError) as error:
                    print(f"the weights stay as they are: {' '.join(str(error).split())}", flush=True)
