"""An engine whose death a learner rank sees first, because the rank drives the engines while it sends weights by nccl
or ipc. Rank and engine are small actors of a real cluster, so that Ray itself wraps their errors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray

from mempipe.actors.cluster import connected
from mempipe.actors.handles import Handle, start_actor
from mempipe.actors.launch import wait_for
from mempipe.actors.learner_group import LearnerGroup, _Engines
from mempipe.actors.lost import EngineLost, LearnerFailed, RoleLost, is_lost
from mempipe.engines.engine_faults import EngineDead, WeightTransferFailed
from mempipe.engines.weights import WeightHandle

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module

DEATH = "the engine ended during 'update': its process ended"


class Engine:
    """Stands for an engine's actor, whose engine fails while it takes weights."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    async def ready(self) -> int:
        return 0

    async def load_weights(self, weights: WeightHandle, policy_version: int) -> None:
        if self._fault == "exit":
            os._exit(1)
        raise {"dead": EngineDead(DEATH), "refused": WeightTransferFailed("'update' failed: no such tensor")}[
            self._fault
        ]


class Rank:
    """Stands for a rank: it drives the engines as a rank does, from a thread as vLLM's sender by nccl does."""

    def __init__(self, engine: Handle, *, wraps: bool = False, through: Handle | None = None) -> None:
        self._engines, self._wraps, self._through = _Engines([engine], 1), wraps, through

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def send_weights(self, policy_version: int) -> None:
        if self._through is not None:
            ray.get(self._through.send_weights.remote(policy_version))
        try:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self._engines.load, WeightHandle(version=policy_version)).result()
        except Exception as error:
            if self._wraps:
                raise RuntimeError("sending the weights failed") from error
            raise


@pytest.fixture(scope="module", autouse=True)
def on_ray() -> Iterator[None]:
    with connected("", name="deaths"):
        yield


def failure_of(fault: str, **rank: Any) -> LearnerFailed:
    """What a sync raises when the engine fails so."""
    engine = start_actor(Engine, {"num_cpus": 0}, fault)
    if rank.pop("nested", False):
        rank["through"] = start_actor(Rank, {"num_cpus": 0}, engine)
    group = LearnerGroup([start_actor(Rank, {"num_cpus": 0}, engine, **rank)], timeout_s=60.0)
    with pytest.raises(LearnerFailed) as caught:
        group.send_weights(1, [engine])
    return caught.value


@pytest.mark.parametrize("rank", [{}, {"nested": True}], ids=["from the rank", "through another task"])
def test_promise_8_the_death_of_an_engine_that_a_rank_sees_is_a_loss(rank):
    failure = failure_of("dead", **rank)
    assert type(failure) is EngineLost and is_lost(failure)
    assert str(failure) == f"sending weights: {DEATH}"


def test_promise_8_the_death_of_an_engine_is_a_loss_when_only_the_text_of_the_rank_says_so():
    failure = failure_of("dead", wraps=True)
    assert type(failure) is EngineLost
    assert str(failure) == "sending weights: sending the weights failed"


def test_an_engine_that_ends_with_its_actor_is_not_called_a_rank():
    failure = failure_of("exit")
    assert type(failure) is EngineLost
    assert str(failure) == "sending weights: Engine: The actor died unexpectedly before finishing this task."


def test_weights_that_an_engine_refuses_end_the_run():
    failure = failure_of("refused")
    assert type(failure) is LearnerFailed and not is_lost(failure)


def test_the_death_of_an_engine_is_a_lost_role_where_the_run_itself_asks_the_engine():
    engine = start_actor(Engine, {"num_cpus": 0}, "dead")
    call = engine.load_weights.remote(WeightHandle(version=1), 1)
    with pytest.raises(RoleLost, match=f"loading weights: generator-0: {DEATH}"):
        wait_for({"generator-0": call}, phase="loading weights", timeout_s=60.0)
    with pytest.raises(EngineDead) as caught:  # as it comes from Ray, without `wait_for`
        ray.get(call)
    assert is_lost(caught.value)
