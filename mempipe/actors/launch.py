"""Starts the roles that a config describes: makes every actor once, waits until each answers, owns all handles, and
cleans up.

All actors of a training start at the same time, and `launch` returns before they are ready. Engines start with the
weights of `model.path`. Ranks start without a model: warm start and training load their models into the same processes.

A named Ray actor dies when its last handle is dropped, so `Roles` holds them all for as long as the run lasts.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from mempipe.actors.admission import Admission
from mempipe.actors.driver import DriverSpec
from mempipe.actors.generator import WATCH_EVERY_S, GeneratorActor
from mempipe.actors.handles import Handle, start_actor
from mempipe.actors.learner_group import LearnerActor, LearnerGroup
from mempipe.actors.lost import LaunchError, RoleLost, is_lost, one_line, refusal
from mempipe.actors.memory import memory_metrics
from mempipe.actors.reference import ReferencePool
from mempipe.actors.reservation import NotReserved, Reservation, cluster_gpus, smallest_gpu
from mempipe.actors.retriever import RetrieverActor, ShardActor
from mempipe.actors.weight_group import WeightGroup
from mempipe.actors.weight_store import WeightStore
from mempipe.beacons import reached
from mempipe.config import RunConfig
from mempipe.engines.config import ModelConfig, SamplingConfig
from mempipe.engines.engine_load import load_metrics
from mempipe.engines.generator import EngineDead
from mempipe.engines.learner_settings import LearnerSettings, profile_files
from mempipe.engines.proof import check_engines
from mempipe.engines.weights import WeightHandle
from mempipe.faults import retry_pauses
from mempipe.planning.ledger import Role
from mempipe.planning.placement import Demand, Placement, plan
from mempipe.provenance import checksums_sha256
from mempipe.rl.packing import MicroBatch
from mempipe.settings import ConfigError
from mempipe.stop import StopRequest

START_TIMEOUT_S = 3600.0
"""A first start may fetch tens of GB from a hub, or read hundreds from a network disk."""
RESERVE_TIMEOUT_S = 900.0
MOST_DEATHS = 3
"""Deaths of its engine that one call survives: an engine that dies at every call, such as one whose attention has no
code for the model, would otherwise be loaded again until the deadline, and nobody would be told why."""
LOOK_S = 1.0
"""How long it takes to look at each of several calls once."""
SILENT_AFTER_S = 10.0
SHUTDOWN_TIMEOUT_S = 20.0
MAX_CALLS = 10_000  # calls that one async actor holds at once; not tuned (Ray's default: 1,000)
RESTARTABLE: dict[str, Any] = {"max_concurrency": MAX_CALLS, "max_restarts": -1}
WEIGHT_STORE = "weights"


@dataclass(kw_only=True)
class RolloutActors:
    """Holds the actors that trajectories need: engines and retrievers."""

    config: RunConfig
    """As the plan runs it."""
    plan: Placement
    namespace: str
    generators: dict[str, Handle]
    retrievers: dict[str, Handle]
    store: Handle
    weights_sha256: str = ""
    """The hash of the weights that the engines serve, by which kept results name their policy."""
    starting: dict[str, Any] = field(default_factory=dict)
    """Ray's references to the first answer of every engine and retriever, by name; empty after `wait`."""

    def wait(self) -> None:
        """Waits until engines and retrievers answer. Raises as `wait_for` does."""
        wait_for(self.starting, phase="start", timeout_s=START_TIMEOUT_S)
        self.starting = {}

    def begin(self, weights: WeightHandle | None) -> None:
        """Makes the engines answer as new ones, from `weights` (None: those that they serve). An engine that Ray starts
        again loads them too. Raises as `wait_for` does."""
        if weights is not None:
            ray.get(self.store.put.remote([ray.put(weights)], weights.version))
        seed = self.config.seed
        loading = f"loading {weights.update_info['path']}" if weights is not None else "emptying caches"
        ask_all(
            self.generators,
            lambda engine: engine.begin.remote(weights, seed),
            phase=loading,
            timeout_s=self.config.generation.timeout_s,
        )

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
    group: WeightGroup | None = None
    """Sends the weights by nccl, once `load_policy` has loaded them."""
    _num_served_bytes: int | None = None

    def new_admission(self, *, policy_version: int, adopted: Mapping[str, int]) -> tuple[str, Handle]:
        """Starts an `Admission` actor for one rollout stream. Returns its name and its handle. `adopted`:
        `mempipe.actors.admission.Admission`."""
        name = f"admission-{uuid.uuid4().hex[:8]}"
        options = {"name": name, "num_cpus": 0, "max_concurrency": MAX_CALLS}
        algorithm = self.config.algorithm
        return name, start_actor(
            Admission,
            options,
            groups_per_step=algorithm.groups_per_step,
            max_off_policy_steps=algorithm.max_off_policy_steps,
            policy_version=policy_version,
            adopted=adopted,
        )

    def start_learner(self, settings: LearnerSettings) -> None:
        """Makes a learner with `settings` on the ranks, in place of their earlier learner."""
        folder = self.config.folder.absolute()
        if folder.is_dir():
            self.learners.check_folder(folder)
        if self.plan.kind == "colocated":  # an engine measures the free memory of its GPU while it starts
            self.wait()
        self.learners.start(settings)

    def load_policy(self, model: ModelConfig) -> None:
        """Loads `model`, from which training starts, into the ranks, and waits until every role is ready. The engines
        get its weights by the next `sync`."""
        self.config = self.config.model_copy(update={"model": model})
        self.start_learner(learner_settings(self.config))
        self.wait()
        if self.plan.transfer == "nccl":
            self.group = WeightGroup(
                self.learners,
                self.generators,
                self.store,
                tensor_parallel=self.plan.tensor_parallel,
                ask=self._all_engines,
            )
        elif self.plan.transfer == "ipc":
            engines = list(self.generators.values())
            self.learners.open_transfer(engines, tensor_parallel=self.plan.tensor_parallel, backend="ipc")

    def close(self) -> None:
        """Ends what looks after the engines; the actors stay."""
        if self.group is not None:
            self.group.close()

    def put_engines_to_sleep(self) -> None:
        """Makes the engines free their GPU memory until the next `sync`; does nothing without engine sleep mode."""
        if self.plan.sleeps:
            self.wait()
            ray.get(self.store.hold_engines.remote(True))  # also an engine that Ray starts again until then
            self._all_engines(lambda engine: engine.sleep.remote(), phase="putting engines to sleep")

    def learn(
        self, updates: Sequence[Sequence[Sequence[MicroBatch]]], *, first: int = 0, stop: StopRequest | None = None
    ) -> list[dict[str, float]]:
        """Runs one learner step (`LearnerGroup.step`). With engine sleep mode the engines free their GPU memory first
        and stay asleep until the next `sync`."""
        self.put_engines_to_sleep()
        if self.group is not None:
            self.group.hold()
        reports = self.learners.step(updates, first=first, stop=stop)
        self._release()
        return reports

    def sync(self, policy_version: int) -> dict[str, float]:
        """Brings the learner's weights to every engine as `policy_version`, and checks that they arrived; returns the
        metrics to be logged.

        Sleeping engines that share a GPU with the learner receive the weights first, and allocate their cache after the
        learner has freed its copy: there is no room for both (`mempipe.planning.ledger`).

        Raises LaunchError naming the phase when an engine does not load them in time, StaleWeights when an engine holds
        other weights, CanaryFailed when an engine computes other log-probs.
        """
        reached("sync", version=policy_version)
        started = time.perf_counter()
        self.put_engines_to_sleep()  # at the first sync nothing has done so
        if self.group is not None:
            self.group.send(policy_version)
        elif self.plan.transfer == "ipc":
            self.learners.send_weights(policy_version, list(self.generators.values()))
        else:
            weights = self.learners.weights()
            ray.get(self.store.put.remote([weights], policy_version))
            self._all_engines(
                lambda engine: engine.load_weights.remote(weights, policy_version),
                phase=f"loading weights of version {policy_version}",
            )
        self._release()
        if self.plan.sleeps:
            ray.get(self.store.hold_engines.remote(False))
            self._all_engines(lambda engine: engine.wake.remote(), phase="waking engines")
        sent = {"sync/send_seconds": time.perf_counter() - started, "sync/megabytes": self._served_bytes() / 1e6}
        checked = self._check(policy_version)
        self._release()
        return sent | checked

    def waited_for(self) -> str:
        """Describes which role the trajectories in flight wait for. It calls every engine and retriever, and starts
        nothing."""
        roles = {"completions in the engines": self.generators, "searches in the retrievers": self.retrievers}
        counts, silent = Counter[str](), []
        for work, actors in roles.items():
            pending = {name: actor.under_way.remote() for name, actor in actors.items()}
            for name, reference in pending.items():
                try:
                    counts[work] += ray.get(reference, timeout=SILENT_AFTER_S)
                except (GetTimeoutError, RayError):
                    silent.append(name)
        if silent:
            return f"{', '.join(silent)}, without an answer for {SILENT_AFTER_S:g} s"
        if not counts.total():
            return "the reference or the code of agent, reward and tools: no engine and no retriever has anything to do"
        return ", ".join(f"{count} {work}" for work, count in counts.most_common() if count)

    def _release(self) -> None:
        """Ends a phase of the ranks: on GPUs they free the memory that is reserved and not used."""
        if self.plan.bundles:
            self.learners.release_memory()

    def _served_bytes(self) -> int:
        if self._num_served_bytes is None:
            self._num_served_bytes = self.learners.num_served_bytes()
        return self._num_served_bytes

    def _check(self, policy_version: int) -> dict[str, float]:
        reached("sync.check", version=policy_version)
        started = time.perf_counter()
        proving = {name: actor.prove.remote(self.canary) for name, actor in self.generators.items()}
        checksums, scores = self.learners.checksums(), self.learners.score(self.canary)
        self.weights_sha256 = checksums_sha256(checksums)
        proofs = self._all_engines(
            lambda engine: engine.prove.remote(self.canary),
            phase=f"checking weights of version {policy_version}",
            begun=proving,
        )
        gap = check_engines(
            proofs, checksums=checksums, scores=scores, version=policy_version, tolerance=self.config.canary_tolerance
        )
        checked = {
            "canary_mean_difference": gap.mean,
            "canary_max_difference": gap.maximum,
            "canary_tokens_from_cache": gap.num_from_cache,
            "sync/check_seconds": time.perf_counter() - started,
        }
        busy = self._all_engines(lambda engine: engine.take_load.remote(), phase="asking for load")
        return checked | load_metrics(list(busy.values())) | self._memory()

    def _all_engines(
        self, submit: Callable[[Handle], Any], *, phase: str, begun: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return ask_all(self.generators, submit, phase=phase, timeout_s=self.config.generation.timeout_s, begun=begun)

    def _memory(self) -> dict[str, float]:
        roles = {"generator": self.generators, "retriever": self.retrievers}
        return memory_metrics(
            {role: actors.values() for role, actors in roles.items()} | {"learner": self.learners.ranks}
        )


def ask_all(
    actors: Mapping[str, Handle],
    submit: Callable[[Handle], Any],
    *,
    phase: str,
    timeout_s: float,
    begun: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the answer of every engine to `submit`, by name; `begun` are calls that were submitted already. One
    that Ray restarts in the meantime is called again, until it has died MOST_DEATHS times. `timeout_s` is
    `generation.timeout_s`. Raises as `wait_for` does.
    """
    pending = begun or {name: submit(actor) for name, actor in actors.items()}
    limit = f"generation.timeout_s {timeout_s:g} s"
    return _answers(pending, phase=phase, timeout_s=timeout_s, limit=limit, again=lambda name: submit(actors[name]))


def wait_for(pending: Mapping[str, Any], *, phase: str, timeout_s: float) -> dict[str, Any]:
    """Gets all object refs and returns their values by name; `timeout_s` covers them together. Raises RoleLost when an
    actor died or the time is up, LaunchError when a call failed; the message names phase and actor. Raises ConfigError
    with the sentence of an actor that refused a setting when it was made."""
    return _answers(pending, phase=phase, timeout_s=timeout_s, limit=f"{timeout_s:g} s")


def _answers(
    pending: Mapping[str, Any],
    *,
    phase: str,
    timeout_s: float,
    limit: str,
    again: Callable[[str], Any] | None = None,
) -> dict[str, Any]:
    """Looks at all calls in turn, because an actor may die while others take minutes to answer."""
    deadline = time.monotonic() + timeout_s
    left, answers = dict(pending), dict[str, Any]()
    pauses, deaths = {name: retry_pauses() for name in left}, Counter[str]()
    while left:
        for name, reference in [*left.items()]:
            rest = max(deadline - time.monotonic(), 0.001)
            look = rest if len(left) == 1 else min(rest, LOOK_S / len(left))
            try:
                answers[name] = ray.get(reference, timeout=look)
                del left[name]
            except GetTimeoutError as error:
                if look == rest:
                    raise RoleLost(f"{phase}: {name} gave no answer within {limit}") from error
            except (RayActorError, RayTaskError) as error:
                of_task = None if isinstance(error, RayActorError) else error.cause
                deaths[name] += isinstance(of_task, EngineDead)
                starts_again = isinstance(error, ActorUnavailableError) or isinstance(of_task, EngineDead)
                pause = next(pauses[name])
                if isinstance(of_task, EngineDead):  # until its actor has ended too: one death must not count twice
                    pause += 2 * WATCH_EVERY_S
                in_time = time.monotonic() + pause < deadline
                if again is not None and starts_again and deaths[name] < MOST_DEATHS and in_time:
                    time.sleep(pause)
                    left[name] = again(name)
                    continue
                if refused := refusal(error):
                    raise ConfigError(refused) from error
                kind = RoleLost if is_lost(error) else LaunchError
                raise kind(f"{phase}: {name}: {one_line(error)}") from error
    return {name: answers[name] for name in pending}


@contextmanager
def launch(config: RunConfig, namespace: str) -> Iterator[Roles]:
    """Starts all roles of a training and does not wait for them. `Roles.wait` waits for engines and retrievers,
    `Roles.load_policy` waits for all roles. No actor, process or placement group is left after the block, also after an
    error.
    """
    started = Started(config, namespace, reserve(ClusterGpus.found().plan(config, Demand.of_training(config))))
    try:
        with closing(started.roles()) as roles:
            yield roles
    finally:
        started.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterGpus:
    """The GPUs of a cluster, as a plan needs them."""

    per_node: list[int]
    gpu_bytes: int | None
    """Memory of the smallest one; None: not known."""

    @classmethod
    def found(cls) -> ClusterGpus:
        """Returns those of the connected cluster. Raises ConfigError when some are unusable."""
        nodes = cluster_gpus()
        return cls(per_node=[*nodes.values()], gpu_bytes=smallest_gpu(nodes) if nodes else None)

    def plan(self, config: RunConfig, demand: Demand) -> Placement:
        """Returns the plan of the demand. Raises ConfigError when there are too few GPUs."""
        return plan(config, demand, self.per_node, gpu_bytes=self.gpu_bytes)


def reserve(made: Placement) -> Reservation:
    """Reserves the GPUs of a plan. Raises LaunchError when the cluster does not free them."""
    if made.bundles:
        print(f"placement  {made}", flush=True)
    try:
        return Reservation(made, timeout_s=RESERVE_TIMEOUT_S)
    except NotReserved as error:
        raise LaunchError(str(error)) from error


def learner_settings(config: RunConfig) -> LearnerSettings:
    """Returns the settings of the run's learner."""
    return LearnerSettings(
        model=config.model,
        optimizer=config.optimizer,
        learner=config.learner,
        algorithm=config.algorithm,
        temperature=config.sampling.temperature,
        num_updates=config.num_steps * config.algorithm.updates_per_step,
        seed=config.seed,
        mismatch_tolerance=config.mismatch_tolerance,
        profiles=profile_files(config.folder.absolute(), config.tracking.profile_steps),
        holds_reference=config.reference_place == "ranks",
    )


class Started:
    """Actors as they are started, so that a half-finished start can be cleaned up."""

    def __init__(self, config: RunConfig, namespace: str, reservation: Reservation) -> None:
        self.plan = reservation.plan
        self.config = self.plan.applied(config)
        self.namespace = namespace
        self.reservation = reservation
        self.generators: dict[str, Handle] = {}
        self.retrievers: dict[str, Handle] = {}
        self._actors: dict[Role, list[Handle]] = defaultdict(list)

    def stop(self, role: Role) -> None:
        """Ends all actors of a role, engines after they have shut down, and frees their seats."""
        if role == "generator":
            with suppress(RayError):  # an engine that is dead already has nothing to shut down
                ray.get([engine.shutdown.remote() for engine in self.generators.values()], timeout=SHUTDOWN_TIMEOUT_S)
            self.generators = {}
        if role == "retrieval":
            self.retrievers = {}
        for actor in self._actors.pop(role, []):
            ray.kill(actor)
        self.reservation.free(role)

    def close(self) -> None:
        """Ends every actor that was started, and removes the placement group."""
        for role in [*self._actors]:
            self.stop(role)
        self.reservation.remove()

    def roles(self) -> Roles:
        """Starts everything that training needs, without waiting."""
        self.start_engines(context_tokens=self.config.budget.context_tokens)
        self.start_retrievers()
        learner = self.config.learner
        ranks = [
            self._start("learner", LearnerActor, self.reservation.options("learner")) for _ in range(learner.num_ranks)
        ]
        reached("launch")
        return Roles(
            **vars(self.rollout_actors()),
            learners=LearnerGroup(ranks, timeout_s=learner.timeout_s),
            references=self._references(),
        )

    def _references(self) -> ReferencePool | None:
        """Returns the settings with which the trajectory stream starts its reference models."""
        if self.config.reference_place != "actors":
            return None
        size = len(self.plan.seats("reference")) or self.config.reference.num_replicas
        return ReferencePool(size=size, options=self.reservation.pool_options("reference"))

    def rollout_actors(self) -> RolloutActors:
        """Returns the engines and retrievers that were started, without waiting."""
        return RolloutActors(
            config=self.config,
            plan=self.plan,
            namespace=self.namespace,
            generators=self.generators,
            retrievers=self.retrievers,
            store=self.store,
            starting={name: actor.ready.remote() for name, actor in (self.generators | self.retrievers).items()},
        )

    def start_engines(self, *, context_tokens: int) -> None:
        """Starts the engines of the config, for contexts of that length, and the store of their weights."""
        config = self.config
        self.store = self._start("generator", WeightStore, {"name": WEIGHT_STORE, "num_cpus": 0})
        # A restarted engine takes the newest weights from the store, or from a new nccl group (`WeightGroup`). An ipc
        # engine shares its GPU with a rank, so all roles start again from the newest checkpoint (`max_restarts`).
        engine_restarts = {"max_restarts": 0 if self.plan.transfer == "ipc" else -1}
        self.generators = {
            f"generator-{i}": self._start(
                "generator",
                GeneratorActor,
                {"name": f"generator-{i}"} | RESTARTABLE | engine_restarts | self.reservation.options("generator"),
                model=config.model,
                config=config.generation,
                context_tokens=context_tokens,
                seed=config.seed,
                number=i,
                store=WEIGHT_STORE,
                transfer=self.plan.transfer,
                stop_texts=config.agent_spec.stop_texts,
                sleeps=self.plan.sleeps,
                reproducible=config.ordered,
            )
            for i in range(self.plan.num_engines)
        }

    def start_retrievers(self) -> None:
        """Starts the retrievers of the config: none when neither retrieval.index nor retrieval.url is set."""
        retrieval, anywhere = self.config.retrieval, {"num_cpus": 0}
        shards = [
            self._start("retrieval", ShardActor, RESTARTABLE | self.reservation.options("retrieval"), retrieval, i)
            for i in range(retrieval.shard_actors if retrieval.index else 0)
        ]
        self.retrievers = {
            f"retriever-{i}": self._start(
                "retrieval",
                RetrieverActor,
                {"name": f"retriever-{i}"}
                | RESTARTABLE
                | (anywhere if shards or retrieval.url else self.reservation.options("retrieval")),
                retrieval,
                shards,
                together=not self.config.ordered,
            )
            for i in range(retrieval.num_replicas if retrieval.index or retrieval.url else 0)
        }

    def _start(self, role: Role, cls: type, options: dict[str, Any], *args: Any, **kwargs: Any) -> Handle:
        actor = start_actor(cls, options, *args, **kwargs)
        self._actors[role].append(actor)
        return actor
