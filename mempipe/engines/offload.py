"""AdamW's moments in the machine's memory: a GPU holds them only while the weights are updated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def host_zeros(tensor: Tensor) -> Tensor:
    """Returns zeros of the shape and the sharding of `tensor`, in the machine's memory; pinned if `tensor` is on a GPU,
    because copies to and from pinned memory run at the full rate of the link."""
    return torch.zeros_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda", requires_grad=False)


@contextmanager
def moments_on_device(optimizer: torch.optim.AdamW) -> Iterator[None]:
    """Copies the moments to the device of their parameters for the block, and back after it.

    Moments that the block makes (the first update) move to the machine's memory as well. After an error in the block
    the moments are those from before.
    """
    kept = {(parameter, name): state[name] for parameter, state in optimizer.state.items() for name in MOMENTS if state}
    try:
        for (parameter, name), moment in kept.items():
            optimizer.state[parameter][name] = torch.empty_like(moment, device=parameter.device).copy_(moment)
        yield
        for parameter, state in optimizer.state.items():
            for name in MOMENTS:
                if (parameter, name) not in kept:
                    kept[parameter, name] = host_zeros(state[name])
                kept[parameter, name].copy_(state[name])
    finally:
        for (parameter, name), moment in kept.items():
            optimizer.state[parameter][name] = moment
