"""Tiny random models and hand-made samples for the tests of model, learner and checkpoint."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from mempipe.engines.config import LearnerConfig, ModelConfig, OptimizerConfig
from mempipe.engines.learner import Learner
from mempipe.engines.learner_settings import LearnerSettings
from mempipe.rl.config import AlgorithmConfig
from mempipe.rl.packing import MicroBatch, pack_step
from mempipe.types import TrainingSample
from tools.processes import free_ports

VOCAB = 97
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.2,
)
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2_untied": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=6),
    "gemma2": Gemma2Config(**SIZES, head_dim=16),
}


def save_model(folder: Path, architecture: str = "qwen2") -> Path:
    """A random model, saved as a Hugging Face folder."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[architecture]).save_pretrained(folder / architecture)
    return folder / architecture


def load_plain(folder: Path) -> PreTrainedModel:
    """The same model as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def sample(
    rng: np.random.Generator,
    *,
    length: int,
    trajectory: str = "t0",
    group: str = "g0",
    index: int = 0,
    advantage: float | None = None,
) -> TrainingSample:
    """A context of random ids whose loss tokens are about a third (at least one, never the first)."""
    mask = (rng.random(length) < 0.35).astype(int)
    mask[0], mask[-1] = 0, 1
    return TrainingSample(
        trajectory_id=trajectory,
        group_id=group,
        context_index=index,
        token_ids=rng.integers(0, VOCAB, length).tolist(),
        loss_mask=mask.tolist(),
        logprobs=np.where(mask, rng.normal(-4.6, 0.3, length), 0.0).tolist(),
        policy_versions=np.where(mask, 0, -1).tolist(),
        advantage=float(rng.normal()) if advantage is None else advantage,
        trajectory_tokens=int(mask.sum()),
        ref_logprobs=np.where(mask, rng.normal(-4.6, 0.3, length), 0.0).tolist(),
    )


def samples(seed: int, lengths: Sequence[int] = (5, 23, 9, 14, 8, 2, 17, 11)) -> list[TrainingSample]:
    """One trajectory of several contexts per pair of lengths."""
    rng = np.random.default_rng(seed)
    return [sample(rng, length=length, trajectory=f"t{i // 2}", index=i % 2) for i, length in enumerate(lengths)]


def family(seed: int) -> list[TrainingSample]:
    """Contexts that begin alike, two of them wholly alike, one alone; loss tokens among what they share."""
    rng = np.random.default_rng(seed)
    tree = {"root": (), "left": ("root",), "right": ("root",), "leaf": ("root", "left"), "twin": ("root", "left")}
    parts = {name: sample(rng, length=length) for name, length in zip(tree, (6, 9, 4, 7, 7), strict=True)}
    parts["twin"] = parts["leaf"]
    joined = [sample(rng, length=11, trajectory="alone")]
    for name, before in tree.items():
        pieces = [parts[part] for part in (*before, name)]
        columns = ("token_ids", "loss_mask", "logprobs", "policy_versions", "ref_logprobs")
        values = {column: [value for piece in pieces for value in getattr(piece, column)] for column in columns}
        joined.append(replace(parts[name], trajectory_id=name, advantage=float(rng.normal()), **values))
    return joined


def pack(
    step: Sequence[TrainingSample], *, num_ranks: int = 1, max_tokens: int = 1000, **settings: bool
) -> list[list[MicroBatch]]:
    return pack_step(step, num_ranks=num_ranks, max_tokens=max_tokens, aggregation="token", **settings)


def make_learner(folder: Path, **changes: Any) -> Learner:
    """A learner of the model in `folder`; `changes` are settings of any section or arguments of Learner."""
    sections = {
        "model": ModelConfig,
        "optimizer": OptimizerConfig,
        "learner": LearnerConfig,
        "algorithm": AlgorithmConfig,
    }
    settings: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder), "dtype": "float32"},
        "optimizer": {"lr": 1e-3},
        "learner": {"timeout_s": 300},
        "algorithm": {},
    }
    arguments: dict[str, Any] = {"temperature": 1.0, "num_updates": 10}
    for name, value in changes.items():
        owner = next((section for section, cls in sections.items() if name in cls.model_fields), None)
        (settings[owner] if owner else arguments)[name] = value
    placement = {name: arguments.pop(name) for name in ("rank", "world_size", "master_port") if name in arguments}
    made: dict[str, Any] = {name: cls(**settings[name]) for name, cls in sections.items()}
    return Learner(LearnerSettings(**made, **arguments), **placement)


class TwoRanks:
    """Two processes that run scenarios one after another. They are fresh interpreters, as learner actors are: a fork of
    a process that holds the threads of polars, Arrow and OpenMP may crash.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(2)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve_rank, args=(rank, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    @property
    def usable(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def run(self, scenario: Callable[..., None], *arguments: Any) -> None:
        (port,) = free_ports(1)
        for connection in self._connections:
            connection.send((scenario, port, arguments))
        waiting = {*self._connections}
        try:
            while waiting:
                for connection in multiprocessing.connection.wait(waiting):
                    if trace := connection.recv():
                        raise AssertionError(trace)
                    waiting.remove(connection)
        except BaseException:  # the other one waits for it
            for process in self._processes:
                process.kill()
                process.join()
            raise


def _serve_rank(rank: int, connection: Connection) -> None:
    faulthandler.enable()  # a crash below Python says where
    while True:
        scenario, port, arguments = connection.recv()
        try:
            scenario(rank, port, *arguments)
        except BaseException:
            connection.send(traceback.format_exc())
        else:
            connection.send("")
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


_two_ranks: list[TwoRanks] = []


def run_two_ranks(scenario: Callable[..., None], *arguments: Any) -> None:
    """Runs `scenario(rank, port, *arguments)` in two processes, where `port` is the same free one. Raises what one of
    them raised. The processes stay for the next scenario: importing torch takes them longer than the scenario.
    """
    if not (_two_ranks and _two_ranks[-1].usable):
        _two_ranks.append(TwoRanks())
    _two_ranks[-1].run(scenario, *arguments)


def assert_close(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, tolerance: float = 1e-5
) -> None:
    """Every tensor differs by at most `tolerance` of the expected one's largest entry."""
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        error = (found[name] - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"
