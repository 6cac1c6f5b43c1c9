"""The policy loss of one micro-batch, by name, and the sums from which its metrics are made.

`loss` is `sum(weights * token_loss)`, and the weights count the whole optimiser step (`mempipe.rl.packing`): losses and
gradients of micro-batches and ranks are added, never averaged.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mempipe.rl.config import AlgorithmConfig

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: beyond any clip, and still finite in float32."""
MAX_KL = 10.0
"""A token's KL term is cut here, as in the trainers that MemSearcher and Search-R1 build on."""


def policy_loss(
    logprobs: Tensor,
    *,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    loss_sequences: Tensor,
    context_indices: Tensor,
    config: AlgorithmConfig,
    sampler_logprobs: Tensor | None = None,
    entropies: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Returns the loss (a scalar that carries the gradient of `logprobs`) and its metric sums (see
    `mempipe.rl.metrics`).

    All tensors are [N], one entry per loss token, except `context_indices` [S]; names are those of `MicroBatch`.
    `old_logprobs` are the denominator of the ratio: the sampler's, or recomputed by the learner; then the sampler's own
    go into `sampler_logprobs`, and each token is weighed by `importance_weights`. Without `sampler_logprobs` the ratio
    is the importance weight itself, and the weights are 0 or 1, as a mask says.

    - grpo: PPO's clipped ratio (arXiv 1707.06347) with its own bound per side (arXiv 2503.14476) and the dual clip
      (arXiv 1912.09729).
    - gspo: one ratio per context, the geometric mean of its tokens' (arXiv 2507.18071). The paper's sequence is the
      whole answer; here it is one context, so two contexts of a trajectory may be clipped differently. Its mean over
      sequences is `aggregation: trajectory` when trajectories have one context.
    - cispo: the clipped ratio as a constant weight on the log-prob (arXiv 2506.13585), so that no token loses its
      gradient. `clip_low: 1` leaves the lower side open, as in the paper. The dual clip has no part in it.

    `advantage: dr_grpo` changes the advantages only. With `kl_coef` the low-variance estimator of KL(policy ||
    reference) is added; with `entropy_coef` the mean of `entropies`, which must carry a gradient, is subtracted.
    """
    if logprobs.dtype in (torch.float16, torch.bfloat16):
        logprobs = logprobs.float()
    log_ratio = logprobs - old_logprobs
    if config.loss == "gspo":
        mean = _sequence_means(log_ratio.detach(), loss_sequences, len(context_indices))
        log_ratio = mean + logprobs - logprobs.detach()
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bound = float("inf") if config.dual_clip is None else config.dual_clip
    if config.loss == "cispo":
        terms = -advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high).detach() * logprobs
    else:
        terms = _clipped(ratio, advantages, config, bound)
    behaviour, newer = (old_logprobs, logprobs) if sampler_logprobs is None else (sampler_logprobs, old_logprobs)
    importance, corrected = importance_weights(newer - behaviour, loss_sequences, len(context_indices), config)
    if sampler_logprobs is None:
        importance = (importance > 0).to(terms)
        corrected = 1 - importance
    policy = (weights * importance * terms).sum()
    kl = kl_to_reference(logprobs, ref_logprobs)
    kl_loss = config.kl_coef * (weights * kl).sum()
    loss = policy + kl_loss if config.kl_coef else policy
    if config.entropy_coef:
        assert entropies is not None, "an entropy bonus needs entropies"
        loss = loss - config.entropy_coef * (weights * entropies).sum()

    real = weights > 0
    with torch.no_grad():
        sums = {
            "tokens": torch.ones_like(ratio),
            "ratio": ratio,
            "old_kl": old_logprobs - logprobs,
            "clip_low": (advantages < 0) & (ratio < 1 - config.clip_low),
            "clip_high": (advantages > 0) & (ratio > 1 + config.clip_high),
            "dual_clip": (advantages < 0) & (ratio > bound) & (config.loss != "cispo"),
            "importance_corrected": corrected,
            "kl_ref": kl if config.kl_coef else torch.zeros_like(kl),
            "advantage": advantages,
            "advantage_abs": advantages.abs(),
        }
        metrics = _floats(
            {"loss": loss, "policy_loss": policy, "kl_loss": kl_loss} | {k: v[real].sum() for k, v in sums.items()}
        )
        metrics |= _mismatch(logprobs[real], behaviour[real], context_indices[loss_sequences[real]])
    return loss, metrics


def importance_weights(
    log_ratios: Tensor, loss_sequences: Tensor, num_sequences: int, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Returns the weight of every token, and which tokens the correction changed. [N] -> [N], [N].

    `log_ratios` are those of the learner's policy over the sampler's; w is their exponential, and W the product of the
    w of a context. With C = max_importance_ratio and c = min_importance_ratio the weight is, by `config.correction`:

    - none: 1.
    - token: min(w, C) (truncated importance sampling, arXiv 2505.24298).
    - sequence: min(W, C), for every token of the context.
    - token_mask: w, but 0 unless c <= w <= C.
    - sequence_mask: w, but 0 unless c <= W <= C.
    """
    log_ratios = log_ratios.detach()
    of_context = _sums_by(log_ratios, loss_sequences, num_sequences)[loss_sequences]
    by_token = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    ratio = of_context.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() if "sequence" in config.correction else by_token
    if config.correction == "none":
        return torch.ones_like(ratio), torch.zeros_like(ratio)
    beyond = ratio > config.max_importance_ratio
    if config.correction.endswith("mask"):
        beyond |= ratio < config.min_importance_ratio
        return by_token.masked_fill(beyond, 0.0), beyond.to(ratio)
    return ratio.clamp(max=config.max_importance_ratio), beyond.to(ratio)


def same_version_mismatch(logprobs: Tensor, sampled: Tensor, of_present: Tensor) -> dict[str, float]:
    """Sums |Δ| between the learner's log-probs [N] and the engine's over the tokens that the present version sampled
    (`of_present` [N] bool), to which only computation contributes. {} when there is none. The mean is
    "same_version/abs_logprob_diff"."""
    if not of_present.any():
        return {}
    difference = (logprobs - sampled)[of_present].detach().abs()
    return {"same_version/tokens": float(len(difference)), "same_version/abs_logprob_diff": difference.sum().item()}


def kl_to_reference(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Returns exp(d) - d - 1 with d = ref - logprob, cut at `MAX_KL`. [N] -> [N].

    It is never negative, and unbiased for tokens that the policy sampled.
    """
    d = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(d) - d).clamp(max=MAX_KL)


def _clipped(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig, bound: float) -> Tensor:
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    terms = torch.maximum(-advantages * ratio, -advantages * clipped)
    if bound == float("inf"):
        return terms
    return torch.where(advantages < 0, torch.minimum(terms, -advantages * bound), terms)


def _sequence_means(values: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
    """Replaces every value by the mean of its sequence. [N] -> [N]."""
    totals = _sums_by(values, sequences, num_sequences)
    counts = _sums_by(torch.ones_like(values), sequences, num_sequences)
    return (totals / counts.clamp(min=1))[sequences]


def _sums_by(values: Tensor, keys: Tensor, num_keys: int) -> Tensor:
    """Sums the values of every key. [N] -> [num_keys]. `index_add` has a deterministic form on every device; `bincount`
    with weights has not.
    """
    return values.new_zeros(num_keys).index_add(0, keys, values)


def _mismatch(logprobs: Tensor, behaviour: Tensor, contexts: Tensor) -> dict[str, float]:
    """Measures how far the learner's log-probs are from the sampler's, over all tokens and by context index: sums of
    |Δ|, of the k3 estimate of KL(sampler || learner), and the largest importance ratio.
    """
    if not len(logprobs):
        return {}
    d = (logprobs - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = torch.expm1(d) - d
    num_contexts = int(contexts.max()) + 1
    by_context = [_sums_by(values, contexts, num_contexts) for values in (torch.ones_like(d), d.abs(), k3)]
    names = ("tokens", "abs_logprob_diff", "mismatch_kl")
    metrics = _floats(
        {"abs_logprob_diff": d.abs().sum(), "mismatch_kl": k3.sum(), "importance_ratio_max": d.exp().max()}
    )
    for index, row in enumerate(zip(*(column.tolist() for column in by_context), strict=True)):
        if row[0]:
            metrics |= {f"context_{index}/{name}": float(value) for name, value in zip(names, row, strict=True)}
    return metrics


def _floats(scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """Moves the scalars to the host, with one wait for the device."""
    return dict(
        zip(scalars, torch.stack([value.detach().double() for value in scalars.values()]).tolist(), strict=True)
    )
