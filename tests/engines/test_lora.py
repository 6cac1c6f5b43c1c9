"""An adapter is served as an adapter, or merged: the engine samples from what the learner trains."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from tiny_qwen2 import CANARY, MAX_MODEL_LEN, VOCAB_SIZE, held, prompts
from transformers import LlamaConfig, LlamaForCausalLM

from mempipe.engines.config import GenerationConfig, LearnerConfig, ModelConfig, OptimizerConfig, SamplingConfig
from mempipe.engines.generator import Generator, WeightTransferFailed
from mempipe.engines.learner import Learner
from mempipe.engines.learner_settings import LearnerSettings
from mempipe.engines.proof import CanaryFailed, StaleWeights, check_canary, check_held
from mempipe.engines.weights import pack_weights
from mempipe.environment import FRONTEND_PID
from mempipe.rl.config import AlgorithmConfig
from mempipe.rl.packing import MicroBatch, pack_step
from mempipe.types import TrainingSample

RANK = 4


@dataclass
class Adapted:
    """An engine and a learner of the same model with the same kind of adapter."""

    generator: Generator
    learner: Learner

    async def sync(self) -> int:
        version = self.generator.policy_version + 1
        await self.generator.load_weights(pack_weights(self.learner.served_state_dict()), version)
        return version

    async def scores(self) -> list[list[float]]:
        return list(await asyncio.gather(*(self.generator.score(ids) for ids in CANARY)))


@asynccontextmanager
async def adapted_model(path: Path, **changes: Any) -> AsyncIterator[Adapted]:
    """One at a time: the engine shares the process."""
    model = ModelConfig(path=str(path), dtype="float32", lora_rank=RANK, lora_alpha=2.0 * RANK, **changes)
    settings = LearnerSettings(
        model=model,
        optimizer=OptimizerConfig(lr=1e-2),
        learner=LearnerConfig(),
        algorithm=AlgorithmConfig(kl_coef=0.0),
        temperature=1.0,
        num_updates=100,
        objective="sft",
    )
    generation = GenerationConfig(max_num_seqs=16, timeout_s=60.0, engine_process="shared")
    generator = Generator(model, generation, max_model_len=MAX_MODEL_LEN, seed=1)
    await generator.start()
    try:
        yield Adapted(generator, Learner(settings))
    finally:
        await generator.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def adapted(model_path: Path) -> AsyncIterator[Adapted]:
    async with adapted_model(model_path) as made:
        yield made


def update(seed: int) -> list[MicroBatch]:
    rows = prompts(4, length=12, seed=seed)
    samples = [
        TrainingSample(
            trajectory_id=f"t{i}",
            group_id="g",
            context_index=0,
            token_ids=row,
            loss_mask=[0] + [1] * 11,
            logprobs=[0.0] * 12,
            policy_versions=[0] * 12,
            advantage=1.0,
            trajectory_tokens=11,
        )
        for i, row in enumerate(rows)
    ]
    ((batch,),) = pack_step(samples, num_ranks=1, max_tokens=1000, aggregation="token")
    return [batch]


async def trained_and_served(adapted: Adapted) -> None:
    """Two updates, each served bit for bit and computed with as the learner does."""
    start = await adapted.scores()
    for seed in (1, 2):
        adapted.learner.step([update(seed)])
        version = await adapted.sync()
        held = await adapted.generator.held_weights()
        check_held(held, adapted.learner.checksums(), engine="generator-0", version=version)
        check_canary(await adapted.scores(), adapted.learner.score(CANARY), tolerance=1e-4)
        (long,) = prompts(1, length=200, seed=seed)
        end = await adapted.generator.score_from_cache(long)
        assert len(end) > 64, "the cache has the beginning, of this adapter"
        check_canary([end], [adapted.learner.score([long])[0][-len(end) :]], tolerance=1e-4)
    with pytest.raises(CanaryFailed):
        check_canary(await adapted.scores(), start, tolerance=1e-2)
    completion = await adapted.generator.generate(CANARY[0], max_tokens=4, sampling=SamplingConfig(), stop_token_ids=[])
    assert completion.policy_version == version
    ((*_, a, b, c, d),) = adapted.learner.score([CANARY[0] + completion.token_ids])
    assert completion.logprobs == pytest.approx([a, b, c, d], abs=1e-4)


async def test_canaries_are_scored_beside_completions(tmp_path):
    """Llama's head could have an adapter of its own; an engine that makes room for one ends here."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_MODEL_LEN,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    async with adapted_model(tmp_path) as adapted:
        await adapted.sync()
        calls = [
            adapted.generator.generate(ids, max_tokens=200, sampling=SamplingConfig(), stop_token_ids=[])
            for ids in prompts(4)
        ]
        with held(adapted.generator, after=20) as steps_are_taken:
            tasks = [asyncio.create_task(call) for call in calls]
            await steps_are_taken()
            scores = asyncio.create_task(adapted.scores())
            while await adapted.generator._engine.num_under_way() < len(tasks) + len(CANARY):
                await asyncio.sleep(0.001)
        check_canary(await scores, adapted.learner.score(CANARY), tolerance=1e-4)
        await asyncio.gather(*tasks)


