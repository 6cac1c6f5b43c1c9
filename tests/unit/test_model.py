"""Packed scoring is what transformers computes context by context, for every architecture and head size."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_setup import SIZES, VOCAB, assert_close, family, load_plain, pack, sample, samples, save_model
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from mempipe.engines import attention
from mempipe.engines import model as model_module
from mempipe.engines.attention import ContextLayout
from mempipe.engines.config import ModelConfig
from mempipe.engines.model import PolicyModel, base_model, load_policy, loss_token_logprobs, score
from mempipe.engines.policy_weights import full_state_dict
from mempipe.rl.packing import MicroBatch
from mempipe.settings import ConfigError


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("models"))


def policy_of(folder: Path, **settings) -> PolicyModel:
    return load_policy(ModelConfig(path=str(folder), dtype="float32", **settings))


def one_by_one(folder: Path, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the loss tokens, each context alone through plain transformers."""
    plain = load_plain(folder)
    logprobs, entropies, start = [], [], 0
    for length in batch.sequence_lengths.tolist():
        ids = torch.tensor(batch.token_ids[start : start + length])
        with torch.no_grad():
            table = (plain(ids.unsqueeze(0)).logits[0] / temperature).log_softmax(-1)
        here = batch.loss_positions[(batch.loss_positions >= start) & (batch.loss_positions < start + length)] - start
        logprobs.append(table[here - 1, ids[here]])
        entropies.append(-(table.exp() * table).sum(-1)[here - 1])
        start += length
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "qwen3", "mistral"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_packed_row_scores_as_its_contexts_do_alone(tmp_path, architecture, temperature):
    folder = save_model(tmp_path, architecture)
    ((batch,),) = pack(samples(0))
    logprobs, entropy = loss_token_logprobs(policy_of(folder), batch, temperature=temperature)
    expected_logprobs, expected_entropy = one_by_one(folder, batch, temperature)
    torch.testing.assert_close(logprobs.detach(), expected_logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "qwen3", "mistral"])
@pytest.mark.parametrize("max_tokens", [1000, 40])
def test_contexts_that_begin_alike_train_on_those_tokens_once_and_alike(tmp_path, architecture, max_tokens):
    folder = save_model(tmp_path, architecture)
    tokens, found = [], []
    for share_prefixes in (False, True):
        policy, logprobs = policy_of(folder), {}
        (batches,) = pack(family(0), max_tokens=max_tokens, share_prefixes=share_prefixes)
        for batch in batches:
            scores, _ = loss_token_logprobs(policy, batch, temperature=0.8)
            (scores * torch.tensor(batch.weights * batch.advantages)).sum().backward()
            logprobs |= zip(zip(batch.advantages, batch.old_logprobs, strict=True), scores.tolist(), strict=True)
        tokens.append(sum(batch.num_tokens for batch in batches))
        found.append((logprobs, {name: p.grad for name, p in policy.named_parameters()}))
    assert tokens[0] == 86 and tokens[1] == (37 if max_tokens == 1000 else tokens[1]) < 60
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-5)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-5, atol=1e-6)


def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
    """Stands for `varlen_attn` of torch 2.11, whose heads are as many of keys as of queries. As in FlashAttention 2,
    the last query is at the last key."""
    assert query.shape[1] == key.shape[1] == value.shape[1] and window_size[1] == 0
    ends = [list(itertools.pairwise(cumulated.tolist())) for cumulated in (cu_seq_q, cu_seq_k)]
    assert [ends[-1][1] for ends in ends] == [len(query), len(key)]
    assert (max_q, max_k) == tuple(max(b - a for a, b in ends) for ends in ends)
    outputs = []
    for (start, end), (first, last) in zip(*ends, strict=True):
        q, k, v = (rows.transpose(0, 1) for rows in (query[start:end], key[first:last], value[first:last]))
        distance = torch.arange(last - first - end + start, last - first)[:, None] - torch.arange(last - first)
        mask = (distance >= 0) & ((window_size[0] < 0) | (distance <= window_size[0]))
        outputs.append(scaled_dot_product_attention(q, k, v, mask, scale=scale).transpose(0, 1))
    return torch.cat(outputs)


