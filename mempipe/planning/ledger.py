"""The ledger of memory: what every role holds on a GPU in each phase of a training step.

Placement, `mempipe doctor` and an engine's share of a GPU read it. All sizes are in bytes and of one GPU. They are
calculated from the config and the model's shape. docs/scale.md has the formulas, docs/gpu.md what one GPU held, and
`make test-gpu` compares the two. Nothing here imports ray or torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mempipe.config import RunConfig
from mempipe.planning.capacity import GIB, ModelShape, trained_parameters, weight_width
from mempipe.rl.packing import MOST_SHARED
from mempipe.settings import ConfigError

Role = Literal["learner", "generator", "reference", "retrieval"]
Transfer = Literal["mempipe_shm", "nccl", "ipc"]
"""How weights reach an engine: as bytes through the object store, from GPU to GPU, or on the GPU that both are on."""
Phase = Literal["learn", "gather", "send", "wake", "check", "sample", "evaluate", "checkpoint"]
"""learn: the optimiser updates of a step. gather: trained weights are made whole, one after the other. send: engines
take them. wake: engines that slept get their cache back. check: both sides score the canary. sample, evaluate: engines
and references work. checkpoint: the state is saved or exported while they do."""
PHASES: tuple[Phase, ...] = get_args(Phase)
ASLEEP: frozenset[Phase] = frozenset(("learn", "gather"))
"""Phases in which an engine that sleeps holds neither weights nor cache. In `send` it holds the weights only."""

SPARE = 0.06
"""The share of a GPU that no plan uses: for what the ledger does not know."""
CONTEXT = 3 * GIB // 2
"""A process on a GPU without any tensor: CUDA context, communication buffers. On an H200 a rank without NCCL
took 1.0 GiB."""
RESERVED = 0.1
"""Memory that torch reserves beyond what it allocates, as a share of the tensors that come and go. Assumed:
on an H200 the tensors took less than calculated and torch reserved more, and the sum was 8 % less."""
KERNELS = 2 * GIB
"""An engine besides weights and cache: CUDA context, workspace, recorded graphs. It keeps them when it sleeps. Assumed,
not measured."""
LOGITS = 2**26
"""Logits that exist at once (`engines.model.MAX_LOGITS`)."""
COPIES_OF_LOGITS = 3
"""Float32 tensors of that size: the log-softmax, which becomes the gradient, next to the logits, its exponential or
its quotient by the temperature (`engines.token_scores`); and the gradient's 16-bit copy, which is half a tensor."""
PACKED = 2 * GIB
"""Two buffers in which nccl sends and receives (vLLM's default)."""
FULL_CONTEXTS = 16
"""An engine whose cache holds fewer contexts does not sample while the learner works on the same GPU: it sleeps.
Assumed, not measured."""

REMEDIES = (
    "set model.lora_rank, model.gradient_checkpointing, learner.offload_optimizer or reference.on_ranks, lower "
    "learner.max_tokens_per_micro_batch or generation.gpu_memory_utilization, or take more GPUs"
)
"""Settings with which a plan needs less of each GPU."""
VECTOR_REMEDIES = (
    "raise retrieval.num_gpus or retrieval.shard_actors, or build the index with a smaller faiss.shard_passages"
)
"""The same for GPUs that hold vectors."""


