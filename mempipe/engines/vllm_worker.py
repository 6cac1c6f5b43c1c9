"""Additions of mempipe to a vLLM worker process: a weight-transfer backend, checksums of the weights it holds, CPU
weights that can be written, an adapter that is quick on a CPU, and an end together with its owner.

vLLM imports this module (`worker_extension_cls`) before it loads the model, and importing it installs all of them. It
is imported nowhere else.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from tqdm import tqdm
from vllm import _custom_ops as ops
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed

from mempipe.engines.checksums import checksum
from mempipe.engines.row_blocks import Product, in_blocks
from mempipe.engines.weights import GROUP_BACKEND, SHARED_MEMORY_BACKEND, read_weights
from mempipe.environment import ENGINE_FOLDER, FRONTEND_PID


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Files need no rendezvous."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Locates the new weights (`WeightHandle`'s fields)."""

    path: str
    checksum: str
    version: int


class SharedMemoryTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads a published safetensors file into the running model.

    On a GPU this goes through vLLM's layerwise reload, as its own backends do. On CPU that reload leaves a tied output
    head at its old values, so the parameters are written in place, which `keep_weights_writable` makes exact.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Taken now: while vLLM reloads layer by layer, a tied head is a separate parameter, which no file has.
        self._names = {name for name, _ in self.model.named_parameters()}

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        if self.device.type != "cpu":
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises ValueError when the file is not the published one or lacks a parameter of the model."""
        model: Any = self.model
        loaded = model.load_weights(read_weights(update_info.path, checksum=update_info.checksum).items())
        missing = self._names - loaded
        if missing:
            raise ValueError(
                f"weights version {update_info.version} lack {min(missing)} ({len(missing)} parameters are missing)"
            )

    def finish_weight_update(self) -> None:
        if self.device.type != "cpu":
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)
            return
        for layer in self.model.modules():
            if hasattr(layer, "cpu_linear"):
                keep_weights_writable(layer, remove_weight=False)

    def shutdown(self) -> None:
        pass


class WorkerExtension:
    """Extends vLLM's worker (`worker_extension_cls`); `collective_rpc` reaches it by name."""

    model_runner: Any

    def weight_checksums(self) -> dict[str, int]:
        """Returns the checksum of every weight that this worker holds; those of all workers of an engine add up."""
        model = self.model_runner.get_model()
        sums = {
            name.replace(".base_layer.", "."): checksum(part)
            for name, parameter in model.named_parameters()
            if (part := _own_part(model, name, parameter)) is not None
        }
        for name, layer in model.named_modules():
            if isinstance(layer, BaseLinearLayerWithLoRA):
                down, up = _own_adapter(layer)
                sums |= {f"{name}.lora_A.weight": _sum(down), f"{name}.lora_B.weight": _sum(up)}
        return {name: int(value) for name, value in sums.items()}

    def reseed(self, seed: int) -> None:
        """Makes unseeded requests draw as after a start with this seed."""
        set_random_seed(seed)

    def compute_rows_alone(self) -> None:
        """Computes every token without influence of the other tokens of its batch from now on
        (`mempipe.engines.row_blocks`).

        Attention on CPUs needs nothing for that, with one thread: it takes every sequence on its own.
        """
        module: Any
        for module in self.model_runner.get_model().modules():
            if hasattr(module, "cpu_linear"):
                module.in_blocks = True
                keep_weights_writable(module, remove_weight=False)
            if isinstance(module, BaseLinearLayerWithLoRA):
                wrapper: Any = module.punica_wrapper
                wrapper.in_blocks = True

    def packed_modules(self) -> dict[str, list[str]]:
        """Returns the modules of the checkpoint that each joined module of this model is made of."""
        return dict(getattr(self.model_runner.get_model(), "packed_modules_mapping", {}))


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor | int:
    return sum((checksum(part) for part in parts), start=0)


