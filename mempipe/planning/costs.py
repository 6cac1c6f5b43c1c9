"""Seconds of a step, calculated from the config, the model's shape and a GPU's data sheet.

docs/scale.md explains every formula and what it assumes. Nothing here is measured: a step that takes twice as long as
this says is worth a look, one that takes a fifth longer is not.
"""

from __future__ import annotations

from dataclasses import dataclass

from mempipe.config import RunConfig
from mempipe.engines.gpus import Gpu
from mempipe.planning.capacity import GIB, ModelShape, trained_parameters, weight_width
from mempipe.planning.ledger import engine_held
from mempipe.planning.placement import Placement

COMPUTE_SHARE = 0.4
"""The share of the data sheet's operations that long matrix products reach: an assumption."""
MEMORY_SHARE = 0.7
"""The share of the data sheet's memory and link rates that is reached: an assumption."""
ENGINE_STEP_S = 0.003
"""Seconds of an engine step in addition to the GPU's work: scheduling, sampling, detokenising."""
STORE_BYTES_PER_SECOND = 1e9
"""Weights as bytes: packed, copied to the object store and from there into an engine."""
DRIVER_S_PER_MILLION = 0.05
"""Seconds of the driver for a million tokens (`benchmarks/driver_step.py`: 0.045 on an idle core)."""
CHUNKS = 8
"""Chunks of a text, which in truth its length decides: an assumption for agents that read."""
INJECTED = {"question", "memory", "observation", "chunk", "document", "marks"}
"""The parts of a context that are not sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """An average trajectory, and the longest one that the budget allows."""

    contexts: float
    """With those that no turn waits for (recall samples)."""
    context_tokens: float
    """Tokens of one context."""
    sampled_tokens: float
    """Of them."""
    message_tokens: float
    """Tokens of its longest message."""
    most_sampled_tokens: float
    """Sampled tokens of the longest trajectory."""

    @classmethod
    def of(cls, config: RunConfig) -> Workload:
        """Assumes half of the turns, and contexts that fill half of every limit; a chunk is always whole."""
        parts = config.budget.parts()
        tokens = sum(size if name == "chunk" else size / 2 for name, size in parts.items())
        messages = [size for name, size in parts.items() if name not in INJECTED]
        sampled, message = sum(messages), max(messages) / 2
        limit = config.budget.turn_limit
        turns, most = ((limit + 1) / 2, limit) if limit else (CHUNKS + 1, CHUNKS + 1)
        if config.agent_spec.grows:  # one context, which holds all turns
            action = config.budget.action_tokens
            tokens = min(config.budget.context_tokens, tokens * turns)
            return cls(
                contexts=1,
                context_tokens=tokens,
                sampled_tokens=turns * action / 2,
                message_tokens=message,
                most_sampled_tokens=most * action,
            )
        return cls(
            contexts=turns + config.agent.side_contexts,
            context_tokens=tokens,
            sampled_tokens=sampled / 2,
            message_tokens=message,
            most_sampled_tokens=most * sampled,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """The sampling speed of one engine."""

    weight_seconds: float
    """To read all weights once."""
    cache_seconds: float
    """To read the cache of one sequence of average length."""
    compute_seconds: float
    """To compute one token."""
    most_sequences: int

    def step_seconds(self, sequences: float) -> float:
        """Returns the seconds in which each of `sequences` gets one token: those of reading memory or of computing,
        whichever takes longer."""
        reading = self.weight_seconds + sequences * self.cache_seconds
        return max(reading, sequences * self.compute_seconds) + ENGINE_STEP_S

    def prefill_seconds(self, tokens: float) -> float:
        return tokens * self.compute_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of one learner step, by role."""

    tokens: float
    generate: float
    longest: float
    """The longest trajectory alone, which no number of engines makes shorter."""
    rounds: int
    """Learner steps over which the longest trajectory may extend: max_off_policy_steps + 1."""
    reference: float
    learn: float
    driver: float
    sync: float
    total: float

    @property
    def bottleneck(self) -> str:
        """Names what the step waits for most."""
        seconds = {
            "the longest trajectory": self.longest / self.rounds,
            "the engines": self.generate,
            "the reference": self.reference,
            "the learner": self.learn + self.driver,
            "the sync": self.sync,
        }
        return max(seconds, key=seconds.__getitem__)


