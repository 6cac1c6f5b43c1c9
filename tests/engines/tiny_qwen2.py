"""A random tiny Qwen2, what transformers says about it, and a generator that serves it."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal

import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from mempipe.engines.config import GenerationConfig, ModelConfig
from mempipe.engines.generator import Generator
from mempipe.engines.vllm_shared import SharedEngine
from tools.processes import command_line

VOCAB_SIZE = 300
MAX_MODEL_LEN = 256


def build_model(seed: int) -> Qwen2ForCausalLM:
    """Weights large enough that every parameter moves the log-probs, biases and norms included.

    They are drawn once: an engine of this process draws from the same generator while it samples.
    """
    return copy.deepcopy(_model(seed))


@cache
def _model(seed: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def changed_model(model: Qwen2ForCausalLM, kind: str = "", *, seed: int = 7) -> Qwen2ForCausalLM:
    """A copy in which the parameters whose name holds `kind` moved."""
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if kind in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def model_scores(model: Qwen2ForCausalLM, token_ids: list[int], *, temperature: float = 1.0) -> list[float]:
    """Log-probs of `token_ids[1:]` by transformers."""
    logits = model(torch.tensor([token_ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()


def prompts(num_prompts: int, *, length: int = 24, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB_SIZE, (num_prompts, length), generator=generator).tolist()


CANARY = prompts(3, length=20, seed=99)


def make_generator(
    model_path: Path,
    *,
    dtype: str = "float32",
    transfer: Literal["mempipe_shm", "ipc"] = "mempipe_shm",
    **settings: object,
) -> Generator:
    # On a GPU two engines of these tests live side by side.
    config = GenerationConfig(**{"max_num_seqs": 64, "timeout_s": 300.0, "gpu_memory_utilization": 0.3, **settings})
    model = ModelConfig(path=str(model_path), dtype=dtype)
    return Generator(model, config, max_model_len=MAX_MODEL_LEN, seed=1, transfer=transfer)


@contextmanager
def held(generator: Generator, *, after: int) -> Iterator[Callable[[], Awaitable[None]]]:
    """Lets an engine of this process take `after` steps, and no further one until the block ends.

    Meanwhile it takes requests and does what is asked of it between two steps. Yields a function that waits until the
    steps are taken.
    """
    engine, taken, let_go = generator._engine, 0, threading.Event()
    assert isinstance(engine, SharedEngine)
    does_what_is_asked = engine._does_what_is_asked

    def holds() -> bool:
        nonlocal taken
        while (goes_on := does_what_is_asked()) and taken >= after and not let_go.is_set():
            time.sleep(0.001)
        taken += goes_on
        return goes_on

    async def all_taken() -> None:
        while taken < after:
            generator.check_alive()
            await asyncio.sleep(0.001)

    engine._does_what_is_asked = holds
    try:
        yield all_taken
    finally:
        let_go.set()
        del engine._does_what_is_asked


def engine_processes(parent: psutil.Process) -> list[psutil.Process]:
    """Descendants that vLLM started; Python's own resource tracker stays as long as its process."""
    lines = {child: command_line(child) for child in parent.children(recursive=True)}
    return [child for child, line in lines.items() if line and "resource_tracker" not in line]


def named_semaphores(process: psutil.Process) -> list[str]:
    """Those that stay in memory when the process is killed."""
    return [memory.path for memory in process.memory_maps() if memory.path.startswith("/dev/shm/sem.")]


def left_in(folder: Path) -> list[str]:
    """What lies in a folder for temporary files, apart from the compiler's cache, which outlives processes."""
    return [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor")]
