"""Random models of the presets' shapes, and updates of the presets' sizes.

Without a GPU the same parts run with a tiny model: a rehearsal, which finds mistakes in the tests themselves.
"""

from __future__ import annotations

import asyncio
import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from mempipe.config import RunConfig
from mempipe.engines.generator import Generator
from mempipe.engines.learner import Learner
from mempipe.engines.learner_settings import LearnerSettings
from mempipe.engines.weights import WeightHandle
from mempipe.loader import load_config
from mempipe.planning.capacity import KNOWN, ModelShape
from mempipe.types import TrainingSample
from tools.processes import ROOT

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")
played_anywhere = pytest.mark.skipif(
    not GPU and not os.environ.get("MEMPIPE_REHEARSE"),
    reason="needs a CUDA device; MEMPIPE_REHEARSE=1 plays it with a tiny model on CPUs",
)


def needs_gpus(count: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} CUDA devices")


PRESET = ROOT / "jobs" / "configs" / "memsearcher_qwen2.5-3b.yaml"
SMALL, LARGE = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct"
TINY = ModelShape(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=256, vocab=300, tied=True)
CONTEXT_TOKENS = 4096 if GPU else 64
CONTEXTS = 4
"""Of a micro-batch: 16,384 tokens, as in the presets."""


def start_afresh() -> None:
    """Gives back what nothing refers to any more, and counts the peak of the device's memory from here."""
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def shape_of(name: str) -> ModelShape:
    return KNOWN[name] if GPU else TINY


def make_model(folder: Path, name: str) -> Path:
    """Writes a random bfloat16 model of the shape, without a tokenizer; its log-probs differ from token to token."""
    shape = shape_of(name)
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=shape.tied,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if GPU else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def run_config(model: Path, *overrides: str) -> RunConfig:
    """The 3B preset with another model."""
    return load_config(PRESET, [f"model.path={model}", *overrides])


def make_learner(config: RunConfig) -> Learner:
    """One rank as a run makes it."""
    return Learner(
        LearnerSettings(
            model=config.model,
            optimizer=config.optimizer,
            learner=config.learner,
            algorithm=config.algorithm,
            temperature=1.0,
            num_updates=100,
            holds_reference=config.reference_place == "ranks",
        )
    )


def make_samples(shape: ModelShape, *, seed: int = 0) -> list[TrainingSample]:
    """The contexts of one micro-batch, each of a trajectory of its own; all tokens but the first are in the loss."""
    rng = np.random.default_rng(seed)
    n = CONTEXT_TOKENS
    return [
        TrainingSample(
            trajectory_id=f"t{i}",
            group_id="g",
            context_index=0,
            token_ids=rng.integers(1, shape.vocab, n).tolist(),
            loss_mask=[0] + [1] * (n - 1),
            logprobs=[0.0] + [-10.0] * (n - 1),
            policy_versions=[-1] + [0] * (n - 1),
            advantage=1.0 - 2.0 * (i % 2),
            trajectory_tokens=n - 1,
            ref_logprobs=[0.0] + [-10.0] * (n - 1),
        )
        for i in range(CONTEXTS)
    ]


def make_siblings(shape: ModelShape, *, seed: int = 0) -> list[TrainingSample]:
    """`make_samples` whose contexts begin with the same three quarters, as siblings that read one chunk do."""
    first, *others = make_samples(shape, seed=seed)
    shared = 3 * CONTEXT_TOKENS // 4
    own = [0] * shared + [1] * (CONTEXT_TOKENS - shared)
    return [
        replace(
            sample,
            token_ids=[*first.token_ids[:shared], *sample.token_ids[shared:]],
            loss_mask=own,
            trajectory_tokens=sum(own),
            logprobs=[old * mine for old, mine in zip(sample.logprobs, own, strict=True)],
        )
        for sample in (first, *others)
    ]


class Control:
    """Reaches the engine from the thread that sends."""

    def __init__(self, generator: Generator, loop: asyncio.AbstractEventLoop) -> None:
        self._generator, self._loop = generator, loop

    def connect(self, init_info: dict[str, Any]) -> None:
        self._wait(self._generator.connect(init_info))

    def load(self, handle: WeightHandle) -> None:
        self._wait(self._generator.load_weights(handle, handle.version))

    def _wait(self, call: Any) -> None:
        asyncio.run_coroutine_threadsafe(call, self._loop).result()
