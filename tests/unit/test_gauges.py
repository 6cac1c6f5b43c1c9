"""Operations by hand, memory against what was allocated, and the gauges of an update."""

from __future__ import annotations

import pytest
import torch
from learner_setup import VOCAB, load_plain, make_learner, pack, samples, save_model

from mempipe.engines import gauges
from mempipe.engines.config import ModelConfig
from mempipe.engines.gauges import TrainingFlops, peak_teraflops
from mempipe.engines.learner import _metrics
from mempipe.engines.model import PolicyModel, load_policy
from mempipe.engines.weights import pack_weights

CPU = torch.device("cpu")


@pytest.mark.parametrize(("architecture", "looked_up"), [("qwen2", 0), ("qwen2_untied", VOCAB * 64)])
def test_training_takes_six_operations_a_weight_and_token_and_those_of_attention(tmp_path, architecture, looked_up):
    model = load_plain(save_model(tmp_path, architecture))
    weights = sum(parameter.numel() for parameter in model.parameters()) - looked_up
    attention = 6 * 2 * 64 * (5**2 + 9**2)  # two layers of 64 dimensions
    assert TrainingFlops(PolicyModel(model)).of([5, 9], [0, 0]) == 6 * weights * 14 + attention


def test_frozen_weights_need_no_gradient(tmp_path):
    """Of four operations: forward, and the gradient that is passed on."""
    policy = load_policy(ModelConfig(path=str(save_model(tmp_path, "qwen2_untied")), lora_rank=4))
    adapter = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    base = sum(parameter.numel() for parameter in policy.parameters()) - adapter - VOCAB * 64
    attention = 6 * 2 * 64 * 9**2
    assert TrainingFlops(policy).of([9], [0]) == (4 * base + 6 * adapter) * 9 + attention


def test_shared_tokens_take_their_operations_once(tmp_path):
    flops = TrainingFlops(PolicyModel(load_plain(save_model(tmp_path))))
    whole, shared = flops.of([9, 9], [0, 0]), flops.of([9, 9], [0, 9])
    assert shared == flops.of([9], [0]) == whole // 2


@pytest.mark.parametrize(
    ("name", "expected"), [("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA T1", None)]
)
def test_a_gpu_is_known_by_a_word_of_its_name(monkeypatch, name, expected):
    monkeypatch.setattr(gauges.torch.cuda, "get_device_name", lambda device: name)
    assert peak_teraflops(torch.device("cuda", 0)) == expected
    assert peak_teraflops(CPU) is None


def report(flops: float, seconds: float, peak: float | None) -> dict[str, object]:
    return {
        "sums": {"loss": 1.0, "tokens": 1.0},
        "counts": {"num_tokens": 10},
        "shared": {"lr": 1.0},
        "seconds": seconds,
        "reference_seconds": seconds / 4,
        "flops": flops,
        "peak_memory_gib": seconds,
        "peak_teraflops": peak,
    }


def test_utilization_is_of_all_ranks_and_the_slowest_ones_time():
    found = _metrics([report(4e14, 1.0, 1000.0), report(12e14, 2.0, 1000.0)])
    assert found["teraflops_per_rank"] == pytest.approx(400.0)
    assert found["model_flops_utilization"] == pytest.approx(0.4)
    assert found["peak_memory_gib"] == 2.0 and found["reference_seconds"] == 0.5
    assert "model_flops_utilization" not in _metrics([report(4e14, 1.0, None)])


def test_every_update_reports_its_gauges(tmp_path):
    (update,) = pack(samples(1))
    (metrics,) = make_learner(save_model(tmp_path)).step([update])
    assert metrics["teraflops_per_rank"] > 0 and 0.1 < metrics["peak_memory_gib"] < 100


LORA = {"lora_rank": 4, "lora_targets": ["q_proj", "down_proj"]}


@pytest.mark.parametrize("lora", [{}, LORA, LORA | {"lora_merge": True}])
def test_the_bytes_of_a_sync_are_those_that_are_packed(tmp_path, lora):
    learner = make_learner(save_model(tmp_path), **lora)
    packed = pack_weights(learner.served_state_dict())
    header = 8 + int.from_bytes(packed[:8].tobytes(), "little")  # safetensors' own
    assert learner.num_served_bytes == packed.nbytes - header
