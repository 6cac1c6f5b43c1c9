"""A vLLM engine and a learner of one model on one GPU: what is sampled, sent and served is the learner's."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shapes import (
    CONTEXT_TOKENS,
    GPU,
    SMALL,
    Control,
    make_learner,
    make_model,
    make_samples,
    needs_gpu,
    played_anywhere,
    shape_of,
)
from shapes import run_config as preset

from mempipe.config import RunConfig
from mempipe.engines.config import SamplingConfig
from mempipe.engines.generator import Generator
from mempipe.engines.learner import Learner
from mempipe.engines.proof import Proof, check_canary, check_engines
from mempipe.engines.weights import GpuWeightSender, pack_weights
from mempipe.rl.packing import pack_step

pytestmark = [pytest.mark.gpu, played_anywhere]

PROMPTS, SAMPLED = (64, 128) if GPU else (4, 16)
SHARE = 0.35
"""Of the device, for an engine beside a learner."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = make_model(tmp_path_factory.mktemp("model"), SMALL)
    yield folder
    shutil.rmtree(folder)


def run_config(model: Path, *overrides: str) -> RunConfig:
    return preset(model, f"generation.gpu_memory_utilization={SHARE}", "generation.max_num_seqs=64", *overrides)


@asynccontextmanager
async def engine(config: RunConfig, **settings: Any) -> AsyncIterator[Generator]:
    length = CONTEXT_TOKENS + SAMPLED
    generator = Generator(config.model, config.generation, max_model_len=length, **settings)
    await generator.start()
    try:
        yield generator
    finally:
        await generator.shutdown()


def canaries() -> list[list[int]]:
    return [list(sample.token_ids)[:256] for sample in make_samples(shape_of(SMALL))]


def train(learner: Learner, *, seed: int = 0) -> None:
    ((batch,),) = pack_step(
        make_samples(shape_of(SMALL), seed=seed), num_ranks=1, max_tokens=2**14, aggregation="token"
    )
    learner.step([[batch]])


async def proven(generator: Generator, learner: Learner, *, version: int, tolerance: float) -> dict[str, float]:
    """The gap between engine and learner, whose weights the engine must hold to the bit."""
    rows = canaries()
    ends = [await generator.score_from_cache(row) for row in rows]  # before the cache has the ends too
    scores = list(await asyncio.gather(*(generator.score(row) for row in rows)))
    assert all(ends) or not GPU, "there each is several cache blocks long"
    gap = check_engines(
        {"engine": Proof(held=await generator.held_weights(), scores=scores, scores_from_cache=ends)},
        checksums=learner.checksums(),
        scores=learner.score(rows),
        version=version,
        tolerance=tolerance,
    )
    return {"canary mean": gap.mean, "canary max": gap.maximum}


CHOICES = [
    "generation.engine_process=own",
    "generation.engine_process=shared",
    "generation.engine_process=own generation.enforce_eager=true",
    pytest.param("generation.engine_process=own generation.ngram_tokens=4", marks=needs_gpu),
]
"""Settings of an engine that change its speed and nothing that it samples."""


@pytest.mark.parametrize("choice", CHOICES)
async def test_what_is_sampled_has_the_log_probs_of_the_learner(model, choice, measured):
    """With the presets' settings: bfloat16, and on a GPU recorded graphs. The end of the table names the fastest
    choice. A random model copies nothing, so the row of n-grams shows what wrong guesses cost."""
    config = run_config(model, *choice.split())
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, shape_of(SMALL).vocab, 32).tolist() for _ in range(PROMPTS)]
    async with engine(config) as generator:
        calls = [
            generator.generate(prompt, max_tokens=SAMPLED, sampling=SamplingConfig(temperature=1.0), stop_token_ids=[])
            for prompt in prompts
        ]
        started = time.perf_counter()
        completions = await asyncio.gather(*calls)
        measured["tokens/s"] = sum(len(c.token_ids) for c in completions) / (time.perf_counter() - started)
    learner = make_learner(config)
    try:
        whole = [[*prompt, *c.token_ids] for prompt, c in zip(prompts, completions, strict=True)]
        trained = [row[31:] for row in learner.score(whole)]
    finally:
        learner.close()
    gap = check_canary([c.logprobs for c in completions], trained, tolerance=config.canary_tolerance)
    measured |= {"canary mean": gap.mean, "canary max": gap.maximum}


async def test_an_adapter_is_served_as_it_is_trained(model, measured):
    config = run_config(model, "model.lora_rank=16")
    learner = make_learner(config)
    try:
        async with engine(config) as generator:
            for version in (1, 2):
                train(learner, seed=version)
                await generator.load_weights(pack_weights(learner.served_state_dict()), version)
                measured |= await proven(generator, learner, version=version, tolerance=config.canary_tolerance)
    finally:
        learner.close()


@needs_gpu
@pytest.mark.parametrize("can_sleep", [False, True])
async def test_weights_go_from_learner_to_engine_on_the_gpu(model, can_sleep, measured):
    """By ipc; what the engine holds is the learner's to the bit. One that sleeps frees its memory until then.

    CUDA opens no handle in the process that made it, where the learner of this test is.
    """
    config = run_config(model, "generation.engine_process=own")
    learner = make_learner(config)
    try:
        async with engine(config, transfer="ipc", can_sleep=can_sleep) as generator:
            control = Control(generator, asyncio.get_running_loop())
            sender = await asyncio.to_thread(
                GpuWeightSender, learner.policy.lm, dtype=learner.dtype, control=control, backend="ipc", rank=0
            )
            for version in (1, 2):
                if can_sleep:
                    before, _ = torch.cuda.mem_get_info()
                    await generator.sleep()
                    after, _ = torch.cuda.mem_get_info()
                    assert after - before > 2 * shape_of(SMALL).num_parameters, "its weights alone are as much"
                train(learner, seed=version)
                await asyncio.to_thread(sender.send, version)
                await generator.wake()  # there is room for the cache when the copy that was sent is gone
                measured |= await proven(generator, learner, version=version, tolerance=config.canary_tolerance)
    finally:
        learner.close()