def grouping_kernel(query, key, value, *arguments, enable_gqa=False, **settings):
    """Stands for that of torch 2.12 and later."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    key, value = (rows.repeat_interleave(query.shape[1] // rows.shape[1], dim=1) for rows in (key, value))
    return kernel(query, key, value, *arguments, **settings)


@pytest.mark.parametrize("installed", [kernel, grouping_kernel])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("sliding_window", [None, 4])
def test_the_varlen_kernel_gets_what_its_torch_takes(installed, num_kv_heads, sliding_window, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", installed)
    layout = ContextLayout([5, 7, 6, 6], shared_lengths=[0, 3, 0, 6], device=torch.device("cpu"))
    rows = [torch.randn(15, heads, 8).requires_grad_() for heads in (4, num_kv_heads, num_kv_heads)]
    outputs = [
        run(*rows, layout=layout, scaling=0.3, sliding_window=sliding_window)
        for run in (attention._varlen, attention._padded)
    ]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(output.square().sum(), rows) for output in outputs))


def test_queries_of_a_shared_prefix_are_computed_once(monkeypatch):
    """Pairs of eight siblings that share three quarters, in squares of a quarter: half of the prefix's 9, and of each
    rest's 7. Whole contexts would have half of 128."""
    pairs = []

    def counting(query, key, value, own, whole, *longest, **settings):
        pairs.append((own.diff() * (whole.diff() - own.diff() / 2)).sum().item())
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", counting)
    layout = ContextLayout([8] * 8, shared_lengths=[0, *[6] * 7], device=torch.device("cpu"))
    row = torch.zeros(6 + 8 * 2, 1, 8)
    assert attention._varlen(row, row, row, layout=layout, scaling=None, sliding_window=None) is row
    assert pairs == [2**2 * (9 + 8 * 7) / 2]


def test_editing_one_context_changes_no_logprob_in_another(qwen2):
    policy = policy_of(qwen2)
    ((batch,),) = pack(samples(1))
    ends = batch.sequence_lengths.cumsum()
    before = loss_token_logprobs(policy, batch, temperature=1.0)[0].detach()
    for edited in range(len(ends)):
        first = ends[edited] - batch.sequence_lengths[edited]
        token_ids = batch.token_ids.copy()
        token_ids[first : ends[edited]] = (token_ids[first : ends[edited]] + 1) % VOCAB
        after = loss_token_logprobs(policy, dataclasses.replace(batch, token_ids=token_ids), temperature=1.0)[
            0
        ].detach()
        elsewhere = torch.tensor(batch.loss_sequences != edited)
        assert torch.equal(after[elsewhere], before[elsewhere])
        assert not torch.equal(after[~elsewhere], before[~elsewhere])


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_padding_and_unpadding_gives_the_row_back(lengths):
    layout = ContextLayout(lengths, device=torch.device("cpu"))
    row = torch.arange(sum(lengths) * 6.0).view(-1, 2, 3)
    padded = layout.pad(row)
    assert torch.equal(layout.unpad(padded), row)
    assert sum(len(part) for part in padded) == len(lengths)


@given(lengths=st.lists(st.integers(8, 4000), min_size=1, max_size=64))
def test_at_most_an_eighth_of_a_bucket_is_padding(lengths):
    layout = ContextLayout(lengths, device=torch.device("cpu"))
    slots = sum(count * length for count, length in layout.buckets)
    assert sum(count for count, _ in layout.buckets) == len(lengths)
    assert slots <= sum(length + max(4, length // 7) for length in lengths)


def test_a_head_in_chunks_gives_the_same_logprobs_and_gradients(qwen2, monkeypatch):
    policy = policy_of(qwen2)
    ((batch,),) = pack(samples(2))

    def run() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        policy.zero_grad()
        logprobs, entropy = loss_token_logprobs(policy, batch, temperature=0.8)
        logprobs.square().sum().backward()
        return logprobs.detach(), entropy, {name: p.grad.clone() for name, p in policy.named_parameters()}

    whole = run()
    monkeypatch.setattr(model_module, "MAX_LOGITS", 4 * VOCAB)
    rows = []
    score_rows = PolicyModel._score
    monkeypatch.setattr(
        PolicyModel, "_score", lambda self, states, *rest: rows.append(len(states)) or score_rows(self, states, *rest)
    )
    chunked = run()
    assert max(rows) == 4
    torch.testing.assert_close(chunked[0], whole[0])
    torch.testing.assert_close(chunked[1], whole[1])
    assert_close(chunked[2], whole[2])


def test_a_mixture_of_experts_is_not_trained(tmp_path):
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name != "tie_word_embeddings"}
    config = Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"mixture of experts \(qwen3_moe, 4 experts\)"):
        load_policy(ModelConfig(path=str(tmp_path)))


