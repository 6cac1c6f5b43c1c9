"""The agent service on Ray Serve: an application of agents and retrievers, and one of engines for each set of weights
(`mempipe serve`, or `serve deploy jobs/configs/agent_service.yaml`).

New weights are another engine application, started next to the old one. The agents use it when it is ready, and
requests in flight end on the weights that they began with.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.schema import LoggingConfig

from mempipe.checks.findings import refuse
from mempipe.checks.service import check_address
from mempipe.environment import EVERY_PROCESS, worker_environment
from mempipe.loader import parse_section
from mempipe.progress import waiting
from mempipe.retrieval.manifest import read_manifest
from mempipe.serve.agent_app import SLACK_S
from mempipe.serve.config import ENGINES, AgentServiceConfig, Replicas
from mempipe.serve.http import bodies, front, strangers
from mempipe.serve.http.keys import load_keys
from mempipe.serve.local import NO_ACCESS_LOG, local_serve, stop_at_signals
from mempipe.serve.mcp.stdio import KEY_VARIABLE
from mempipe.serve.replicas.agent_replica import AgentReplica
from mempipe.serve.replicas.generator_replica import GeneratorReplica
from mempipe.serve.replicas.retriever_replica import RetrieverReplica
from mempipe.serve.routing import ROUTER, sheds
from mempipe.serve.served_run import (
    ServedRun,
    check_agent_service,
    named_by,
    resolve,
    searched_by,
    weights_version,
)
from mempipe.settings import ConfigError
from mempipe.storage.scratch import logs_of_serve

NAME = "agent"
HEALTH_CHECK_PERIOD_S = 2.0


def app(args: dict[str, Any]) -> Application:
    """Returns the application of agents and retrievers for `serve deploy jobs/configs/agent_service.yaml`.

    `args` are settings of AgentServiceConfig. The agents ask the engines of the application `generator`, or of the one
    that the user_config of the deployment `agent` names. Raises ConfigError.
    """
    return _agents(resolve(parse_section(args, AgentServiceConfig)), ENGINES)


def generator(args: dict[str, Any]) -> Application:
    """Returns the application of engines for the same `args`; it uses those about the run.

    Raises ConfigError.
    """
    config = parse_section(args, AgentServiceConfig)
    if config.endpoint is not None:
        raise ConfigError(f"endpoint is {config.endpoint.url!r}, which samples; there are no engines to start")
    return _engines(resolve(config))


def _agents(served: ServedRun, engines: str) -> Application:
    config, retrieval = served.config, served.main.retrieval
    retriever = None
    if served.searches:
        retriever = (
            _deployment(RetrieverReplica, "retriever", config.retriever_replicas)
            .options(
                ray_actor_options=_resources(retrieval.num_gpus),
                max_ongoing_requests=4 * config.max_in_flight,  # as many as the agents' own
                graceful_shutdown_timeout_s=retrieval.timeout_s,
                # On a CPU a new replica is there before the old one goes; a second GPU may not be free.
                max_surge_percent=0 if retrieval.num_gpus else 100,
            )
            .bind(retrieval)
        )
    agent = _deployment(serve.ingress()(AgentReplica), NAME, config.agent_replicas).options(
        **sheds(config.max_in_flight, max_wait_s=config.max_wait_s),
        graceful_shutdown_timeout_s=config.timeout_s + 60,  # answers in flight are finished first
        max_surge_percent=100,  # a new replica is there before the old one goes
        user_config={"generator": engines},
        logging_config=LoggingConfig(encoding="JSON", enable_access_log=False),
        ray_actor_options=_resources(0),
    )
    return agent.bind(config, retriever)


def _engines(served: ServedRun) -> Application:
    main = served.main
    on_gpus = main.generation.tensor_parallel if ray.cluster_resources().get("GPU") else 0
    engine = _deployment(GeneratorReplica, "generator", served.config.generator_replicas).options(
        max_ongoing_requests=main.generation.max_num_seqs,
        graceful_shutdown_timeout_s=main.generation.timeout_s,
        ray_actor_options=_resources(on_gpus),
    )
    return engine.bind(main, weights_version(main.model.path))


def _deployment(replica: Any, name: str, replicas: Replicas) -> Any:
    """Returns a deployment with as many replicas as the settings say."""
    deployment: Any = serve.deployment(replica)
    options: dict[str, Any] = {
        "name": name,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "logging_config": NO_ACCESS_LOG,
        "request_router_config": ROUTER,
    }
    if replicas.min == replicas.max:
        return deployment.options(**options, num_replicas=replicas.min)
    limits = {"min_replicas": replicas.min, "max_replicas": replicas.max}
    load = {"target_ongoing_requests": replicas.target_ongoing_requests}
    return deployment.options(**options, autoscaling_config={**limits, **load})


def _resources(num_gpus: int) -> dict[str, Any]:
    return {"num_cpus": 0, "num_gpus": num_gpus, "runtime_env": worker_environment(EVERY_PROCESS)}


class LocalService:
    """The service on a local Serve: it deploys the two applications, and new weights next to the old ones."""

    def __init__(self, served: ServedRun) -> None:
        self.served = served
        """The service that was deployed last; before that, the one to deploy first."""
        self._engines = ""
        self._started: set[str] = set()
        """Applications of engines, also of a deployment whose agents did not start."""
        self._agents: tuple[ServedRun, str] | None = None
        """Configs of the agents that were deployed last, and what their files held; None where they did not start."""

    def reload(self) -> str:
        """Deploys the same service as its files are now, as `deploy` does. Raises ConfigError."""
        return self.deploy(resolve(self.served.config))

    def deploy(self, served: ServedRun) -> str:
        """Deploys a resolved service, and returns the version of its weights.

        Engines of new weights start next to the old ones, which end when no request uses them. Agents and retrievers
        are replaced if weights, settings, prompts or the index are others than before.
        """
        config = served.config
        version = config.endpoint.model if config.endpoint else weights_version(served.main.model.path)
        engines = "generator-" + "".join(c if c.isalnum() else "-" for c in version)
        agents = served, _snapshot(served)
        if (engines, agents) != (self._engines, self._agents):
            if served.own_engine and engines != self._engines:
                self._started.add(engines)
                serve.run(_engines(served), name=engines, route_prefix=None)
            self._agents = None  # if they do not start, Serve still tries to start them and no others
            serve.run(_agents(served, engines), name=NAME, route_prefix="/")
            self.served, self._engines, self._agents = served, engines, agents
        self._end_others(engines, timeout_s=config.timeout_s + 60)
        return version

    def _end_others(self, engines: str, *, timeout_s: float) -> None:
        """Ends all other engines when no request uses them any more."""
        if others := self._started - {engines}:
            _wait_until_drained(timeout_s)
            for each in sorted(others):
                serve.delete(each)
            self._started -= others


def _snapshot(served: ServedRun) -> str:
    """Returns a text that changes with the files that agents and retrievers read: the hash of the index in the
    service's own files, and the prompt sets that are files."""
    index = served.main.retrieval.index if served.searches else ""
    prompts = [Path(getattr(each.agent, "prompts", "")) for each in served.agents.values()]
    texts = [file.read_text(encoding="utf-8") for file in prompts if file.is_file()]
    return "\n".join([read_manifest(Path(index))[1] if index else "", *texts])