def _own_adapter(layer: BaseLinearLayerWithLoRA) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Returns the part of a layer's adapter that this tensor-parallel rank counts, per joined module: first and second
    matrices.

    A layer that is cut by columns has its second matrices cut, one that is cut by rows its first ones.
    """
    down, up = layer.lora_a_stacked, layer.lora_b_stacked
    rank = get_tensor_model_parallel_rank()
    base = layer.base_layer
    if rank == 0:
        return down, up
    if isinstance(base, RowParallelLinear):
        return down, []
    if isinstance(base, QKVParallelLinear) and rank % base.num_kv_head_replicas:
        return [], up[:1]
    return [], up if isinstance(base, ColumnParallelLinear) else []


def _own_part(model: torch.nn.Module, name: str, parameter: torch.Tensor) -> torch.Tensor | None:
    """Returns the part of a parameter that this tensor-parallel rank counts, so that every value of the model counts
    once. Shards count on their rank, copies that all ranks hold on the first; heads that several ranks hold on the
    first of them.
    """
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    module = model.get_submodule(name.rpartition(".")[0])
    if size == 1:
        return parameter
    if isinstance(module, QKVParallelLinear):
        if rank % module.num_kv_head_replicas:
            return parameter[: module.num_heads * module.head_size]
        return parameter
    is_row_bias = isinstance(module, RowParallelLinear) and name.endswith(".bias")
    is_shard = isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding) and not is_row_bias
    return parameter if is_shard or rank == 0 else None


def keep_weights_writable(layer: Any, remove_weight: bool) -> None:
    """Stands in for vLLM's CPU dispatch, which packs a layer's weight into a private copy and drops the original.

    Here the parameter stays, so that it can be written. It is called again after each write, since a layer may multiply
    by a copy (`SharedMemoryTransfer.finish_weight_update`).
    """
    layer.cpu_linear = _maybe_in_blocks(layer, _product(layer, layer.weight))


def _maybe_in_blocks(owner: Any, product: Product) -> Product:
    """Returns the product as `WorkerExtension.compute_rows_alone` wants it of this layer or wrapper."""
    return in_blocks(product) if getattr(owner, "in_blocks", False) else product


def _product(layer: torch.nn.Module, weight: torch.Tensor) -> Product:
    """Returns the function that multiplies by `weight`: in float32 by the parameter itself.

    In bfloat16 a layer multiplies by a packed copy, which takes half the time, and a head by a float32 copy, since the
    learner computes logits in float32: to cast the head in every engine step takes a quarter of a small model's step.
    The head's copy is made at the first call; an embedding that is not the head never needs it. A processor without
    AVX-512 has no fast product of bfloat16 (torch's own takes two to seven times as long as float32): all layers have a
    float32 copy there.
    """
    if weight.dtype != torch.bfloat16 or weight.ndim != 2:
        return F.linear
    if isinstance(layer, VocabParallelEmbedding):
        head = cache(weight.float)
        return lambda x, _, bias: _wide_linear(x, head(), bias)
    if ops._supports_onednn:
        with suppress(RuntimeError):  # oneDNN's answer on a processor that cannot
            packed = ops.create_onednn_mm(weight.t())
            return lambda x, _, bias: ops.onednn_mm(packed, x, bias)
    wide = weight.float()
    return lambda x, _, bias: _wide_linear(x, wide, bias).to(x.dtype)


def _wide_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiplies in float32, whatever the inputs are."""
    return F.linear(x.float(), weight, None if bias is None else bias.float())


def add_one_adapter(
    self: PunicaWrapperCPU,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: Sequence[torch.Tensor],
    lora_b_stacked: Sequence[torch.Tensor],
    scale: float,
    output_slices: Sequence[int],
    **_: Any,
) -> None:
    """Adds the adapter's product with x [T, inputs] to y [T, outputs], whose columns are cut into `output_slices`;
    nothing for a token without an adapter.

    vLLM's own CPU path copies the adapter for every token, since each could have another one: prompts take twenty times
    as long. An engine here serves one adapter, in slot 0 of each part ([1, 1, rank, inputs] and [1, 1, outputs, rank]).
    Both products are of the model's dtype, as in the learner: in float32 they take up to twice as long.
    """
    product = _maybe_in_blocks(self, F.linear)
    factors = (scale * (self.token_lora_indices[: len(x)] >= 0)).to(x.dtype).unsqueeze(1)
    start = 0
    for first, second, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        y[:, start : start + size] += product(product(x, first[0, 0], None) * factors, second[0, 0], None)
        start += size


def end_with(frontend: psutil.Process) -> None:
    """Ends this process when `frontend` has ended. vLLM ends an engine that is shut down; an engine whose front-end was
    killed would stay, with its memory."""
    frontend.wait()
    if folder := os.environ.get(ENGINE_FOLDER):
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def install() -> None:
    """Registers and starts all that this module adds to a worker."""
    tqdm.set_lock(threading.RLock())  # its own one is a named semaphore, which stays in memory when a process is killed
    WeightTransferEngineFactory.register_engine(SHARED_MEMORY_BACKEND, SharedMemoryTransfer)
    WeightTransferEngineFactory.register_engine(GROUP_BACKEND, "mempipe.engines.vllm_group", "GroupTransfer")
    if current_platform.is_cpu():
        layer_utils.dispatch_cpu_unquantized_gemm = keep_weights_writable
        PunicaWrapperCPU.add_lora_linear = add_one_adapter
        if torch.cpu._is_amx_tile_supported():
            # vLLM's attention needs the system's permission for AMX. Only oneDNN asks for it, and not if
            # ONEDNN_MAX_CPU_ISA keeps it from AMX: then the first token ends the process (illegal instruction).
            torch.cpu._init_amx()
        # vLLM compiles one small sampling function even in eager mode, which costs 15 s at start.
        torch.compiler.set_stance("force_eager")
    frontend = int(os.environ[FRONTEND_PID])
    if frontend != os.getpid():
        watch = threading.Thread(target=end_with, args=(psutil.Process(frontend),), name="mempipe-frontend-watch")
        watch.daemon = True
        watch.start()


install()
