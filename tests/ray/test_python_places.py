"""`mempipe` where Python users call it: in a thread, in a running event loop as a notebook has one, and beside a Ray of
their own. One short training and one engine serve all tests."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import ray
from miniature import FEW_PROCESSES, MINIATURE, QUICKSTART

import mempipe
from mempipe.actors import cluster
from mempipe.loader import load_values

pytestmark = pytest.mark.jobs

SHORT = [*MINIATURE, *FEW_PROCESSES, "num_steps=1", "warm_start=null", "tracking.enabled=false"]
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def settings(output: Path, *overrides: str) -> dict[str, Any]:
    return load_values(QUICKSTART, [*SHORT, f"output={output}", *overrides])


@pytest.fixture(scope="module")
def run(output: Path) -> mempipe.Run:
    """A run that was trained in a thread, inside the event loop of that thread."""

    async def train() -> mempipe.Run:
        return mempipe.train(settings(output))

    before = list(map(signal.getsignal, HANDLED))
    with ThreadPoolExecutor(1) as threads:
        trained = threads.submit(asyncio.run, train()).result()
    assert list(map(signal.getsignal, HANDLED)) == before
    return trained


@pytest.fixture(scope="module")
def own_ray(run: mempipe.Run) -> Iterator[None]:
    """A Ray that the user has started after the training: `ray.init`, once more where the node is late."""
    options = {"num_cpus": 1, "include_dashboard": False, "log_to_driver": False, "object_store_memory": 128 * 2**20}
    cluster._start_node(options | {"_node_ip_address": cluster.LOOPBACK}, metrics=False)
    yield
    ray.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agent(run: mempipe.Run, own_ray: None) -> AsyncIterator[Any]:
    """The run's agent, loaded in a running event loop and beside the user's Ray."""
    with mempipe.load(run) as agent:
        yield agent


def test_a_thread_with_an_event_loop_trains(run):
    assert run.finished and run.state["num_steps"] == 1 and run.model is not None and run.report is not None
    assert not ray.is_initialized()


@pytest.mark.asyncio(loop_scope="module")
async def test_an_agent_answers_in_a_running_loop_and_in_threads(agent, run):
    example = run.trajectories().row(-1, named=True)
    asked = {"partition": example["partition"], "sampling": {"temperature": 0.0}}
    here = agent.ask(example["question"], **asked)
    later = await agent.ask_async(example["question"], **asked)
    in_threads = await asyncio.gather(*(asyncio.to_thread(agent.ask, example["question"], **asked) for _ in range(2)))
    assert {len(reply.turns) > 0 for reply in (here, later, *in_threads)} == {True}
    rows = [{"question": example["question"], "answer": example["golden_answers"]}]
    assert mempipe.evaluate(agent, rows).table.height == 1


def test_a_training_beside_the_users_own_ray_is_refused_and_leaves_it_alone(own_ray, output):
    with pytest.raises(mempipe.ConfigError) as refused:
        mempipe.train(settings(output, "name=another"))
    assert str(refused.value) == (
        "this process is connected to Ray already (ray.init), and a run makes its own connection; call ray.shutdown() "
        "first, and name your cluster in ray_address if the run shall use it"
    )
    assert ray.is_initialized() and not (output / "another").exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(output):
    for given in ({}, {"reward": lambda trajectory, question: 0.0}):
        with pytest.raises(mempipe.ConfigError, match=r"^output.*/proc/runs") as refused:
            mempipe.train(settings(output, "output=/proc/runs"), **given)
        assert "\n" not in str(refused.value)
