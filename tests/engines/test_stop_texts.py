"""Completions that end with a text:
the ids and log-probs are those of a longer completion, up to the token in which the text ends.
"""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2ForCausalLM

from mempipe.engines.config import GenerationConfig, ModelConfig, SamplingConfig
from mempipe.engines.generator import Generator
from mempipe.engines.tiny import build_model, build_tokenizer
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.types import FinishReason

MAX_TOKENS = 12


@torch.no_grad()
def greedy(model: Qwen2ForCausalLM, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The likeliest MAX_TOKENS ids after `prompt`, one after the other, by transformers, and their log-probs."""
    token_ids, logprobs = list(prompt), []
    for _ in range(MAX_TOKENS):
        best = model(torch.tensor([token_ids])).logits[0, -1].log_softmax(-1).max(-1)
        token_ids.append(int(best.indices))
        logprobs.append(float(best.values))
    return token_ids[len(prompt) :], logprobs


async def test_a_completion_ends_with_the_token_in_which_a_stop_text_ends(tmp_path):
    folder = tmp_path / "model"
    build_tokenizer(folder)
    model = build_model(folder, seed=3).eval()
    tokenizer = load_tokenizer(str(folder))
    prompts = [tokenizer.encode_text(text) for text in ("the friend of", "who is it", "a city")]
    whole = [greedy(model, prompt) for prompt in prompts]
    # The text of the sixth sampled token of the first prompt, wherever it first comes.
    stop_text = tokenizer.decode(whole[0][0][5:6])
    generator = Generator(
        ModelConfig(path=str(folder), dtype="float32"),
        GenerationConfig(enforce_eager=True),
        max_model_len=64,
        stop_texts=[stop_text],
    )
    await generator.start()
    try:
        for prompt, (token_ids, logprobs) in zip(prompts, whole, strict=True):
            ends = [n for n in range(1, MAX_TOKENS + 1) if stop_text in tokenizer.decode(token_ids[:n])]
            expected = ends[0] if ends else MAX_TOKENS
            stopped = await generator.generate(
                prompt, max_tokens=MAX_TOKENS, sampling=SamplingConfig(temperature=0.0), stop_token_ids=[]
            )
            assert stopped.token_ids == token_ids[:expected]
            assert stopped.logprobs == pytest.approx(logprobs[:expected], abs=1e-4)
            assert stopped.finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)
    finally:
        await generator.shutdown()
