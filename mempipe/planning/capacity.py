"""Shapes of models, and the sizes that follow from a shape alone. All are in bytes.

What every role needs on a GPU, phase by phase, is in `mempipe.planning.ledger`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mempipe.engines.architectures import fused_layers, num_experts
from mempipe.engines.config import ModelConfig
from mempipe.engines.gpus import GIB
from mempipe.settings import ConfigError

SMALL_STORE = GIB // 2
VOCAB_BLOCK = 64
"""An engine pads the vocabulary to a multiple of this, and splits the padded one (vLLM 0.32)."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only transformer on which its memory depends."""

    hidden: int
    layers: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    heads: int
    fused: tuple[str, ...] = ()
    """Those of "qkv_proj" and "gate_up_proj" that are one linear layer instead of three or two."""

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Returns (inputs, outputs) of each linear layer of a decoder layer, by its dotted name there."""
        hidden, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        qkv = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        gate_up = {"gate_proj": self.intermediate, "up_proj": self.intermediate}
        if "qkv_proj" in self.fused:
            qkv = {"qkv_proj": sum(qkv.values())}
        if "gate_up_proj" in self.fused:
            gate_up = {"gate_up_proj": sum(gate_up.values())}
        return {
            **{f"self_attn.{name}": (hidden, outputs) for name, outputs in qkv.items()},
            "self_attn.o_proj": (queries, hidden),
            **{f"mlp.{name}": (hidden, outputs) for name, outputs in gate_up.items()},
            "mlp.down_proj": (self.intermediate, hidden),
        }

    @property
    def layer_parameters(self) -> int:
        return sum(inputs * outputs for inputs, outputs in self.linear_layers.values())

    @property
    def root_parameters(self) -> int:
        """Returns the parameters of embedding and head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def head_parameters(self) -> int:
        """Counts the head, which is as large as the embedding and the largest weight of a model."""
        return self.vocab * self.hidden

    @property
    def matrices(self) -> list[int]:
        """Returns the number of parameters of each matrix: embedding, head and linear layers."""
        of_layer = [inputs * outputs for inputs, outputs in self.linear_layers.values()]
        return [self.head_parameters] * (1 if self.tied else 2) + self.layers * of_layer

    @property
    def num_parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    def kv_bytes_per_token(self, width: int, *, tensor_parallel: int = 1) -> int:
        """Returns the bytes of one token in the KV cache of each of `tensor_parallel` GPUs. A head is on one GPU; GPUs
        that are more than the heads hold copies."""
        return 2 * self.layers * max(1, self.kv_heads // tensor_parallel) * self.head_dim * width


# Public architecture facts, for models whose config.json is not on this machine.
KNOWN = {
    "Qwen/Qwen2.5-0.5B-Instruct": ModelShape(
        hidden=896, layers=24, heads=14, kv_heads=2, head_dim=64, intermediate=4864, vocab=151936, tied=True
    ),
    "Qwen/Qwen2.5-3B-Instruct": ModelShape(
        hidden=2048, layers=36, heads=16, kv_heads=2, head_dim=128, intermediate=11008, vocab=151936, tied=True
    ),
    "Qwen/Qwen2.5-7B-Instruct": ModelShape(
        hidden=3584, layers=28, heads=28, kv_heads=4, head_dim=128, intermediate=18944, vocab=152064, tied=False
    ),
    "Qwen/Qwen2.5-14B-Instruct": ModelShape(
        hidden=5120, layers=48, heads=40, kv_heads=8, head_dim=128, intermediate=13824, vocab=152064, tied=False
    ),
    "Qwen/Qwen3-4B-Instruct-2507": ModelShape(
        hidden=2560, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=9728, vocab=151936, tied=True
    ),
}


def uneven(shape: ModelShape, parts: int) -> str:
    """Returns why vLLM cannot split the model evenly over an engine's GPUs; an empty text where it can. GPUs beyond the
    number of heads of keys and values hold copies of them."""
    vocab, keys = VOCAB_BLOCK * math.ceil(shape.vocab / VOCAB_BLOCK), shape.kv_heads
    rests = {
        f"does not divide the {shape.heads} attention heads": shape.heads % parts,
        f"neither divides nor repeats the {keys} heads of keys and values": keys % parts and parts % keys,
        f"does not divide the intermediate size {shape.intermediate}": shape.intermediate % parts,
        f"does not divide the padded vocabulary {vocab}": vocab % parts,
    }
    return next((reason for reason, rest in rests.items() if rest), "")


def model_shape(model: ModelConfig) -> ModelShape | None:
    """Reads the shape from the model folder's config.json, or from the table of known models; returns None for a model
    that is not here, and for a mixture of experts, whose layers have another shape.

    Raises ConfigError for a file that does not say the shape.
    """
    file = Path(model.path) / "config.json"
    if not model.path or not file.is_file():
        return KNOWN.get(model.path)
    try:
        values: dict[str, Any] = json.loads(file.read_text())
        if num_experts(values):
            return None
        heads = values["num_attention_heads"]
        return ModelShape(
            hidden=values["hidden_size"],
            layers=values["num_hidden_layers"],
            heads=heads,
            kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            intermediate=values["intermediate_size"],
            vocab=values["vocab_size"],
            tied=values.get("tie_word_embeddings", False),
            fused=fused_layers(values),
        )
    except (KeyError, json.JSONDecodeError) as error:
        raise ConfigError(f"model.path: {file} is not the config of a decoder-only transformer ({error})") from error


def object_store_bytes(model: ModelConfig, *, memory: int, shared_memory: int) -> int:
    """Sizes the object store of a local cluster, on a machine with `memory` and as much as `shared_memory` of it in
    /dev/shm.

    Returns bytes: SMALL_STORE for groups in flight plus four copies of the engine weights (being sent, still being
    read, and one copy of each inside an engine), but at most 30 % of `memory` and 90 % of `shared_memory`, which is
    Ray's own default.
    """
    shape = model_shape(model)
    weights = shape.num_parameters * weight_width(model) if shape else 0
    return min(SMALL_STORE + 4 * weights, max(SMALL_STORE, min(3 * memory // 10, 9 * shared_memory // 10)))


def weight_width(model: ModelConfig) -> int:
    """Returns the bytes of one weight in an engine."""
    return 4 if model.dtype == "float32" else 2


def trained_parameters(model: ModelConfig, shape: ModelShape) -> int:
    """Returns the number of trained parameters, all or those of the LoRA adapter: a target names every linear layer
    whose dotted name ends in it."""
    return sum(trained_matrices(model, shape))


def trained_matrices(model: ModelConfig, shape: ModelShape) -> list[int]:
    """Returns the number of parameters of each matrix that is trained: of the model, or the two of each layer that gets
    an adapter."""
    if not model.lora_rank:
        return shape.matrices
    targets = tuple(f".{target}" for target in model.lora_targets)
    of_layer = shape.linear_layers
    return [
        model.lora_rank * size
        for i in range(shape.layers)
        for name, sizes in of_layer.items()
        if f".model.layers.{i}.{name}".endswith(targets)
        for size in sizes
    ]
