"""Memory that a run needs, calculated from the config and the model's shape (docs/scale.md explains it).

All sizes are in bytes, and all are of one GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mempipe.config import RunConfig
from mempipe.engines.config import ModelConfig
from mempipe.settings import ConfigError

GIB = 2**30
CONTEXT = 3 * GIB
"""A process on a GPU: CUDA context, communication buffers, logits (`engines.model.MAX_LOGITS`), fragments. Assumed, not
measured; `make test-gpu` prints the peaks to compare with."""
KERNELS = 2 * GIB
"""An engine besides weights and cache: CUDA context, workspace, recorded graphs. Assumed, not measured."""
SMALL_STORE = GIB // 2
FULL_CONTEXTS = 16
"""An engine whose cache holds fewer contexts does not sample while the learner works on the same GPU: it sleeps.
Assumed, not measured."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Holds what memory depends on in a decoder-only transformer."""

    hidden: int
    layers: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    heads: int

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def root_parameters(self) -> int:
        """Embedding and head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def num_parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    def kv_bytes_per_token(self, width: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * width


# Public architecture facts, for models whose config.json is not on this machine.
KNOWN = {
    "Qwen/Qwen2.5-0.5B-Instruct": Shape(
        hidden=896, layers=24, heads=14, kv_heads=2, head_dim=64, intermediate=4864, vocab=151936, tied=True
    ),
    "Qwen/Qwen2.5-3B-Instruct": Shape(
        hidden=2048, layers=36, heads=16, kv_heads=2, head_dim=128, intermediate=11008, vocab=151936, tied=True
    ),
    "Qwen/Qwen2.5-7B-Instruct": Shape(
        hidden=3584, layers=28, heads=28, kv_heads=4, head_dim=128, intermediate=18944, vocab=152064, tied=False
    ),
    "Qwen/Qwen3-4B-Instruct-2507": Shape(
        hidden=2560, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=9728, vocab=151936, tied=True
    ),
}


def model_shape(model: ModelConfig) -> Shape | None:
    """From the model folder's config.json, or from the table of known models."""
    file = Path(model.path) / "config.json"
    if not file.is_file():
        return KNOWN.get(model.path)
    try:
        values: dict[str, Any] = json.loads(file.read_text())
        heads = values["num_attention_heads"]
        return Shape(
            hidden=values["hidden_size"],
            layers=values["num_hidden_layers"],
            heads=heads,
            kv_heads=values.get("num_key_value_heads", heads),
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            intermediate=values["intermediate_size"],
            vocab=values["vocab_size"],
            tied=values.get("tie_word_embeddings", False),
        )
    except (KeyError, json.JSONDecodeError) as error:
        raise ConfigError(f"model.path: {file} is not the config of a decoder-only transformer ({error})") from error


def object_store_bytes(model: ModelConfig, *, memory: int, shared_memory: int) -> int:
    """The object store of a local cluster, on a machine with `memory` and as much as `shared_memory` of it in /dev/shm.

    Returns bytes: SMALL_STORE for groups in flight plus four copies of the engine weights (being sent, still being
    read, and one copy of each inside an engine), but at most 30 % of `memory` and 90 % of `shared_memory`, which is
    Ray's own default.
    """
    shape = model_shape(model)
    weights = shape.num_parameters * weight_width(model) if shape else 0
    return min(SMALL_STORE + 4 * weights, max(SMALL_STORE, min(3 * memory // 10, 9 * shared_memory // 10)))


def weight_width(model: ModelConfig) -> int:
    """Bytes of one weight in an engine."""
    return 4 if model.dtype == "float32" else 2


def trained_parameters(model: ModelConfig, shape: Shape) -> int:
    """All of them, or those of the LoRA adapter: a target names every linear layer whose dotted name ends in it."""
    if not model.lora_rank:
        return shape.num_parameters
    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj": shape.hidden + heads,
        "self_attn.k_proj": shape.hidden + kv_heads,
        "self_attn.v_proj": shape.hidden + kv_heads,
        "self_attn.o_proj": shape.hidden + heads,
        "mlp.gate_proj": shape.hidden + shape.intermediate,
        "mlp.up_proj": shape.hidden + shape.intermediate,
        "mlp.down_proj": shape.hidden + shape.intermediate,
    }
    layers = ((f".model.layers.{i}.{name}", size) for i in range(shape.layers) for name, size in sizes.items())
    targets = tuple(f".{target}" for target in model.lora_targets)
    return model.lora_rank * sum(size for name, size in layers if name.endswith(targets))


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that a role holds all the time, and those that it needs on top while it works."""

    held: int
    working: int

    @property
    def peak(self) -> int:
        return self.held + self.working


def learner_memory(config: RunConfig, shape: Shape, *, num_ranks: int) -> Memory:
    """One learner rank.

    Held: float32 master weights (4 bytes a parameter), and for each trained parameter a gradient and two moments of
    AdamW (12 bytes), all split over the ranks. Working: one layer gathered and its gradient reduced (14 bytes a
    parameter), embedding and head with their gradients, and the activations of one micro-batch; or the copy of the
    weights that is sent.
    """
    width, tokens = weight_width(config.model), config.learner.max_tokens_per_micro_batch
    trained = trained_parameters(config.model, shape)
    held = (4 * shape.num_parameters + 12 * trained) // num_ranks + CONTEXT
    of_layer = tokens * (16 * shape.hidden + 8 * shape.intermediate) * width
    states = tokens * shape.hidden * shape.layers * width
    activations = states + of_layer if config.model.gradient_checkpointing else shape.layers * of_layer
    root = shape.root_parameters * width * (1 if config.model.lora_rank else 2)
    sync = shape.num_parameters * width  # a whole copy, while no gradient is computed
    return Memory(held=held, working=max(14 * shape.layer_parameters + root + activations, sync))


def reference_memory(config: RunConfig, shape: Shape) -> Memory:
    """One reference model: its weights, and one layer's activations of a micro-batch that keeps none of them."""
    width, tokens = weight_width(config.model), config.learner.max_tokens_per_micro_batch
    working = tokens * (8 * shape.hidden + 4 * shape.intermediate) * width
    return Memory(held=shape.num_parameters * width + CONTEXT, working=working)


def engine_memory(config: RunConfig, shape: Shape, *, tensor_parallel: int) -> Memory:
    """One GPU of an engine: weights, and as working memory the cache of `FULL_CONTEXTS` full contexts."""
    width = weight_width(config.model)
    contexts = min(FULL_CONTEXTS, config.generation.max_num_seqs)
    cache = contexts * shape.kv_bytes_per_token(width) * config.budget.context_tokens
    held = shape.num_parameters * width // tensor_parallel + KERNELS
    return Memory(held=held, working=cache // tensor_parallel)