def rank_needs(config: RunConfig, shape: ModelShape, *, num_ranks: int, transfer: Transfer) -> dict[Phase, int]:
    """Returns the memory of one learner rank, which frees what it reserved when a phase ends (`Roles.learn`,
    `Roles.sync`).

    All the time it holds float32 masters (4 bytes a parameter) and two moments of AdamW (8 bytes a trained one), split
    over the ranks. With `learner.offload_optimizer` the moments are there in `learn` only, while the weights are
    updated and no activations exist. On top of them:

    - learn: the gradient (4 bytes a trained parameter, split), two gathered layers, the gradient of one and its float32
      reduction, embedding and head with their gradients, saved states, the activations of one layer (of all layers
      without gradient checkpointing) and the logits of a chunk. A reference on the ranks (`reference.on_ranks`) scores
      before that, while there is no gradient: it takes embedding, head and two layers, gathered, and what a reference
      computes with. Its shards are in the machine's memory.
    - gather: the largest weight, whole and as this rank's shard.
    - send: by ipc a whole copy in the engine's width; by nccl the largest weight and the buffers.
    - check: embedding, head and two layers, gathered, and logits.
    - checkpoint: the largest weight in float32, for an export.
    """
    width, tokens = weight_width(config.model), config.learner.max_tokens_per_micro_batch
    trained = trained_parameters(config.model, shape)
    offloads = config.learner.offload_optimizer
    moments = 8 * trained // num_ranks
    state = CONTEXT + (4 * shape.num_parameters + (0 if offloads else 8 * trained)) // num_ranks

    of_layer = tokens * (16 * shape.hidden + 8 * shape.intermediate) * width
    if config.learner.share_prefixes:  # attention sees every context whole, forward and backward
        heads = shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
        of_layer += 2 * (MOST_SHARED - 1) * tokens * heads * width
    kept = tokens * shape.hidden * shape.layers * width + of_layer
    activations = kept if config.model.gradient_checkpointing else shape.layers * of_layer
    layers = (3 * width + 8) * shape.layer_parameters
    root = shape.root_parameters * width
    if not config.model.lora_rank:  # their gradients; the head's sum over chunks in float32, and that of one chunk
        root += root + 8 * shape.head_parameters
    logits = _logits(tokens, shape)
    gather = (width * shape.head_parameters * (num_ranks + 1)) // num_ranks
    sent = {"ipc": width * shape.num_parameters, "nccl": gather + PACKED, "mempipe_shm": 4 * shape.head_parameters}
    gathered = width * (shape.root_parameters + 2 * shape.layer_parameters)
    updating = 4 * trained // num_ranks + max(layers + root + activations + logits, moments if offloads else 0)
    scoring = gathered + _scoring(config, shape) if config.reference_place == "ranks" else 0
    working: dict[Phase, int] = {
        "learn": max(updating, scoring),
        "gather": gather,
        "send": sent[transfer] + gather,
        "check": gathered + logits,
        "checkpoint": 4 * shape.head_parameters,
    }
    return {phase: state + _reserved(working.get(phase, 0)) for phase in PHASES}


def reference_needs(config: RunConfig, shape: ModelShape) -> dict[Phase, int]:
    """Returns the memory of one reference model: its weights, and one layer's activations of a micro-batch that keeps
    none of them. It keeps what it reserved."""
    weights = shape.num_parameters * weight_width(config.model)
    return dict.fromkeys(PHASES, CONTEXT + weights + _reserved(_scoring(config, shape)))


def vector_needs(vector_bytes: int) -> dict[Phase, int]:
    """Returns the memory of a GPU that holds vectors, the same in every phase."""
    return dict.fromkeys(PHASES, CONTEXT + vector_bytes)


def engine_needs(
    config: RunConfig, shape: ModelShape, *, tensor_parallel: int, share_bytes: int, sleeps: bool, transfer: Transfer
) -> dict[Phase, int]:
    """Returns the memory of one GPU of an engine: its share, and the buffer of new weights while it loads them."""
    needs = dict.fromkeys(PHASES, share_bytes)
    arriving = weight_width(config.model) * max(shape.layer_parameters, shape.head_parameters)
    arriving += PACKED if transfer == "nccl" else 0
    if not sleeps:
        return needs | {"send": share_bytes + arriving}
    held = engine_held(config, shape, tensor_parallel=tensor_parallel)
    asleep = held - weight_width(config.model) * shape.num_parameters // tensor_parallel
    return needs | dict.fromkeys(ASLEEP, asleep) | {"send": held + arriving}


def engine_held(config: RunConfig, shape: ModelShape, *, tensor_parallel: int) -> int:
    """Returns the memory of one GPU of an engine without its cache: weights, adapter and working memory."""
    width = weight_width(config.model)
    adapter = trained_parameters(config.model, shape) if config.model.serves_adapter else 0
    return width * (shape.num_parameters + adapter) // tensor_parallel + KERNELS


