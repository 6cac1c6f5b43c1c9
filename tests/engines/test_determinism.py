"""The engine of an ordered run: a request gives the same tokens and log-probs to the last bit, whatever the engine
does beside it. With an adapter, so that both kinds of products are in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from tiny_qwen2 import MAX_MODEL_LEN, prompts

from mempipe.engines.config import GenerationConfig, ModelConfig, SamplingConfig
from mempipe.engines.generator import Generator
from mempipe.engines.model import load_policy
from mempipe.engines.policy_weights import adapter_state_dict
from mempipe.engines.weights import pack_weights
from mempipe.types import Completion

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels on GPUs are not ordered")

SHARED = prompts(1, length=70, seed=5)[0]
PROMPTS = [
    shared + own
    for length in (3, 24, 90)
    for own in prompts(8, length=length, seed=length)
    for shared in ([], SHARED)  # of several blocks, so that a cache of prefixes would find it
]


def adapter(model: ModelConfig, *, seed: int) -> np.ndarray:
    """Packed weights of an adapter that changes what is sampled."""
    policy = load_policy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    return pack_weights(adapter_state_dict(policy, dtype=torch.float32))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(model_path: Path) -> AsyncIterator[Generator]:
    model = ModelConfig(path=str(model_path), dtype="float32", lora_rank=4)
    engine = Generator(model, GenerationConfig(max_num_seqs=32), max_model_len=MAX_MODEL_LEN, reproducible=True)
    await engine.start()
    await engine.load_weights(adapter(model, seed=0), 1)
    yield engine
    await engine.shutdown()


async def sampled(engine: Generator, number: int) -> Completion:
    return await engine.generate(
        PROMPTS[number], max_tokens=16, sampling=SamplingConfig(), stop_token_ids=[], seed=number
    )


async def sampled_together(engine: Generator, *, at_once: int) -> list[Completion]:
    completions: list[Completion] = []
    for start in range(0, len(PROMPTS), at_once):
        numbers = range(start, min(start + at_once, len(PROMPTS)))
        completions += await asyncio.gather(*(sampled(engine, number) for number in numbers))
    return completions


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def alone(engine: Generator) -> list[Completion]:
    """What the engine samples when it has one request at a time."""
    return await sampled_together(engine, at_once=1)


async def test_a_seeded_request_gives_the_same_bits_alone_in_company_and_again(engine, alone):
    assert await sampled(engine, 0) == alone[0]
    assert len({tuple(completion.logprobs) for completion in alone}) == len(PROMPTS)
    for at_once in (2, 7, len(PROMPTS)):
        assert await sampled_together(engine, at_once=at_once) == alone, at_once


async def test_requests_that_come_while_others_are_under_way_change_nothing(engine, alone):
    scores = [await engine.score(prompt) for prompt in PROMPTS[:6]]

    async def late(number: int) -> Completion:
        await asyncio.sleep(0.01 * (number % 7))
        return await sampled(engine, number)

    completions, beside = await asyncio.gather(
        asyncio.gather(*map(late, range(len(PROMPTS)))), asyncio.gather(*map(engine.score, PROMPTS[:6]))
    )
    assert completions == alone and list(beside) == scores


async def test_weights_that_come_back_give_the_same_bits_again(engine, alone):
    await engine.load_weights(adapter(engine._model, seed=1), 2)
    assert [c.token_ids for c in await sampled_together(engine, at_once=8)] != [c.token_ids for c in alone]
    await engine.load_weights(adapter(engine._model, seed=0), 1)
    assert await sampled_together(engine, at_once=24) == alone
