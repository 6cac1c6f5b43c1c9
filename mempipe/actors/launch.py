"""From a config to running roles: connects to Ray, makes every actor once, waits until each answers, owns all handles,
and cleans up.

A named Ray actor dies when its last handle is dropped, so `Roles` holds them all for as long as the run lasts.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
)

from mempipe.actors.admission import Admission
from mempipe.actors.driver import DriverSpec, GroupFailed
from mempipe.actors.generator import GeneratorActor
from mempipe.actors.handles import Handle, start_actor
from mempipe.actors.learner_group import LearnerActor, LearnerGroup, LearnerLost
from mempipe.actors.memory import memory_metrics
from mempipe.actors.quiet import quiet_loggers, quiet_retries, take_note_of_pool_arguments
from mempipe.actors.reference import ReferencePool
from mempipe.actors.reservation import NotReserved, Reservation, cluster_gpus, smallest_gpu
from mempipe.actors.retriever import RetrieverActor, ShardActor
from mempipe.actors.weight_store import WeightStore
from mempipe.beacons import reached
from mempipe.capacity import object_store_bytes
from mempipe.config import RunConfig
from mempipe.engines.config import ModelConfig, SamplingConfig
from mempipe.engines.engine_load import load_metrics
from mempipe.engines.generator import EngineDead
from mempipe.engines.learner_settings import LearnerSettings
from mempipe.engines.proof import check_engines
from mempipe.environment import EVERY_PROCESS
from mempipe.placement import Demand, Plan, needs_reference, plan
from mempipe.progress import say
from mempipe.provenance import checksums_sha256
from mempipe.rl.packing import MicroBatch

START_TIMEOUT_S = 900.0
KNOCK_TIMEOUT_S = 10.0
ANSWER_S = 10.0
SHUTDOWN_TIMEOUT_S = 20.0
MAX_CALLS = 10_000  # calls that one async actor holds at once
WEIGHT_STORE = "weights"
NODE_IS_LATE = "the Ray node did not come up in time; starting it again"
"""Ray ends a node whose agents have not begun after 15 s, which no setting changes. On a busy machine it takes Python
longer than that to load them."""


class LaunchError(RuntimeError):
    """A role did not start or did not stay alive, or the cluster cannot be reached."""


class RoleLost(LaunchError):
    """A role died or is late: another start may do better."""


LOST = (
    RoleLost,
    LearnerLost,
    GroupFailed,
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    ObjectLostError,
)
"""What a run can meet when an actor, an engine or a node is lost."""


@dataclass(kw_only=True)
class RolloutActors:
    """Holds what runs trajectories: engines and retrievers."""

    config: RunConfig
    """As the plan runs it."""
    plan: Plan
    namespace: str
    generators: dict[str, Handle]
    retrievers: dict[str, Handle]
    store: Handle
    weights_sha256: str = ""
    """The hash of the weights that the engines serve, by which kept results name their policy."""

    def driver_spec(self, *, sampling: SamplingConfig, group_size: int, **settings: Any) -> DriverSpec:
        """Returns what a driver needs to find these actors; `settings` are further ones of `DriverSpec`."""
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
    references: ReferencePool | None
    canary: list[list[int]] = field(default_factory=list)
    """Token sequences that learner and engines score after every sync (promise 5)."""
    _num_served_bytes: int | None = None

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

    def learn(self, updates: Sequence[Sequence[Sequence[MicroBatch]]]) -> list[dict[str, float]]:
        """One learner step (`LearnerGroup.step`), for which engines that share its memory sleep until the next sync."""
        if not self.plan.sleeps:
            return self.learners.step(updates)
        pending = {name: actor.sleep.remote() for name, actor in self.generators.items()}
        wait_for(pending, phase="putting engines to sleep", timeout_s=self.config.generation.timeout_s)
        reports = self.learners.step(updates)
        self.learners.release_memory()
        return reports

    def sync(self, policy_version: int) -> dict[str, float]:
        """Brings the learner's weights to every engine as `policy_version`, and checks that they arrived; returns what
        is logged of it.

        Raises LaunchError naming the phase when an engine does not take them in time, StaleWeights when one does not
        hold them, CanaryFailed when one computes otherwise.
        """
        reached("sync", version=policy_version)
        started = time.perf_counter()
        if self.plan.transfer != "mempipe_shm":
            self.learners.send_weights(policy_version, list(self.generators.values()))
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
        sent = {"sync/send_seconds": time.perf_counter() - started, "sync/megabytes": self._served_bytes() / 1e6}
        return sent | self._check(policy_version)

    def waited_for(self) -> str:
        """Says which role the trajectories under way wait for. It asks every engine and retriever, and starts
        nothing."""
        roles = {"completions in the engines": self.generators, "searches in the retrievers": self.retrievers}
        counts, silent = Counter[str](), []
        for work, actors in roles.items():
            pending = {name: actor.under_way.remote() for name, actor in actors.items()}
            for name, reference in pending.items():
                try:
                    counts[work] += ray.get(reference, timeout=ANSWER_S)
                except (GetTimeoutError, RayError):
                    silent.append(name)
        if silent:
            return f"{', '.join(silent)}, without an answer for {ANSWER_S:g} s"
        if not counts.total():
            return "the reference or the code of agent, reward and tools: no engine and no retriever has anything to do"
        return ", ".join(f"{count} {work}" for work, count in counts.most_common() if count)

    def _served_bytes(self) -> int:
        if self._num_served_bytes is None:
            self._num_served_bytes = self.learners.num_served_bytes()
        return self._num_served_bytes

    def _check(self, policy_version: int) -> dict[str, float]:
        reached("sync.check", version=policy_version)
        started = time.perf_counter()
        pending = {name: actor.prove.remote(self.canary) for name, actor in self.generators.items()}
        loads = {name: actor.take_load.remote() for name, actor in self.generators.items()}
        checksums, scores = self.learners.checksums(), self.learners.score(self.canary)
        self.weights_sha256 = checksums_sha256(checksums)
        generation = self.config.generation
        proofs = wait_for(
            pending, phase=f"checking weights of version {policy_version}", timeout_s=generation.timeout_s
        )
        gap = check_engines(
            proofs, checksums=checksums, scores=scores, version=policy_version, tolerance=self.config.canary_tolerance
        )
        checked = {
            "canary_mean_difference": gap.mean,
            "canary_max_difference": gap.maximum,
            "sync/check_seconds": time.perf_counter() - started,
        }
        busy = wait_for(loads, phase="asking for load", timeout_s=generation.timeout_s)
        return checked | load_metrics(list(busy.values())) | self._memory()

    def _memory(self) -> dict[str, float]:
        roles = {"generator": self.generators, "retriever": self.retrievers}
        return memory_metrics(
            {role: actors.values() for role, actors in roles.items()} | {"learner": self.learners.ranks}
        )


def wait_for(pending: Mapping[str, Any], *, phase: str, timeout_s: float) -> dict[str, Any]:
    """Returns what every reference holds, by name. Raises LaunchError naming the phase and who failed, RoleLost when
    it died or was late."""
    deadline = time.monotonic() + timeout_s
    results = {}
    for name, reference in pending.items():
        try:
            results[name] = ray.get(reference, timeout=max(deadline - time.monotonic(), 0.001))
        except GetTimeoutError as error:
            raise RoleLost(f"{phase}: {name} did not finish within {timeout_s:g} s") from error
        except RayActorError as error:
            raise RoleLost(f"{phase}: {name} died: {error}") from error
        except RayTaskError as error:
            kind = RoleLost if isinstance(error.cause, EngineDead) else LaunchError
            raise kind(f"{phase}: {name}: {error.cause}") from error
    return results


@contextmanager
def connected(address: str, *, name: str, model: ModelConfig | None = None) -> Iterator[str]:
    """A Ray connection for the run `name`: the cluster at `address`, the job's own (RAY_ADDRESS), or a local one that
    ends with the run and whose object store has room for `model`.
    """
    namespace = f"mempipe-{name}-{uuid.uuid4().hex[:8]}"
    address = address or os.environ.get("RAY_ADDRESS", "")
    os.environ.update({name: os.environ.get(name, value) for name, value in EVERY_PROCESS.items()})
    options: dict[str, Any] = {"namespace": namespace, "logging_level": logging.WARNING, "log_to_driver": False}
    if address:
        options |= {"address": address, "runtime_env": {"env_vars": EVERY_PROCESS}}
    else:
        options |= {
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "object_store_memory": _object_store(model),
        }
    quiet_loggers()
    quiet_retries()
    try:
        if address:
            _knock(address)
            ray.init(**options)
        else:
            _start_node(options)
    except OSError as error:
        raise LaunchError(
            f"cannot reach the Ray cluster at {address!r}; is it up, and is RAY_AUTH_MODE=token set? ({error})"
        ) from error
    except Exception as error:
        if not _is_late(error):
            raise
        raise LaunchError(f"Ray did not start: {' '.join(str(error).split())}") from error
    try:
        take_note_of_pool_arguments()
        yield namespace
    except RayActorError as error:
        raise LaunchError(f"a role of the run died: {' '.join(str(error).split())}") from error
    finally:
        ray.shutdown()


def _start_node(options: Mapping[str, Any]) -> None:
    """Starts a cluster of this machine, a second time when the node does not come up."""
    me = psutil.Process()
    before = set(me.children(recursive=True))
    try:
        ray.init(**options)
        return
    except Exception as error:
        if not _is_late(error):
            raise
    for process in set(me.children(recursive=True)) - before:  # what is left of the node
        with suppress(psutil.NoSuchProcess):
            process.kill()
    say(NODE_IS_LATE)
    ray.init(**options)


def _is_late(error: Exception) -> bool:
    """Whether `ray.init` gave up on a node of its own that did not come up, which Ray raises as a bare Exception."""
    return type(error) is Exception


def _object_store(model: ModelConfig | None) -> int:
    shared = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    memory = psutil.virtual_memory().total
    return object_store_bytes(model or ModelConfig(), memory=memory, shared_memory=shared)


def _knock(address: str) -> None:
    """Raises OSError when nobody listens at host:port; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=KNOCK_TIMEOUT_S).close()


