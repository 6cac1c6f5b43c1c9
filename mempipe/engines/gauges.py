"""Computes training FLOPs by formula and reads the peak memory of a rank."""

from __future__ import annotations

import resource
from collections.abc import Sequence

import torch

from mempipe.engines.gpus import GIB, GPUS
from mempipe.engines.model import PolicyModel


class TrainingFlops:
    """Counts the operations that a model needs for a forward and a backward pass (arXiv 2204.02311, appendix B).

    Recomputed activations do not count: they are a choice, not a need. Six operations per token and weight that
    multiplies it, but four where the weight is frozen and has no gradient; for attention 12 per token, pair of
    positions, layer and hidden dimension, half of them since attention looks back only.
    """

    def __init__(self, policy: PolicyModel) -> None:
        config = policy.lm.config.get_text_config()
        # A table that is only looked up multiplies nothing; a tied one is the head as well.
        looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        operations = 6 if policy.lm.get_input_embeddings().weight.requires_grad else 4
        self._of_weights = -operations * looked_up + sum(
            (6 if parameter.requires_grad else 4) * parameter.numel() for parameter in policy.lm.parameters()
        )
        self._attention = config.num_hidden_layers * config.hidden_size

    def of(self, lengths: Sequence[int], shared_lengths: Sequence[int]) -> int:
        """Returns the operations of contexts of these lengths, whose shared tokens count once."""
        pairs = sum(length**2 for length in lengths) - sum(shared**2 for shared in shared_lengths)
        return self._of_weights * (sum(lengths) - sum(shared_lengths)) + 6 * self._attention * pairs


def peak_memory_gib(device: torch.device) -> float:
    """Returns the most memory that this process has held so far: of its GPU (what torch reserved, which no other
    process can use), or of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def peak_teraflops(device: torch.device) -> float | None:
    """Returns what the device can do in bfloat16; None for a CPU, and for a GPU that is not known here."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    return next((gpu.teraflops for name, gpu in GPUS.items() if name in words), None)
