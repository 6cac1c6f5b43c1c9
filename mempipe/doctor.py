"""`mempipe doctor`: can this config work? Files, context arithmetic, devices and memory are checked; nothing is
started.

The memory estimate counts what a run certainly holds (weights, gradients, optimiser, KV cache, activations under the
given packing); it is a lower bound, so a config that fails here fails on the machine too.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mempipe.config import RunConfig
from mempipe.engines.config import ModelConfig
from mempipe.settings import ConfigError

GIB = 2**30
SERVICE_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Finding:
    """One checked thing: ok, worth knowing, or fatal."""

    level: str  # "ok" | "note" | "fatal"
    text: str

    @property
    def fatal(self) -> bool:
        return self.level == "fatal"

    def __str__(self) -> str:
        return f"{self.level:5}  {self.text}"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What memory depends on in a decoder-only transformer."""

    hidden: int
    layers: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    heads: int

    @property
    def num_parameters(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocab * self.hidden * (
            1 if self.tied else 2
        )

    def kv_bytes_per_token(self, width: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * width


# Public architecture facts, for models whose config.json is not on this machine.
KNOWN = {
    "Qwen/Qwen2.5-3B-Instruct": Shape(
        hidden=2048, layers=36, heads=16, kv_heads=2, head_dim=128, intermediate=11008, vocab=151936, tied=True
    ),
    "Qwen/Qwen2.5-7B-Instruct": Shape(
        hidden=3584, layers=28, heads=28, kv_heads=4, head_dim=128, intermediate=18944, vocab=152064, tied=False
    ),
}


def check(config: RunConfig, *, num_devices: int | None = None, device_gib: float | None = None) -> list[Finding]:
    """All findings, in the order in which a run would meet them.
    `num_devices` and `device_gib` describe a machine that is elsewhere.
    """
    if config.world is not None:
        return [
            Finding("ok", "the embedded default makes its own data and model, and runs on CPUs"),
            *_context(config, template_tokens=None),
        ]
    devices, gib = _devices()
    devices = devices if num_devices is None else num_devices
    gib = gib if device_gib is None else device_gib
    findings = [*_files(config), *_template(config), *_cluster(config, devices)]
    shape = model_shape(config.model)
    if shape is None:
        reason = f"model.path {config.model.path!r} is not on this machine and not a known model"
        return [*findings, Finding("note", f"memory not estimated: {reason}")]
    return [*findings, *_memory(config, shape, gib)]


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


def num_gpus_needed(config: RunConfig) -> dict[str, int]:
    """GPUs by role, when the cluster has any."""
    needs = {
        "learner": config.learner.num_ranks,
        "generator": config.generation.num_replicas * config.generation.tensor_parallel,
    }
    if config.algorithm.kl_coef > 0 and not config.model.lora_rank:
        needs["reference"] = 1
    if config.retrieval.num_gpus and config.retrieval.index:
        needs["retrieval"] = config.retrieval.num_gpus * (
            config.retrieval.shard_actors or config.retrieval.num_replicas
        )
    return needs


def _files(config: RunConfig) -> list[Finding]:
    findings = []
    for setting, value, required in (
        ("data.train", config.data.train, True),
        ("data.validation", config.data.validation, False),
        *(
            []
            if config.retrieval.url or not config.agent_spec.searches
            else [("retrieval.index", config.retrieval.index, True)]
        ),
    ):
        if not value:
            findings.append(
                Finding("fatal", f"{setting} is empty")
                if required
                else Finding("note", f"{setting} is empty: nothing is evaluated")
            )
        elif not Path(value).exists():
            findings.append(Finding("fatal", f"{setting} is {value!r}, which does not exist on this machine"))
        else:
            findings.append(Finding("ok", f"{setting}: {value}"))
    if config.retrieval.url:
        findings.append(_service(config.retrieval.url))
    folder = config.folder.parent
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        findings.append(Finding("fatal", f"output is {config.output!r}: no permission to write to {folder}"))
    return findings


def _service(url: str) -> Finding:
    import httpx

    try:
        health = httpx.get(f"{url.rstrip('/')}/health", timeout=SERVICE_TIMEOUT_S, trust_env=False)
        described = health.json() if health.is_success else {}
        return Finding(
            "ok", f"retrieval.url: {url}, snapshot {described['snapshot']}, {described['num_passages']} passages"
        )
    except httpx.RequestError as error:
        return Finding("note", f"retrieval.url {url} cannot be reached from this machine: {error!r}")
    except (KeyError, TypeError, ValueError):
        return Finding(
            "note", f"retrieval.url {url} is no mempipe service; searches in partitions and snapshots need one"
        )


def _template(config: RunConfig) -> list[Finding]:
    if not (Path(config.model.path) / "tokenizer_config.json").is_file():
        return [
            Finding(
                "note",
                f"template tokens not counted: the tokenizer of model.path {config.model.path!r} is not on this "
                "machine",
            ),
            *_context(config, template_tokens=None),
        ]
    from mempipe.engines.tokenizer import load_tokenizer
    from mempipe.rollout import make_renderer

    renderer = make_renderer(config, tokenizer=load_tokenizer(config.model.path))
    return _context(config, template_tokens=renderer.template_tokens)


def _context(config: RunConfig, *, template_tokens: int | None) -> list[Finding]:
    room, row = config.budget.context_tokens, config.learner.max_tokens_per_micro_batch
    parts = dict(config.budget.parts())
    if template_tokens is not None:
        parts["template"] = template_tokens
    total = sum(parts.values())
    sum_text = " + ".join(f"{name} {tokens}" for name, tokens in parts.items())
    findings = [Finding("fatal" if total > room else "ok", f"{sum_text} = {total} of budget.context_tokens {room}")]
    if room > row:
        findings.append(
            Finding("fatal", f"learner.max_tokens_per_micro_batch {row} is below budget.context_tokens {room}")
        )
    return findings


def _devices() -> tuple[int, float]:
    import torch

    if not torch.cuda.is_available():
        return 0, 80.0
    return torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory / GIB


def _cluster(config: RunConfig, devices: int) -> list[Finding]:
    needs = num_gpus_needed(config)
    total = sum(needs.values())
    sentence = ", ".join(f"{role} {count}" for role, count in needs.items()) + f" = {total} GPUs"
    if total > devices:
        return [
            Finding(
                "fatal",
                f"{sentence}, but {devices} are there; lower learner.num_ranks, generation.num_replicas or "
                "generation.tensor_parallel, "
                "or name the cluster's with --devices",
            )
        ]
    return [Finding("ok", f"{sentence} of {devices}")]


def _memory(config: RunConfig, shape: Shape, gib: float) -> list[Finding]:
    width = 4 if config.model.dtype == "float32" else 2
    parameters = shape.num_parameters
    trained = parameters if not config.model.lora_rank else _lora_parameters(config.model, shape)
    tokens = config.learner.max_tokens_per_micro_batch
    per_layer = tokens * (6 * shape.hidden + 3 * shape.intermediate) * width
    activations = (
        tokens * shape.hidden * shape.layers * width + per_layer
        if config.model.gradient_checkpointing
        else shape.layers * per_layer
    )
    # float32 master weights everywhere; gradients and two Adam moments for what is trained
    learner = (
        (parameters * 4 + trained * 12) / config.learner.num_ranks + activations + shape.vocab * shape.hidden * width
    )
    engine_weights = parameters * width / config.generation.tensor_parallel
    per_sequence = shape.kv_bytes_per_token(width) * config.budget.context_tokens / config.generation.tensor_parallel
    room = gib * GIB * config.generation.gpu_memory_utilization - engine_weights
    return [
        Finding("ok", f"model: {parameters / 1e9:.2f} B parameters, {trained / 1e9:.3f} B trained"),
        Finding(
            "fatal" if learner > gib * GIB else "ok",
            f"learner rank: at least {learner / GIB:.1f} of {gib:.0f} GiB (weights, gradients, optimiser over "
            f"{config.learner.num_ranks} ranks; "
            f"{'recomputed ' if config.model.gradient_checkpointing else ''}activations of {tokens})",
        ),
        Finding(
            "fatal" if room < per_sequence else "ok",
            f"engine: weights {engine_weights / GIB:.1f} GiB, KV cache {per_sequence / GIB:.2f} GiB per full "
            "context; room for "
            f"{max(0, math.floor(room / per_sequence))} of them (generation.max_num_seqs "
            f"{config.generation.max_num_seqs})",
        ),
    ]


def _lora_parameters(model: ModelConfig, shape: Shape) -> int:
    rows = {
        "q_proj": (shape.hidden, shape.heads * shape.head_dim),
        "k_proj": (shape.hidden, shape.kv_heads * shape.head_dim),
        "v_proj": (shape.hidden, shape.kv_heads * shape.head_dim),
        "o_proj": (shape.heads * shape.head_dim, shape.hidden),
        "gate_proj": (shape.hidden, shape.intermediate),
        "up_proj": (shape.hidden, shape.intermediate),
        "down_proj": (shape.intermediate, shape.hidden),
    }
    return shape.layers * sum(model.lora_rank * sum(rows[name]) for name in model.lora_targets if name in rows)
