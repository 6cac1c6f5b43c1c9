"""Places the roles on GPUs: makes one plan from the GPUs of every node and the demand of the config.

`separate`: every role has its own GPUs, and weights go from GPU to GPU by nccl. `colocated`: every GPU has a learner
rank and an engine, or a worker of an engine that extends over the GPUs of several ranks of a node, and weights are
handed over on each GPU by ipc. `auto` is the first of these that fits, in number and in memory: separate; separate, but
with the references on GPUs of the learner; colocated on all GPUs. The numbers of ranks and of engines and the tensor
parallelism change nothing in the learned result, so with few GPUs a plan differs from the config in them.

docs/scale.md has the rules with examples. Nothing here imports ray or torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal

from mempipe.config import RunConfig
from mempipe.planning.capacity import GIB, ModelShape, model_shape, uneven
from mempipe.planning.ledger import (
    Card,
    Ledger,
    Phase,
    Role,
    Transfer,
    engine_needs,
    rank_needs,
    reference_needs,
    share_bounds,
    vector_needs,
)
from mempipe.retrieval.manifest import gpu_bytes as vector_gpu_bytes
from mempipe.settings import ConfigError

Bundle = dict[Role, float]
"""The GPUs, or the share of one, of each role that works in one place; a bundle is on one node."""
RANK_SHARE, ENGINE_SHARE, REFERENCE_SHARE = 0.5, 0.3, 0.2
"""Shares that Ray counts for the roles of a shared GPU. They must add up to 1 at most; a bundle reserves whole GPUs
(`bundle_gpus`). Memory is divided by `Placement.gpu_memory_utilization`. Ray gives an actor parts of one GPU only: an
engine of several shared GPUs takes none by Ray's count, and their ranks more than half of one, so that each has
another."""
ENGINE_SIZES = (2, 4, 8)
"""Values of generation.tensor_parallel that a refused plan is tried with."""
UNKNOWN_UTILIZATION = 0.4
"""An engine's part of a shared GPU when the sizes of GPU or model are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The number of actors of each role that a job needs; 0 for a role that is not part of it."""

    learners: int = 0
    engines: int = 0
    tensor_parallel: int = 1
    references: int = 0
    holders: int = 0
    """Actors that hold vectors on GPUs. They never share."""
    gpus_per_holder: int = 0
    vector_bytes: int | None = None
    """Memory of the fullest of these GPUs; None: not known."""

    @classmethod
    def of_training(cls, config: RunConfig) -> Demand:
        return cls(
            learners=config.learner.num_ranks,
            engines=config.generation.num_replicas,
            tensor_parallel=config.generation.tensor_parallel,
            references=config.reference.num_replicas if config.reference_place == "actors" else 0,
            **_holders(config),
        )

    @classmethod
    def of_rollouts(cls, config: RunConfig) -> Demand:
        generation = config.generation
        return cls(engines=generation.num_replicas, tensor_parallel=generation.tensor_parallel, **_holders(config))

    @property
    def by_role(self) -> dict[Role, int]:
        """Returns the GPUs of the roles, if each had its own; without the roles that have none."""
        gpus: dict[Role, int] = {
            "learner": self.learners,
            "generator": self.engines * self.tensor_parallel,
            "reference": self.references,
            "retrieval": self.holders * self.gpus_per_holder,
        }
        return {role: count for role, count in gpus.items() if count}


