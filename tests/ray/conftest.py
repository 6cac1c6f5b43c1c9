"""A local Ray cluster, and the embedded world in miniature, shared by the tests of this folder."""

import pytest
import ray
from miniature import MINIATURE, QUICKSTART

from mempipe.actors.launch import connected
from mempipe.config import RunConfig
from mempipe.loader import load_config
from mempipe.runs import Run
from pipelines.prepare import prepare


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> RunConfig:
    """The miniature's config with its files made."""
    output = tmp_path_factory.mktemp("world")
    return prepare(Run(load_config(QUICKSTART, [*MINIATURE, f"output={output}"])))


@pytest.fixture(scope="module")
def cluster(world):
    """A namespace on a cluster of the module's own."""
    with connected(world.ray_address, name=world.name) as namespace:
        yield namespace
    assert not ray.is_initialized()
