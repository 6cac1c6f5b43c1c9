"""The learner on one CUDA device:
attention kernels agree with the exact path, and bfloat16 stays within rounding of float32.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from learner_setup import make_learner, pack, samples, save_model

from mempipe.engines import attention, learner, token_scores
from mempipe.engines.attention import ContextLayout
from mempipe.engines.checkpoint import Position
from mempipe.engines.config import ModelConfig
from mempipe.engines.learner import Learner
from mempipe.engines.reference import ReferenceModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = (5, 23, 9, 14, 8, 2, 17, 11, 120, 64)
SHARED = (0, 4, 9, 6, 0, 2, 1, 0, 5, 60)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def exact(qwen2, monkeypatch) -> Learner:
    """The float32 learner on the CPU."""
    with monkeypatch.context() as patch:
        patch.setattr(learner, "_device", lambda rank: torch.device("cpu"))
        return make_learner(qwen2, objective="sft")


@pytest.mark.parametrize("num_kv_heads", [8, 2])
@pytest.mark.parametrize("sliding_window", [None, 16])
@pytest.mark.parametrize("shared", [(0,) * len(LENGTHS), SHARED], ids=["alone", "shared"])
def test_the_varlen_kernel_is_the_padded_attention(num_kv_heads, sliding_window, shared):
    generator = torch.Generator("cuda").manual_seed(0)
    layout = ContextLayout(LENGTHS, shared_lengths=shared, device=torch.device("cuda"))
    shapes = [(layout.num_tokens, heads, 64) for heads in (8, num_kv_heads, num_kv_heads)]
    rows = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        for shape in shapes
    ]
    upstream = torch.randn(shapes[0], device="cuda", dtype=torch.bfloat16, generator=generator)
    outputs, gradients = [], []
    for run in (attention._varlen, attention._padded):
        output = run(*rows, layout=layout, scaling=None, sliding_window=sliding_window)
        outputs.append(output.detach())
        gradients.append(torch.autograd.grad(output, rows, upstream))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=2e-2, atol=2e-2)
    for varlen, padded in zip(*gradients, strict=True):
        torch.testing.assert_close(varlen, padded, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_the_compiled_loss_kernel_is_that_of_the_cpu(entropy_gradient):
    generator = torch.Generator().manual_seed(0)
    for num_rows in (441, 100):  # a chunk, and the rest of a row
        logits = 4 * torch.randn(num_rows, 151_936, generator=generator)
        targets, upstream = torch.randint(151_936, (num_rows,), generator=generator), torch.randn(num_rows)
        found = []
        for device in ("cpu", "cuda"):
            here = logits.to(device).requires_grad_()
            logprobs, entropies = token_scores.token_scores(here, targets.to(device), entropy_gradient=entropy_gradient)
            loss = upstream.to(device) @ (logprobs + entropy_gradient * entropies)
            (gradient,) = torch.autograd.grad(loss, here)
            found.append([tensor.detach().cpu() for tensor in (logprobs, entropies, gradient)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    kernel = token_scores._scores
    assert kernel._fastest not in (None, kernel._function), "this machine cannot compile; a warning says why"


def test_float32_on_the_device_is_float32_on_the_cpu(qwen2, exact):
    ((batch,),) = pack(samples(0, lengths=LENGTHS))
    on_device = make_learner(qwen2, objective="sft")
    np.testing.assert_allclose(on_device.logprobs(batch), exact.logprobs(batch), atol=1e-4)
    here, there = on_device.step([[batch], [batch]]), exact.step([[batch], [batch]])
    assert [m["grad_norm"] for m in here] == pytest.approx([m["grad_norm"] for m in there], rel=1e-3)


def test_bfloat16_on_the_device_is_within_rounding_of_float32(qwen2, exact):
    ((batch,),) = pack(samples(1, lengths=LENGTHS))
    rounded = make_learner(qwen2, objective="sft", dtype="bfloat16", gradient_checkpointing=True)
    try:
        gap = np.abs(rounded.logprobs(batch) - exact.logprobs(batch))
        assert gap.mean() < 0.03
        assert gap.max() < 0.25
        here, there = rounded.step([[batch], [batch]]), exact.step([[batch], [batch]])
        assert [m["loss"] for m in here] == pytest.approx([m["loss"] for m in there], rel=0.02)
        assert [m["grad_norm"] for m in here] == pytest.approx([m["grad_norm"] for m in there], rel=0.1)
        assert all(parameter.dtype == torch.float32 for parameter in rounded.policy.parameters())
    finally:
        rounded.close()


def test_packing_does_not_change_bfloat16_logprobs_beyond_rounding(qwen2):
    step = samples(2, lengths=LENGTHS)
    reference = ReferenceModel(ModelConfig(path=str(qwen2), dtype="bfloat16"), temperature=1.0, max_tokens=1000)
    alone = ReferenceModel(ModelConfig(path=str(qwen2), dtype="bfloat16"), temperature=1.0, max_tokens=1)
    for packed, single in zip(reference.logprobs(step), alone.logprobs(step), strict=True):
        np.testing.assert_allclose(packed, single, atol=0.1)


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}])
def test_a_resumed_bfloat16_run_is_the_undisturbed_one(qwen2, tmp_path, settings):
    updates = [pack([dataclasses.replace(s, advantage=1.0) for s in samples(seed)])[0] for seed in range(3)]
    undisturbed = make_learner(qwen2, dtype="bfloat16", **settings)
    try:
        undisturbed.step(updates[:2])
        path = undisturbed.save(tmp_path, Position(), keep=1)
        undisturbed.step(updates[2:])
        resumed = make_learner(qwen2, dtype="bfloat16", seed=9, **settings)
        resumed.load(path)
        resumed.step(updates[2:])
        expected = undisturbed.full_state_dict()
        for name, weight in resumed.full_state_dict().items():
            # Reductions of CUDA kernels are not ordered, so equality is up to one rounding of the engine's dtype.
            torch.testing.assert_close(weight, expected[name], rtol=1e-2, atol=1e-4)
    finally:
        undisturbed.close()
