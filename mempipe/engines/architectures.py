"""Networks that mempipe does not train, by the values of their config.json or by their name.

- Mixtures of experts: the learner has no loss that balances the experts, and engine and learner would route tokens
  differently, so that the ratios of their log-probs would be those of different networks.
- Layers that carry a state from token to token (Mamba, linear attention, convolutions): the contexts of a packed row
  would read each other.
- Soft-capped attention, soft-capped logits and attention sinks, which the learner does not compute.
- Networks whose implementation in transformers takes no attention from outside: the contexts of a packed row would read
  each other there too.
- Quantized networks: their weights are rounded, and an export would name a quantization that it does not have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NAMES = re.compile(r"moe|mixtral|-a\d+(\.\d+)?b\b|gpt-oss|deepseek-(v[23]|r1$)", re.IGNORECASE)
_ATTENTION = {"full_attention", "sliding_attention", "attention"}
_LAYERS = ("layer_types", "layers_block_type", "block_types")
_STATES = ("mamba_d_state", "state_size", "ssm_state_size", "lru_width", "conv_L_cache", "linear_conv_kernel_dim")
_STATEFUL = {"rwkv", "xlstm"}
_FIXED_ATTENTION = {
    "bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "nemotron", "stablelm", "xglm"
}  # fmt: skip
"""By model_type, tried with transformers 5."""
_SINKS = {"granite_swa"}
"""Dense networks by model_type whose attention has learned sinks."""
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_FUSED = {"phi3": ("qkv_proj", "gate_up_proj"), "glm": ("gate_up_proj",), "glm4": ("gate_up_proj",)}
"""Linear layers by model_type that compute what other networks compute with several."""
_UNSERVED = {"glm4": ("gate_up_proj",)}
"""Fused layers by model_type whose adapter vLLM 0.32 refuses, since it expects one of each part."""
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files from which vLLM reads the quantization of a model whose config.json names none."""
TINY_POSITIONS = 1024
"""Positions of the tiny model (`mempipe.engines.tiny`), which a run with a `world` makes."""
_TINY_LAYER = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
)
_ADVICE = "take a dense model with attention in every layer, e.g. Qwen/Qwen3-4B-Instruct-2507"


def num_experts(values: Mapping[str, Any]) -> int:
    """Returns the experts of a layer by the values of a config.json; 0 for a dense model."""
    counts = [part.get(name) for part in _parts(values) for name in _COUNTS]
    return max((count for count in counts if isinstance(count, int) and count > 1), default=0)


def is_named_as_mixture(name: str) -> bool:
    """Returns whether a model's name on the hub is that of a mixture, e.g. Qwen/Qwen3-30B-A3B."""
    return _NAMES.search(name) is not None


def quantization(path: str, values: Mapping[str, Any]) -> str:
    """Names the quantization that an engine reads for the model at `path`: from the values of its config.json, or from
    a file next to it; "" for none."""
    for name in ("quantization_config", "compression_config"):
        if given := values.get(name):
            return given.get("quant_method") or name
    return next((name for name in QUANTIZATION_FILES if (Path(path) / name).is_file()), "")


def refusal(path: str, values: Mapping[str, Any]) -> str:
    """Returns the sentence that refuses the model at `path` by the values of its config.json; "" for one that can be
    trained."""
    kind = values.get("model_type", "unknown")
    if experts := num_experts(values):
        return mixture_refusal(path, known=f" ({kind}, {experts} experts)")
    if method := quantization(path, values):
        return (
            f"model.path {path!r} is quantized ({method}), and rounded weights cannot be trained; take the model that "
            "it was made of"
        )
    if kind in _FIXED_ATTENTION:
        return (
            f"model.path {path!r} ({kind}) computes attention in a way that packed rows cannot use: their contexts "
            f"would read each other; {_ADVICE}"
        )
    if kind in _SINKS:
        return f"model.path {path!r} ({kind}) uses attention with sinks, which mempipe does not compute; {_ADVICE}"
    for part in _parts(values):
        if layers := _stateful_layers(part):
            return (
                f"model.path {path!r} ({kind}) has layers that carry a state from token to token ({layers}), which "
                f"mempipe does not train; {_ADVICE}"
            )
        for name in _CAPS:
            if part.get(name) is not None:
                return (
                    f"model.path {path!r} ({kind}) uses {name} {part[name]}, which mempipe does not compute; {_ADVICE}"
                )
    return ""


