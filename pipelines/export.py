"""Export a checkpoint of a run: which one, and which model the run trained."""

from __future__ import annotations

from pathlib import Path

from mempipe.config import RunConfig
from mempipe.engines.config import ModelConfig
from mempipe.loader import load_config
from mempipe.settings import ConfigError


def export_run(run: Path, target: Path, *, step: int | None = None) -> Path:
    """Writes the policy of the run in folder `run` after learner step `step` (None: the newest checkpoint) to the new
    folder `target`, for transformers and vLLM.

    Raises ConfigError, before anything is loaded, and CheckpointError.
    """
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} holds no run (no config.yaml)")
    if target.exists():
        raise ConfigError(f"{target} exists; choose another folder or remove it")
    config = load_config(run / "config.yaml")
    from mempipe.engines.export import choose_checkpoint, export_checkpoint  # torch, for what can still be right

    return export_checkpoint(choose_checkpoint(run, step), _trained_model(run, config), target)


def _trained_model(run: Path, config: RunConfig) -> ModelConfig:
    """Returns what the learner started from: the supervised start or the model that the run made,
    else that of the config."""
    made = [run / name for name in ("warm_start", "model") if (run / name / "config.json").is_file()]
    return config.model.model_copy(update={"path": str(made[0])}) if made else config.model
