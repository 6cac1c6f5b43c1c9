"""Losses by hand, and the same gradient however a step is packed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mempipe.rl.config import AlgorithmConfig
from mempipe.rl.losses import kl_to_reference, policy_loss, same_version_mismatch
from mempipe.rl.metrics import mean_metrics, merge_metrics, step_metrics
from mempipe.rl.packing import MicroBatch, pack_step
from mempipe.types import TrainingSample

LOSSES = ("grpo", "gspo", "cispo")


def loss_of(log_ratios, advantages, *, sequences=None, weights=None, ref=None, sampler=None, contexts=None, **settings):
    """Loss, gradient of the log-probs and metric means for tokens whose old log-prob is -1 and whose new one is -1 +
    log_ratio.
    """
    size = len(log_ratios)
    logprobs = (torch.tensor(log_ratios, dtype=torch.float64) - 1).requires_grad_()
    sequences = torch.tensor(sequences if sequences is not None else range(size))
    loss, sums = policy_loss(
        logprobs,
        old_logprobs=torch.full((size,), -1.0, dtype=torch.float64),
        ref_logprobs=torch.tensor(ref if ref is not None else [0.0] * size, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.tensor(weights if weights is not None else [1 / size] * size, dtype=torch.float64),
        loss_sequences=sequences,
        context_indices=torch.tensor(contexts if contexts is not None else [0] * (int(sequences.max()) + 1)),
        config=AlgorithmConfig(**{"kl_coef": 0.0} | settings),
        sampler_logprobs=None if sampler is None else torch.tensor(sampler, dtype=torch.float64),
    )
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.tolist(), mean_metrics(sums)


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_on_policy_the_gradient_is_the_weighted_advantage(loss):
    value, gradient, metrics = loss_of([0, 0, 0], [1.0, -2.0, 0.5], loss=loss)
    assert value == pytest.approx(0.5 / 3) and gradient == pytest.approx([-1 / 3, 2 / 3, -0.5 / 3])
    assert metrics["ratio"] == 1 and metrics["importance_ratio_max"] == 1 and metrics["abs_logprob_diff"] == 0


def test_the_metrics_are_means_over_the_tokens_and_the_old_kl_is_old_over_new():
    """KL(old || new) by its first-order estimator: the mean of old - new log-probs."""
    _, _, metrics = loss_of([0.5, -0.25], [2.0, -1.0])
    assert metrics["old_kl"] == pytest.approx((-0.5 + 0.25) / 2) and metrics["tokens"] == 2
    assert metrics["ratio"] == pytest.approx((math.exp(0.5) + math.exp(-0.25)) / 2)
    assert metrics["advantage"] == 0.5 and metrics["advantage_abs"] == 1.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_log_probs_are_compared_in_float32(dtype):
    logprobs = torch.tensor([-1.0078125, -0.5], dtype=dtype)
    settings = {"ref_logprobs": torch.zeros(2), "advantages": torch.tensor([1.0, -1.0]), "weights": torch.ones(2)}
    settings |= {"loss_sequences": torch.arange(2), "context_indices": torch.zeros(2, dtype=torch.long)}
    old = torch.tensor([-1.0, -0.5], dtype=dtype)
    loss, metrics = policy_loss(logprobs, old_logprobs=old, config=AlgorithmConfig(kl_coef=0.0), **settings)
    exact = -math.exp(-0.0078125) + 1
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact, abs=1e-7)
    assert metrics["old_kl"] == pytest.approx(0.0078125)


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_rejection_sampling_has_the_gradient_of_supervised_learning_on_what_is_right(loss):
    weights = [0.125, 0.25, 0.5, 0.0625]
    _, gradient, _ = loss_of([0, 0, 0, 0], [1.0, 0.0, 1.0, 0.0], weights=weights, loss=loss, advantage="rejection")
    supervised = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True)
    (torch.tensor([0.125, 0.0, 0.5, 0.0], dtype=torch.float64) * -supervised).sum().backward()
    assert supervised.grad is not None and gradient == supervised.grad.tolist() == [-0.125, 0.0, -0.5, 0.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "metric"),
    [
        (1.1, 1.0, -1.1, -1.1, None),
        (1.5, 1.0, -1.2, 0.0, "clip_high"),
        (0.5, 1.0, -0.5, -0.5, None),  # the pessimistic side: no clip
        (0.5, -1.0, 0.8, 0.0, "clip_low"),
        (1.5, -1.0, 1.5, 1.5, None),
        (4.0, -1.0, 3.0, 0.0, "dual_clip"),
    ],
)
def test_clipped_ratio_by_hand(ratio, advantage, loss, gradient, metric):
    value, slope, metrics = loss_of([math.log(ratio)], [advantage])
    assert value == pytest.approx(loss) and slope == pytest.approx([gradient])
    for name in ("clip_low", "clip_high", "dual_clip"):
        assert metrics[name] == (name == metric)


def test_each_side_has_its_own_clip():
    assert loss_of([math.log(1.25)], [1.0], clip_high=0.28)[0] == pytest.approx(-1.25)
    assert loss_of([math.log(1.5)], [1.0], clip_high=0.28)[0] == pytest.approx(-1.28)
    assert loss_of([math.log(0.5)], [-1.0], clip_low=0.1)[0] == pytest.approx(0.9)


def test_without_dual_clip_negative_advantages_are_unbounded():
    assert loss_of([math.log(40)], [-1.0], dual_clip=None)[0] == pytest.approx(40)


def test_gspo_uses_one_ratio_per_context():
    # contexts {0.2, 0} and {0.1}: the geometric mean of both is e^0.1
    value, gradient, _ = loss_of([0.2, 0.0, 0.1], [1.0, 1.0, 1.0], sequences=[0, 0, 1], loss="gspo")
    assert value == pytest.approx(-math.exp(0.1)) and gradient == pytest.approx([-math.exp(0.1) / 3] * 3)


def test_gspo_clips_a_context_as_a_whole():
    _, gradient, metrics = loss_of([0.0, 0.8, 0.0], [1.0, 1.0, 1.0], sequences=[0, 0, 1], loss="gspo")
    assert gradient == pytest.approx([0, 0, -1 / 3]) and metrics["clip_high"] == pytest.approx(2 / 3)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    value, gradient, metrics = loss_of([math.log(4), math.log(0.25)], [1.0, -1.0], loss="cispo")
    assert gradient == pytest.approx([-1.2 / 2, 0.8 / 2])
    assert value == pytest.approx(-1.2 * (-1 + math.log(4)) / 2 + 0.8 * (-1 + math.log(0.25)) / 2)
    assert metrics["clip_high"] == metrics["clip_low"] == 0.5 and metrics["dual_clip"] == 0


def test_cispo_with_an_open_lower_side_uses_the_ratio_itself():
    _, gradient, _ = loss_of([math.log(0.25)], [1.0], loss="cispo", clip_low=1.0)
    assert gradient == pytest.approx([-0.25])


def test_kl_by_hand():
    kl = kl_to_reference(
        torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0]).double(), torch.tensor([-1.0, 0.0, -6.0, -31.0, 99.0]).double()
    )
    assert kl.tolist() == pytest.approx([0.0, math.e - 2, math.exp(-5) + 4, 10.0, 10.0])


def test_kl_joins_the_loss_with_its_coefficient_outside_the_clip():
    value, gradient, metrics = loss_of([math.log(4)], [0.0], ref=[math.log(4)], kl_coef=0.5)  # d = 1
    assert value == pytest.approx(0.5 * (math.e - 2)) == pytest.approx(metrics["kl_loss"])
    assert gradient == pytest.approx([0.5 * (1 - math.e)]) and metrics["kl_ref"] == pytest.approx(math.e - 2)


@given(st.floats(-60, 60), st.floats(-60, 0))
def test_kl_is_never_negative_nor_above_its_cut(ref, logprob):
    kl = kl_to_reference(torch.tensor([logprob]), torch.tensor([ref])).item()
    assert 0 <= kl <= 10


def test_tiny_kl_keeps_its_digits_in_float32():
    kl = kl_to_reference(torch.tensor([0.0]), torch.tensor([1e-3])).item()
    assert kl == pytest.approx(math.exp(1e-3) - 1 - 1e-3, rel=1e-3)


# Two contexts, of two tokens and of one; the importance weights of their tokens are 1.5, 8 and 0.25.
SAMPLER = [-1 - math.log(1.5), -1 - math.log(8), -1 + math.log(4)]
CORRECTIONS = {
    "none": [1, 1, 1],
    "token": [1.5, 2, 0.25],  # min(w, 2)
    "sequence": [2, 2, 0.25],  # min(1.5 * 8, 2), min(0.25, 2)
    "token_mask": [1.5, 0, 0],  # w, or 0 outside of 0.5 to 2
    "sequence_mask": [0, 0, 0],  # 12 and 0.25 are outside
}


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize(("correction", "weights"), CORRECTIONS.items())
def test_a_correction_weighs_tokens_by_its_formula_at_any_lag(correction, weights, lag):
    value, gradient, metrics = loss_of(
        [0.0] * 3,
        [1.0, -1.0, 2.0],
        sequences=[0, 0, 1],
        sampler=SAMPLER,
        correction=correction,
        max_off_policy_steps=lag,
    )
    expected = [-a * w / 3 for a, w in zip([1.0, -1.0, 2.0], weights, strict=True)]
    assert value == pytest.approx(sum(expected)) and gradient == pytest.approx(expected)
    changed = {"none": 0, "token": 1, "sequence": 2, "token_mask": 2, "sequence_mask": 3}
    assert metrics["importance_corrected"] == pytest.approx(changed[correction] / 3)


def test_a_sequence_mask_keeps_contexts_whose_tokens_balance():
    sampler = [-1 - math.log(4), -1 + math.log(4), -1.0]
    _, gradient, _ = loss_of([0.0] * 3, [1.0] * 3, sequences=[0, 0, 1], sampler=sampler, correction="sequence_mask")
    assert gradient == pytest.approx([-4 / 3, -0.25 / 3, -1 / 3])
    _, gradient, _ = loss_of([0.0] * 3, [1.0] * 3, sequences=[0, 0, 1], sampler=sampler, correction="token_mask")
    assert gradient == pytest.approx([0, 0, -1 / 3])


@pytest.mark.parametrize(("minimum", "kept"), [(0.5, 0), (0.2, 1), (0.0, 1)])
def test_the_lower_bound_of_a_mask_is_a_setting(minimum, kept):
    settings = {"correction": "token_mask", "min_importance_ratio": minimum}
    _, gradient, _ = loss_of([0.0], [1.0], sampler=[-1 + math.log(4)], **settings)
    assert gradient == pytest.approx([-0.25 * kept])


@pytest.mark.parametrize(("correction", "kept"), [("none", [1, 1]), ("token", [1, 1]), ("token_mask", [0, 1])])
def test_against_the_sampler_itself_only_masks_add_to_the_clipped_ratio(correction, kept):
    value, _, metrics = loss_of([math.log(2.5), 0.0], [-1.0, -1.0], correction=correction, max_off_policy_steps=1)
    assert value == pytest.approx((2.5 * kept[0] + kept[1]) / 2)
    assert metrics["importance_corrected"] == 1 - sum(kept) / 2


@pytest.mark.parametrize("lag", [0, 1])
def test_dual_clip_is_as_set_at_any_lag(lag):
    assert loss_of([math.log(40)], [-1.0], dual_clip=3.0, max_off_policy_steps=lag)[0] == pytest.approx(3.0)
    assert loss_of([math.log(40)], [-1.0], dual_clip=5.0, max_off_policy_steps=lag)[0] == pytest.approx(5.0)


def test_the_mismatch_is_measured_whatever_is_done_about_it():
    _, gradient, metrics = loss_of([0.0, 0.0], [1.0, 1.0], sampler=[-1.5, -1.0], correction="none")
    assert gradient == pytest.approx([-0.5, -0.5]) and metrics["importance_corrected"] == 0
    assert metrics["abs_logprob_diff"] == 0.25 and metrics["importance_ratio_max"] == pytest.approx(math.exp(0.5))
    assert metrics["mismatch_kl"] == pytest.approx((math.exp(0.5) - 1.5) / 2)


def test_the_entropy_bonus_is_the_weighted_entropy_of_what_is_sampled_from():
    logits = torch.tensor([[0.3, -1.0, 0.7], [0.0, 2.0, -0.5]], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logprobs[:, 0]
    zeros, weights = torch.zeros(2, dtype=torch.float64), torch.tensor([0.25, 0.75], dtype=torch.float64)
    loss, _ = policy_loss(
        chosen,
        old_logprobs=chosen.detach(),
        ref_logprobs=zeros,
        advantages=zeros,
        weights=weights,
        loss_sequences=torch.tensor([0, 1]),
        context_indices=torch.tensor([0, 0]),
        config=AlgorithmConfig(kl_coef=0.0, entropy_coef=0.01),
        entropies=entropies,
    )
    assert loss.item() == pytest.approx(-0.01 * (0.25 * entropies[0] + 0.75 * entropies[1]).item())
    loss.backward()
    p, h = logprobs.exp().detach(), entropies.detach()
    expected = 0.01 * weights[:, None] * p * (p.log() + h[:, None])  # -dH/dlogit = p (log p + H)
    assert logits.grad is not None and torch.allclose(logits.grad, expected)


def test_the_mismatch_of_one_version_leaves_out_tokens_of_others():
    logprobs, sampled = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True), torch.tensor([-1.5, -2.25, 9.0])
    sums = same_version_mismatch(logprobs, sampled, torch.tensor([True, True, False]))
    assert mean_metrics(merge_metrics([sums, sums])) == {
        "same_version/tokens": 4.0,
        "same_version/abs_logprob_diff": 0.375,
    }
    assert same_version_mismatch(logprobs, sampled, torch.zeros(3, dtype=torch.bool)) == {}


def test_mismatch_is_told_by_context_index():
    _, _, metrics = loss_of([0.5, 0.0, 0.1], [1.0] * 3, sequences=[0, 0, 1], contexts=[2, 0])
    assert metrics["context_2/tokens"] == 2 and metrics["context_0/tokens"] == 1 and "context_1/tokens" not in metrics
    assert metrics["context_2/abs_logprob_diff"] == pytest.approx(0.25)
    assert metrics["context_0/mismatch_kl"] == pytest.approx(math.exp(0.1) - 1.1)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_filler_adds_neither_gradient_nor_metrics(loss):
    value, gradient, metrics = loss_of([5.0], [0.0], weights=[0.0], loss=loss, kl_coef=1.0)
    assert (value, gradient) == (0.0, [0.0]) and metrics["tokens"] == 0
    one = loss_of([0.1], [1.0], loss=loss, kl_coef=1.0)[2]
    assert merge_metrics([metrics, one]) == pytest.approx(one)


def test_where_no_token_was_trained_there_are_no_means():
    assert loss_of([5.0], [0.0], weights=[0.0])[2] == {"loss": 0, "policy_loss": 0, "kl_loss": 0, "tokens": 0}


@pytest.mark.parametrize(
    ("settings", "skips"), [({}, True), ({"kl_coef": 0.1}, False), ({"entropy_coef": 0.1}, False)], ids=str
)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_token_without_an_advantage_may_be_left_out_where_nothing_else_is_in_the_loss(loss, settings, skips):
    config = AlgorithmConfig(**{"loss": loss, "kl_coef": 0.0} | settings)
    logprobs = torch.tensor([-1.5, -0.5, -4.0], dtype=torch.float64, requires_grad=True)
    entropies = -logprobs.exp() * logprobs
    total, _ = policy_loss(
        logprobs,
        old_logprobs=torch.full_like(logprobs, -1.0).detach(),
        ref_logprobs=torch.zeros(3, dtype=torch.float64),
        advantages=torch.zeros(3, dtype=torch.float64),
        weights=torch.full((3,), 1 / 3, dtype=torch.float64),
        loss_sequences=torch.tensor([0, 0, 1]),
        context_indices=torch.tensor([0, 1]),
        config=config,
        entropies=entropies,
    )
    total.backward()
    assert logprobs.grad is not None
    assert (not logprobs.grad.any()) == config.skips_zero_advantages == skips


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_stay_finite(loss, advantage):
    value, gradient, metrics = loss_of([-500.0, 500.0], [advantage] * 2, loss=loss, kl_coef=1.0, dual_clip=None)
    assert all(map(math.isfinite, [value, *gradient, *metrics.values()]))


def test_half_precision_log_probs_are_computed_in_float32():
    half = torch.tensor([-1.0], dtype=torch.bfloat16)
    one = torch.ones(1)
    loss, _ = policy_loss(
        half,
        old_logprobs=torch.tensor([-1.001]),
        ref_logprobs=-one,
        advantages=one,
        weights=one,
        loss_sequences=torch.tensor([0]),
        context_indices=torch.tensor([0]),
        config=AlgorithmConfig(kl_coef=0),
    )
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(-math.exp(0.001))


def test_metrics_of_a_step_are_those_of_all_its_tokens():
    names = ("tokens", "num_tokens", "abs_logprob_diff", "importance_ratio_max", "loss", "grad_norm", "peak_memory_gib")
    small = dict(zip(names, (100.0, 1000, 0.1, 41.0, 0.2, 1.0, 2.0), strict=True))
    large = dict(zip(names, (900.0, 9000, 0.9, 1.0, 0.4, 3.0, 1.0), strict=True))
    both = dict(zip(names, (1000.0, 10000, 0.82, 41.0, 0.3, 2.0, 2.0), strict=True))
    first = {"context_0/mismatch_kl": 0.5, "context_0/tokens": 9.0}
    second = {"context_1/mismatch_kl": 0.3, "context_1/tokens": 4.0}  # of contexts that the other update lacks
    assert step_metrics([small | first, large | second]) == pytest.approx(both | first | second)
    assert step_metrics([small]) == pytest.approx(small)


def test_metrics_of_micro_batches_add_up_to_those_of_the_step():
    def sums(log_ratios, sequences, contexts):
        size = len(log_ratios)
        logprobs = torch.tensor(log_ratios, dtype=torch.float64)
        return policy_loss(
            logprobs,
            old_logprobs=torch.zeros(size, dtype=torch.float64),
            ref_logprobs=logprobs / 2,
            advantages=torch.ones(size, dtype=torch.float64),
            weights=torch.full((size,), 0.25, dtype=torch.float64),
            loss_sequences=torch.tensor(sequences),
            context_indices=torch.tensor(contexts),
            config=AlgorithmConfig(kl_coef=0.1),
        )[1]

    whole = sums([0.5, -0.25, 0.125, 0.0], [0, 0, 1, 2], [0, 1, 1])
    parts = merge_metrics([sums([0.5, -0.25], [0, 0], [0]), sums([0.125, 0.0], [0, 1], [1, 1])])
    assert parts == pytest.approx(whole) and mean_metrics(parts)["tokens"] == 4
    assert mean_metrics(whole)["importance_ratio_max"] == pytest.approx(math.exp(0.5))
    assert mean_metrics(whole)["loss"] == whole["loss"]


def step_samples() -> list[TrainingSample]:
    """Two trajectories with 1 to 4 contexts per group of three; token ids are unique in the step."""
    rng, samples, token = np.random.default_rng(0), [], 0
    for member in range(6):
        lengths = rng.integers(2, 9, size=rng.integers(1, 5)).tolist()
        masks = [[0, *rng.integers(0, 2, size=n - 1).tolist(), 1] for n in lengths]
        for index, mask in enumerate(masks):
            samples.append(
                TrainingSample(
                    trajectory_id=f"t{member}",
                    group_id=f"g{member // 3}",
                    context_index=index,
                    token_ids=list(range(token, token + len(mask))),
                    loss_mask=mask,
                    logprobs=rng.uniform(-2, 0, size=len(mask)).tolist(),
                    policy_versions=[0] * len(mask),
                    advantage=float(rng.normal()),
                    trajectory_tokens=sum(map(sum, masks)),
                    ref_logprobs=rng.uniform(-2, 0, size=len(mask)).tolist(),
                )
            )
            token += len(mask)
    return samples


def gradient_of(batches: list[MicroBatch], policy: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """The gradient of a table of log-probs, one per token id, summed over the micro-batches."""
    table = torch.tensor(policy, requires_grad=True)
    for batch in batches:
        names = ("old_logprobs", "ref_logprobs", "advantages", "weights", "loss_sequences", "context_indices")
        tensors = {name: torch.from_numpy(getattr(batch, name)) for name in names}
        policy_loss(table[batch.token_ids[batch.loss_positions]], **tensors, config=config)[0].backward()
    assert table.grad is not None
    return table.grad.numpy()


@pytest.mark.parametrize("aggregation", ["token", "context", "trajectory"])
@pytest.mark.parametrize("loss", LOSSES)
def test_promise_4_packing_and_ranks_do_not_change_the_gradient(loss, aggregation):
    samples = step_samples()
    policy = np.random.default_rng(1).uniform(-2, 0, size=samples[-1].token_ids[-1] + 1)
    config = AlgorithmConfig(loss=loss, kl_coef=0.05)

    def gradient(num_ranks, max_tokens):
        ranks = pack_step(samples, num_ranks=num_ranks, max_tokens=max_tokens, aggregation=aggregation)
        return sum(gradient_of(rank, policy, config) for rank in ranks)

    alone = gradient(1, max(len(s.token_ids) for s in samples))
    assert np.abs(alone).max() > 1e-3
    for num_ranks, max_tokens in [(1, 10_000), (2, 10_000), (2, 20), (3, 13), (4, 40)]:
        np.testing.assert_allclose(gradient(num_ranks, max_tokens), alone, rtol=0, atol=1e-12)
