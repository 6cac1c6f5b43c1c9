"""The retrieval service on Ray Serve: replicas of one index behind one address (`mempipe index serve`, or `serve run`,
or a Serve config).

Replicas on one machine share the index through the page cache, since its files are memory-mapped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp

from mempipe.checks.findings import refuse
from mempipe.checks.retrieval import check_service
from mempipe.environment import EVERY_PROCESS, worker_environment
from mempipe.loader import parse_section
from mempipe.progress import waiting
from mempipe.retrieval.config import ServiceConfig
from mempipe.retrieval.manifest import check_index
from mempipe.retrieval.retriever import Retriever
from mempipe.serve.local import NO_ACCESS_LOG, local_serve, stop_at_signals
from mempipe.serve.replicas.own_port import listen_at_node
from mempipe.serve.retrieval_app import RetrievalService, make_app
from mempipe.serve.routing import ROUTER

NAME = "retrieval"
MAX_ONGOING = 2048
"""Requests that Serve sends to one replica at the least, those included that it turns away."""
HEALTH_CHECK_PERIOD_S = 5.0


class RetrievalReplica:
    """One opened index and its routes."""

    def __init__(self, config: ServiceConfig) -> None:
        listen_at_node()
        retriever = Retriever(config.index, mode=config.mode, encoder_path=config.encoder_path)
        self._service = RetrievalService(retriever, config)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return make_app(self._service)

    def check_health(self) -> None:
        """Raises when Serve should put a fresh replica in this one's place."""
        self._service.check_health()


def app(args: dict[str, Any]) -> Application:
    """Returns the application for `serve run mempipe.serve.retrieval:app index=/data/wiki18_e5 num_replicas=2`.

    `args` are settings of ServiceConfig; `index` is required. Raises ConfigError.
    """
    config = parse_section(args, ServiceConfig)
    check_index(config.index, mode=config.mode, num_gpus=config.num_gpus)
    deployment: Any = serve.deployment(serve.ingress()(RetrievalReplica))
    return deployment.options(
        name=NAME,
        num_replicas=config.num_replicas,
        # The service itself turns requests away, and says why. Serve would let them wait and tell nobody.
        max_ongoing_requests=max(MAX_ONGOING, 4 * config.max_in_flight),
        request_router_config=ROUTER,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        logging_config=NO_ACCESS_LOG,
        ray_actor_options={
            "num_cpus": 0,
            "num_gpus": config.num_gpus,
            "runtime_env": worker_environment(EVERY_PROCESS),
        },
    ).bind(config)


@contextmanager
def served(settings: dict[str, Any], *, host: str, port: int) -> Iterator[str]:
    """Serves the index on a local Ray cluster until the end of the block; yields its address.

    Raises ConfigError before anything starts: for wrong settings, a port that is taken, and a RAY_ADDRESS.
    """
    refuse(check_service(parse_section(settings, ServiceConfig), host=host, port=port))
    application = app(settings)
    with local_serve(NAME, host=host, port=port) as url:
        serve.run(application, name=NAME, route_prefix="/")
        yield url


def serve_index(settings: dict[str, Any], *, host: str, port: int) -> None:
    """Serves until Ctrl-C or SIGTERM (`mempipe index serve`)."""
    with ExitStack() as stack:
        with waiting(f"starting the service of {settings['index']}"):
            url = stack.enter_context(served(settings, host=host, port=port))
        stop = stop_at_signals(threading.Event())
        print(f"serving {settings['index']} at {url} until Ctrl-C; try")
        print(
            f"  curl {url}/search -H 'content-type: application/json' "
            """-d '{"query": "capital of Peru", "top_n": 3}'""",
            flush=True,
        )
        stop.wait()
