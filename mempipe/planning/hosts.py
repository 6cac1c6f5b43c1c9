"""The memory of machines: what ranks on GPUs keep there, and all roles without a GPU.

Lower bounds in bytes, calculated from the config and the model's shape: processes, activations and the object store
come on top. Nothing here imports ray or torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from mempipe.config import RunConfig
from mempipe.planning.capacity import GIB, ModelShape, trained_matrices, trained_parameters, weight_width


def offloaded(config: RunConfig, shape: ModelShape, *, num_ranks: int) -> dict[str, int]:
    """Returns what each of `num_ranks` ranks on GPUs keeps in pinned memory of its machine, by name; {} for nothing.

    torch rounds each tensor in pinned memory up to a block whose size is a power of two
    (`PowerOf2Ceil` in its CachingHostAllocator, `pinned_max_round_threshold_mb`). This was read, not measured.
    """
    kept: dict[str, int] = {}
    if config.learner.offload_optimizer:
        kept["moments of AdamW"] = 2 * _pinned(trained_matrices(config.model, shape), 4, num_ranks)
    if config.reference_place == "ranks":
        kept["reference"] = _pinned(shape.matrices, weight_width(config.model), num_ranks)
    return kept


def all_on_cpus(config: RunConfig, shape: ModelShape, *, training: bool) -> int:
    """Returns what all roles of a run hold together on a machine without a GPU: engines with their caches, the
    learner's float32 masters, gradients and moments, and the references."""
    weights = shape.num_parameters * weight_width(config.model)
    needed = (weights + config.generation.cpu_kv_cache_gib * GIB) * config.generation.num_replicas
    if training:
        references = {"none": 0, "actors": config.reference.num_replicas, "ranks": 1}[config.reference_place]
        needed += 4 * shape.num_parameters + 12 * trained_parameters(config.model, shape) + weights * references
    return needed


def _pinned(matrices: Iterable[int], width: int, num_ranks: int) -> int:
    """Returns the pinned memory of a rank's shards of `matrices`, which are numbers of elements of `width` bytes."""
    shards = (width * -(-elements // num_ranks) for elements in matrices)
    return sum(1 << (size - 1).bit_length() for size in shards)
