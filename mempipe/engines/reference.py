"""The frozen reference policy of the KL term. With LoRA the learner's own base model is the reference instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mempipe.engines.config import ModelConfig
from mempipe.engines.model import load_policy, score
from mempipe.types import TrainingSample


class ReferenceModel:
    """The model that training starts from, computing in `model.dtype` on one device."""

    def __init__(self, model: ModelConfig, *, temperature: float, max_tokens: int, num_threads: int = 1) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._device.type == "cpu":
            torch.set_num_threads(num_threads)
        base = model.model_copy(update={"lora_rank": 0, "gradient_checkpointing": False})
        self._policy = load_policy(base, dtype=getattr(torch, model.dtype)).to(self._device).requires_grad_(False)
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