@contextmanager
def launch(config: RunConfig, namespace: str) -> Iterator[Roles]:
    """All roles, started side by side. Leaves no actor, process or placement group behind, whatever happens inside."""
    with _launched(config, namespace, Demand.of_training(config)) as started:
        yield started.roles()


@contextmanager
def launch_rollout_actors(config: RunConfig, namespace: str, *, generators: bool = True) -> Iterator[RolloutActors]:
    """RolloutActors under the weights of `model.path`, and retrievers; without `generators` somebody else completes.

    Cleans up as `launch` does.
    """
    demand = Demand.of_rollouts(config)
    with _launched(config, namespace, demand if generators else replace(demand, engines=0)) as started:
        actors = started.rollout_actors()
        started.wait()
        yield actors


@contextmanager
def launch_learners(config: RunConfig, settings: LearnerSettings) -> Iterator[LearnerGroup]:
    """Only the learner ranks, for supervised phases."""
    reservation = reserve(config, Demand(learners=config.learner.num_ranks))
    group = _learner_group(reservation.plan.applied(config), reservation)
    try:
        group.start(settings)
        yield group
    finally:
        for rank in group.ranks:
            ray.kill(rank)
        reservation.remove()


def reserve(config: RunConfig, demand: Demand) -> Reservation:
    """Seats for the demand on the cluster that is there. Raises ConfigError when it has too few GPUs, or unusable ones,
    and LaunchError when it does not free them."""
    nodes = cluster_gpus()
    made = plan(config, demand, list(nodes.values()), gpu_bytes=smallest_gpu(nodes) if nodes else None)
    if made.bundles:
        print(f"placement  {made}", flush=True)
    try:
        return Reservation(made, timeout_s=START_TIMEOUT_S)
    except NotReserved as error:
        raise LaunchError(str(error)) from error


