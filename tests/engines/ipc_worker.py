"""A worker of an engine whose ipc transfer reads files (`ipc_in_files`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ipc_in_files import on_gpu
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer import ipc_engine

from mempipe.engines.vllm_worker import SharedMemoryTransfer, WorkerExtension


class Extension(WorkerExtension):
    """Also says which files the worker has opened."""

    def opened(self) -> list[str]:
        return OPENED


OPENED: list[str] = []


def opened(file: str, *_: Any) -> torch.Tensor:
    OPENED.append(Path(file).name)
    return torch.load(file)


class FileTransfer(ipc_engine.IPCWeightTransferEngine):
    """Loads in place, as every engine without a GPU (`SharedMemoryTransfer`)."""

    start_weight_update: Any = SharedMemoryTransfer.start_weight_update
    update_weights: Any = SharedMemoryTransfer.update_weights
    finish_weight_update: Any = SharedMemoryTransfer.finish_weight_update

    def receive_weights(self, update_info: Any) -> None:
        with on_gpu(get_tensor_model_parallel_rank()):
            super().receive_weights(update_info)


ipc_engine.rebuild_cuda_tensor = opened
ipc_engine.IPCWeightTransferEngine = FileTransfer
