"""The memory of machines: how much this process may use, what ranks on GPUs keep there, and all roles without a GPU.

The needs are lower bounds in bytes, calculated from the config and the model's shape: processes, activations and the
object store come on top. Nothing here imports ray or torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil

from mempipe.config import RunConfig
from mempipe.planning.capacity import GIB, ModelShape, trained_matrices, trained_parameters, weight_width


def usable_memory(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Returns how many bytes this process and its children may use: the machine's memory, or less where a control group
    has a limit, which is that of a container, a Slurm job or a systemd unit.

    `groups` is where control groups are mounted, and `own` lists those of this process.
    """
    return min([psutil.virtual_memory().total, *_memory_limits(groups, own)])


def _memory_limits(groups: Path, own: Path) -> Iterator[int]:
    """Yields the limits of the process's groups and of all groups above them. A container often sees its own group as
    the root, and /proc still has the group's path outside."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2 of control groups
                mount, name = groups, "memory.max"
            elif "memory" in controllers.split(","):
                mount, name = groups / "memory", "memory.limit_in_bytes"
            else:
                continue
            group = PurePosixPath(path)
            for each in (group, *group.parents):
                with suppress(OSError, ValueError):  # the root has no such file, and "max" says that nothing is limited
                    yield int((mount / each.relative_to("/") / name).read_text())


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