def cache_bytes(config: RunConfig, shape: ModelShape, *, contexts: int, tensor_parallel: int = 1) -> int:
    """Returns the KV cache of full contexts, on one GPU of an engine."""
    per_token = shape.kv_bytes_per_token(weight_width(config.model), tensor_parallel=tensor_parallel)
    return contexts * per_token * config.budget.context_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU, and what the roles on it need in each phase."""

    needs: Mapping[Role, Mapping[Phase, int]]

    @property
    def name(self) -> str:
        return " + ".join(self.needs)

    def total(self, phase: Phase) -> int:
        return sum(needs[phase] for needs in self.needs.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """All GPUs of a plan, but those that hold vectors of a size that is not known."""

    gpu_bytes: int
    """Memory of each."""
    cards: Sequence[Card]

    @property
    def limit(self) -> int:
        """Returns what may be used of a GPU."""
        return math.floor((1 - SPARE) * self.gpu_bytes)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Returns the phases that happen: without a learner engines evaluate, or serve."""
        return PHASES if any("learner" in card.needs for card in self.cards) else ("evaluate",)

    @property
    def tightest(self) -> tuple[Card, Phase]:
        """Returns the GPU and the phase that need most; of several the first. Raises ValueError when there are none."""
        return max(
            ((card, phase) for card in self.cards for phase in self.phases), key=lambda pair: pair[0].total(pair[1])
        )

    def excess(self) -> str:
        """Describes the fullest GPU, the phase, each role's part and what would help when something does not fit; ""
        when all fits."""
        if not self.cards:
            return ""
        card, phase = self.tightest
        if card.total(phase) <= self.limit:
            return ""
        parts = ", ".join(f"{role} {needs[phase] / GIB:.1f}" for role, needs in card.needs.items())
        return (
            f"phase {phase} needs {card.total(phase) / GIB:.1f} GiB ({parts}), and of a GPU of "
            f"{self.gpu_bytes / GIB:.1f} GiB at most {self.limit / GIB:.1f} are planned; "
            f"{VECTOR_REMEDIES if 'retrieval' in card.needs else REMEDIES}"
        )

    def table(self) -> list[str]:
        """Returns lines of text: GiB of every role by phase, one block for each kind of GPU, and the tightest phase."""
        counts = Counter(card.name for card in self.cards)
        cards = {card.name: card for card in self.cards}
        rows: list[tuple[str, Sequence[str]]] = [("GiB of a GPU", self.phases)]
        for name, count in counts.items():
            card = cards[name]
            rows.append((f"{count} x {name}", [f"{card.total(phase) / GIB:.1f}" for phase in self.phases]))
            if len(card.needs) > 1:
                rows += [
                    (f"  {role}", [f"{needs[phase] / GIB:.1f}" for phase in self.phases])
                    for role, needs in card.needs.items()
                ]
        label = max(len(name) for name, _ in rows)
        lines = [
            f"{name:<{label}}"
            + "".join(f"{cell:>{len(phase) + 2}}" for cell, phase in zip(cells, self.phases, strict=True))
            for name, cells in rows
        ]
        card, phase = self.tightest
        lines.append(
            f"tightest: {phase} on {card.name}, {card.total(phase) / GIB:.1f} of {self.gpu_bytes / GIB:.1f} GiB; at "
            f"most {self.limit / GIB:.1f} are planned. Arithmetic, not measured (docs/scale.md)"
        )
        return lines


def share_bounds(config: RunConfig, shape: ModelShape, *, gpu_bytes: int, tensor_parallel: int = 1) -> tuple[int, int]:
    """Returns the least and the largest part of a GPU, in hundredths, that an engine on shared GPUs may have of each.

    The least holds the weights and `FULL_CONTEXTS` full contexts. The largest is generation.gpu_memory_utilization, and
    at most twice the cache that the engine can fill: the rest keeps prefixes of contexts that have ended. Raises
    ConfigError when the least is larger.
    """
    held = engine_held(config, shape, tensor_parallel=tensor_parallel)
    context = cache_bytes(config, shape, contexts=1, tensor_parallel=tensor_parallel)
    most_contexts = config.generation.max_num_seqs
    least = held + min(FULL_CONTEXTS, most_contexts) * context
    useful = held + KERNELS + 2 * most_contexts * context
    highest = min(
        math.floor(round(100 * config.generation.gpu_memory_utilization, 6)), math.ceil(100 * useful / gpu_bytes)
    )
    lowest = math.ceil(100 * least / gpu_bytes)
    if lowest > highest:
        raise ConfigError(
            f"generation.gpu_memory_utilization is {config.generation.gpu_memory_utilization}, but weights and cache "
            f"of an engine need {least / GIB:.1f} GiB of a GPU of {gpu_bytes / GIB:.0f} GiB at least; raise it, lower "
            "budget.context_tokens or generation.max_num_seqs, or take larger GPUs or more of them "
            "(generation.tensor_parallel)"
        )
    return lowest, highest


def _scoring(config: RunConfig, shape: ModelShape) -> int:
    """Returns what a reference computes with: activations of one layer, and logits of a chunk."""
    width, tokens = weight_width(config.model), config.learner.max_tokens_per_micro_batch
    return tokens * (8 * shape.hidden + 4 * shape.intermediate) * width + _logits(tokens, shape)


def _logits(tokens: int, shape: ModelShape) -> int:
    return 4 * COPIES_OF_LOGITS * min(LOGITS, tokens * shape.vocab)


def _reserved(working: int) -> int:
    return math.ceil((1 + RESERVED) * working)
