"""Checksums of weights that do not depend on how a tensor is cut up, and what they prove after a sync.

The checksum of a tensor is the sum modulo 2^64 of a hash of every value's bits, where zero has the hash zero. So the
shards of a tensor add up to the whole one, tensors that an engine joins (q, k and v) add up to the joined one, and
padding adds nothing: learner and engine compute it where the weights lie, without gathering any. A changed value shows
in it, however small the change; a changed order of the same values does not, which is left to the canary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNKS = {"cpu": 2**15, "cuda": 2**24}
"""Values that are hashed at a time, 8 bytes each: on a CPU what its cache holds, on a GPU what keeps it busy."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIERS = (-7046029254386353131, -4417276706812531889)  # odd, with bits in all places
_MODULUS = 2**64


class StaleWeights(RuntimeError):
    """An engine does not hold the weights that the learner sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeights:
    """Holds what an engine says about the weights it samples from."""

    version: int
    checksums: dict[str, int]
    """By the engine's names of its tensors."""
    packed_modules: dict[str, list[str]]
    """The modules of the checkpoint that the engine's joined modules are made of."""


def checksum(tensor: Tensor) -> Tensor:
    """The checksum of the values in `tensor`: a number, int64, on its device."""
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in bits.split(CHUNKS[tensor.device.type]):
        hashed = part.to(torch.int64) * _MULTIPLIERS[0]
        hashed = hashed.bitwise_xor_(hashed >> 29) * _MULTIPLIERS[1]
        total += hashed.bitwise_xor_(hashed >> 32).sum()
    return total


def added(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The checksums of whole tensors from those of their shards."""
    totals: dict[str, int] = defaultdict(int)
    for part in parts:
        for name, value in part.items():
            totals[name] = (totals[name] + value) % _MODULUS
    return dict(totals)


def joined(checksums: Mapping[str, int], packed: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The checksums of an engine's tensors from those of the checkpoint's.

    `packed` names the modules that an engine's module is made of, e.g. {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
    """
    owner = {part: whole for whole, parts in packed.items() for part in parts}
    return added(
        [{".".join(owner.get(part, part) for part in name.split(".")): value} for name, value in checksums.items()]
    )


def check_held(held: HeldWeights, learner: Mapping[str, int], *, engine: str, version: int) -> None:
    """Raises StaleWeights when `engine` does not hold the weights of the learner, whose checksums are given, as
    `version`; it names the first tensor.

    An engine whose names of tensors are no joined names of the checkpoint's is judged by the sum over all tensors.
    """
    if held.version != version:
        raise StaleWeights(f"{engine} serves weights of version {held.version}, the learner sent {version}")
    found, expected = held.checksums, joined(learner, held.packed_modules)
    if not expected.keys() <= found.keys():
        found, expected = ({"all tensors": sum(sums.values()) % _MODULUS} for sums in (found, expected))
    # Places for adapters that the learner does not train hold zeros, whose checksum is zero.
    differing = [name for name in found if found[name] != expected.get(name, 0)]
    if differing:
        raise StaleWeights(
            f"{engine} does not hold the learner's weights of version {version}, which it says it serves: "
            f"{len(differing)} of {len(expected)} checksums differ, the first that of {differing[0]}"
        )
