"""Products in which no row depends on how many rows there are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mempipe.engines.row_blocks import BLOCK_ROWS, in_blocks

INPUTS, OUTPUTS = 128, 384


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def layer(request) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(*shape, generator=generator) for shape in ((OUTPUTS, INPUTS), (OUTPUTS,)))
    return weight.to(request.param), bias.to(request.param)


def inputs(count: int, weight: Tensor) -> Tensor:
    return torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(1)).to(weight.dtype)


def test_a_row_is_the_same_to_the_last_bit_whatever_is_beside_it(layer):
    rows = inputs(200, layer[0])
    product = in_blocks(F.linear)
    alone = torch.cat([product(row[None], *layer) for row in rows])
    for count in (2, 3, 7, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 100, 200):
        assert torch.equal(product(rows[-count:], *layer), alone[-count:]), count


def test_the_product_is_that_of_all_rows_at_once_up_to_rounding(layer):
    rows = inputs(70, layer[0]).view(2, 35, INPUTS)
    outputs = in_blocks(F.linear)(rows, *layer)
    assert outputs.shape == (2, 35, OUTPUTS) and outputs.dtype == layer[0].dtype
    assert torch.allclose(
        outputs, F.linear(rows, *layer), rtol=2e-2 if rows.dtype == torch.bfloat16 else 1e-4, atol=1e-4
    )
    assert torch.equal(in_blocks(F.linear)(rows, layer[0], None), in_blocks(F.linear)(rows, layer[0]))
    assert in_blocks(F.linear)(rows[:, :0], *layer).shape == (2, 0, OUTPUTS)
