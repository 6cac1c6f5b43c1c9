"""Hugging Face folders from trained weights, and from a run's checkpoint without the run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig
from transformers.utils.hub import cached_file

from mempipe.engines.adapter import write_adapter
from mempipe.engines.checkpoint import CheckpointError, read_state, reason
from mempipe.engines.config import ModelConfig
from mempipe.engines.model import PolicyModel, load_policy
from mempipe.engines.policy_weights import adapter_state_dict, full_state_dict
from mempipe.engines.sharded_checkpoint import load_tensors
from mempipe.engines.weights import pack_weights
from mempipe.storage.checksums import write_checksums
from mempipe.storage.files import whole_folder, write_text

_COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def export_checkpoint(
    checkpoint: Path, model: ModelConfig, target: Path, *, files: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """Writes the policy of a checkpoint to `target` as the end of a run does, with LoRA merged, on the CPU.

    `model` is what the run trained: its path has the configuration and the tokenizer, and with LoRA the base. `files`
    are further texts of the folder by name. Raises CheckpointError when the checkpoint is damaged or of another model,
    ConfigError when there is no such model.
    """
    weights = full_state_dict(_trained_policy(checkpoint, model), dtype=getattr(torch, model.dtype))
    return export_hf(target, weights, source=model.path, files=files)


def export_adapter(checkpoint: Path, model: ModelConfig, target: Path) -> Path:
    """Writes the LoRA adapter of a checkpoint to `target` as PEFT does, on the CPU; its base is `model.path`.

    Raises CheckpointError and ConfigError as `export_checkpoint` does.
    """
    adapter = adapter_state_dict(_trained_policy(checkpoint, model), dtype=getattr(torch, model.dtype))
    try:
        with whole_folder(target) as partial:
            write_adapter(partial, pack_weights(adapter), model)
            write_checksums(partial)
    except OSError as error:
        raise CheckpointError(f"cannot export an adapter to {target}: {reason(error)}") from error
    return target


def _trained_policy(checkpoint: Path, model: ModelConfig) -> PolicyModel:
    read_state(checkpoint)
    policy = load_policy(model)
    load_tensors(
        checkpoint,
        {f"model/{name}": weight.detach() for name, weight in policy.lm.named_parameters() if weight.requires_grad},
    )
    return policy


def export_hf(
    folder: str | Path,
    state_dict: Mapping[str, Tensor],
    *,
    source: str | Path,
    files: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Writes a Hugging Face model folder that transformers and vLLM load: `state_dict` (Hugging Face names, whole
    tensors, LoRA merged) as safetensors, with configuration and tokenizer of the model at `source`, and the texts
    `files` by name. An existing folder is replaced.

    Raises CheckpointError and leaves nothing half-written.
    """
    target = Path(folder)
    try:
        config = AutoConfig.from_pretrained(source)
        config.dtype = next(iter(state_dict.values())).dtype
        with whole_folder(target) as partial:
            config.save_pretrained(partial)
            save_torch_state_dict(dict(state_dict), partial)
            for name in _COPIED_FILES:
                file = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
                if file is not None:
                    shutil.copyfile(file, partial / name)
            write_checksums(partial)
            for name, text in files.items():
                write_text(partial / name, text)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot export a model to {target}: {reason(error)}") from error
    return target
