"""The policy network: a Hugging Face causal LM that scores the loss tokens of packed rows.

Weights are kept in float32; `ModelConfig.dtype` is what FSDP2 computes in. All contexts of a micro-batch are one row
[T] without padding, attention stays within each context (`mempipe.engines.attention`), and logits exist only where a
loss token is predicted, a chunk of positions at a time.
"""

from __future__ import annotations

import mempipe.engines.lean_libraries  # noqa: F401  # isort: skip  # before transformers

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from mempipe.engines.adapter import lora_config, lora_layers
from mempipe.engines.architectures import adapter_refusal, logit_factor, refusal
from mempipe.engines.attention import ContextLayout, packed_attention
from mempipe.engines.config import ModelConfig
from mempipe.engines.token_scores import token_scores
from mempipe.engines.tokenizer import MEND
from mempipe.rl.packing import MicroBatch
from mempipe.settings import ConfigError
from mempipe.storage.checksums import check_folder
from mempipe.storage.files import recover_folder

ATTENTION_NAME = "mempipe_packed"
MAX_LOGITS = 2**26
"""Logits that may exist at once (256 MiB in float32). More than that are computed chunk by chunk, and once more in the
backward pass."""

ADAPTER = "default"


class PolicyModel(nn.Module):
    """A causal LM whose forward pass returns log-probs of chosen tokens instead of logits."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        self.logit_factor = logit_factor(lm.config.to_dict())
        self.entropy_gradient = False  # an entropy bonus needs it

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        loss_positions: Tensor,
        source_positions: Tensor,
        layout: ContextLayout,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Returns log-prob and entropy, float32 [N] each, of the tokens at `loss_positions` [N] of a row of `token_ids`
        [T].

        The token before each is at `source_positions` [N]. Both results are of the distribution that is sampled
        from: logits / temperature. The entropy carries a gradient with `entropy_gradient` only.
        """
        backbone = cast(nn.Module, self.lm.base_model)
        states = backbone(
            input_ids=token_ids.unsqueeze(0), position_ids=position_ids.unsqueeze(0), use_cache=False, layout=layout
        ).last_hidden_state[0]
        states = states.index_select(0, source_positions)
        targets = token_ids.index_select(0, loss_positions)
        rows = max(1, MAX_LOGITS // self.lm.config.get_text_config().vocab_size)
        gradient = _gradient_sum(cast(nn.Module, self.lm.get_output_embeddings()))
        if len(targets) <= rows:
            return self._score(states, targets, temperature, gradient)
        chunks = [
            checkpoint(self._score, s, t, temperature, gradient, use_reentrant=False)
            for s, t in zip(states.split(rows), targets.split(rows), strict=True)
        ]
        logprobs, entropies = zip(*cast(list[tuple[Tensor, Tensor]], chunks), strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score(
        self, states: Tensor, targets: Tensor, temperature: float, gradient: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logits = _float32_logits(cast(nn.Module, self.lm.get_output_embeddings()), states, gradient)
        if self.logit_factor != 1.0:
            logits = logits * self.logit_factor
        if temperature != 1.0:
            logits = logits / temperature
        return token_scores(logits, targets, entropy_gradient=self.entropy_gradient)


def _float32_logits(head: nn.Module, states: Tensor, gradient: Tensor | None) -> Tensor:
    """Logits [N, vocabulary] of `states` [N, hidden], never rounded to 16 bits, as the engine computes them.

    In bfloat16 the spacing of logits near 20 is 0.125, which would cause most of the difference between learner and
    engine. `gradient` is the head's `_gradient_sum`.
    """
    if gradient is None:
        return head(states).float()
    logits = _WideHead.apply(states, cast(nn.Linear, head).weight.detach(), gradient)
    assert isinstance(logits, Tensor)
    return logits


def _gradient_sum(head: nn.Module) -> Tensor | None:
    """Returns a stand-in for the weight of a 16-bit head, to which all chunks add their gradients in float32; None for
    another head."""
    if type(head) is not nn.Linear or head.bias is not None or head.weight.dtype == torch.float32:
        return None
    total = _Float32Sum.apply(head.weight)
    assert isinstance(total, Tensor)
    return total


class _Float32Sum(torch.autograd.Function):
    """A 16-bit weight [V, H] as a float32 tensor without content, whose gradient is rounded once, when it is whole."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return torch.zeros((), device=weight.device).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, *total: Tensor) -> Tensor:
        return total[0].to(ctx.dtype)


class _WideHead(torch.autograd.Function):
    """states [N, H] @ weight [V, H] transposed, from 16-bit values to float32 sums. The gradients are products of
    16-bit values: that of the states has 16 bits, that of the weight goes to its `_gradient_sum` in float32."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        return _float32_product(states, weight.t())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, Tensor | None]:
        states, weight = ctx.saved_tensors
        rounded = upstream[0].to(weight.dtype)
        return rounded @ weight, None, _float32_product(rounded.t(), states) if ctx.needs_input_grad[2] else None


def _float32_product(left: Tensor, right: Tensor) -> Tensor:
    """Returns the product of two 16-bit matrices in float32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def load_policy(config: ModelConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PolicyModel:
    """Loads the model at `config.path` with `dtype` weights on the CPU, and a fresh LoRA adapter when `lora_rank` > 0
    (made from `seed`).

    Raises ConfigError when there is no such model, for a network that mempipe does not train
    (`mempipe.engines.architectures`), and for adapters of layers that it does not have.
    """
    disable_progress_bar()
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    recover_folder(Path(config.path))
    check_folder(Path(config.path), advice=MEND)
    if not (Path(config.path) / "config.json").is_file() and (not config.path or Path(config.path).is_absolute()):
        raise ConfigError(
            f"model.path is {config.path!r}, where no config.json lies; it must be a Hugging Face model folder or name"
        )
    try:
        network = AutoConfig.from_pretrained(config.path)
        if refused := refusal(config.path, network.to_dict()):
            raise ConfigError(refused)
        lm, found = AutoModelForCausalLM.from_pretrained(
            config.path, dtype=dtype, attn_implementation=ATTENTION_NAME, output_loading_info=True
        )
    except ConfigError:
        raise
    except Exception as error:  # a damaged file makes the libraries raise errors of any kind
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        raise ConfigError(
            f"model.path {config.path!r} cannot be loaded: {reason}; a file of it is missing or damaged, or the model "
            "is of a kind that is not supported"
        ) from error
    if wrong := sorted([*found["missing_keys"], *(each[0] for each in found["mismatched_keys"])]):
        raise ConfigError(
            f"model.path {config.path!r} lacks {len(wrong)} of its weights, {wrong[0]} among them, or holds them in "
            f"another shape; {MEND}"
        )
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # log-probs of one policy must not differ between two passes
    if config.lora_rank:
        _add_lora(lm, config, seed=seed)
    if config.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return PolicyModel(lm)


def shard(
    policy: PolicyModel,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool,
    offloaded: bool = False,
) -> None:
    """Applies FSDP2 in place: each decoder layer is a unit, and the root holds the rest (embedding, norm and head, so
    that tied ones stay tied). `offloaded`: shards stay in the machine's memory, pinned where the mesh is of GPUs, and
    each layer's is copied to the GPU when that layer is gathered.

    Gradients are summed over the ranks, not averaged: the loss weights already count the whole step.
    """
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offloaded else OffloadPolicy()
    layer_names = set(policy.lm._no_split_modules or ())
    layers = [module for module in policy.lm.modules() if type(module).__name__ in layer_names]
    assert layers, f"{type(policy.lm).__name__} names no decoder layer to shard by"
    for layer in layers:
        fully_shard(
            layer, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward, offload_policy=offload
        )
    fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=offload)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def loss_token_logprobs(
    policy: PolicyModel, micro_batch: MicroBatch, *, temperature: float, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Returns log-prob and entropy, float32 [N] on `device`, of the loss tokens of a micro-batch. `device` is that of
    the parameters by default, and must be given for a model whose shards are offloaded."""
    device = device or next(policy.parameters()).device
    layout = ContextLayout(
        micro_batch.sequence_lengths.tolist(), shared_lengths=micro_batch.shared_lengths.tolist(), device=device
    )
    assert layout.num_tokens == micro_batch.num_tokens, (
        f"contexts of {layout.num_tokens} tokens in a row of {micro_batch.num_tokens}; sequence_lengths less "
        "shared_lengths must sum to the row's length"
    )
    names = ("token_ids", "position_ids", "loss_positions", "source_positions")
    return policy(*(to_device(getattr(micro_batch, name), device) for name in names), layout, temperature)


@torch.no_grad()
def score(
    policy: PolicyModel,
    sequences: Sequence[Sequence[int]],
    *,
    loss_masks: Sequence[Sequence[int]],
    temperature: float,
    max_tokens: int,
) -> list[list[float]]:
    """Returns the log-prob of each token of every sequence, 0.0 where its mask is 0 (the first token's must be).

    Sequences of similar length share a forward pass of at most `max_tokens` tokens; a longer one has its own.
    """
    device = next(policy.parameters()).device
    scores = [[0.0] * len(sequence) for sequence in sequences]
    for row in _rows([len(sequence) for sequence in sequences], max_tokens):
        lengths = [len(sequences[index]) for index in row]
        mask = torch.tensor([bit for index in row for bit in loss_masks[index]], device=device)
        loss_positions = mask.nonzero().squeeze(1)
        token_ids = torch.tensor([token for index in row for token in sequences[index]], device=device)
        position_ids = torch.cat([torch.arange(length, device=device) for length in lengths])
        logprobs, _ = policy(
            token_ids,
            position_ids,
            loss_positions,
            loss_positions - 1,
            ContextLayout(lengths, device=device),
            temperature,
        )
        dense = torch.zeros(len(token_ids), device=device).index_copy(0, loss_positions, logprobs)
        for index, part in zip(row, dense.cpu().split(lengths), strict=True):
            scores[index] = part.tolist()
    return scores


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Returns a copy of the array as a tensor on `device`; on the CPU too, since arrays of the object store are
    read-only."""
    return torch.tensor(values, device=device)


def accumulate_locally(policy: PolicyModel, enabled: bool) -> None:
    """Turns gradient reduction across ranks off or on (gradient accumulation). While off, each rank accumulates
    unsharded gradients and keeps gathered weights; the first backward pass after turning it on reduces the sum.

    This saves communication, and costs a whole copy of the gradients on every rank.
    """
    if isinstance(policy, FSDPModule):
        policy.set_requires_gradient_sync(not enabled)
        policy.set_reshard_after_backward(not enabled)


def reshard(policy: PolicyModel) -> None:
    """Frees the gathered weights that a forward pass without backward leaves behind; after the next optimizer step they
    would be stale.
    """
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def base_model(policy: PolicyModel) -> Iterator[None]:
    """Switches the LoRA adapter off for the block: the policy is then the model that training started from."""
    layers = lora_layers(policy).values()
    assert layers, "the policy has no adapter to switch off"
    # Not `enable_adapters`: that toggles requires_grad, which FSDP2 reads once, when it first gathers a parameter.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _add_lora(lm: PreTrainedModel, config: ModelConfig, *, seed: int) -> None:
    from peft import inject_adapter_in_model

    layers = [name for name, module in lm.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    kind, targets = lm.config.model_type, config.lora_targets
    if refused := adapter_refusal(kind, targets, layers=layers, merged=config.lora_merge):
        raise ConfigError(refused)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # every rank must start from the same adapter
        inject_adapter_in_model(cast(Any, lora_config(config)), lm, adapter_name=ADAPTER)


def _rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Returns the indices of sequences, longest first, in rows of at most `max_tokens` tokens (or one sequence)."""
    rows: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if lengths[index] > room:
            rows.append([])
            room = max_tokens
        rows[-1].append(index)
        room -= lengths[index]
    return rows