def _holders(config: RunConfig) -> dict[str, Any]:
    retrieval = config.retrieval
    if not retrieval.index or not retrieval.num_gpus:
        return {}
    return {
        "holders": retrieval.shard_actors or retrieval.num_replicas,
        "gpus_per_holder": retrieval.num_gpus,
        "vector_bytes": vector_gpu_bytes(
            retrieval.index, num_parts=retrieval.shard_actors or 1, num_gpus=retrieval.num_gpus
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The placement of every role. Without GPUs there are no bundles, and a role may be on any node."""

    kind: Literal["cpu", "separate", "colocated"]
    num_ranks: int
    num_engines: int
    tensor_parallel: int
    gpu_memory_utilization: float
    """An engine's share of a GPU's memory."""
    bundles: list[Bundle] = field(default_factory=list)
    """One bundle for each GPU that engines share with ranks. Those of an engine of several GPUs come one after the
    other, before all other bundles."""
    transfer: Transfer = "mempipe_shm"
    sleeps: bool = False
    """Whether engines give their memory back while the learner works."""
    unused_gpus: int = 0
    vector_bytes: int | None = None
    """Memory of the fullest GPU that holds vectors; None: not known, or there is none."""

    def ledger(self, config: RunConfig, shape: ModelShape, *, gpu_bytes: int) -> Ledger:
        """Returns what every role needs on its GPU in each phase."""
        needs: dict[Role, Mapping[Phase, int]] = {
            "learner": rank_needs(config, shape, num_ranks=max(1, self.num_ranks), transfer=self.transfer),
            "reference": reference_needs(config, shape),
            "generator": engine_needs(
                config,
                shape,
                tensor_parallel=self.tensor_parallel,
                share_bytes=math.ceil(self.gpu_memory_utilization * gpu_bytes),
                sleeps=self.sleeps,
                transfer=self.transfer,
            ),
        }
        if self.vector_bytes is not None:
            needs["retrieval"] = vector_needs(self.vector_bytes)
        return Ledger(
            gpu_bytes=gpu_bytes,
            cards=[
                Card(needs={role: needs[role] for role in bundle})
                for bundle in self.bundles
                if bundle.keys() <= needs.keys()
                for _ in range(bundle_gpus(bundle))
            ],
        )

    @property
    def span(self) -> int:
        """Returns the number of GPUs that an engine shares with as many ranks."""
        return self.tensor_parallel if self.kind == "colocated" else 1

    def place(self, bundle: int) -> int:
        """Returns the number of the place on one node that the bundle is in: those of an engine are in one."""
        shared = self.num_engines * self.span
        return bundle // self.span if bundle < shared else bundle - shared + self.num_engines

    @property
    def places(self) -> list[int]:
        """Returns the whole GPUs of every place."""
        gpus = Counter[int]()
        for i, bundle in enumerate(self.bundles):
            gpus[self.place(i)] += bundle_gpus(bundle)
        return [gpus[i] for i in sorted(gpus)]

    def seats(self, role: Role) -> list[tuple[int, float]]:
        """Returns (place, GPUs by Ray's count) of every actor of the role."""
        seats = [(self.place(i), bundle[role]) for i, bundle in enumerate(self.bundles) if role in bundle]
        return seats[:: self.span] if role == "generator" else seats

    def applied(self, config: RunConfig) -> RunConfig:
        """Returns the config as the plan runs it. An engine that sleeps answers late: its deadline grows by the
        learner's."""
        generation = {
            "num_replicas": self.num_engines,
            "tensor_parallel": self.tensor_parallel,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "timeout_s": config.generation.timeout_s + (config.learner.timeout_s if self.sleeps else 0.0),
        }
        learner = {"num_ranks": self.num_ranks or config.learner.num_ranks}
        return config.model_copy(
            update={
                "generation": config.generation.model_copy(update=generation),
                "learner": config.learner.model_copy(update=learner),
            }
        )

    def __str__(self) -> str:
        if not self.bundles:
            return "every role on CPUs"
        groups = Counter(tuple(bundle.items()) for bundle in self.bundles)
        places = ", ".join(
            f"{count} x {math.ceil(sum(gpus for _, gpus in roles))} GPU for {' + '.join(role for role, _ in roles)}"
            for roles, count in groups.items()
        )
        sleep = "; engines sleep while the learner works" if self.sleeps else ""
        count = "1 GPU stays" if self.unused_gpus == 1 else f"{self.unused_gpus} GPUs stay"
        unused = f"; {count} unused" if self.unused_gpus else ""
        spans = f"; every engine on {self.span} of them" if self.span > 1 else ""
        return f"{self.kind}: {places}{spans}; weights by {self.transfer}{sleep}{unused}"


def plan(config: RunConfig, demand: Demand, gpus_per_node: Sequence[int], *, gpu_bytes: int | None = None) -> Placement:
    """Returns the plan for nodes that have `gpus_per_node` GPUs of `gpu_bytes` memory each (None: not known).

    Where the model's shape is known as well, every GPU has `ledger.SPARE` of its memory to spare in every phase. Raises
    ConfigError, which names the settings to change, when the demand does not fit; where the memory is too small, it
    also names the first of `_remedies` with which it fits.
    """
    try:
        return _first_way(config, demand, gpus_per_node, gpu_bytes=gpu_bytes)
    except ConfigError as error:
        if not _can_be_placed(config, demand, gpus_per_node, gpu_bytes=None):  # GPUs are missing, not memory
            raise
        for settings, changed, needed in _remedies(config, demand):
            if _can_be_placed(changed, needed, gpus_per_node, gpu_bytes=gpu_bytes):
                raise ConfigError(f"{error}. It fits with {settings}") from error
        raise


def _can_be_placed(config: RunConfig, demand: Demand, gpus_per_node: Sequence[int], *, gpu_bytes: int | None) -> bool:
    try:
        _first_way(config, demand, gpus_per_node, gpu_bytes=gpu_bytes)
    except ConfigError:
        return False
    return True


def _remedies(config: RunConfig, demand: Demand) -> Iterator[tuple[str, RunConfig, Demand]]:
    """Yields settings that take less of a GPU, as few as possible, and config and demand with them. None changes the
    learned result. A run without a reference (algorithm.kl_coef: 0) would need as much as with one on the ranks."""
    if not demand.learners:
        return
    switches: list[tuple[str, str, Any]] = [("learner", "offload_optimizer", True)]
    switches.append(("model", "gradient_checkpointing", True))
    if demand.references and not config.algorithm.kl_reward_coef:
        switches.append(("reference", "on_ranks", True))
    shape = model_shape(config.model)
    if demand.engines and shape is not None:
        sizes = [size for size in ENGINE_SIZES if size > demand.tensor_parallel and not uneven(shape, size)]
        switches += [("generation", "tensor_parallel", size) for size in sizes]
    for count in range(1, len(switches) + 1):
        for chosen in combinations(switches, count):
            sections = {name: getattr(config, name).model_copy(update={key: value}) for name, key, value in chosen}
            if len(sections) < count:  # two sizes of an engine
                continue
            needed = replace(
                demand,
                references=0 if "reference" in sections else demand.references,
                tensor_parallel=sections.get("generation", config.generation).tensor_parallel,
            )
            settings = " and ".join(f"{name}.{key}: {str(value).lower()}" for name, key, value in chosen)
            yield settings, config.model_copy(update=sections), needed


def _first_way(config: RunConfig, demand: Demand, gpus_per_node: Sequence[int], *, gpu_bytes: int | None) -> Placement:
    """Returns the first plan that fits: of those that `placement` allows, the one that shares least."""
    separate = _separate(demand)
    if not sum(gpus_per_node) or not separate:
        return _plan(config, demand, "cpu", [], gpus_per_node)
    sharing = _separate(demand, references_share=True)
    together = demand.learners and demand.engines
    ways: list[Callable[[], Placement]] = []
    if config.placement != "colocated" or not together:
        ways.append(lambda: _in_memory(config, _counted(config, demand, separate, gpus_per_node), gpu_bytes))
    if config.placement == "auto" and demand.learners >= demand.references > 0:
        ways.append(lambda: _in_memory(config, _counted(config, demand, sharing, gpus_per_node), gpu_bytes))
    if config.placement != "separate":
        ways.append(lambda: _in_memory(config, _fewer(config, demand, gpus_per_node, gpu_bytes=gpu_bytes), gpu_bytes))
    for way in ways[:-1]:
        try:
            return way()
        except ConfigError:  # the next way shares more
            continue
    return ways[-1]()


def _counted(config: RunConfig, demand: Demand, bundles: list[Bundle], gpus_per_node: Sequence[int]) -> Placement:
    """Returns the separate plan of these bundles. Raises ConfigError when there are too few GPUs."""
    if not _fits(map(bundle_gpus, bundles), gpus_per_node):
        raise _shortage(config, demand, gpus_per_node)
    return _plan(config, demand, "separate", bundles, gpus_per_node)


def _in_memory(config: RunConfig, made: Placement, gpu_bytes: int | None) -> Placement:
    """Returns the plan, when every GPU has room for its roles in every phase. Raises ConfigError when one has not."""
    shape = model_shape(config.model)
    if shape is None or gpu_bytes is None:
        return made
    if excess := made.ledger(config, shape, gpu_bytes=gpu_bytes).excess():
        raise ConfigError(f"placement, {made.kind}: {excess}")
    return made


def _separate(demand: Demand, *, references_share: bool = False) -> list[Bundle]:
    shared = demand.references if references_share else 0
    rank_with_reference: Bundle = {"learner": 1 - REFERENCE_SHARE, "reference": REFERENCE_SHARE}
    ranks: list[Bundle] = [{"learner": 1} for _ in range(demand.learners - shared)]
    ranks += [rank_with_reference for _ in range(shared)]
    engines: list[Bundle] = [{"generator": demand.tensor_parallel} for _ in range(demand.engines)]
    references: list[Bundle] = [{"reference": 1} for _ in range(demand.references - shared)]
    return ranks + engines + references + _holder_bundles(demand)


def _fewer(config: RunConfig, demand: Demand, gpus_per_node: Sequence[int], *, gpu_bytes: int | None) -> Placement:
    """Returns a smaller plan: learner and engines share every GPU; of one of them alone there are as many as GPUs.

    An engine of several GPUs shares them with as many ranks. It has one GPU where no node has enough, or where the
    GPUs that are then in use are too small.
    """
    if not demand.learners or not demand.engines:
        size = demand.tensor_parallel if demand.engines else 1
        bundle: Bundle = {"generator" if demand.engines else "learner": size}
        bundles = [bundle] * _most(demand, size, gpus_per_node)
        if not bundles:
            raise _shortage(config, demand, gpus_per_node)
        return _plan(config, demand, "separate", bundles + _holder_bundles(demand), gpus_per_node)
    refused: ConfigError | None = None
    for size in dict.fromkeys((demand.tensor_parallel, 1)):
        count = size * _most(demand, size, gpus_per_node)
        if not count:
            continue
        references = min(demand.references, count)
        without: Bundle = {"learner": RANK_SHARE, "generator": ENGINE_SHARE}
        if size > 1:
            without = {"learner": 1 - REFERENCE_SHARE, "generator": 0}
        with_reference: Bundle = {**without, "reference": REFERENCE_SHARE}
        bundles = [without] * (count - references) + [with_reference] * references + _holder_bundles(demand)
        made = _plan(config, replace(demand, tensor_parallel=size), "colocated", bundles, gpus_per_node)
        try:
            return _divided(config, made, gpu_bytes)
        except ConfigError as error:
            refused = refused or error
    raise refused or _shortage(config, demand, gpus_per_node)


def _most(demand: Demand, size: int, gpus_per_node: Sequence[int]) -> int:
    """Returns the number of places of `size` GPUs, next to the holders of vectors; no more GPUs than are demanded."""
    holders = [demand.gpus_per_holder] * demand.holders
    room = min(sum(gpus_per_node) - sum(holders), sum(demand.by_role.values()))
    return next((count for count in range(room // size, 0, -1) if _fits([size] * count + holders, gpus_per_node)), 0)


def _divided(config: RunConfig, made: Placement, gpu_bytes: int | None) -> Placement:
    """Returns the colocated plan with an engine's part of a GPU: the largest that fits in every phase. The engine
    sleeps while the learner works if it fits only then.

    Raises ConfigError when it does not fit at all.
    """
    shape = model_shape(config.model)
    if shape is None or gpu_bytes is None:
        share = min(config.generation.gpu_memory_utilization, UNKNOWN_UTILIZATION)
        return replace(made, gpu_memory_utilization=share, sleeps=True)
    lowest, highest = share_bounds(config, shape, gpu_bytes=gpu_bytes, tensor_parallel=made.tensor_parallel)

    def excess(plan: Placement) -> str:
        return plan.ledger(config, shape, gpu_bytes=gpu_bytes).excess()

    plans: list[Placement] = []
    for sleeps in (False, True):
        plans = [replace(made, gpu_memory_utilization=i / 100, sleeps=sleeps) for i in range(lowest, highest + 1)]
        num_fitting = bisect_left(plans, True, key=lambda plan: excess(plan) != "")  # more is needed with a larger part
        if num_fitting:
            return plans[num_fitting - 1]
    raise ConfigError(
        f"placement: a GPU of {gpu_bytes / GIB:.0f} GiB that all roles share over {made.num_ranks} ranks has no room, "
        f"also when engines sleep while the learner works: {excess(plans[0])}"
    )


def _transfer(config: RunConfig, kind: str) -> Transfer:
    """Chooses how weights go from ranks to engines that both have GPUs. A sender of GPU memory supports full parameters
    only: an adapter, or weights merged with it, are sent as bytes."""
    return "mempipe_shm" if config.model.lora_rank else "ipc" if kind == "colocated" else "nccl"


def _holder_bundles(demand: Demand) -> list[Bundle]:
    return [{"retrieval": demand.gpus_per_holder} for _ in range(demand.holders)]


def _plan(
    config: RunConfig,
    demand: Demand,
    kind: Literal["cpu", "separate", "colocated"],
    bundles: list[Bundle],
    gpus_per_node: Sequence[int],
) -> Placement:
    engines = sum("generator" in bundle for bundle in bundles)
    ranks = sum("learner" in bundle for bundle in bundles)
    return Placement(
        kind=kind,
        num_ranks=ranks or demand.learners,
        num_engines=engines // (demand.tensor_parallel if kind == "colocated" else 1) or demand.engines,
        tensor_parallel=demand.tensor_parallel,
        gpu_memory_utilization=config.generation.gpu_memory_utilization,
        bundles=bundles,
        transfer=_transfer(config, kind) if engines and ranks else "mempipe_shm",
        unused_gpus=sum(gpus_per_node) - sum(map(bundle_gpus, bundles)) if bundles else 0,
        vector_bytes=demand.vector_bytes,
    )


def bundle_gpus(bundle: Bundle) -> int:
    """Returns the whole GPUs of a bundle."""
    return math.ceil(round(sum(bundle.values()), 6))


def _fits(sizes: Iterable[int], gpus_per_node: Sequence[int]) -> bool:
    """Returns whether every place, of these numbers of GPUs, fits on a node; the largest are placed first."""
    free = list(gpus_per_node)
    for size in sorted(sizes, reverse=True):
        node = next((i for i, gpus in enumerate(free) if gpus >= size), None)
        if node is None:
            return False
        free[node] -= size
    return True


def _shortage(config: RunConfig, demand: Demand, gpus_per_node: Sequence[int]) -> ConfigError:
    wanted = ", ".join(f"{role} {count}" for role, count in demand.by_role.items())
    nodes = f" on nodes of {' + '.join(map(str, gpus_per_node))}" if len(gpus_per_node) > 1 else ""
    return ConfigError(
        f"placement is {config.placement!r}, and the roles need {sum(demand.by_role.values())} GPUs ({wanted}), but "
        f"the cluster has {sum(gpus_per_node)}{nodes}; lower learner.num_ranks, generation.num_replicas, "
        "generation.tensor_parallel or retrieval.num_gpus, or set placement to auto"
    )
