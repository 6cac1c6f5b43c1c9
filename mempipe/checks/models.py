"""Locates a model: in a folder, in the cache of this machine, or on the Hugging Face hub, which is asked last."""

from __future__ import annotations

import importlib.metadata
import json
import os
import threading
from pathlib import Path

from mempipe.checks.findings import Finding, fatal, ok
from mempipe.engines.architectures import (
    adapter_refusal,
    is_named_as_mixture,
    mixture_refusal,
    refusal,
    rotation_limit,
)
from mempipe.engines.config import ModelConfig
from mempipe.runs import unfinished
from mempipe.storage.files import is_local_path

HUB_TIMEOUT_S = 8.0
_NO_LAYERS = ("embed_tokens.weight", "lm_head.weight")


def model_folder(path: str) -> Path | None:
    """Returns the folder on this machine with the model's config.json: `path` itself, or its copy in the cache."""
    if (Path(path) / "config.json").is_file():
        return Path(path)
    if not _is_hub_name(path):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def check_model(path: str, *, setting: str, context_tokens: int = 0) -> list[Finding]:
    """Checks that a folder holds a model whose contexts are long enough. `check_hub` looks for a model that is only
    named."""
    if not path:
        return [fatal(f"{setting} is empty; it is a folder with a model, or the name of one")]
    folder = model_folder(path)
    if folder is None:
        if not _is_hub_name(path):
            return [
                fatal(
                    f"{setting} is {path!r}, {_no_model(Path(path))}; expected a folder with a model, or its name",
                    absent="" if Path(path).is_dir() else path,
                )
            ]
        return []
    try:
        values = json.loads((folder / "config.json").read_text())
        positions = values.get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        return [fatal(f"{setting}: {folder} holds no model: config.json cannot be read ({error})")]
    if folder == Path(path) and not list(folder.glob("*.safetensors")):  # the rest of a cached model can be fetched
        return [fatal(f"{setting}: {folder} holds no weights (*.safetensors)")]
    if isinstance(positions, int) and positions < context_tokens:
        return [
            fatal(
                f"budget.context_tokens is {context_tokens}, but {folder} has {positions} positions "
                "(max_position_embeddings)"
            )
        ]
    return [ok(f"{setting}: {path}")]


def check_architecture(path: str, *, context_tokens: int = 0) -> list[Finding]:
    """Checks that a policy is a network that mempipe trains: by its config.json on this machine, else by its name."""
    folder = model_folder(path)
    if folder is None:
        return [fatal(mixture_refusal(path))] if is_named_as_mixture(path) else []
    try:
        values = json.loads((folder / "config.json").read_text())
        refused = refusal(path, values)
        window = values.get("sliding_window") if values.get("model_type") == "cohere2" else None
        limit = rotation_limit(values)
    except (OSError, ValueError, AttributeError):  # `check_model` says it
        return []
    if not refused and isinstance(window, int) and window < context_tokens:
        # vLLM 0.32 adds one token to the window, as Cohere trains; transformers does not
        refused = (
            f"budget.context_tokens is {context_tokens}, but the sliding window of {path} (cohere2) has {window} "
            "tokens, beyond which engine and learner attend to different tokens; lower budget.context_tokens to "
            f"{window}"
        )
    if not refused and limit is not None and limit < context_tokens:
        refused = (
            f"budget.context_tokens is {context_tokens}, but {path} has LongRoPE, which rotates otherwise beyond "
            f"{limit} tokens (original_max_position_embeddings): a context's log-probs would depend on those that it "
            f"is packed with; lower budget.context_tokens to {limit}"
        )
    return [fatal(refused)] if refused else []


def check_adapter(model: ModelConfig) -> list[Finding]:
    """Checks that a model on this machine has the layers that are to get a LoRA adapter."""
    folder = model_folder(model.path) if model.lora_rank else None
    if folder is None:
        return []
    try:
        kind = str(json.loads((folder / "config.json").read_text()).get("model_type"))
        layers = [name for file in sorted(folder.glob("*.safetensors")) for name in _linear_layers(file)]
    except (OSError, ValueError, AttributeError):  # `check_model` says it, or the load
        return []
    refused = adapter_refusal(kind, model.lora_targets, layers=layers, merged=model.lora_merge) if layers else ""
    return [fatal(refused)] if refused else []


def _linear_layers(file: Path) -> list[str]:
    """Returns the names of the layers with a matrix in a safetensors file, but of embedding and head; reads its header
    only: the length in 8 bytes, and JSON."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return [
        name.removesuffix(".weight")
        for name, value in header.items()
        if name.endswith(".weight") and len(value["shape"]) == 2 and not name.endswith(_NO_LAYERS)
    ]


def check_encoder(path: str, *, setting: str) -> list[Finding]:
    """Does what `check_model` does for an encoder, which may also be the name of an installed package with one."""
    return [] if _is_package(path) else check_model(path, setting=setting)


def check_hub(path: str, *, setting: str) -> list[Finding]:
    """Asks the hub for a model that is not on this machine, and gives up after HUB_TIMEOUT_S."""
    if model_folder(path) is not None or not _is_hub_name(path) or _is_package(path):
        return []
    problem = _ask_hub(path)
    if problem is None:
        return [ok(f"{setting}: {path}, to be fetched from the Hugging Face hub")]
    return [fatal(f"{setting} is {path!r}, which is not on this machine, and {problem}", absent=f"hf://{path}")]


def _no_model(folder: Path) -> str:
    if not folder.is_dir():
        return "which does not exist"
    return unfinished(folder) or "which holds no model (no config.json)"


def _ask_hub(name: str) -> str | None:
    """Returns the reason why the model cannot be fetched; None when it can."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    answers: list[str | None] = []

    def ask() -> None:
        try:
            HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
            answers.append(None)
        except GatedRepoError:
            answers.append("the hub gives it to accepted users only; set HF_TOKEN to the token of one")
        except RepositoryNotFoundError:
            answers.append("the hub has no model of that name that HF_TOKEN may see")
        except Exception as error:  # of many kinds, also without network; the thread must not raise
            answers.append(f"the Hugging Face hub cannot be reached ({_short(error)}); name a folder instead")

    thread = threading.Thread(target=ask, daemon=True)  # a name server that is silent keeps no time limit
    thread.start()
    thread.join(HUB_TIMEOUT_S)
    if not answers:
        return f"the Hugging Face hub did not answer within {HUB_TIMEOUT_S:g} s; name a folder instead"
    return answers[0]


def _is_hub_name(path: str) -> bool:
    """Returns whether the hub could have a model of this name."""
    if not path or is_local_path(path):
        return False
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return True


def _is_package(name: str) -> bool:
    if os.sep in name or not name:
        return False
    try:
        return any(file.name == "config.json" for file in importlib.metadata.files(name) or [])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False


def _short(error: object) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
