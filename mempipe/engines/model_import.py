"""A Hugging Face folder from a GGUF file, or from an installed package that carries one.

The weights are dequantised to float32 by transformers; tokenizer, chat template and stop token come from the file's own
metadata. What was written is loaded again and compared before it gets its name, so a folder that exists works.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from mempipe.engines.gguf_file import find_gguf
from mempipe.engines.tokenizer import HFTokenizer, load_tokenizer
from mempipe.settings import ConfigError
from mempipe.storage.checksums import write_checksums
from mempipe.storage.files import whole_folder

PROBES = (
    "The capital of France is Paris, founded in the 3rd century BC.",
    "Zoë's naïve café — 12,345.67 € (ca. 1994–2003)\n\ttabs  and   spaces",
    '{"name": "search", "arguments": {"query": "Ωmega \\u00e9"}}',
    "日本語のテキスト と emoji 🙂🙃",
)
"""Texts that a tokenizer must give back exactly."""
_QUESTION = "What is the capital of France?"
_NUM_NEW_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class ImportedModel:
    """The result of an import. `reply` is the greedy answer to a question that is always the same."""

    folder: Path
    source: Path
    architecture: str
    quantization: str
    num_parameters: int
    context_tokens: int
    reply: str


def import_model(
    source: str, folder: str | Path, *, dtype: Literal["float32", "bfloat16"] = "float32"
) -> ImportedModel:
    """Writes the model of `source` (a GGUF file, or the name of an installed package with one) to `folder` in `dtype`.

    Raises ConfigError, before anything is written, for a source that does not exist, an architecture, quantisation or
    tokenizer that cannot be represented, and for a result that does not agree with its source.
    """
    target = Path(folder)
    if target.exists():
        raise ConfigError(f"{target} exists; choose another folder or remove it")
    file = find_gguf(source)
    with _quiet(), _parsed_once():
        return _import(file, _read_facts(file), target, dtype)


def _import(file: Path, facts: _Facts, target: Path, dtype: str) -> ImportedModel:
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model = _plain_copy(loaded, config)
    _check_parameters(model, facts)
    tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))
    tokenizer.chat_template = facts.chat_template
    with whole_folder(target) as partial:
        model.to(getattr(torch, dtype)).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        GenerationConfig(eos_token_id=facts.stop_token_ids, pad_token_id=tokenizer.pad_token_id).save_pretrained(
            partial
        )
        reply = _check_written(partial, model)
        write_checksums(partial)
    return ImportedModel(
        folder=target,
        source=file,
        architecture=facts.architecture,
        quantization=facts.quantization,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        context_tokens=facts.context_tokens,
        reply=reply,
    )


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Lets all readers of a GGUF file inside the block share one parse. Config, weights and tokenizer each parse it
    again otherwise, and a parse takes seconds: the reader makes an object of every word of the vocabulary."""
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("importing a GGUF file needs the package gguf: pip install 'mempipe[real]'") from error
    reader = gguf.GGUFReader
    vars(gguf)["GGUFReader"] = functools.cache(reader)
    try:
        yield
    finally:
        vars(gguf)["GGUFReader"] = reader


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses transformers' notes and progress bars, which would interrupt ours."""
    import transformers.modeling_gguf_pytorch_utils as gguf_utils

    verbosity, shown, bar = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
        gguf_utils.tqdm,
    )
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    vars(gguf_utils)["tqdm"] = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        vars(gguf_utils)["tqdm"] = bar
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """Holds what the file says about itself."""

    architecture: str
    quantization: str
    num_elements: int
    tied: bool
    context_tokens: int
    chat_template: str
    stop_token_ids: list[int]


