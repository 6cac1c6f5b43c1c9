"""A deployment whose only replica is not there yet, or was killed: no request waits long for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from starlette.requests import Request

from mempipe.serve.http import front, strangers
from mempipe.serve.local import local_serve
from mempipe.serve.routing import WITHOUT_REPLICA_S, sheds

NAME = "late"
MAX_WAIT_S = 90.0
SLACK_S = 10.0
"""Seconds by which a busy machine is late."""


def late() -> Any:
    """Returns a deployment that is ready when its file is there. Its class has no module that a replica could miss."""

    class Late:
        def __init__(self, file: str) -> None:
            while not Path(file).exists():
                time.sleep(0.05)

        async def __call__(self, request: Request) -> str:
            return "here"

    return serve.deployment(Late)


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[tuple[str, Path]]:
    """The address, and the file that lets replicas start."""
    file = tmp_path_factory.mktemp("late") / "ready"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(front.VARIABLE, front.PATH)
        patched.setenv(strangers.VARIABLE, "")
        with local_serve(NAME, host="127.0.0.1", port=0) as url:
            deployment = late().options(
                **sheds(4, max_wait_s=MAX_WAIT_S), ray_actor_options={"num_cpus": 0}, health_check_period_s=2.0
            )
            serve._run(deployment.bind(str(file)), name=NAME, _blocking=False)
            yield url, file
            file.touch()


def seconds_until(status: int, url: str, **headers: str) -> tuple[float, httpx.Response]:
    began = time.monotonic()
    answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=MAX_WAIT_S + 60)
    assert answer.status_code == status, answer.text
    return time.monotonic() - began, answer


def refused_after(url: str, **headers: str) -> float:
    """The seconds after which a request gets 503, in the form of the API and with a time to come again."""
    seconds, answer = seconds_until(503, url, **headers)
    assert answer.json()["error"]["type"] == "server_error"
    assert 1 <= int(answer.headers["retry-after"]) <= 10
    return seconds


def test_a_request_waits_for_a_replica_as_long_as_it_asks_and_not_long_otherwise(service):
    url, file = service
    deadline = time.monotonic() + 60
    while "/" not in httpx.get(f"{url}/-/routes").text:  # before, there is no application
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert WITHOUT_REPLICA_S - 1 < refused_after(url) < WITHOUT_REPLICA_S + SLACK_S
    assert refused_after(url, prefer="wait=0") < SLACK_S
    file.touch()
    seconds_until(200, url, prefer="wait=90")


def test_requests_after_the_death_of_the_only_replica_are_bounded_too(service):
    url, file = service
    seconds_until(200, url, prefer="wait=90")
    file.unlink()
    actors = ray.util.list_named_actors(all_namespaces=True)
    replica = next(each for each in actors if each["name"].startswith("SERVE_REPLICA::"))
    ray.kill(ray.get_actor(replica["name"], namespace=replica["namespace"]))
    assert refused_after(url) < WITHOUT_REPLICA_S + SLACK_S
    assert refused_after(url, prefer="wait=1") < SLACK_S
    file.touch()
    seconds_until(200, url, prefer="wait=90")
