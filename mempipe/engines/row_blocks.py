"""Matrix products in which no row depends on how many rows there are.

A library chooses its kernel by the number of rows, and kernels add up in different orders: the same row gets other
last bits in a batch of one than in a batch of two. Here every product has `BLOCK_ROWS` rows, so its kernel is always
the same one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [..., inputs], weight [outputs, inputs], bias [outputs] or None -> [..., outputs]."""

BLOCK_ROWS = 32
"""With fewer, whole batches take longer (16: 1.4 to 1.7 times as long as one product; 32: 1.1 to 1.5 times); with more,
a few rows do (64: a product of one row takes as long as one of 64)."""


def in_blocks(product: Product) -> Product:
    """Returns `product`, made of `BLOCK_ROWS` rows at a time; the last block is filled up with zeros."""

    def blocked(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        count = len(rows)
        filled = F.pad(rows, (0, 0, 0, -count % BLOCK_ROWS))
        outputs = torch.cat([product(block, weight, bias) for block in filled.split(BLOCK_ROWS)])
        return outputs[:count].reshape(*x.shape[:-1], outputs.shape[-1])

    return blocked