async def test_the_engine_serves_merged_weights_bit_for_bit_and_agrees_with_the_learner(model_path):
    async with adapted_model(model_path, lora_merge=True) as merged:
        await trained_and_served(merged)
        sent = pack_weights(merged.learner.served_state_dict())
        assert sent.nbytes == pack_weights(merged.learner.full_state_dict()).nbytes


async def test_layers_may_be_named_by_more_than_the_last_part_of_their_names(model_path):
    async with adapted_model(model_path, lora_targets=["layers.1.self_attn.q_proj", "mlp.down_proj"]) as adapted:
        await trained_and_served(adapted)


async def test_the_engine_serves_the_adapter_bit_for_bit_and_agrees_with_the_learner(adapted):
    await trained_and_served(adapted)


async def test_a_new_adapter_samples_the_rest_of_the_completions_under_way(adapted, monkeypatch):
    generator = adapted.generator
    monkeypatch.setattr(generator, "_config", generator._config.model_copy(update={"updates_in_flight": True}))
    before = await adapted.sync()
    calls = [
        generator.generate(ids, max_tokens=200, sampling=SamplingConfig(), stop_token_ids=[]) for ids in prompts(12)
    ]
    with held(generator, after=20) as steps_are_taken:
        tasks = [asyncio.create_task(call) for call in calls]
        await steps_are_taken()
        adapted.learner.step([update(4)])
        after = await adapted.sync()
    completions = await asyncio.gather(*tasks)
    crossed = [i for i, completion in enumerate(completions) if set(completion.policy_versions) == {before, after}]
    assert len(crossed) == 12
    for i in crossed[:4]:
        (scores,) = adapted.learner.score([prompts(12)[i] + completions[i].token_ids])
        new = [place - 200 for place, version in enumerate(completions[i].policy_versions) if version == after]
        assert [completions[i].logprobs[j] for j in new] == pytest.approx([scores[j] for j in new], abs=1e-4)


async def test_an_engine_that_missed_an_adapter_is_caught(adapted):
    version = await adapted.sync()
    adapted.learner.step([update(3)])
    with pytest.raises(StaleWeights, match=r"the first that of model\.layers\.0\..*\.lora_A"):
        check_held(await adapted.generator.held_weights(), adapted.learner.checksums(), engine="e", version=version)
    await adapted.sync()


async def test_a_sync_ships_the_adapter_only(adapted):
    adapter = pack_weights(adapted.learner.served_state_dict())
    assert adapter.nbytes < 0.2 * pack_weights(adapted.learner.full_state_dict()).nbytes


async def test_a_damaged_adapter_stops_sampling_until_a_whole_one_comes(adapted):
    version = await adapted.sync()
    adapter = pack_weights(adapted.learner.served_state_dict())
    with pytest.raises(WeightTransferFailed, match="'update' failed"):
        await adapted.generator.load_weights(np.ascontiguousarray(adapter[:-100]), version + 1)
    assert adapted.generator.policy_version == version
    with pytest.raises(WeightTransferFailed, match=f"version {version + 1}"):
        await adapted.generator.score(CANARY[0])
    await adapted.sync()
    assert await adapted.generator.score(CANARY[0])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_each_part_of_a_joined_layer_gets_its_adapter_and_a_token_without_one_none(monkeypatch, dtype, tolerance):
    monkeypatch.setenv(FRONTEND_PID, str(os.getpid()))
    from mempipe.engines.vllm_worker import add_one_adapter

    torch.manual_seed(0)
    x, before, parts = torch.randn(6, 8, dtype=dtype), torch.randn(6, 7, dtype=dtype), (4, 3)
    first = [torch.randn(1, 1, RANK, 8, dtype=dtype) / 4 for _ in parts]
    second = [torch.randn(1, 1, size, RANK, dtype=dtype) / 4 for size in parts]
    with_adapter = torch.tensor([0, 0, -1, 0, -1, 0])
    found = before.clone()
    wrapper = SimpleNamespace(token_lora_indices=torch.cat([with_adapter, torch.tensor([-1, -1])]))
    add_one_adapter(wrapper, found, x, first, second, 2.0, parts, buffer=None)
    added = [2.0 * x.float() @ a[0, 0].float().T @ b[0, 0].float().T for a, b in zip(first, second, strict=True)]
    expected = before.float() + torch.cat(added, dim=1) * (with_adapter >= 0).unsqueeze(1)
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(found[with_adapter < 0], before[with_adapter < 0])