def learner_settings(config: RunConfig) -> LearnerSettings:
    """Returns what the learner of the run is made from."""
    return LearnerSettings(
        model=config.model,
        optimizer=config.optimizer,
        learner=config.learner,
        algorithm=config.algorithm,
        temperature=config.sampling.temperature,
        num_updates=config.num_steps * config.algorithm.updates_per_step,
        seed=config.seed,
    )


def _learner_group(config: RunConfig, reservation: Reservation) -> LearnerGroup:
    ranks = [start_actor(LearnerActor, reservation.options("learner")) for _ in range(config.learner.num_ranks)]
    return LearnerGroup(ranks, timeout_s=config.learner.timeout_s)


@contextmanager
def _launched(config: RunConfig, namespace: str, demand: Demand) -> Iterator[_Started]:
    """An empty start; everything that is started with it is ended when the block ends."""
    started = _Started(config, namespace, reserve(config, demand))
    try:
        yield started
    finally:
        with suppress(RayError):  # an engine that is dead already has nothing to shut down
            ray.get([engine.shutdown.remote() for engine in started.generators.values()], timeout=SHUTDOWN_TIMEOUT_S)
        for actor in started.actors:
            ray.kill(actor)
        started.reservation.remove()


class _Started:
    """Actors as they are started, so that a half-finished start can be cleaned up."""

    def __init__(self, config: RunConfig, namespace: str, reservation: Reservation) -> None:
        self.plan = reservation.plan
        self.config = self.plan.applied(config)
        self.namespace = namespace
        self.reservation = reservation
        self.actors: list[Handle] = []
        self.generators: dict[str, Handle] = {}
        self._pending: dict[str, Any] = {}

    def roles(self) -> Roles:
        """Everything that training needs, ready."""
        rollout_actors = self.rollout_actors()
        reached("launch")
        if self.plan.kind == "colocated":  # an engine measures what is free on its GPU while it starts
            self.wait()
        learners = _learner_group(self.config, self.reservation)
        self.actors += learners.ranks
        learners.start(learner_settings(self.config))
        self.wait()
        if self.plan.transfer != "mempipe_shm":
            engines = list(rollout_actors.generators.values())
            learners.open_transfer(engines, tensor_parallel=self.plan.tensor_parallel, backend=self.plan.transfer)
        return Roles(**vars(rollout_actors), learners=learners, references=self._references())

    def _references(self) -> ReferencePool | None:
        """Returns what the trajectory stream starts its reference models with."""
        if not needs_reference(self.config):
            return None
        size = len(self.plan.seats("reference")) or self.config.reference.num_replicas
        return ReferencePool(size=size, options=self.reservation.pool_options("reference"))

    def rollout_actors(self) -> RolloutActors:
        """Engines and retrievers on their way; `wait` waits for them. An agent without an index has no retriever."""
        config = self.config
        store = self._start(WeightStore, {"name": WEIGHT_STORE, "num_cpus": 0})
        restartable = {"max_concurrency": MAX_CALLS, "max_restarts": -1}
        # An engine that starts again takes the newest weights from the store; it cannot join a sender of GPU memory.
        engine_restarts = {"max_restarts": -1 if self.plan.transfer == "mempipe_shm" else 0}
        for i in range(self.plan.num_engines):
            self.generators[f"generator-{i}"] = self._start(
                GeneratorActor,
                {"name": f"generator-{i}"} | restartable | engine_restarts | self.reservation.options("generator"),
                model=config.model,
                config=config.generation,
                context_tokens=config.budget.context_tokens,
                seed=config.seed + i,
                store=WEIGHT_STORE,
                transfer=self.plan.transfer,
                stop_texts=config.agent_spec.stop_texts,
                sleeps=self.plan.sleeps,
            )
        retrieval, anywhere = config.retrieval, {"num_cpus": 0}
        shards = [
            self._start(ShardActor, restartable | self.reservation.options("retrieval"), retrieval, i)
            for i in range(retrieval.shard_actors if retrieval.index else 0)
        ]
        retrievers = {
            f"retriever-{i}": self._start(
                RetrieverActor,
                {"name": f"retriever-{i}"}
                | restartable
                | (anywhere if shards or retrieval.url else self.reservation.options("retrieval")),
                retrieval,
                shards,
            )
            for i in range(retrieval.num_replicas if retrieval.index or retrieval.url else 0)
        }
        self._pending |= {name: actor.ready.remote() for name, actor in [*self.generators.items(), *retrievers.items()]}
        return RolloutActors(
            config=config,
            plan=self.plan,
            namespace=self.namespace,
            generators=self.generators,
            retrievers=retrievers,
            store=store,
        )

    def wait(self) -> None:
        """Until all that was started since the last call answers."""
        wait_for(self._pending, phase="start", timeout_s=START_TIMEOUT_S)
        self._pending = {}

    def _start(self, cls: type, options: dict[str, Any], *args: Any, **kwargs: Any) -> Handle:
        self.actors.append(start_actor(cls, options, *args, **kwargs))
        return self.actors[-1]
