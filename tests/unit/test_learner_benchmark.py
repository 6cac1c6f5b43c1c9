"""What the learner's benchmark counts as the operations of an update."""

from __future__ import annotations

import pytest
from learner_setup import VOCAB, load_plain, save_model

from benchmarks.learner_throughput import make_contexts, needed_operations
from mempipe.engines.model import PolicyModel


@pytest.mark.parametrize("architecture", ["qwen2", "qwen2_untied"])
def test_the_head_is_counted_at_loss_tokens_only(tmp_path, architecture):
    model = load_plain(save_model(tmp_path, architecture))
    samples = make_contexts(4, scale=1, seed=0)
    lengths, num_loss = [len(each.token_ids) for each in samples], sum(sum(each.loss_mask) for each in samples)
    head = VOCAB * 64
    others = sum(each.numel() for each in model.parameters()) - head * (1 if architecture == "qwen2" else 2)
    attention = 6 * 2 * 64 * sum(length**2 for length in lengths)  # two layers of 64 dimensions
    expected = 6 * (others * sum(lengths) + head * num_loss) + attention
    assert needed_operations(PolicyModel(model), samples) == expected