def test_chunks_of_a_16_bit_head_are_summed_in_float32(tmp_path, monkeypatch):
    """The gradient is rounded once. A sum of rounded chunks is off in most places."""
    policy = load_policy(ModelConfig(path=str(save_model(tmp_path, "qwen2_untied"))), dtype=torch.bfloat16)
    ((batch,),) = pack(samples(2))
    head = policy.lm.get_output_embeddings().weight

    def gradient() -> torch.Tensor:
        policy.zero_grad()
        loss_token_logprobs(policy, batch, temperature=1.0)[0].sum().backward()
        assert head.grad is not None and head.grad.dtype == torch.bfloat16
        return head.grad.clone()

    whole = gradient()
    monkeypatch.setattr(model_module, "MAX_LOGITS", VOCAB)
    chunked = gradient()
    assert (chunked != whole).float().mean() < 0.01
    torch.testing.assert_close(chunked, whole, rtol=0.01, atol=1e-4)


def test_gradient_checkpointing_changes_no_gradient(qwen2):
    ((batch,),) = pack(samples(3))
    gradients = []
    for enabled in (False, True):
        policy = policy_of(qwen2, gradient_checkpointing=enabled).train()
        loss_token_logprobs(policy, batch, temperature=1.0)[0].sum().backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters()})
    assert_close(gradients[1], gradients[0])


def test_sequences_are_scored_alike_alone_and_packed(qwen2):
    policy = policy_of(qwen2)
    step = samples(4)
    ids, masks = [s.token_ids for s in step], [s.loss_mask for s in step]
    alone = score(policy, ids, loss_masks=masks, temperature=0.7, max_tokens=1)
    packed = score(policy, ids, loss_masks=masks, temperature=0.7, max_tokens=40)
    for one, other, mask in zip(alone, packed, masks, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
        assert [value != 0.0 for value in one] == [bool(bit) for bit in mask]


def test_tied_weights_appear_once_and_load_again(tmp_path):
    for architecture, tied in (("qwen2", True), ("qwen2_untied", False)):
        folder = save_model(tmp_path, architecture)
        weights = full_state_dict(policy_of(folder), dtype=torch.float32)
        assert ("lm_head.weight" not in weights) == tied
        plain = load_plain(folder)
        missing, unexpected = plain.load_state_dict(weights, strict=False)
        assert not unexpected
        assert missing == (["lm_head.weight"] if tied else [])


def test_merged_lora_weights_are_the_adapted_model(qwen2):
    policy = policy_of(qwen2, lora_rank=4, lora_alpha=6.0)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    ((batch,),) = pack(samples(5))
    adapted = loss_token_logprobs(policy, batch, temperature=1.0)[0].detach()
    with base_model(policy):
        base = loss_token_logprobs(policy, batch, temperature=1.0)[0].detach()
    merged = policy_of(qwen2)
    merged.lm.load_state_dict(full_state_dict(policy, dtype=torch.float32), strict=False)
    assert (adapted - base).abs().max() > 0.01
    torch.testing.assert_close(
        loss_token_logprobs(merged, batch, temperature=1.0)[0].detach(), adapted, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(base, one_by_one(qwen2, batch, 1.0)[0], rtol=1e-5, atol=1e-5)


def test_only_the_adapter_is_trained_with_lora(qwen2):
    policy = policy_of(qwen2, lora_rank=2)
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)


def test_a_wrong_model_is_refused_with_its_setting(tmp_path, qwen2):
    with pytest.raises(ConfigError, match=r"model\.path is .*no config\.json"):
        policy_of(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"model\.path .*gemma2.*attn_logit_softcapping"):
        policy_of(save_model(tmp_path, "gemma2"))
    with pytest.raises(ConfigError, match=r"model\.lora_targets names nonsense, .* layers are down_proj, gate_proj"):
        policy_of(qwen2, lora_rank=2, lora_targets=["q_proj", "nonsense"])
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((qwen2 / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"model\.path .*broken' cannot be loaded"):
        policy_of(broken)


def test_soft_capped_attention_is_refused(tmp_path, monkeypatch):
    """Also where a config does not name it as such."""
    monkeypatch.setattr(model_module, "refusal", lambda path, values: "")
    ((batch,),) = pack([sample(np.random.default_rng(0), length=8)])
    with pytest.raises(ValueError, match="soft-capped"):
        loss_token_logprobs(policy_of(save_model(tmp_path, "gemma2")), batch, temperature=1.0)
