"""A LoRA adapter as PEFT describes and saves it. PEFT is loaded with the first adapter, since most learners and
references have none.
"""

from __future__ import annotations

import mempipe.engines.lean_libraries  # noqa: F401  # isort: skip  # before peft

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mempipe.engines.config import ModelConfig

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer
    from torch import nn

WEIGHTS_FILE = "adapter_model.safetensors"


def lora_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Returns the layers of the model that have an adapter, by name."""
    if "peft" not in sys.modules:
        return {}  # only PEFT makes one
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def lora_config(model: ModelConfig, **more: Any) -> LoraConfig:
    """Returns PEFT's description of the adapter that `model` asks for; `more` are further fields of it."""
    from peft import LoraConfig

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
    # A relative path would be looked for where the adapter is loaded, and then on the hub.
    base = str(Path(model.path).absolute()) if Path(model.path).is_dir() else model.path
    lora_config(model, base_model_name_or_path=base, inference_mode=True).save_pretrained(str(folder))
