"""Settings of a learner. A separate module, so that a driver need not load the learner's libraries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mempipe.engines.config import LearnerConfig, ModelConfig, OptimizerConfig
from mempipe.rl.config import AlgorithmConfig

Objective = Literal["policy", "sft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """Holds what all ranks of a learner are made from."""

    model: ModelConfig
    optimizer: OptimizerConfig
    learner: LearnerConfig
    algorithm: AlgorithmConfig
    temperature: float
    """The sampler's: log-probs are of logits / temperature."""
    num_updates: int
    """Optimiser updates of the whole run; cosine and linear schedules end with its last step."""
    seed: int = 1
    mismatch_tolerance: float = math.inf
    """Largest mean |Δ log-prob| to the engines over a step's tokens of the present version."""
    profiles: Mapping[int, Path] = field(default_factory=dict)
    """Steps whose first update rank 0 profiles, and the files of the traces."""
    holds_reference: bool = False
    """The ranks hold the model that training starts from as well, and fill in the `ref_logprobs` of a step."""
    objective: Objective = "policy"
    """With "sft" the loss is cross-entropy: the sum over loss tokens of weight * advantage * -logprob."""


def profile_files(folder: Path, steps: Sequence[int]) -> dict[int, Path]:
    """Returns where the traces of these steps of the run in `folder` are."""
    return {step: folder / "profiles" / f"step-{step:08d}.json" for step in steps}