def _wait_until_drained(timeout_s: float) -> None:
    """Waits until every earlier agent replica has finished its requests, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        states = serve.status().applications[NAME].deployments[NAME].replica_states
        if set(states) == {"RUNNING"}:
            return
        time.sleep(0.2)


@contextmanager
def served_agent(
    settings: dict[str, Any], *, host: str, port: int, finishes: bool = True
) -> Iterator[tuple[str, LocalService]]:
    """Serves on a local Ray cluster until the end of the block; yields its address and the service. It then `finishes`
    the requests in flight, unless nobody waits for them.

    Raises ConfigError before anything starts: for wrong settings, too little memory, a port that is taken, a host that
    other machines reach without API keys, and a RAY_ADDRESS.
    """
    config = parse_section(settings, AgentServiceConfig)
    served = named_by(config)
    refuse(check_agent_service(served))
    refuse(check_address(host=host, port=port, has_keys=bool(load_keys(config.keys))))
    # Serve's controller and proxy are started with this environment.
    keys = os.path.abspath(config.keys) if config.keys else ""
    os.environ |= {
        front.VARIABLE: front.PATH,
        front.CHECK_VARIABLE: str(front.CHECK_EVERY_S),
        front.TIMEOUT_VARIABLE: str(config.max_wait_s + config.timeout_s + 2 * SLACK_S),
        bodies.VARIABLE: str(config.max_body_bytes),
        strangers.VARIABLE: keys,
    }
    service = LocalService(served)
    with local_serve(NAME, host=host, port=port, finishes=finishes) as url:
        service.deploy(served)
        yield url, service


def welcome_lines(url: str, served: ServedRun) -> list[str]:
    """Returns the lines that name the address, the searched part of the corpus, and a question with its answer."""
    searched, config = searched_by(served), served.config
    source = config.run or config.checkpoint
    lines = [f"serving {source} at {url} until Ctrl-C: a page to try it, and an OpenAI-compatible API at {url}/v1"]
    if searched.partition:
        lines.append(
            f"it searches the part {searched.partition!r} of its corpus; a request may name another `partition`"
        )
    asked: dict[str, str] = {"question": "..."}
    if searched.examples:
        (example, *_), asked = searched.examples, {}
        asked = {"question": example.question} | ({"text": example.text} if example.text else {})
        if example.partition != searched.partition:
            asked["partition"] = example.partition
        lines.append(f"try a held-out question, whose right answer is {' or '.join(example.golden_answers)}:")
    body = shlex.quote(json.dumps(asked, ensure_ascii=False).replace("'", "\\u0027"))  # an apostrophe ends its quotes
    key = f' -H "authorization: Bearer ${KEY_VARIABLE}"' if load_keys(config.keys) else ""
    return [*lines, f"  curl {url}/v1/answer{key} -H 'content-type: application/json' -d {body}"]


def serve_agent(settings: dict[str, Any], *, host: str, port: int) -> None:
    """Serves until Ctrl-C or SIGTERM (`mempipe serve`); SIGHUP loads new weights of the same run."""
    wake = threading.Event()
    source = settings.get("run") or settings.get("checkpoint")
    with ExitStack() as stack:
        with waiting(f"starting the service of {source}"):
            url, service = stack.enter_context(served_agent(settings, host=host, port=port))
        stop = stop_at_signals(wake)
        signal.signal(signal.SIGHUP, lambda *_: wake.set())
        print(f"its logs, which say why a request failed, are in {logs_of_serve()}")
        print("\n".join(welcome_lines(url, service.served)), flush=True)
        while not stop.is_set():
            wake.wait()
            wake.clear()
            if not stop.is_set():
                try:
                    print(f"serving weights {service.reload()}", flush=True)
                except (ConfigError, RuntimeError, OSError) as error:  # the run's files may be on their way
                    print(f"the weights stay as they are: {' '.join(str(error).split())}", flush=True)
        print("ending; requests in flight are finished first, unless Ctrl-C is pressed again", flush=True)
