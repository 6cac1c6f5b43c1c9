"""The fused loss kernel against automatic differentiation."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mempipe.engines import token_scores as module
from mempipe.engines.token_scores import token_scores


def plain(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    all_logprobs = logits.log_softmax(-1)
    return all_logprobs.gather(1, targets[:, None])[:, 0], -(all_logprobs.exp() * all_logprobs).sum(-1)


@pytest.fixture
def compiling(monkeypatch, tmp_path) -> None:
    """Compiles for the CPU as for a GPU."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "_compiles_for", lambda logits: True)


def rows(num_rows: int = 150, vocab: int = 1000, *, spread: float = 4.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, targets, and what the loss says of log-probs and entropies; the first target has almost no
    probability."""
    torch.manual_seed(0)
    logits, targets = spread * torch.randn(num_rows, vocab), torch.randint(vocab, (num_rows,))
    logits[0, targets[0]] = -60.0
    return logits, targets, torch.randn(num_rows), torch.randn(num_rows)


@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize("again", [True, False], ids=["recomputed", "kept"])
def test_the_fused_scores_and_gradients_are_those_of_log_softmax(entropy_gradient, again):
    logits, targets, of_logprobs, of_entropies = rows()
    logits.requires_grad_()

    def gradient(logprobs: Tensor, entropies: Tensor) -> Tensor:
        loss = of_logprobs @ logprobs.square()  # so that the upstream gradients differ from row to row
        loss = loss + of_entropies @ (entropies if entropy_gradient else entropies.detach())
        (found,) = torch.autograd.grad(loss, logits)
        return found

    expected = plain(logits, targets)
    if again:
        found = checkpoint(token_scores, logits, targets, entropy_gradient=entropy_gradient, use_reentrant=False)
    else:
        found = token_scores(logits, targets, entropy_gradient=entropy_gradient)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert found[1].requires_grad == entropy_gradient
    right = gradient(*expected)
    assert (gradient(*found) - right).abs().max() <= 1e-5 * right.abs().max()


def test_the_gradient_holds_to_the_last_digits_in_double_precision():
    logits, targets, of_logprobs, of_entropies = rows()
    logits = logits.double().requires_grad_()
    found, right = (
        torch.autograd.grad((logprobs @ of_logprobs.double()) + (entropies @ of_entropies.double()), logits)[0]
        for logprobs, entropies in (token_scores(logits, targets, entropy_gradient=True), plain(logits, targets))
    )
    torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-11)


def test_a_second_backward_pass_is_an_error_and_no_wrong_gradient():
    logits, targets, *_ = rows(4, 9)
    loss = token_scores(logits.requires_grad_(), targets, entropy_gradient=False)[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler of C++")
def test_compiled_scores_and_gradients_are_the_same_for_another_number_of_rows(compiling):
    for num_rows, entropy_gradient in ((7, False), (5, False), (7, True), (5, True)):
        logits, targets, of_logprobs, of_entropies = rows(num_rows)
        logits.requires_grad_()
        found = checkpoint(token_scores, logits, targets, entropy_gradient=entropy_gradient, use_reentrant=False)
        expected = plain(logits, targets)
        gradients = []
        for logprobs, entropies in (found, expected):
            loss = of_logprobs @ logprobs.square() + entropy_gradient * (of_entropies @ entropies)
            gradients.append(torch.autograd.grad(loss, logits)[0])
        for one, other in zip((*found, gradients[0]), (*expected, gradients[1]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for kernel in (module._scores, module._to_gradient, module._to_gradient_with_entropies):
        assert kernel._fastest not in (None, kernel._function), "it was compiled"


def test_a_machine_that_cannot_compile_computes_the_same_and_says_so_once(compiling, monkeypatch, caplog):
    def fails(function, **options):
        def call(*tensors):
            raise RuntimeError("Failed to find C compiler.")

        return call

    monkeypatch.setattr(torch, "compile", fails)
    kernel = module._Kernel(module._scores._function)
    logits, targets, *_ = rows(3)
    for _ in range(2):
        _, logprobs, entropies = kernel(logits, targets)
        torch.testing.assert_close((logprobs, entropies), plain(logits, targets))
    assert [record.getMessage() for record in caplog.records] == [
        "log-probs are computed without torch.compile, more slowly: Failed to find C compiler."
    ]
    with pytest.raises(IndexError):
        kernel(logits, targets + 1000)
    assert len(caplog.records) == 1