def engine_speed(
    config: RunConfig, shape: ModelShape, plan: Placement, gpu: Gpu, *, context_tokens: float
) -> EngineSpeed:
    """Returns the speed of one engine of the plan."""
    width, tensor_parallel = weight_width(config.model), plan.tensor_parallel
    bandwidth = gpu.terabytes_per_second * 1e12 * MEMORY_SHARE
    cache_bytes = shape.kv_bytes_per_token(width, tensor_parallel=tensor_parallel) * context_tokens
    room = gpu.usable_gib * GIB * plan.gpu_memory_utilization - engine_held(
        config, shape, tensor_parallel=tensor_parallel
    )
    return EngineSpeed(
        weight_seconds=width * shape.num_parameters / (bandwidth * tensor_parallel),
        cache_seconds=cache_bytes / bandwidth,
        compute_seconds=2 * shape.num_parameters / (gpu.teraflops * 1e12 * COMPUTE_SHARE * tensor_parallel),
        most_sequences=max(1, min(config.generation.max_num_seqs, int(room / cache_bytes))),
    )


def learner_seconds(
    config: RunConfig, shape: ModelShape, gpu: Gpu, *, num_ranks: int, contexts: float, context_tokens: float
) -> float:
    """Returns the seconds of forward and backward over contexts of one length, by the operations that they need; with
    the forward pass of a reference that is not an actor."""
    trained = trained_parameters(config.model, shape) / shape.num_parameters
    passes = 4 + 2 * min(trained, 1)  # the gradient of weights that do not train is not computed
    if config.model.gradient_checkpointing:
        passes += 2
    if config.learner.old_logprobs == "recompute":
        updates = config.algorithm.updates_per_step
        passes += 2 * (updates - 1) / updates
    if config.algorithm.uses_reference and config.reference_place != "actors":
        passes += 2
    attention = shape.layers * shape.heads * shape.head_dim * context_tokens  # per token and operation
    operations = contexts * context_tokens * passes * (shape.num_parameters + attention)
    return operations / (num_ranks * gpu.teraflops * 1e12 * COMPUTE_SHARE)


def reference_seconds(shape: ModelShape, gpu: Gpu, *, tokens: float) -> float:
    """Returns the seconds of one reference's forward over `tokens`."""
    return 2 * shape.num_parameters * tokens / (gpu.teraflops * 1e12 * COMPUTE_SHARE)


def sync_seconds(config: RunConfig, shape: ModelShape, plan: Placement, gpu: Gpu) -> float:
    """Returns the seconds in which weights are gathered from the ranks and sent to all engines at the same time."""
    served = trained_parameters(config.model, shape) if config.model.serves_adapter else shape.num_parameters
    size = served * weight_width(config.model)
    if plan.transfer == "mempipe_shm":
        return 2 * size / STORE_BYTES_PER_SECOND
    return 2 * size / (gpu.link_gigabytes_per_second * 1e9 * MEMORY_SHARE)


def step_costs(config: RunConfig, shape: ModelShape, plan: Placement, gpu: Gpu) -> StepCosts:
    """Returns the seconds of a step of the config as the plan runs it (`Placement.applied`), without searches."""
    work = Workload.of(config)
    algorithm = config.algorithm
    trajectories = algorithm.groups_per_step * algorithm.group_size
    contexts = trajectories * work.contexts
    tokens = contexts * work.context_tokens
    engine = engine_speed(config, shape, plan, gpu, context_tokens=work.context_tokens)

    waiting = min(
        algorithm.groups_per_step * (algorithm.max_off_policy_steps + 1),
        config.stream.num_drivers * config.stream.groups_in_flight,
    )
    sequences = max(1.0, min(engine.most_sequences, waiting * algorithm.group_size / plan.num_engines))
    sampling = contexts * work.sampled_tokens / (plan.num_engines * sequences) * engine.step_seconds(sequences)
    reading = engine.prefill_seconds(tokens - contexts * work.sampled_tokens) / plan.num_engines
    generate, longest = sampling + reading, work.most_sampled_tokens * engine.step_seconds(1)

    has_actors = config.reference_place == "actors"
    references = (len(plan.seats("reference")) or config.reference.num_replicas) if has_actors else 0
    reference = reference_seconds(shape, gpu, tokens=tokens) / references if references else 0.0
    learn = learner_seconds(
        config, shape, gpu, num_ranks=plan.num_ranks, contexts=contexts, context_tokens=work.context_tokens
    )
    driver = DRIVER_S_PER_MILLION * tokens / 1e6
    sync = sync_seconds(config, shape, plan, gpu)
    if algorithm.max_off_policy_steps and not config.generation.updates_in_flight:
        sync += work.message_tokens * engine.step_seconds(sequences)  # completions in flight finish first
    if plan.kind == "colocated":
        total = max(generate, longest) + reference + learn + driver + sync
    elif algorithm.max_off_policy_steps:
        total = max(generate, longest / (algorithm.max_off_policy_steps + 1), reference, learn + driver) + sync
    else:
        total = max(generate, longest, reference) + learn + driver + sync
    return StepCosts(
        tokens=tokens,
        generate=generate,
        longest=longest,
        rounds=algorithm.max_off_policy_steps + 1,
        reference=reference,
        learn=learn,
        driver=driver,
        sync=sync,
        total=total,
    )
