"""vLLM's ipc transfer for ranks and workers without GPUs: each pretends to be on a GPU of its own, and a handle names a
file in place of GPU memory. Selecting and opening handles, and loading the weights, stay vLLM's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tiny_qwen2 import build_model, changed_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from vllm.distributed.weight_transfer import ipc_engine

from mempipe.engines.weights import GpuWeightSender, WeightHandle

NUM_RANKS = 2


class ToFile:
    """Stands in for the engines: writes what rank 0 hands to them, as they receive it, to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def connect(self, init_info: dict[str, Any]) -> None:
        pass

    def load(self, handle: WeightHandle) -> None:
        self._file.write_text(json.dumps(handle.update_info))


def on_gpu(number: int) -> Any:
    """Makes the ipc engine of this process believe that it is on this GPU."""
    cuda: Any = SimpleNamespace(
        get_device_properties=lambda _: SimpleNamespace(uuid=f"GPU-{number}"),
        synchronize=lambda: None,
        ipc_collect=lambda: None,
    )
    accelerator = SimpleNamespace(current_device_index=lambda: 0)
    replaced = SimpleNamespace(cuda=cuda, accelerator=accelerator, distributed=dist, Tensor=torch.Tensor)
    return patch.object(ipc_engine, "torch", replaced)


def send(rank: int, folder: Path, seed: int) -> None:
    """What a rank does that holds half of every weight of the changed model."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=NUM_RANKS)
    model = changed_model(build_model(seed=0), seed=seed)
    fully_shard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    files = iter(range(1000))

    def exported(weight: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
        file = folder / f"{next(files)}-of-GPU-{rank}.pt"
        torch.save(weight, file)
        return None, (str(file), *[None] * 6)

    with on_gpu(rank), patch.object(ipc_engine, "reduce_tensor", exported):
        sender = GpuWeightSender(
            model, dtype=torch.float32, control=ToFile(folder / "update.json"), backend="ipc", rank=rank
        )
        sender.send(1)
    dist.destroy_process_group()
