"""Copies of faiss indexes on GPUs, in float16: they propose candidates, which are scored exactly elsewhere.

faiss searches them where it can use the GPU. The wheels of faiss-gpu-cu12 on PyPI up to 1.14.1 hold code for compute
capabilities 7.0 and 8.0 alone, as cuobjdump lists it, so it cannot use an H100 or an H200. There torch searches the
indexes that compare every vector.
"""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Protocol

import faiss
import numpy as np
import numpy.typing as npt

from mempipe.retrieval.encoders import Vectors
from mempipe.retrieval.manifest import GPU_SCRATCH_BYTES

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 2**16  # vectors that are copied at once
PROBE = """
import faiss, numpy
rows = numpy.eye(64, dtype=numpy.float32)
index = faiss.index_cpu_to_all_gpus(faiss.IndexFlatIP(64))
index.add(rows)
assert (index.search(rows, 1)[1][:, 0] == numpy.arange(64)).all()
"""


class Candidates(Protocol):
    def search(self, vectors: Vectors, depth: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Returns scores and rows [n, depth] of `vectors` [n, dimension], best first."""
        ...


def num_visible_gpus() -> int:
    """Returns the number of GPUs that a faiss for GPUs sees here; an actor sees only those that it was given."""
    return faiss.get_num_gpus() if hasattr(faiss, "StandardGpuResources") else 0


@functools.cache
def faiss_computes() -> bool:
    """Returns whether faiss can search on every visible GPU. A process tries it once, in another, which faiss may
    end."""
    tried = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if tried.returncode:
        reason = (tried.stderr.strip().splitlines() or [f"its process ended with {tried.returncode}"])[-1]
        logging.getLogger(__name__).warning("faiss cannot use this machine's GPUs: %s", reason)
    return not tried.returncode


def gpu_copy(index: Any, gpu: int) -> Candidates | None:
    """Returns the index in float16 on a GPU; None for kinds that GPUs cannot search, and when it does not fit.

    A shard is completely on one GPU: faiss cannot split every kind (SQfp16 among them) over several.
    """
    reason: Any = "faiss cannot use it, and torch searches only indexes that compare every vector"
    try:
        if faiss_computes():
            return _faiss_copy(index, gpu)
        if isinstance(index, faiss.IndexFlatCodes):
            return TorchCopy(index, f"cuda:{gpu}")
    except RuntimeError as error:  # torch's out-of-memory error is one
        reason = error
    logging.getLogger(__name__).warning(
        "a faiss %s stays on the CPU instead of GPU %d: %s", type(index).__name__, gpu, reason
    )
    return None


def _faiss_copy(index: Any, gpu: int) -> Any:
    options = faiss.GpuClonerOptions()
    options.useFloat16 = True
    # Of its own: shards are searched at the same time, and one set of resources serves one search at a time.
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(GPU_SCRATCH_BYTES)
    return faiss.index_cpu_to_gpu(resources, gpu, index, options)


class TorchCopy:
    """The vectors of an index that compares all of them, in float16 on a device of torch's."""

    def __init__(self, index: Any, device: str) -> None:
        """Raises RuntimeError when the device has no room."""
        import torch

        self._vectors = torch.empty(index.ntotal, index.d, dtype=torch.float16, device=device)
        for first in range(0, index.ntotal, BLOCK):
            block = index.reconstruct_n(first, min(BLOCK, index.ntotal - first))
            self._vectors[first : first + len(block)] = torch.from_numpy(block)

    def search(self, vectors: Vectors, depth: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        import torch

        queries = torch.from_numpy(vectors).to(self._vectors)
        scores = queries.new_empty(len(queries), 0, dtype=torch.float32)
        rows = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
        size = max(GPU_SCRATCH_BYTES // (8 * len(queries)), depth)  # a float32 score, and as much room to sort
        for first in range(0, len(self._vectors), size):
            block = _float32_product(queries, self._vectors[first : first + size].T)
            best = block.topk(min(depth, block.shape[1]))
            scores, rows = torch.cat([scores, best.values], 1), torch.cat([rows, best.indices + first], 1)
            kept = scores.topk(min(depth, scores.shape[1]))
            scores, rows = kept.values, rows.gather(1, kept.indices)
        return scores.cpu().numpy(), rows.cpu().numpy()


def _float32_product(left: Tensor, right: Tensor) -> Tensor:
    """Returns the product of two float16 matrices. In float16 it would differ from the exact scores by 0.0005 of them,
    which is more than neighbours among millions of passages differ."""
    import torch

    return torch.mm(left, right, out_dtype=torch.float32) if left.is_cuda else left.float() @ right.float()
