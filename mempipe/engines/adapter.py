"""A LoRA adapter as PEFT describes and saves it."""

from __future__ import annotations

import mempipe.engines.lean_transformers  # noqa: F401  # isort: skip  # before peft

from pathlib import Path
from typing import Any, cast

import numpy as np
from peft import LoraConfig

from mempipe.engines.config import ModelConfig

WEIGHTS_FILE = "adapter_model.safetensors"


def lora_config(model: ModelConfig, **more: Any) -> LoraConfig:
    """Returns PEFT's description of the adapter that `model` asks for; `more` are further fields of it."""
    return LoraConfig(
        r=model.lora_rank,
        lora_alpha=cast(Any, model.lora_alpha),
        target_modules=list(model.lora_targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        **more,
    )


def write_adapter(folder: Path, packed: np.ndarray, model: ModelConfig) -> None:
    """Writes a LoRA adapter of `model` to `folder`, for PEFT and vLLM; `packed` is `pack_weights` of matrices under
    PEFT's names."""
    (folder / WEIGHTS_FILE).write_bytes(packed.data)
    lora_config(model, base_model_name_or_path=model.path, inference_mode=True).save_pretrained(str(folder))
