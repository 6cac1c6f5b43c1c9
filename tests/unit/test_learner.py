"""The gradient is that of a dense one-by-one computation, whatever the packing, the order and the number of ranks
(promise 4).
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_setup import (
    VOCAB,
    assert_close,
    load_plain,
    make_learner,
    pack,
    run_two_ranks,
    sample,
    samples,
    save_model,
)
from torch import Tensor
from torch.distributed.tensor import DTensor

from mempipe.actors.launch import learner_settings
from mempipe.engines import learner as learner_module
from mempipe.engines import model as model_module
from mempipe.engines import proof
from mempipe.engines.checksums import checksum
from mempipe.engines.config import FEWEST_TOKENS, ModelConfig, OptimizerConfig
from mempipe.engines.learner import Learner, lr_factor
from mempipe.engines.learner_settings import profile_files
from mempipe.engines.model import accumulate_locally, shard
from mempipe.engines.proof import SamplingMismatch, added
from mempipe.engines.reference import ReferenceModel
from mempipe.loader import parse_config
from mempipe.rl.packing import MicroBatch
from mempipe.types import TrainingSample

LORA = {"lora_rank": 4, "lora_alpha": 8.0}


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("models"))


def gradients(learner: Learner, batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """The summed gradient of the micro-batches over all ranks, by parameter."""
    for batch in batches:
        learner.forward_backward(batch)
    found = {}
    for name, parameter in learner.policy.lm.named_parameters():
        if parameter.grad is not None:
            whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            found[name] = whole.clone()
            parameter.grad = None
    return found


def dense_gradients(folder: Path, step: Sequence[TrainingSample]) -> dict[str, Tensor]:
    """PPO's clipped loss with dual clip 3 and KL 0.001, token mean, each context alone through plain transformers."""
    plain = load_plain(folder)
    num_tokens = sum(sum(s.loss_mask) for s in step)
    for s in step:
        logits = plain(torch.tensor([s.token_ids])).logits[0]
        for position, is_sampled in enumerate(s.loss_mask):
            if not is_sampled:
                continue
            logprob = logits[position - 1].log_softmax(-1)[s.token_ids[position]]
            ratio = (logprob - s.logprobs[position]).exp()
            gain = torch.min(ratio * s.advantage, ratio.clamp(0.8, 1.2) * s.advantage)
            if s.advantage < 0:
                gain = gain.clamp(min=3.0 * s.advantage)
            d = s.ref_logprobs[position] - logprob
            ((-gain + 0.001 * (d.exp() - d - 1)) / num_tokens).backward(retain_graph=True)
    return {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}


