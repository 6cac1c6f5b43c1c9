"""A local Ray cluster, and the embedded world in miniature, shared by the tests of this folder."""

import os
from pathlib import Path

import pytest
import ray

from mempipe.actors.launch import connected
from mempipe.cli import ENVIRONMENT
from mempipe.config import RunConfig, load_config
from mempipe.runs import Run
from pipelines.prepare import prepare

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "jobs" / "configs" / "quickstart.yaml"
MINIATURE = [
    "world.num_train_worlds=4",
    "world.num_train_questions=60",
    "world.num_validation_questions=12",
    "algorithm.groups_per_step=4",
    "algorithm.group_size=3",
    "algorithm.updates_per_step=2",
    "num_steps=4",
]


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session", autouse=True)
def environment():
    os.environ.update(ENVIRONMENT)


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> RunConfig:
    """The miniature's config with its files made."""
    output = tmp_path_factory.mktemp("world")
    return prepare(Run(load_config(QUICKSTART, [*MINIATURE, f"output={output}"])))


@pytest.fixture(scope="module")
def cluster(world):
    """A namespace on a cluster of the module's own."""
    with connected(world) as namespace:
        yield namespace
    assert not ray.is_initialized()
