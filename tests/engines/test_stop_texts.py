"""Completions that end with a text:
the ids and log-probs are those of a longer completion, up to the token in which the text ends.
"""

from __future__ import annotations

import pytest

from mempipe.engines.config import GenerationConfig, ModelConfig, SamplingConfig
from mempipe.engines.generator import Generator
from mempipe.engines.tiny import build_model, build_tokenizer
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.types import FinishReason

GREEDY = SamplingConfig(temperature=0.0)


async def test_a_completion_ends_with_the_token_in_which_a_stop_text_ends(tmp_path):
    build_tokenizer(tmp_path / "model")
    build_model(tmp_path / "model", seed=3)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    config = ModelConfig(path=str(tmp_path / "model"), dtype="float32")
    settings = GenerationConfig(enforce_eager=True)
    prompts = [tokenizer.encode_text(text) for text in ("the friend of", "who is it", "a city")]
    free = Generator(config, settings, max_model_len=64)
    await free.start()
    try:
        whole = [await free.generate(prompt, max_tokens=12, sampling=GREEDY, stop_token_ids=[]) for prompt in prompts]
    finally:
        await free.shutdown()
    # The text of the sixth sampled token of the first prompt, wherever it first comes.
    stop_text = tokenizer.decode(whole[0].token_ids[5:6])
    stopping = Generator(config, settings, max_model_len=64, stop_texts=[stop_text])
    await stopping.start()
    try:
        for prompt, full in zip(prompts, whole, strict=True):
            ends = [n for n in range(1, 13) if stop_text in tokenizer.decode(full.token_ids[:n])]
            expected = ends[0] if ends else 12
            stopped = await stopping.generate(prompt, max_tokens=12, sampling=GREEDY, stop_token_ids=[])
            assert stopped.token_ids == full.token_ids[:expected]
            assert stopped.logprobs == pytest.approx(full.logprobs[:expected], abs=1e-5)
            assert stopped.finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)
    finally:
        await stopping.shutdown()