def near_policy(folder: Path, step: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The samples with log-probs around the model's own, so that some ratios are clipped and some are not."""
    reference = ReferenceModel(ModelConfig(path=str(folder), dtype="float32"), temperature=1.0, max_tokens=100)
    rng = np.random.default_rng(0)
    moved = []
    for s, own in zip(step, reference.logprobs(step), strict=True):
        noise = lambda scale, own=own: [v + float(rng.normal(0, scale)) if v else 0.0 for v in own]  # noqa: E731
        moved.append(dataclasses.replace(s, logprobs=noise(0.3), ref_logprobs=noise(0.1)))
    return moved


def test_a_packed_row_has_the_gradient_of_its_contexts_one_by_one(qwen2):
    step = near_policy(qwen2, samples(0))
    assert_close(gradients(make_learner(qwen2), pack(step)[0]), dense_gradients(qwen2, step))


@pytest.mark.parametrize("max_tokens", [23, 40, 60])
def test_splitting_into_micro_batches_does_not_change_the_gradient(qwen2, max_tokens):
    step = near_policy(qwen2, samples(1))
    learner = make_learner(qwen2)
    (whole,), (split,) = pack(step), pack(step, max_tokens=max_tokens)
    assert len(split) > len(whole) == 1
    assert_close(gradients(learner, split), gradients(learner, whole))


def test_the_order_of_contexts_does_not_change_the_gradient(qwen2):
    step = near_policy(qwen2, samples(2))
    learner = make_learner(qwen2)
    expected = gradients(learner, pack(step, max_tokens=30)[0])
    for seed in range(3):
        shuffled = random.Random(seed).sample(step, len(step))
        (batches,) = pack(shuffled, max_tokens=30)
        assert_close(gradients(learner, batches[::-1]), expected)


def test_fillers_add_nothing(qwen2):
    step = near_policy(qwen2, samples(3, lengths=(20, 19, 18)))
    ranks = pack(step, num_ranks=2, max_tokens=20)
    fillers = [batch for rank in ranks for batch in rank if batch.is_filler]
    learner = make_learner(qwen2)
    everything = gradients(learner, [batch for rank in ranks for batch in rank])
    assert_close(everything, gradients(learner, pack(step)[0]))
    assert fillers
    assert all(not gradient.any() for gradient in gradients(learner, fillers).values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_uneven_groups_have_the_dense_gradient(qwen2, seed):
    """1 to 8 contexts per trajectory, some groups left empty by a filter, any budget, dealt to 1 to 3 ranks."""
    rng = np.random.default_rng(seed)
    step = []
    for group in range(rng.integers(2, 5)):
        if group and rng.random() < 0.3:
            continue
        for member in range(rng.integers(1, 4)):
            advantage = float(rng.normal())
            for index in range(rng.integers(1, 9)):
                length = int(rng.integers(2, 25))
                step.append(
                    sample(
                        rng,
                        length=length,
                        trajectory=f"g{group}/{member}",
                        group=f"g{group}",
                        index=index,
                        advantage=advantage,
                    )
                )
    step = near_policy(qwen2, step)
    ranks = pack(step, num_ranks=int(rng.integers(1, 4)), max_tokens=int(rng.integers(25, 120)))
    found = gradients(make_learner(qwen2), [batch for rank in ranks for batch in rank])
    assert_close(found, dense_gradients(qwen2, step))


def test_lora_has_the_gradient_of_its_contexts_one_by_one(qwen2):
    step = near_policy(qwen2, samples(4))
    learner = make_learner(qwen2, **LORA)
    spread_adapter(learner)
    whole = gradients(learner, pack(step)[0])
    alone = gradients(learner, pack(step, max_tokens=max(len(s.token_ids) for s in step))[0])
    assert all(".lora_" in name for name in whole)
    assert_close(alone, whole)


def test_lora_gradients_are_the_chain_rule_of_the_full_ones(qwen2):
    """For W + f·B·A: dA = f·Bᵀ·dW and dB = f·dW·Aᵀ, with dW of a model whose weight is the merged one."""
    step = near_policy(qwen2, samples(5))
    lora = make_learner(qwen2, kl_coef=0.0, **LORA)
    spread_adapter(lora)
    merged = make_learner(qwen2, kl_coef=0.0)
    merged.policy.lm.load_state_dict(lora.full_state_dict(), strict=False)
    full, adapter = gradients(merged, pack(step)[0]), gradients(lora, pack(step)[0])
    weights = dict(lora.policy.lm.named_parameters())
    expected = {}
    for name in adapter:
        layer = name.split(".lora_")[0]
        up, down = (
            weights[f"{layer}.lora_B.default.weight"].detach(),
            weights[f"{layer}.lora_A.default.weight"].detach(),
        )
        gradient = full[f"{layer}.weight"]
        expected[name] = 2.0 * (up.T @ gradient if ".lora_A." in name else gradient @ down.T)  # f = alpha / rank
    assert_close(adapter, expected)


def spread_adapter(learner: Learner) -> None:
    """Gives LoRA's B, which starts at zero, random values (the same on every rank)."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in learner.policy.lm.named_parameters():
        if ".lora_B." in name:
            with torch.no_grad():
                values = torch.randn(parameter.shape, generator=generator) * 0.1
                if isinstance(parameter, DTensor):
                    values = torch.distributed.tensor.distribute_tensor(
                        values, parameter.device_mesh, parameter.placements
                    )
                parameter.copy_(values)


def two_rank_scenarios(rank: int, port: int, folder: Path, out: Path) -> None:
    """What two FSDP ranks compute, saved by rank 0 for the tests below."""

    def learner(**changes: Any) -> Learner:
        return make_learner(folder, rank=rank, world_size=2, master_port=port, **changes)

    step = two_rank_step(folder)
    mine = pack(step, num_ranks=2, max_tokens=30)[rank]
    found: dict[str, Any] = {}

    full = learner()
    initial = full.full_state_dict()
    found["logprobs_before"] = full.logprobs(mine[0])
    found["weights_intact"] = all(torch.equal(weight, initial[name]) for name, weight in full.full_state_dict().items())
    found["gradients"] = gradients(full, mine)
    found["gradients_reduced_once"] = gradients_reduced_once(full, mine)
    found["scores"] = full.score([s.token_ids for s in step])
    try:
        full.step([mine[: 1 + rank]])
    except ValueError as error:
        found["uneven"] = str(error)
    found["metrics"] = full.step([mine, mine[::-1]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "FEWEST_TOKENS", 1)
        guarded = learner(mismatch_tolerance=1e-9)
        one_sided = mine if rank else pack(step[:1], max_tokens=30)[0] * len(mine)
        one_sided = [dataclasses.replace(b, policy_versions=b.policy_versions + (1 - rank)) for b in one_sided]
        try:
            guarded.step([one_sided])
        except SamplingMismatch as error:
            found["mismatch"] = str(error)
    found["weights"] = full.full_state_dict()
    found["checksums"] = full.checksums()

    plain = learner(kl_coef=0.0)
    some, none = (
        pack(each, num_ranks=2, max_tokens=30, skip_zero_advantages=True)[rank] for each in skipping_steps(step)
    )
    found["skipping_gradients"] = gradients(plain, some)
    found["skipping_metrics"] = plain.step([some, none])
    found["skipping_weights"] = plain.full_state_dict()

    # As on GPUs, where memory counts: gathered layers are freed between the passes, and activations and logits computed
    # twice.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            learner_module,
            "shard",
            lambda *args, **settings: shard(*args, **settings | {"reshard_after_forward": True}),
        )
        patch.setattr(model_module, "MAX_LOGITS", 3 * VOCAB)
        found["frugal_gradients"] = gradients(learner(gradient_checkpointing=True), mine)

    lora = learner(**LORA)
    found["initial_adapter"] = {
        name: p.full_tensor() for name, p in lora.policy.lm.named_parameters() if ".lora_A." in name
    }
    spread_adapter(lora)
    found["reference"] = lora.reference_logprobs(mine[0])
    found["lora_gradients"] = gradients(lora, mine)
    found["lora_gradients_reduced_once"] = gradients_reduced_once(lora, mine)
    found["merged"] = lora.full_state_dict()
    found["lora_checksums"] = lora.checksums()
    merging = learner(**LORA, lora_merge=True)
    spread_adapter(merging)
    found["merged_checksums"] = merging.checksums()
    later = learner()
    later.step([mine, mine[::-1]])
    found["weights_of_a_later_learner"] = later.full_state_dict()
    assert rank == 0 or not found["merged"]
    torch.save(found, out / f"rank{rank}.pt")
    full.close()


def skipping_steps(step: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
    """The step with an advantage for every third trajectory only, and with none at all."""
    teaches = [{f"t{number}" for number in range(0, len(step), 3)}, set()]
    return [[s if s.trajectory_id in kept else dataclasses.replace(s, advantage=0.0) for s in step] for kept in teaches]


def gradients_reduced_once(learner: Learner, batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """As `Learner.step` does it on CPU ranks."""
    for index, batch in enumerate(batches):
        accumulate_locally(learner.policy, index + 1 < len(batches))
        learner.forward_backward(batch)
    return gradients(learner, [])


def two_rank_step(folder: Path) -> list[TrainingSample]:
    return near_policy(folder, samples(6, lengths=(5, 23, 9, 14, 8, 2, 17, 11, 29)))


@pytest.fixture(scope="module")
def two_ranks(qwen2, tmp_path_factory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("two_ranks")
    run_two_ranks(two_rank_scenarios, qwen2, out)
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def test_two_ranks_have_the_gradient_of_one(qwen2, two_ranks):
    step = two_rank_step(qwen2)
    ranks = pack(step, num_ranks=2, max_tokens=30)
    assert len(ranks[0]) == len(ranks[1]) > 1
    expected = gradients(make_learner(qwen2), pack(step)[0])
    assert_close(two_ranks[0]["gradients"], expected)
    assert_close(two_ranks[0]["gradients_reduced_once"], expected)
    assert_close(two_ranks[0]["frugal_gradients"], expected)


def test_two_ranks_have_the_lora_gradient_of_one(qwen2, two_ranks):
    learner = make_learner(qwen2, **LORA)
    initial = {name: p.detach().clone() for name, p in learner.policy.lm.named_parameters() if ".lora_A." in name}
    spread_adapter(learner)
    assert_close(two_ranks[0]["initial_adapter"], initial, tolerance=0.0)
    expected = gradients(learner, pack(two_rank_step(qwen2))[0])
    assert_close(two_ranks[0]["lora_gradients"], expected)
    assert_close(two_ranks[0]["lora_gradients_reduced_once"], expected)
    assert_close(two_ranks[0]["merged"], learner.full_state_dict())


GAUGES = {"seconds", "tokens_per_second", "teraflops_per_rank", "peak_memory_gib"}


def test_two_ranks_step_as_one_does(qwen2, two_ranks):
    learner = make_learner(qwen2)
    batches = pack(two_rank_step(qwen2), max_tokens=30)[0]
    metrics = learner.step([batches, batches])
    for one, two, other in zip(metrics, two_ranks[0]["metrics"], two_ranks[1]["metrics"], strict=True):
        same = {name for name in one if name not in GAUGES}
        assert two == other
        assert {name: two[name] for name in same} == pytest.approx(
            {name: one[name] for name in same}, rel=1e-4, abs=1e-6
        )
    weights = learner.full_state_dict()
    for name, weight in two_ranks[0]["weights"].items():
        assert (weight - weights[name]).abs().max() < 0.02 * 1e-3  # of two steps of about lr


def test_a_later_learner_of_the_same_processes_learns_the_same_to_the_last_bit(two_ranks):
    """As when the ranks of a warm start go on with training by reward."""
    assert_close(two_ranks[0]["weights_of_a_later_learner"], two_ranks[0]["weights"], tolerance=0.0)


def test_contexts_without_an_advantage_cost_nothing_and_change_nothing(qwen2, two_ranks):
    """Gradients and weights are those of all contexts, after a second update that trains nothing too: Adam's moments
    and weight decay still move the weights."""
    steps = skipping_steps(two_rank_step(qwen2))
    everything = [pack(step, max_tokens=30)[0] for step in steps]
    trained = [pack(step, max_tokens=30, skip_zero_advantages=True)[0] for step in steps]
    assert [len(batches) for batches in trained] == [3, 1] and [len(batches) for batches in everything] == [5, 5]

    expected = gradients(make_learner(qwen2, kl_coef=0.0), everything[0])
    for found in (gradients(make_learner(qwen2, kl_coef=0.0), trained[0]), two_ranks[0]["skipping_gradients"]):
        assert_close(found, expected, tolerance=2e-6)  # of float32 in another order: 1.04e-6 on a CPU without AVX-512

    full, skipping = (make_learner(qwen2, kl_coef=0.0) for _ in range(2))
    losses = [report["loss"] for report in full.step(everything)]
    reports = skipping.step(trained)
    weights = full.full_state_dict()
    for metrics, found in (
        (reports, skipping.full_state_dict()),
        (two_ranks[0]["skipping_metrics"], two_ranks[0]["skipping_weights"]),
    ):
        assert [report["loss"] for report in metrics] == pytest.approx(losses, rel=1e-5)
        nothing = metrics[1]
        assert (nothing["loss"], nothing["grad_norm"], nothing["num_contexts"], nothing["tokens"]) == (0, 0, 0, 0)
        assert "entropy" not in nothing and "ratio" not in nothing and "entropy" in metrics[0]
        for name, weight in found.items():
            assert (weight - weights[name]).abs().max() < 0.02 * 1e-3  # of two updates of about lr


def test_the_checksums_of_two_ranks_are_those_of_the_whole_weights(two_ranks):
    expected = added([{name: int(checksum(weight))} for name, weight in two_ranks[0]["weights"].items()])
    assert two_ranks[0]["checksums"] == two_ranks[1]["checksums"] == expected


def test_the_checksums_of_merged_weights_are_those_that_are_sent(two_ranks):
    expected = added([{name: int(checksum(weight))} for name, weight in two_ranks[0]["merged"].items()])
    assert two_ranks[0]["merged_checksums"] == two_ranks[1]["merged_checksums"] == expected


def test_the_checksums_of_an_adapter_stand_beside_its_base(qwen2, two_ranks):
    base = make_learner(qwen2).checksums()
    learner = make_learner(qwen2, **LORA)
    spread_adapter(learner)
    found = learner.checksums()
    assert found == two_ranks[1]["lora_checksums"]
    assert {name: value for name, value in found.items() if ".lora_" not in name} == base
    weights = dict(learner.policy.lm.named_parameters())
    layer = "model.layers.1.mlp.up_proj"
    scaled = 2.0 * weights[f"{layer}.lora_B.default.weight"]  # alpha / rank
    assert found[f"{layer}.lora_B.weight"] == int(checksum(scaled)) % 2**64
    assert found[f"{layer}.lora_A.weight"] == int(checksum(weights[f"{layer}.lora_A.default.weight"])) % 2**64


def test_canaries_are_scored_at_temperature_one(qwen2):
    """Engines score prompts at temperature 1, whatever the run samples at."""
    sequences = [s.token_ids for s in samples(17)]
    assert make_learner(qwen2, temperature=0.7).score(sequences) == make_learner(qwen2).score(sequences)


@pytest.mark.parametrize("train_head", [True, False])
def test_logits_of_a_bfloat16_model_are_not_rounded_and_have_its_gradients(train_head):
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(64, 300, bias=False).bfloat16().requires_grad_(train_head)
    states = (8 * torch.randn(20, 64, generator=generator)).bfloat16().requires_grad_()
    exact = states.double() @ head.weight.double().t()
    logits = model_module._float32_logits(head, states, model_module._gradient_sum(head))
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 1e-4 < (head(states) - exact).abs().max()
    upstream = torch.randn(20, 300, generator=generator)
    inputs = [states, head.weight] if train_head else [states]
    expected = torch.autograd.grad(head(states), inputs, upstream.bfloat16())
    for found, wanted in zip(torch.autograd.grad(logits, inputs, upstream), expected, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, wanted)


def test_two_ranks_score_as_one_does(qwen2, two_ranks):
    sequences = [s.token_ids for s in two_rank_step(qwen2)]
    for one, two in zip(make_learner(qwen2).score(sequences), two_ranks[1]["scores"], strict=True):
        assert len(one) == len(two)
        np.testing.assert_allclose(one, two, atol=1e-5)


def test_a_forward_pass_without_backward_leaves_the_sharded_weights_in_place(two_ranks):
    assert two_ranks[0]["weights_intact"]


def test_all_ranks_end_the_step_when_the_tokens_of_one_were_computed_otherwise(two_ranks):
    """The first rank has no token of the present version, and would wait in the optimiser for the second."""
    assert two_ranks[0]["mismatch"] == two_ranks[1]["mismatch"]
    assert "The step's update was not made" in two_ranks[0]["mismatch"]


def test_ranks_with_unequal_micro_batch_counts_are_told_instead_of_hanging(two_ranks):
    assert all("[[1], [2]]" in rank["uneven"] for rank in two_ranks)


def test_the_lora_reference_is_the_base_model(qwen2, two_ranks):
    batch = pack(two_rank_step(qwen2), num_ranks=2, max_tokens=30)[0][0]
    np.testing.assert_allclose(two_ranks[0]["reference"], make_learner(qwen2).logprobs(batch), atol=1e-5)


def test_with_lora_the_reference_logprobs_are_filled_in(qwen2):
    """The adapter starts at zero, so that policy and reference agree, whatever the batch says."""
    (update,) = pack(near_policy(qwen2, samples(7)))
    (metrics,) = make_learner(qwen2, kl_coef=0.1, **LORA).step([update])
    assert metrics["kl_ref"] == pytest.approx(0.0, abs=1e-9)
    (metrics,) = make_learner(qwen2, kl_coef=0.1).step([update])
    assert metrics["kl_ref"] > 1e-3


def test_reference_logprobs_lie_where_the_loss_is(qwen2):
    step = samples(8)
    reference = ReferenceModel(ModelConfig(path=str(qwen2), dtype="float32"), temperature=0.5, max_tokens=30)
    expected = make_learner(qwen2, temperature=0.5)
    for s, row in zip(step, reference.logprobs(step), strict=True):
        ((batch,),) = pack([s])
        assert [bool(value) for value in row] == [bool(bit) for bit in s.loss_mask]
        np.testing.assert_allclose(np.array(row)[np.array(s.loss_mask) == 1], expected.logprobs(batch), atol=1e-5)


def sampled_like(folder: Path, *, off: float, version: int = 0) -> list[MicroBatch]:
    """An update whose tokens, more than `FEWEST_TOKENS`, were sampled by `version` with log-probs that are `off`."""
    learner, step = make_learner(folder), samples(12, lengths=[60] * 6)
    scores = learner.score([s.token_ids for s in step])
    logprobs = [
        [0.0] + [(score + off) * bit for score, bit in zip(row, s.loss_mask[1:], strict=True)]
        for s, row in zip(step, scores, strict=True)
    ]
    versions = [[version if bit else -1 for bit in s.loss_mask] for s in step]
    changed = zip(step, logprobs, versions, strict=True)
    return pack([dataclasses.replace(s, logprobs=own, policy_versions=by) for s, own, by in changed])[0]


def test_engines_that_computed_otherwise_what_they_sampled_end_the_step_before_its_update(qwen2):
    learner = make_learner(qwen2, mismatch_tolerance=0.05)
    before = learner.full_state_dict()
    with pytest.raises(
        SamplingMismatch, match=r"differ by 0\.1 in .* generation.mismatch_tolerance allows 0\.05"
    ) as error:
        learner.step([sampled_like(qwen2, off=0.1)])
    assert error.value.mean == pytest.approx(0.1, abs=1e-5)
    assert learner.num_updates_done == 0
    assert all(torch.equal(weight, before[name]) for name, weight in learner.full_state_dict().items())
    (metrics,) = learner.step([sampled_like(qwen2, off=0.01)])
    assert metrics["same_version/abs_logprob_diff"] == pytest.approx(0.01, abs=1e-5), "no gradient was left"


def test_tokens_of_other_versions_and_later_updates_of_a_step_say_nothing_of_the_engines(qwen2):
    learner = make_learner(qwen2, mismatch_tolerance=0.05, updates_per_step=2, lr=1e-2)
    right, older = sampled_like(qwen2, off=0.0), sampled_like(qwen2, off=0.5, version=3)
    first, second = learner.step([right, right])
    assert first["same_version/abs_logprob_diff"] < 1e-5 and "same_version/tokens" not in second
    assert second["abs_logprob_diff"] > 0.05, "the first update moved the policy"
    (third, _) = learner.step([older, older])
    assert "same_version/tokens" not in third
    few = make_learner(qwen2, mismatch_tolerance=1e-6)
    (metrics,) = few.step(pack(samples(1, lengths=[6, 5])))
    assert 0 < metrics["same_version/tokens"] < FEWEST_TOKENS


def test_the_mismatch_is_the_samplers_where_the_learner_computes_old_logprobs_again(qwen2):
    learner = make_learner(qwen2, mismatch_tolerance=0.05, old_logprobs="recompute")
    with pytest.raises(SamplingMismatch):
        learner.step([sampled_like(qwen2, off=0.1)])


def test_recomputed_old_logprobs_make_the_first_ratio_one_and_keep_the_samplers_mismatch(qwen2):
    updates = [pack(near_policy(qwen2, samples(seed)))[0] for seed in (9, 10)]
    first, second = make_learner(qwen2, old_logprobs="recompute", lr=1e-2).step(updates)
    assert first["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert first["old_kl"] == pytest.approx(0.0, abs=1e-6)
    assert first["abs_logprob_diff"] > 0.05
    assert abs(second["ratio"] - 1.0) > 1e-3  # relative to the policy before the first update


def test_a_vanishing_learning_rate_leaves_the_policy_where_it_was(qwen2):
    """Nothing else moves it: the second update sees the log-probs of the first, to the last bit."""
    (update,) = pack(samples(11))
    learner = make_learner(qwen2, lr=1e-30, weight_decay=0.0)
    before = learner.logprobs(update[0])
    first, second = learner.step([update, update])
    assert first["loss"] == second["loss"]
    assert np.array_equal(learner.logprobs(update[0]), before)


def test_sft_loss_is_the_mean_negative_logprob(qwen2):
    step = [dataclasses.replace(s, advantage=1.0) for s in samples(12)]
    batches = pack(step, max_tokens=30)[0]
    learner = make_learner(qwen2, objective="sft", lr=3e-3)
    expected = -np.concatenate([learner.logprobs(batch) for batch in batches]).mean()
    reports = learner.step([batches] * 8)
    assert reports[0]["loss"] == pytest.approx(expected, rel=1e-5)
    assert reports[0]["nll"] == pytest.approx(expected, rel=1e-5)
    assert reports[-1]["loss"] < 0.7 * reports[0]["loss"]


def test_the_gradient_is_clipped_to_its_norm(qwen2):
    (update,) = pack(samples(13))
    norms, weights = [], []
    for grad_clip in (1e9, 1e-4):
        learner = make_learner(qwen2, grad_clip=grad_clip)
        norms.append(learner.step([update])[0]["grad_norm"])
        weights.append(learner)
    expected = (
        torch.stack([g.square().sum() for g in gradients(make_learner(qwen2), update).values()]).sum().sqrt().item()
    )
    assert norms == pytest.approx([expected, expected], rel=1e-5)
    moments = [next(iter(learner._optimizer.state.values()))["exp_avg"] for learner in weights]
    torch.testing.assert_close(moments[1], moments[0] * (1e-4 / expected), rtol=1e-4, atol=0.0)


def test_a_gradient_that_is_not_finite_changes_nothing(qwen2):
    ((batch,),) = pack(samples(14))
    learner = make_learner(qwen2)
    before = learner.full_state_dict()
    with pytest.raises(FloatingPointError, match="update 0"):
        learner.step([[dataclasses.replace(batch, weights=batch.weights * np.float32("nan"))]])
    assert_close(learner.full_state_dict(), before, tolerance=0.0)
    assert learner.step([[batch]])[0]["grad_norm"] > 0


def test_an_update_without_micro_batches_is_refused(qwen2):
    with pytest.raises(ValueError, match=r"rank 0 was given \[0\]"):
        make_learner(qwen2).step([[]])


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.2 + 0.4 * (1 - 0.5**0.5), 0.2]),
    ],
)
def test_the_learning_rate_warms_up_and_ends_with_the_last_update(schedule, factors):
    config = OptimizerConfig(schedule=schedule, warmup_steps=3, min_lr_ratio=0.2)
    assert [lr_factor(config, done, 8) for done in range(8)] == pytest.approx(factors)
    assert lr_factor(config, 20, 8) == pytest.approx(factors[-1])


def test_all_updates_of_a_step_have_its_learning_rate(qwen2):
    (update,) = pack(samples(15))
    settings = {"lr": 1e-2, "schedule": "linear", "min_lr_ratio": 0.0, "updates_per_step": 2, "num_updates": 6}
    reports = make_learner(qwen2, **settings).step([update] * 6)
    assert [report["lr"] for report in reports] == pytest.approx([1e-2, 1e-2, 0.5e-2, 0.5e-2, 0.0, 0.0])


@pytest.mark.parametrize("chunk", [None, 3])
def test_an_entropy_bonus_raises_the_entropy_where_nothing_else_is_learnt(qwen2, monkeypatch, chunk):
    if chunk:  # logits of a few rows at a time, computed again in the backward pass
        monkeypatch.setattr(model_module, "MAX_LOGITS", chunk * VOCAB)
    indifferent = [dataclasses.replace(each, advantage=0.0) for each in samples(15)]
    (update,) = pack(indifferent)
    entropies = {}
    for coef in (0.0, 1.0):
        reports = make_learner(qwen2, lr=1e-3, kl_coef=0.0, weight_decay=0.0, entropy_coef=coef).step([update] * 4)
        entropies[coef] = [report["entropy"] for report in reports]
    assert entropies[0.0] == pytest.approx([entropies[0.0][0]] * 4)
    assert entropies[1.0][0] == pytest.approx(entropies[0.0][0])
    assert all(earlier < later for earlier, later in pairwise(entropies[1.0]))


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(qwen2):
    """One rank in a 16-bit dtype runs under FSDP2 too; its log-probs are off by rounding only."""
    ((batch,),) = pack(samples(16, lengths=[20] * 8))
    exact, rounded = (make_learner(qwen2, objective="sft", dtype=dtype) for dtype in ("float32", "bfloat16"))
    try:
        gap = np.abs(rounded.logprobs(batch) - exact.logprobs(batch))
        assert 1e-4 < gap.max() < 0.25
        assert all(parameter.dtype == torch.float32 for parameter in rounded.policy.parameters())
        assert {weight.dtype for weight in rounded.full_state_dict().values()} == {torch.bfloat16}
        assert rounded.step([[batch]])[0]["grad_norm"] == pytest.approx(exact.step([[batch]])[0]["grad_norm"], rel=0.1)
    finally:
        rounded.close()


def test_the_first_update_of_a_step_is_profiled_where_that_is_asked_for(qwen2, tmp_path):
    (update,) = pack(samples(11))
    files = profile_files(tmp_path, [2, 3])
    learner = make_learner(qwen2, updates_per_step=2, profiles=files)
    for _ in range(2):
        learner.step([update, update])
    make_learner(qwen2, objective="sft", profiles=profile_files(tmp_path, [1])).step([update])  # a warm start
    assert list((tmp_path / "profiles").iterdir()) == [files[2]]
    names = {event.get("name") for event in json.loads(files[2].read_text())["traceEvents"]}
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= names


def test_the_setting_profile_steps_puts_a_trace_into_the_folder_of_the_run(qwen2, tmp_path):
    config = parse_config(
        {
            "name": "run",
            "output": str(tmp_path),
            "model": {"path": str(qwen2), "dtype": "float32"},
            "algorithm": {"kl_coef": 0.0},
            "tracking": {"profile_steps": [1]},
        }
    )
    config.folder.mkdir()
    (update,) = pack(samples(11))
    Learner(learner_settings(config)).step([update])
    (trace,) = (config.folder / "profiles").iterdir()
    assert trace.name == "step-00000001.json" and json.loads(trace.read_text())["traceEvents"]


def test_a_profile_that_cannot_be_written_disturbs_nothing(qwen2, tmp_path, caplog):
    (update,) = pack(samples(11))
    away = tmp_path / "away" / "profiles" / "step-00000001.json"
    learner, plain = make_learner(qwen2, profiles={1: away}), make_learner(qwen2)
    assert learner.step([update])[0]["loss"] == plain.step([update])[0]["loss"]
    assert_close(learner.full_state_dict(), plain.full_state_dict(), tolerance=0.0)
    assert f"{away} is not written" in caplog.text and not away.parent.parent.exists()
