"""What actors see of GPUs, on a cluster that declares GPUs it does not have."""

import os

import pytest
import ray

from mempipe.actors.handles import start_actor


@pytest.fixture
def machine_with_gpus():
    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    yield
    ray.shutdown()


def test_an_actor_sees_the_gpus_it_was_given_and_one_without_gpus_none(machine_with_gpus):
    class Sees:  # here, since workers cannot import a test's file
        def gpus(self) -> str | None:
            return os.environ.get("CUDA_VISIBLE_DEVICES")

    actors = [start_actor(Sees, {"num_cpus": 0, "num_gpus": count}) for count in (0, 1, 1, 0)]
    first, *given, last = ray.get([actor.gpus.remote() for actor in actors])
    assert first == last == "" and sorted(given) == ["0", "1"]