def mixture_refusal(path: str, *, known: str = "") -> str:
    """Returns the sentence that refuses a mixture; `known` is what its config says."""
    return f"model.path {path!r} is a mixture of experts{known}, which mempipe does not train; {_ADVICE}"


def adapter_refusal(kind: str, targets: Sequence[str], *, layers: Sequence[str], merged: bool) -> str:
    """Returns the sentence that refuses a LoRA adapter of the layers `targets` (`model.lora_targets`); "" for one that
    fits. `layers` are the full names of the model's linear layers, and `merged` is `model.lora_merge`."""
    if missing := [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in layers)]:
        known = sorted({name.rpartition(".")[2] for name in layers})
        return (
            f"model.lora_targets names {', '.join(missing)}, which {kind} does not have; its linear layers are "
            f"{', '.join(known)}"
        )
    if not merged and (unserved := [target for target in targets if target in _UNSERVED.get(kind, ())]):
        return (
            f"model.lora_targets names {', '.join(unserved)}, and vLLM serves no adapter of that for {kind}; leave it "
            "out, or set model.lora_merge to true"
        )
    return ""


def tiny_layers(num_layers: int) -> list[str]:
    """Returns the full names of the tiny model's linear layers."""
    return [f"model.layers.{i}.{name}" for i in range(num_layers) for name in _TINY_LAYER]


def fused_layers(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of a network's fused linear layers: of "qkv_proj" and "gate_up_proj" those that it has."""
    return _FUSED.get(str(values.get("model_type")), ())


def logit_factor(values: Mapping[str, Any]) -> float:
    """Returns the number by which the network multiplies its logits: Cohere multiplies by `logit_scale`, HyperCLOVA X
    by `logits_scaling`, by which every Granite divides. MiniCPM3 names two widths instead. 1 for other networks."""
    for part in _parts(values):
        if part.get("model_type") == "minicpm3":
            return part["dim_model_base"] / part["hidden_size"]
        if factor := part.get("logit_scale"):
            return factor
        if factor := part.get("logits_scaling"):
            return factor if str(part.get("model_type")).startswith("hyperclovax") else 1.0 / factor
    return 1.0


def rotation_limit(values: Mapping[str, Any]) -> int | None:
    """Returns the positions beyond which a network with LongRoPE (Phi-3.5, Phi-4-mini) rotates queries and keys in
    another way; None for other networks. transformers does so for all contexts of a row if one of them is longer, and
    vLLM for all contexts of an engine that would take longer ones."""
    for part in _parts(values):
        rope = part.get("rope_parameters") or part.get("rope_scaling")
        if isinstance(rope, Mapping) and "long_factor" in rope:
            name = "original_max_position_embeddings"
            limit = rope.get(name) or part.get(name)
            return limit if isinstance(limit, int) else None
    return None


def _parts(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the config, and that of its language model where it has several."""
    of_text = values.get("text_config")
    return [values, of_text] if isinstance(of_text, Mapping) else [values]


def _stateful_layers(values: Mapping[str, Any]) -> str:
    """Returns what shows that layers carry a state; "" when nothing does."""
    kinds = {kind for name in _LAYERS for kind in values.get(name) or () if isinstance(kind, str)}
    if kinds:
        return ", ".join(sorted(kinds - _ATTENTION))
    named = [name for name in _STATES if values.get(name)]
    return named[0] if named else "all of them" if values.get("model_type") in _STATEFUL else ""
