"""Log-probs of chosen tokens and entropies, from logits, with few copies of the logits in memory.

Liger's fused linear cross-entropy gives no entropies. Its scaled variant gives them by kernels for a few GPUs only,
and elsewhere rounds logits, and sums of the head's gradient, to 16 bits. So these are torch's operators, which
`torch.compile` joins on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

_ROWS_AT_ONCE = 64
"""Rows of the logits whose probabilities exist at once, for their entropies. Not tuned."""

_logger = logging.getLogger(__name__)


def token_scores(logits: Tensor, targets: Tensor, *, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """Returns the log-probs and entropies [N] of the softmax of `logits` [N, V] at the ids `targets` [N].

    It computes what log_softmax, gather and -sum(p log p) give, and its backward pass turns the log-softmax into the
    gradient in place: two tensors of the size of the logits exist, where automatic differentiation has five. So the
    backward pass can run only once. The entropies have a gradient only with `entropy_gradient`.
    """
    scores: Any = _TokenScores.apply(logits, targets, entropy_gradient)
    return scores


class _Kernel:
    """A function of logits that a GPU runs as few compiled kernels, if this machine has the compilers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._fastest: Callable[..., Any] | None = None

    def __call__(self, of_logits: Tensor, *others: Tensor) -> Any:
        if not _compiles_for(of_logits):
            return self._function(of_logits, *others)
        try:
            if self._fastest is None:  # without a pool of processes that compile
                self._fastest = torch.compile(self._function, options={"compile_threads": 1})
            return self._fastest(of_logits, *others)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers fail in many ways; an error of the function itself is raised again
            if self._fastest is self._function:
                raise
            self._fastest = self._function
            reason = " ".join(str(error).split())[:300]
            _logger.warning("log-probs are computed without torch.compile, more slowly: %s", reason)
            return self._function(of_logits, *others)


def _compiles_for(logits: Tensor) -> bool:
    """Returns whether time is won: on CPUs other parts take almost all of it, and compiling takes a minute."""
    return logits.is_cuda


@_Kernel
def _scores(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    all_logprobs = logits.log_softmax(-1)
    if torch.compiler.is_compiling():  # the probabilities never exist
        entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
    else:
        entropies = torch.cat([-torch.linalg.vecdot(rows.exp(), rows) for rows in all_logprobs.split(_ROWS_AT_ONCE)])
    return all_logprobs, -nll_loss(all_logprobs, targets, reduction="none"), entropies


@_Kernel
def _to_gradient(all_logprobs: Tensor, of_logprobs: Tensor) -> None:
    """Replaces log p by -p d_logprob."""
    all_logprobs.exp_().mul_(-of_logprobs[:, None])


@_Kernel
def _to_gradient_with_entropies(
    all_logprobs: Tensor, of_logprobs: Tensor, entropies: Tensor, of_entropies: Tensor
) -> None:
    """Replaces log p by -p d_logprob - p (log p + entropy) d_entropy."""
    probs = all_logprobs.exp()
    all_logprobs.add_(entropies[:, None]).mul_(-of_entropies[:, None])
    all_logprobs.sub_(of_logprobs[:, None]).mul_(probs)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        all_logprobs, logprobs, entropies = _scores(logits.detach(), targets)
        ctx.save_for_backward(all_logprobs, targets, entropies)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        all_logprobs, targets, entropies = ctx.saved_tensors
        of_logprobs, of_entropies = upstream
        if ctx.entropy_gradient:
            _to_gradient_with_entropies(all_logprobs, of_logprobs, entropies, of_entropies)
        else:
            _to_gradient(all_logprobs, of_logprobs)
        all_logprobs.scatter_add_(1, targets[:, None], of_logprobs[:, None])  # d_logprob more at the target
        return all_logprobs, None, None
