"""The frozen reference policy of the KL term: a whole model on one device, or shards on the learner's ranks. With LoRA
the learner's own base model is the reference instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from mempipe.engines.config import ModelConfig
from mempipe.engines.model import PolicyModel, load_policy, loss_token_logprobs, reshard, score, shard
from mempipe.rl.packing import MicroBatch
from mempipe.types import TrainingSample


class ReferenceModel:
    """The model that training starts from, computing in `model.dtype` on one device."""

    def __init__(self, model: ModelConfig, *, temperature: float, max_tokens: int, num_threads: int = 1) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._device.type == "cpu":
            torch.set_num_threads(num_threads)
        self._policy = _load(model).to(self._device)
        self._temperature = temperature
        self._max_tokens = max_tokens

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
        """Returns `ref_logprobs` for every sample: one entry per token, 0.0 where the loss mask is 0."""
        return score(
            self._policy,
            [sample.token_ids for sample in samples],
            loss_masks=[sample.loss_mask for sample in samples],
            temperature=self._temperature,
            max_tokens=self._max_tokens,
        )


class ShardedReference:
    """The model that training starts from, computing in `model.dtype` on the ranks of `mesh`.

    Between two uses its shards are in the machine's memory, pinned on a machine with GPUs. FSDP2 itself offloads them
    (`CPUOffloadPolicy`) and copies a layer's shard to the GPU when the layer is gathered, so that the shards together
    never need room on the GPU. AdamW's moments (`mempipe.engines.offload`) are moved as a whole instead, because the
    fused optimizer needs them in one place.
    """

    def __init__(self, model: ModelConfig, mesh: DeviceMesh, *, device: torch.device, temperature: float) -> None:
        self._policy = _load(model)
        self._device = device
        self._temperature = temperature
        shard(
            self._policy,
            mesh,
            compute_dtype=getattr(torch, model.dtype),
            reshard_after_forward=device.type != "cpu",
            offloaded=True,
        )

    @torch.no_grad()
    def scored(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Returns the micro-batches with `ref_logprobs` [N] of this model. All ranks must bring equally many, with
        fillers."""
        found = []
        for batch in batches:
            logprobs, _ = loss_token_logprobs(self._policy, batch, temperature=self._temperature, device=self._device)
            found.append(replace(batch, ref_logprobs=logprobs.cpu().numpy()))
        reshard(self._policy)
        return found


def _load(model: ModelConfig) -> PolicyModel:
    base = model.model_copy(update={"lora_rank": 0, "gradient_checkpointing": False})
    return load_policy(base, dtype=getattr(torch, model.dtype)).requires_grad_(False)
