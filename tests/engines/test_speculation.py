"""An engine that guesses ahead from the context samples what the others sample, and says with which log-probs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from tiny_qwen2 import build_model, changed_model, make_generator, model_scores, prompts

from mempipe.engines import generator as generator_module
from mempipe.engines.config import GenerationConfig, ModelConfig, SamplingConfig
from mempipe.engines.generator import Generator
from mempipe.engines.vllm_settings import engine_arguments, guesses
from mempipe.engines.weights import publish
from mempipe.types import FinishReason

TOLERANCE = 1e-4
GREEDY = SamplingConfig(temperature=0)
LENGTH = 64


samples_right = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="vLLM 0.32 samples guessed tokens wrongly on CPUs",
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guessing(model_path: Path) -> AsyncIterator[Generator]:
    """Guesses without a GPU too, which the setting does not.

    In a process of its own: guessing imports numba, and vLLM's CPU kernels cannot be registered in a process with it.
    """

    def arguments(*args: Any, **settings: Any) -> dict[str, Any]:
        return engine_arguments(*args, **settings) | {"speculative_config": guesses(4)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator_module, "engine_arguments", arguments)
        generator = make_generator(model_path, engine_process="own")
        await generator.start()
    yield generator
    await generator.shutdown()


def test_the_setting_is_for_gpus():
    config = GenerationConfig(ngram_tokens=4)
    on_gpu, on_cpu = (
        engine_arguments(ModelConfig(), config, max_model_len=64, seed=0, device=device, transfer="mempipe_shm")
        for device in ("cuda", "cpu")
    )
    assert on_gpu["speculative_config"] == guesses(4) and "speculative_config" not in on_cpu


def repeating(num_prompts: int) -> list[list[int]]:
    """Prompts in which the same few ids come again and again."""
    return [prompt * 6 for prompt in prompts(num_prompts, length=6, seed=3)]


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        *(pytest.param(SamplingConfig(temperature=t), marks=samples_right) for t in (1.0, 0.3)),
    ],
    ids=str,
)
async def test_the_log_probs_of_guessed_tokens_are_those_of_the_sampled_distribution(guessing, sampling):
    model = build_model(seed=0)
    guessing.take_load()
    asked = repeating(4)
    completions = await asyncio.gather(
        *(guessing.generate(ids, max_tokens=LENGTH, sampling=sampling, stop_token_ids=[]) for ids in asked)
    )
    for prompt, completion in zip(asked, completions, strict=True):
        assert len(completion.token_ids) == len(completion.logprobs) == LENGTH
        temperature = sampling.temperature or 1.0
        expected = model_scores(model, prompt + completion.token_ids, temperature=temperature)[-LENGTH:]
        assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE)
    load = guessing.take_load()
    assert load.right_tokens <= load.guessed_tokens
    if sampling == GREEDY:
        assert load.right_tokens > LENGTH, "a model that takes the likeliest id repeats itself"
        in_steps = load.running  # a request counts once in each step that it takes part in
        assert in_steps < len(asked) * LENGTH, "so its requests take fewer steps than tokens, whichever of them it is"


async def test_greedy_ids_are_the_likeliest_with_and_without_guesses(guessing, model_path):
    plain = make_generator(model_path)
    await plain.start()
    try:
        for prompt in repeating(3):
            calls = (
                engine.generate(prompt, max_tokens=LENGTH, sampling=GREEDY, stop_token_ids=[])
                for engine in (guessing, plain)
            )
            guessed, one_by_one = await asyncio.gather(*calls)
            assert guessed.token_ids == one_by_one.token_ids
            stop = guessed.token_ids[LENGTH // 2]
            ended = await guessing.generate(prompt, max_tokens=LENGTH, sampling=GREEDY, stop_token_ids=[stop])
            length = guessed.token_ids.index(stop) + 1
            assert ended.token_ids == guessed.token_ids[:length] and ended.finish_reason == FinishReason.STOP
            assert ended.logprobs == pytest.approx(guessed.logprobs[:length], abs=TOLERANCE)
    finally:
        await plain.shutdown()


@samples_right
async def test_a_seeded_completion_is_the_same_next_to_others(guessing):
    asked = repeating(5)

    async def seeded(prompt: list[int]) -> list[int]:
        completion = await guessing.generate(
            prompt, max_tokens=24, sampling=SamplingConfig(temperature=0.5), stop_token_ids=[], seed=7
        )
        return list(completion.token_ids)

    alone = await seeded(asked[0])
    together, *_ = await asyncio.gather(*map(seeded, asked))
    assert together == alone


async def test_guesses_are_checked_by_new_weights_and_canaries_are_scored(guessing, tmp_path):
    model = changed_model(build_model(seed=0))
    await guessing.load_weights(publish(model.state_dict(), tmp_path, 3), 3)
    (prompt,) = repeating(1)
    completion = await guessing.generate(prompt, max_tokens=LENGTH, sampling=GREEDY, stop_token_ids=[])
    assert completion.policy_version == 3 and not completion.policy_versions
    expected = model_scores(model, prompt + completion.token_ids)
    assert completion.logprobs == pytest.approx(expected[-LENGTH:], abs=TOLERANCE)
    whole = prompt + completion.token_ids
    assert await guessing.score(whole) == pytest.approx(expected, abs=TOLERANCE)
    end = await guessing.score_from_cache(whole * 2)
    assert end == pytest.approx(model_scores(model, whole * 2)[-len(end) :], abs=TOLERANCE) and end
