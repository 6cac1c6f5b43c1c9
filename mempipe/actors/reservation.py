"""A plan's GPUs on a Ray cluster: the GPUs that the cluster has, and the placement group with the seats of a job."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from mempipe.engines.devices import gpu_bytes
from mempipe.environment import GROWING_SEGMENTS, seen_gpus, worker_environment
from mempipe.planning.placement import Placement, Role
from mempipe.settings import ConfigError

INSPECTION_TIMEOUT_S = 120.0


class NotReserved(RuntimeError):
    """The cluster did not free the GPUs in time."""


def cluster_gpus() -> dict[str, int]:
    """Returns the GPUs of every node that has some, by node id."""
    nodes = {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]}
    return {node: count for node, count in nodes.items() if count}


def smallest_gpu(nodes: dict[str, int]) -> int | None:
    """Returns the memory in bytes of the smallest GPU, asked of one on every node; None when all are taken.

    Raises ConfigError, which names the node, when Ray counts GPUs that torch cannot use there.
    """
    ask: Any = ray.remote(gpu_bytes)
    asked = {
        node: ask.options(
            num_cpus=0, num_gpus=1, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote()
        for node in nodes
    }
    sizes = []
    for node, answer in asked.items():
        try:
            sizes.append(ray.get(answer, timeout=INSPECTION_TIMEOUT_S))
        except GetTimeoutError:  # another job uses them, so they are usable
            ray.cancel(answer)
        except RayTaskError as error:
            raise ConfigError(f"node {node[:8]} counts {nodes[node]} GPUs for Ray, but {error.cause}") from error
    return min(sizes, default=None)


class Reservation:
    """The seats of a plan, reserved as a whole before anything starts; without GPUs there is nothing to reserve."""

    def __init__(self, plan: Placement, *, timeout_s: float) -> None:
        """Raises NotReserved."""
        self.plan = plan
        self._group: PlacementGroup | None = None
        self._taken: dict[Role, int] = {}
        if not plan.bundles:
            return
        sizes = plan.places
        self._group = placement_group([{"GPU": float(size)} for size in sizes], strategy="PACK")
        if not self._group.wait(timeout_seconds=timeout_s):
            self.remove()
            raise NotReserved(f"the cluster did not free {sum(sizes)} GPUs within {timeout_s:g} s")
        self._shared = self._gpus_of_engines() if plan.span > 1 else []

    def options(self, role: Role) -> dict[str, Any]:
        """Returns Ray's options for the next actor of the role."""
        if self._group is None or not self.plan.seats(role):
            return {"num_cpus": 0}
        index = self._taken.get(role, 0)
        self._taken[role] = index + 1
        place, num_gpus = self.plan.seats(role)[index]
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": num_gpus,
            "scheduling_strategy": self._at(place),
        }
        if role == "generator" and self.plan.span > 1:
            options["runtime_env"] = worker_environment(seen_gpus(self._shared[place]))
        if role == "learner" and self.plan.transfer != "ipc":
            options["runtime_env"] = worker_environment(GROWING_SEGMENTS)
        return options

    def free(self, role: Role) -> None:
        """Gives the seats of a role, whose actors have ended, to the next actors of it."""
        self._taken.pop(role, None)

    def pool_options(self, role: Role) -> dict[str, Any]:
        """Returns the Ray options of a role whose actor pool is started by Ray Data: any free bundle of the placement
        group (bundle index -1). The other roles must be started already."""
        seats = self.plan.seats(role)
        if self._group is None or not seats:
            return {"num_cpus": 0}
        return {"num_cpus": 0, "num_gpus": seats[0][1], "scheduling_strategy": self._at(-1)}

    def _gpus_of_engines(self) -> list[str]:
        """Returns the GPUs of every engine that shares several with ranks, as CUDA_VISIBLE_DEVICES names them: those of
        its place, before anybody is there. Ray gives no actor parts of several GPUs.

        Raises NotReserved."""
        ask: Any = ray.remote(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
        asked = [
            ask.options(num_cpus=0, num_gpus=self.plan.span, scheduling_strategy=self._at(place)).remote()
            for place in range(self.plan.num_engines)
        ]
        try:
            return ray.get(asked, timeout=INSPECTION_TIMEOUT_S)
        except GetTimeoutError as error:
            self.remove()
            raise NotReserved(f"the places of engines did not answer within {INSPECTION_TIMEOUT_S:g} s") from error

    def _at(self, place: int) -> PlacementGroupSchedulingStrategy:
        assert self._group is not None, "only a plan with GPUs has places"
        return PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=place)

    def remove(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)
