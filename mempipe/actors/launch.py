"""From a config to running roles: connects to Ray, makes every actor once, waits until each answers, owns all handles, and cleans up.

A named Ray actor dies when its last handle is dropped, so `Roles` holds them all for as long as the run lasts.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mempipe.actors.admission import Admission
from mempipe.actors.learner_group import LearnerGroup
from mempipe.actors.pools import GeneratorActor, RetrieverActor, WeightStore
from mempipe.actors.reference import ReferenceActor
from mempipe.config import RunConfig, SamplingConfig
from mempipe.stream import DriverSpec

START_TIMEOUT_S = 900.0
WORKER_ENV = {
    # Several processes share the cores: an idle OpenMP thread must sleep, not spin.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}


class LaunchError(RuntimeError):
    """A role did not start, or the cluster lacks what the config asks for."""


@dataclass(kw_only=True)
class Roles:
    """The actors of a run."""

    config: RunConfig
    namespace: str
    learners: LearnerGroup
    generators: dict[str, ActorHandle]
    retrievers: dict[str, ActorHandle]
    reference: ActorHandle | None
    store: ActorHandle
    extra: list[ActorHandle] = field(default_factory=list)
    placement: PlacementGroup | None = None

    def driver_spec(self, *, sampling: SamplingConfig, group_size: int, admission: str = "") -> DriverSpec:
        return DriverSpec(
            config=self.config,
            sampling=sampling,
            group_size=group_size,
            namespace=self.namespace,
            generators=list(self.generators),
            retrievers=list(self.retrievers),
            admission=admission,
        )

    def new_admission(self, *, policy_version: int) -> tuple[str, ActorHandle]:
        """A fresh gate for one stream, and its name."""
        name = f"admission-{uuid.uuid4().hex[:8]}"
        algorithm = self.config.algorithm
        actor = (
            ray.remote(Admission)
            .options(name=name, num_cpus=0, max_concurrency=10_000)
            .remote(
                groups_per_step=algorithm.groups_per_step,
                max_off_policy_steps=algorithm.max_off_policy_steps,
                policy_version=policy_version,
            )
        )
        return name, actor

    def sync(self, policy_version: int) -> float:
        """Brings the learner's weights to every engine as `policy_version`; returns the seconds it took.

        Raises LaunchError naming the phase when an engine does not take them in time.
        """
        started = time.perf_counter()
        weights = self.learners.weights()
        ray.get(self.store.put.remote([weights], policy_version))
        pending = {name: actor.load_weights.remote(weights, policy_version) for name, actor in self.generators.items()}
        wait_for(pending, phase=f"loading weights of version {policy_version}", timeout_s=self.config.generation.timeout_s)
        return time.perf_counter() - started

    def engine_scores(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
        """Per engine, the log-probs of every sequence (promise 5's probe)."""
        return {name: ray.get([actor.score.remote(list(s)) for s in sequences]) for name, actor in self.generators.items()}


def wait_for(pending: dict[str, ray.ObjectRef], *, phase: str, timeout_s: float) -> dict[str, Any]:
    """What every reference holds, by name. Raises LaunchError naming the phase and who failed or was late."""
    deadline = time.monotonic() + timeout_s
    results = {}
    for name, reference in pending.items():
        try:
            results[name] = ray.get(reference, timeout=max(deadline - time.monotonic(), 0.001))
        except GetTimeoutError as error:
            raise LaunchError(f"{phase}: {name} did not finish within {timeout_s:g} s") from error
        except RayActorError as error:
            raise LaunchError(f"{phase}: {name} died: {error}") from error
    return results


@contextmanager
def connected(config: RunConfig) -> Iterator[str]:
    """A Ray connection for the run: the config's cluster, the job's own (RAY_ADDRESS), or a local one that ends with the run."""
    namespace = f"mempipe-{config.name}-{uuid.uuid4().hex[:8]}"
    address = config.ray_address or os.environ.get("RAY_ADDRESS", "")
    os.environ.update({name: os.environ.get(name, value) for name, value in WORKER_ENV.items()})
    options: dict[str, Any] = {"namespace": namespace, "logging_level": logging.WARNING}
    if address:
        options |= {"address": address, "runtime_env": {"env_vars": WORKER_ENV}}
    else:
        options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "log_to_driver": False, "object_store_memory": 512 * 2**20}
    try:
        ray.init(**options)
    except ConnectionError as error:
        raise LaunchError(f"cannot reach the Ray cluster at {address!r}; is it up, and is RAY_AUTH_MODE=token set? ({error})") from error
    try:
        yield namespace
    finally:
        ray.shutdown()


@contextmanager
def launch(config: RunConfig, namespace: str) -> Iterator[Roles]:
    """All roles, started side by side. Leaves no actor and no placement group behind, whatever happens inside."""
    placement = _placement(config)
    roles: Roles | None = None
    try:
        roles = _start(config, namespace, placement)
        yield roles
    finally:
        if roles is not None:
            for actor in [*roles.generators.values(), *roles.retrievers.values(), *roles.learners.ranks, roles.store, *roles.extra]:
                ray.kill(actor)
            if roles.reference is not None:
                ray.kill(roles.reference)
        if placement is not None:
            remove_placement_group(placement)