def _read_facts(file: Path) -> _Facts:
    from gguf import GGUFReader  # the one of `_parsed_once`
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    try:
        reader = GGUFReader(str(file))
    except (ValueError, OSError, IndexError) as error:
        raise ConfigError(f"{file} is truncated or no GGUF file: {error}") from error

    def value(name: str, default: Any = None) -> Any:
        field = reader.get_field(name)
        return default if field is None else field.contents()

    architecture = value("general.architecture", "")
    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        known = ", ".join(sorted(GGUF_SUPPORTED_ARCHITECTURES))
        raise ConfigError(f"{file} has architecture {architecture!r}, which transformers cannot read; it reads {known}")
    for name, what in (("tokenizer.ggml.tokens", "tokenizer"), ("tokenizer.chat_template", "chat template")):
        if value(name) is None:
            raise ConfigError(f"{file} has no {what} ({name}); agents need one")
    scaled = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_freqs")]
    if scaled:
        raise ConfigError(
            f"{file} scales its rotary embedding by {scaled[0]} (Llama 3.1 does), which the import would lose; "
            "use the model's own Hugging Face folder"
        )
    scaling, factor = (value(f"{architecture}.rope.scaling.{name}") for name in ("type", "factor"))
    if scaling not in (None, "", "none") and factor not in (None, 1.0):
        raise ConfigError(
            f"{file} scales its rotary embedding ({architecture}.rope.scaling.type {scaling}, factor {factor:g}), "
            "which the import would lose; use the model's own Hugging Face folder"
        )
    stops = [value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    if stops[0] is None:
        raise ConfigError(f"{file} has no tokenizer.ggml.eos_token_id; messages would not end")
    return _Facts(
        architecture=architecture,
        quantization=", ".join(sorted({tensor.tensor_type.name for tensor in reader.tensors})),
        num_elements=sum(int(tensor.n_elements) for tensor in reader.tensors),
        tied=all(tensor.name != "output.weight" for tensor in reader.tensors),
        context_tokens=int(value(f"{architecture}.context_length", 0)),
        chat_template=value("tokenizer.chat_template"),
        stop_token_ids=sorted({int(stop) for stop in stops if stop is not None}),
    )


def _plain_copy(loaded: PreTrainedModel, config: Any) -> PreTrainedModel:
    """Copies the weights into a fresh model: a model that was loaded from a GGUF file refuses to be saved."""
    config.dtype = torch.float32
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    return model.eval()


def _check_parameters(model: PreTrainedModel, facts: _Facts) -> None:
    """Raises ConfigError when the model has more or fewer weights than the file: some would be random, or lost."""
    found = sum(parameter.numel() for parameter in model.parameters())  # a tied head counts once
    if found != facts.num_elements:
        raise ConfigError(
            f"the file holds {facts.num_elements} weights, the {facts.architecture} model {found}; it cannot be "
            "represented"
        )


def _check_written(folder: Path, model: PreTrainedModel) -> str:
    """Returns the greedy reply of the model in `folder`. Raises ConfigError when it is not the model or its tokenizer
    loses text.
    """
    tokenizer = load_tokenizer(str(folder))
    for text in PROBES:
        if (again := tokenizer.decode(tokenizer.encode_text(text))) != text:
            raise ConfigError(f"the tokenizer makes {again!r} of {text!r}; text would not survive it")
    written = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).eval()
    prompt = tokenizer.encode_template(
        tokenizer.render_chat([{"role": "user", "content": _QUESTION}], add_generation_prompt=True)
    )
    replies = [_greedy(each, prompt, tokenizer) for each in (model, written)]
    if replies[0] != replies[1] or not replies[1]:
        texts = [tokenizer.decode(reply) for reply in replies]
        raise ConfigError(f"the written model answers {texts[1]!r}, the imported one {texts[0]!r}")
    return tokenizer.decode(replies[1])


@torch.no_grad()
def _greedy(model: PreTrainedModel, prompt: Sequence[int], tokenizer: HFTokenizer) -> list[int]:
    """Returns the token ids of the greedy reply, at most `_NUM_NEW_TOKENS`, without its stop token."""
    token_ids = list(prompt)
    for _ in range(_NUM_NEW_TOKENS):
        logits = model(torch.tensor([token_ids])).logits[0, -1]
        if not torch.isfinite(logits).all():
            raise ConfigError("the model's logits are not finite")
        token_ids.append(int(logits.argmax()))
        if token_ids[-1] in tokenizer.stop_token_ids:
            token_ids.pop()
            break
    return token_ids[len(prompt) :]
