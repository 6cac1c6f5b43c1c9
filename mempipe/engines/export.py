"""A Hugging Face folder from a run's checkpoint, without the run."""

from __future__ import annotations

from pathlib import Path

import torch

from mempipe.engines.checkpoint import checkpoints, export_hf, load_tensors, read_state, step_of
from mempipe.engines.config import ModelConfig
from mempipe.engines.model import full_state_dict, load_policy
from mempipe.settings import ConfigError


def choose_checkpoint(run: Path, step: int | None) -> Path:
    """The checkpoint of the run in `run` after learner step `step`; None: the newest. Raises ConfigError."""
    found = {step_of(path): path for path in checkpoints(run / "checkpoints")}
    if not found:
        raise ConfigError(f"{run} holds no checkpoint")
    if step is not None and step not in found:
        known = ", ".join(map(str, sorted(found)))
        raise ConfigError(f"--step is {step}; {run} holds checkpoints of the steps {known}")
    return found[max(found) if step is None else step]


def export_checkpoint(checkpoint: Path, model: ModelConfig, target: Path) -> Path:
    """Writes the policy of a checkpoint to `target` as the end of a run does, with LoRA merged, on the CPU.

    `model` is what the run trained: its path has the configuration and the tokenizer, and with LoRA the base. Raises
    CheckpointError when the checkpoint is damaged or of another model, ConfigError when there is no such model.
    """
    read_state(checkpoint)
    policy = load_policy(model)
    load_tensors(
        checkpoint,
        {f"model/{name}": weight.detach() for name, weight in policy.lm.named_parameters() if weight.requires_grad},
    )
    return export_hf(target, full_state_dict(policy, dtype=getattr(torch, model.dtype)), source=model.path)
