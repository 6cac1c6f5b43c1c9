"""The weights of the policy under their Hugging Face names: whole tensors for an export or an engine, and checksums."""

from __future__ import annotations

import mempipe.engines.lean_libraries  # noqa: F401  # isort: skip  # before transformers

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from mempipe.engines.adapter import lora_layers
from mempipe.engines.checksums import checksum
from mempipe.engines.model import ADAPTER, PolicyModel, reshard


def full_state_dict(policy: PolicyModel, *, dtype: torch.dtype, keep: bool = True) -> dict[str, Tensor]:
    """Returns every weight under its Hugging Face name, whole, on the CPU, in `dtype`, with LoRA merged; a tied weight
    appears once.

    All ranks must call it together; those with `keep` False take part and get an empty dict.
    """
    reshard(policy)
    weights: dict[str, Tensor] = {}
    for name, parameter in policy.lm.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if keep:
            weights[name] = whole.detach().to("cpu", copy=True)
    if keep:
        _merge_lora(weights, _scaling(policy))
    return {name: weight.to(dtype) for name, weight in weights.items()}


def adapter_state_dict(policy: PolicyModel, *, dtype: torch.dtype, keep: bool = True) -> dict[str, Tensor]:
    """Returns the LoRA adapter's matrices as PEFT saves them: whole, on the CPU, in `dtype`, without the base.

    All ranks must call it together; those with `keep` False take part and get an empty dict.
    """
    reshard(policy)
    adapter: dict[str, Tensor] = {}
    for name, parameter in policy.lm.named_parameters():
        if f".{ADAPTER}." not in name:
            continue
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if keep:
            plain_name = name.replace(f".{ADAPTER}.", ".")
            adapter[f"base_model.model.{plain_name}"] = whole.detach().to("cpu", dtype, copy=True)
    return adapter


@torch.no_grad()
def weight_checksums(policy: PolicyModel, *, dtype: torch.dtype) -> dict[str, int]:
    """Returns the checksum (`mempipe.engines.checksums`) of every weight as the engine holds it: in `dtype`, under its
    Hugging Face name, a LoRA adapter apart from its base and with the scaling in its second matrix.

    All ranks must call it together, and all get the same. Nothing is gathered: shards add up.
    """
    reshard(policy)
    scaling = _scaling(policy)
    names, sums = [], []
    for name, parameter in policy.lm.named_parameters():
        values = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).to(dtype)
        layer, is_second, _ = name.partition(".lora_B.")
        names.append(name.replace(".base_layer.", ".").replace(f".{ADAPTER}.", "."))
        sums.append(checksum(values * scaling[layer] if is_second else values))
    totals = torch.stack(sums)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(totals)
    return {name: value % 2**64 for name, value in zip(names, totals.tolist(), strict=True)}


def merged_checksums(policy: PolicyModel, *, dtype: torch.dtype) -> dict[str, int]:
    """Returns the checksum of every weight with LoRA merged, as `full_state_dict` gives it.

    All ranks must call it together, and all get the same. The weights are gathered: a product of shards may be rounded
    otherwise than the shard of a product.
    """
    several = dist.is_initialized() and dist.get_world_size() > 1
    weights = full_state_dict(policy, dtype=dtype, keep=not several or dist.get_rank() == 0)
    found = [{name: int(checksum(weight)) % 2**64 for name, weight in weights.items()}]
    if several:
        dist.broadcast_object_list(found)
    return found[0]


def _scaling(policy: PolicyModel) -> dict[str, float]:
    """Returns the factor of each layer's adapter."""
    return {name: layer.scaling[ADAPTER] for name, layer in lora_layers(policy.lm).items()}


def _merge_lora(weights: dict[str, Tensor], scaling: dict[str, float]) -> None:
    """Puts W + (B A) * scaling, as PEFT rounds it, under the base layer's name, in place. PEFT merges modules,
    but a rank holds only shards of them."""
    for layer, factor in scaling.items():
        down = weights.pop(f"{layer}.lora_A.{ADAPTER}.weight")
        up = weights.pop(f"{layer}.lora_B.{ADAPTER}.weight")
        weights[f"{layer}.weight"] = weights.pop(f"{layer}.base_layer.weight") + (up @ down) * factor
        bias = weights.pop(f"{layer}.base_layer.bias", None)
        if bias is not None:
            weights[f"{layer}.bias"] = bias
