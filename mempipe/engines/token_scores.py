"""Log-probs of chosen tokens and entropies, from logits, with few copies of the logits in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

_ROWS_AT_ONCE = 64
"""Rows of the logits whose probabilities exist at once, for their entropies. Not tuned."""


def token_scores(logits: Tensor, targets: Tensor, *, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """Returns the log-probs and entropies [N] of the softmax of `logits` [N, V] at the ids `targets` [N].

    It computes what log_softmax, gather and -sum(p log p) give, and its backward pass turns the log-softmax into the
    gradient in place: two tensors of the size of the logits exist, where automatic differentiation has five. So the
    backward pass can run only once. The entropies have a gradient only with `entropy_gradient`.
    """
    scores: Any = _TokenScores.apply(logits, targets, entropy_gradient)
    return scores


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        all_logprobs = logits.log_softmax(-1)
        entropies = torch.cat([-torch.linalg.vecdot(rows.exp(), rows) for rows in all_logprobs.split(_ROWS_AT_ONCE)])
        logprobs = -nll_loss(all_logprobs, targets, reduction="none")
        ctx.save_for_backward(all_logprobs, targets, entropies)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        """Returns per row: (1 at the target - p) d_logprob - p (log p + entropy) d_entropy."""
        all_logprobs, targets, entropies = ctx.saved_tensors
        of_logprobs, of_entropies = upstream
        if ctx.entropy_gradient:
            probs = all_logprobs.exp()
            gradient = all_logprobs.add_(entropies[:, None]).mul_(-of_entropies[:, None])
            gradient.sub_(of_logprobs[:, None]).mul_(probs)
        else:
            gradient = all_logprobs.exp_().mul_(-of_logprobs[:, None])
        gradient.scatter_add_(1, targets[:, None], of_logprobs[:, None])
        return gradient, None, None
