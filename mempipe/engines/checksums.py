"""Checksums of weights that do not depend on how a tensor is cut up.

The checksum of a tensor is the sum modulo 2^64 of a hash of every value's bits, where zero has the hash zero. So the
shards of a tensor add up to the whole one, tensors that an engine joins (q, k and v) add up to the joined one, and
padding adds nothing: learner and engine compute it where the weights lie, without gathering any. A changed value shows
in it, however small the change; a changed order of the same values does not, which is left to the canary.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNKS = {"cpu": 2**15, "cuda": 2**24}
"""Values that are hashed at a time, 8 bytes each: on a CPU what its cache holds, on a GPU what keeps it busy."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIERS = (-7046029254386353131, -4417276706812531889)  # odd, with bits in all places


def checksum(tensor: Tensor) -> Tensor:
    """Returns the checksum of the values in `tensor`: a number, int64, on its device."""
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in bits.split(CHUNKS[tensor.device.type]):
        hashed = part.to(torch.int64) * _MULTIPLIERS[0]
        hashed = hashed.bitwise_xor_(hashed >> 29) * _MULTIPLIERS[1]
        total += hashed.bitwise_xor_(hashed >> 32).sum()
    return total
