"""From a config to running roles: connects to Ray, makes every actor once, waits until each answers, owns all handles,
and cleans up.

A named Ray actor dies when its last handle is dropped, so `Roles` holds them all for as long as the run lasts.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mempipe.actors.admission import Admission
from mempipe.actors.driver import DriverSpec
from mempipe.actors.generator import GeneratorActor, Transfer, WeightStore
from mempipe.actors.handles import Handle, start_actor
from mempipe.actors.learner_group import LearnerActor, LearnerGroup
from mempipe.actors.quiet import quiet_loggers, take_note_of_pool_arguments
from mempipe.actors.reference import ReferenceActor
from mempipe.actors.retriever import RetrieverActor, ShardActor
from mempipe.config import RunConfig
from mempipe.engines.config import SamplingConfig
from mempipe.engines.learner import LearnerSettings
from mempipe.engines.weights import check_canary
from mempipe.environment import EVERY_PROCESS
from mempipe.settings import ConfigError

START_TIMEOUT_S = 900.0
KNOCK_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 20.0
MAX_CALLS = 10_000  # calls that one async actor holds at once
WEIGHT_STORE = "weights"


class LaunchError(RuntimeError):
    """A role did not start or did not stay alive, or the cluster cannot be reached."""


@dataclass(kw_only=True)
class RolloutActors:
    """What runs trajectories: engines and retrievers."""

    config: RunConfig
    namespace: str
    generators: dict[str, Handle]
    retrievers: dict[str, Handle]
    store: Handle
    transfer: Transfer

    def driver_spec(self, *, sampling: SamplingConfig, group_size: int, **settings: Any) -> DriverSpec:
        """What a driver needs to find these actors; `settings` are further ones of `DriverSpec`."""
        return DriverSpec(
            config=self.config,
            sampling=sampling,
            group_size=group_size,
            namespace=self.namespace,
            generators=list(self.generators),
            retrievers=list(self.retrievers),
            **settings,
        )


@dataclass(kw_only=True)
class Roles(RolloutActors):
    """The actors of a training run."""

    learners: LearnerGroup
    reference: Handle | None
    canary: list[list[int]] = field(default_factory=list)
    """Token sequences that learner and engines score after every sync (promise 5)."""

    def new_admission(self, *, policy_version: int) -> tuple[str, Handle]:
        """A fresh gate for one stream, and its name."""
        name = f"admission-{uuid.uuid4().hex[:8]}"
        options = {"name": name, "num_cpus": 0, "max_concurrency": MAX_CALLS}
        algorithm = self.config.algorithm
        return name, start_actor(
            Admission,
            options,
            groups_per_step=algorithm.groups_per_step,
            max_off_policy_steps=algorithm.max_off_policy_steps,
            policy_version=policy_version,
        )

    def sync(self, policy_version: int) -> float:
        """Brings the learner's weights to every engine as `policy_version`; returns the largest canary difference.

        Raises LaunchError naming the phase when an engine does not take them in time, StaleWeights when one does not
        serve them.
        """
        if self.transfer == "nccl":
            self.learners.send_weights(policy_version)
        else:
            weights = self.learners.weights()
            ray.get(self.store.put.remote([weights], policy_version))
            pending = {
                name: actor.load_weights.remote(weights, policy_version) for name, actor in self.generators.items()
            }
            wait_for(
                pending,
                phase=f"loading weights of version {policy_version}",
                timeout_s=self.config.generation.timeout_s,
            )
        scores = {
            name: [actor.score.remote(sequence) for sequence in self.canary] for name, actor in self.generators.items()
        }
        expected = self.learners.score(self.canary)
        return max(
            check_canary(ray.get(found), expected, tolerance=self.config.generation.canary_tolerance)
            for found in scores.values()
        )


def wait_for(pending: Mapping[str, Any], *, phase: str, timeout_s: float) -> dict[str, Any]:
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
        except RayTaskError as error:
            raise LaunchError(f"{phase}: {name}: {error.cause}") from error
    return results


@contextmanager
def connected(address: str, *, name: str) -> Iterator[str]:
    """A Ray connection for the run `name`:
    the cluster at `address`, the job's own (RAY_ADDRESS), or a local one that ends with the run.
    """
    namespace = f"mempipe-{name}-{uuid.uuid4().hex[:8]}"
    address = address or os.environ.get("RAY_ADDRESS", "")
    os.environ.update({name: os.environ.get(name, value) for name, value in EVERY_PROCESS.items()})
    options: dict[str, Any] = {"namespace": namespace, "logging_level": logging.WARNING, "log_to_driver": False}
    if address:
        options |= {"address": address, "runtime_env": {"env_vars": EVERY_PROCESS}}
    else:
        options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "object_store_memory": 512 * 2**20}
    quiet_loggers()
    try:
        _knock(address)
        ray.init(**options)
    except OSError as error:
        raise LaunchError(
            f"cannot reach the Ray cluster at {address!r}; is it up, and is RAY_AUTH_MODE=token set? ({error})"
        ) from error
    try:
        take_note_of_pool_arguments()
        yield namespace
    except RayActorError as error:
        raise LaunchError(f"a role of the run died: {' '.join(str(error).split())}") from error
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raises OSError when nobody listens at host:port; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=KNOCK_TIMEOUT_S).close()


@contextmanager
def launch(config: RunConfig, namespace: str) -> Iterator[Roles]:
    """All roles, started side by side. Leaves no actor, process or placement group behind, whatever happens inside."""
    reference = [1] * needs_reference(config)
    with _launched(
        config, namespace, sizes=[1] * config.learner.num_ranks + _engine_sizes(config) + reference
    ) as started:
        yield started.roles()


@contextmanager
def launch_rollout_actors(config: RunConfig, namespace: str, *, generators: bool = True) -> Iterator[RolloutActors]:
    """RolloutActors under the weights of `model.path`, and retrievers; without `generators` somebody else completes.

    Cleans up as `launch` does.
    """
    if not generators:
        config = config.model_copy(update={"generation": config.generation.model_copy(update={"num_replicas": 0})})
    with _launched(config, namespace, sizes=_engine_sizes(config)) as started:
        engines = started.engines("mempipe_shm")
        started.wait()
        yield engines


@contextmanager
def launch_learners(config: RunConfig, settings: LearnerSettings) -> Iterator[LearnerGroup]:
    """Only the learner ranks, for supervised phases."""
    placement = _Placement([1] * config.learner.num_ranks)
    group = _learner_group(config, placement)
    try:
        group.start(settings)
        yield group
    finally:
        for rank in group.ranks:
            ray.kill(rank)
        placement.remove()


def learner_settings(config: RunConfig) -> LearnerSettings:
    """What the learner of the run is made from."""
    return LearnerSettings(
        model=config.model,
        optimizer=config.optimizer,
        learner=config.learner,
        algorithm=config.algorithm,
        temperature=config.sampling.temperature,
        num_updates=config.num_steps * config.algorithm.updates_per_step,
        seed=config.seed,
    )


class _Placement:
    """Where roles go: on a cluster with GPUs one placement group, reserved as a whole before anything starts;
    otherwise anywhere.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes` are the GPUs of each role."""
        self.group: PlacementGroup | None = None
        self._next = 0
        available = int(ray.cluster_resources().get("GPU", 0))
        if not available or not sizes:
            return
        if sum(sizes) > available:
            raise ConfigError(
                f"the roles need {sum(sizes)} GPUs (`mempipe doctor` lists them), but the cluster has {available}; "
                "lower learner.num_ranks, generation.num_replicas or generation.tensor_parallel"
            )
        self.group = placement_group([{"GPU": size, "CPU": 1} for size in sizes], strategy="PACK")
        if not self.group.wait(timeout_seconds=START_TIMEOUT_S):
            self.remove()
            raise LaunchError(f"the cluster did not free {sum(sizes)} GPUs within {START_TIMEOUT_S:g} s")

    def options(self, num_gpus: int) -> dict[str, Any]:
        """Actor options of the next role in the group."""
        if self.group is None:
            return {"num_cpus": 0}
        index, self._next = self._next, self._next + 1
        strategy = PlacementGroupSchedulingStrategy(placement_group=self.group, placement_group_bundle_index=index)
        return {"num_cpus": 1, "num_gpus": num_gpus, "scheduling_strategy": strategy}

    def transfer(self, config: RunConfig) -> Transfer:
        """GPU to GPU where roles have GPUs of their own; merged LoRA weights go as bytes, since the sender knows
        full parameters only.
        """
        return "nccl" if self.group is not None and not config.model.lora_rank else "mempipe_shm"

    def remove(self) -> None:
        if self.group is not None:
            remove_placement_group(self.group)


def needs_reference(config: RunConfig) -> bool:
    """Whether a second model is held: with LoRA the base with the adapter off serves as the reference."""
    return config.algorithm.kl_coef > 0 and not config.model.lora_rank


def _learner_group(config: RunConfig, placement: _Placement) -> LearnerGroup:
    ranks = [start_actor(LearnerActor, placement.options(1)) for _ in range(config.learner.num_ranks)]
    return LearnerGroup(ranks, timeout_s=config.learner.timeout_s)


def _engine_sizes(config: RunConfig) -> list[int]:
    """GPUs of each engine and of each actor that holds vectors and wants some."""
    retrieval = [config.retrieval.num_gpus] * _num_vector_holders(config) if config.retrieval.num_gpus else []
    return [config.generation.tensor_parallel] * config.generation.num_replicas + retrieval


def _num_vector_holders(config: RunConfig) -> int:
    return (config.retrieval.shard_actors or config.retrieval.num_replicas) if config.retrieval.index else 0


@contextmanager
def _launched(config: RunConfig, namespace: str, *, sizes: Sequence[int]) -> Iterator[_Started]:
    """What is started inside is ended behind it."""
    started = _Started(config, namespace, _Placement(sizes))
    try:
        yield started
    finally:
        with suppress(RayError):  # an engine that is dead already has nothing to shut down
            ray.get([engine.shutdown.remote() for engine in started.generators.values()], timeout=SHUTDOWN_TIMEOUT_S)
        for actor in started.actors:
            ray.kill(actor)
        started.placement.remove()


class _Started:
    """Actors as they are started, so that a half-finished start can be cleaned up."""

    def __init__(self, config: RunConfig, namespace: str, placement: _Placement) -> None:
        self.config = config
        self.namespace = namespace
        self.placement = placement
        self.actors: list[Handle] = []
        self.generators: dict[str, Handle] = {}
        self._pending: dict[str, Any] = {}

    def roles(self) -> Roles:
        """Everything that training needs, ready."""
        learners = _learner_group(self.config, self.placement)
        self.actors += learners.ranks
        engines = self.engines(self.placement.transfer(self.config))
        reference = None
        if needs_reference(self.config):
            reference = self._start(ReferenceActor, self.placement.options(1), self.config)
            self._pending["reference"] = reference.ready.remote()
        learners.start(learner_settings(self.config))
        self.wait()
        if engines.transfer == "nccl":
            learners.open_transfer(
                list(engines.generators.values()), tensor_parallel=self.config.generation.tensor_parallel
            )
        return Roles(**vars(engines), learners=learners, reference=reference)

    def engines(self, transfer: Transfer) -> RolloutActors:
        """RolloutActors and retrievers on their way; `wait` waits for them.
        An agent without an index has no retriever."""
        config = self.config
        store = self._start(WeightStore, {"name": WEIGHT_STORE, "num_cpus": 0})
        restartable = {"max_concurrency": MAX_CALLS, "max_restarts": -1}
        for i in range(config.generation.num_replicas):
            self.generators[f"generator-{i}"] = self._start(
                GeneratorActor,
                # A restarted engine takes the newest weights from the store; an nccl group cannot be joined again.
                {"name": f"generator-{i}", **restartable, "max_restarts": 0 if transfer == "nccl" else -1}
                | self.placement.options(config.generation.tensor_parallel),
                model=config.model,
                config=config.generation,
                context_tokens=config.budget.context_tokens,
                seed=config.seed + i,
                store=WEIGHT_STORE,
                transfer=transfer,
                stop_texts=config.agent_spec.stop_texts,
            )
        retrieval, anywhere = config.retrieval, {"num_cpus": 0}
        on_gpus = retrieval.num_gpus > 0
        of_holder = [
            self.placement.options(retrieval.num_gpus) if on_gpus else anywhere
            for _ in range(_num_vector_holders(config))
        ]
        shards = [
            self._start(ShardActor, restartable | of_holder[i], retrieval, i) for i in range(retrieval.shard_actors)
        ]
        retrievers = {
            f"retriever-{i}": self._start(
                RetrieverActor,
                {"name": f"retriever-{i}", **restartable} | (anywhere if shards or retrieval.url else of_holder[i]),
                retrieval,
                shards,
            )
            for i in range(retrieval.num_replicas if retrieval.index or retrieval.url else 0)
        }
        self._pending |= {name: actor.ready.remote() for name, actor in [*self.generators.items(), *retrievers.items()]}
        return RolloutActors(
            config=config,
            namespace=self.namespace,
            generators=self.generators,
            retrievers=retrievers,
            store=store,
            transfer=transfer,
        )

    def wait(self) -> None:
        """Until every engine, retriever and reference answers."""
        wait_for(self._pending, phase="start", timeout_s=START_TIMEOUT_S)

    def _start(self, cls: type, options: dict[str, Any], *args: Any, **kwargs: Any) -> Handle:
        self.actors.append(start_actor(cls, options, *args, **kwargs))
        return self.actors[-1]
