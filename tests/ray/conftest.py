"""A local Ray cluster for each file of this folder that asks for one."""

import pytest
import ray

from mempipe.actors.cluster import connected


@pytest.fixture(scope="module")
def cluster(world):
    """A namespace on a cluster of the module's own."""
    with connected(world.ray_address, name=world.name) as namespace:
        yield namespace
    assert not ray.is_initialized()
