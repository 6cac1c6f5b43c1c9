"""A real model in bfloat16 at a published learning rate: what a canary cannot see, checksums do.

SmolLM2 comes from an installed package (`mempipe.engines.model_import`); without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from mempipe.engines.config import GenerationConfig, LearnerConfig, ModelConfig, OptimizerConfig
from mempipe.engines.generator import Generator
from mempipe.engines.learner import Learner
from mempipe.engines.learner_settings import LearnerSettings
from mempipe.engines.proof import CanaryFailed, StaleWeights, check_canary, check_held
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.engines.weights import pack_weights
from mempipe.rl.config import AlgorithmConfig
from mempipe.rl.packing import MicroBatch, pack_step
from mempipe.types import TrainingSample

pytestmark = pytest.mark.jobs  # `make test` has the same of a tiny model (test_weights.py)
NUM_UPDATES = 3
TOLERANCE = 0.1
"""Of the mean: engine and learner were seen 0.050 apart on a CPU, whose bfloat16 kernels differ more than a GPU's. The
default of generation.canary_tolerance is the same."""
TEXTS = (
    "The river Aare flows through Bern, the capital of Switzerland, and meets the Rhine near Koblenz.",
    "Who wrote the novel that the film is based on? It was written by an engineer from Lisbon.",
    "<think>The passage names the year, 1911, but not the town.</think> I search for the town next.",
)


@pytest.fixture
def learner(smollm2: Path) -> Iterator[Learner]:
    settings = LearnerSettings(
        model=ModelConfig(path=str(smollm2), dtype="bfloat16"),
        optimizer=OptimizerConfig(lr=1e-6),
        learner=LearnerConfig(num_threads=2),
        algorithm=AlgorithmConfig(kl_coef=0.0),
        temperature=1.0,
        num_updates=100,
        objective="sft",
    )
    with closing(Learner(settings)) as made:
        yield made


def update(rows: list[list[int]]) -> list[MicroBatch]:
    samples = [
        TrainingSample(
            trajectory_id=f"t{i}",
            group_id="g",
            context_index=0,
            token_ids=row,
            loss_mask=[0] + [1] * (len(row) - 1),
            logprobs=[0.0] * len(row),
            policy_versions=[0] * len(row),
            advantage=1.0,
            trajectory_tokens=len(row) - 1,
        )
        for i, row in enumerate(rows)
    ]
    ((batch,),) = pack_step(samples, num_ranks=1, max_tokens=1000, aggregation="token")
    return [batch]


def scale(learner: Learner, part: str, factor: float) -> None:
    with torch.no_grad():
        for name, parameter in learner.policy.named_parameters():
            if part in name:
                parameter *= factor


async def test_promise_5_an_engine_that_misses_one_small_update_is_caught(smollm2, learner):
    tokenizer = load_tokenizer(str(smollm2))
    rows = [tokenizer.encode_text(text) for text in TEXTS]
    engine = Generator(
        ModelConfig(path=str(smollm2), dtype="bfloat16"),
        GenerationConfig(max_num_seqs=4, timeout_s=120.0, num_threads=2),
        max_model_len=256,
    )
    await engine.start()

    async def scores() -> list[list[float]]:
        return list(await asyncio.gather(*(engine.score(row) for row in rows)))

    try:
        for version in range(1, NUM_UPDATES + 1):
            learner.step([update(rows)])
            await engine.load_weights(pack_weights(learner.served_state_dict()), version)
            check_held(await engine.held_weights(), learner.checksums(), engine="generator-0", version=version)
        gap = check_canary(await scores(), learner.score(rows), tolerance=TOLERANCE)
        assert gap.mean > 0

        learner.step([update(rows)])
        check_canary(await scores(), learner.score(rows), tolerance=TOLERANCE)  # which is why checksums are needed
        with pytest.raises(StaleWeights, match="generator-0 does not hold the learner's weights"):
            check_held(await engine.held_weights(), learner.checksums(), engine="generator-0", version=NUM_UPDATES)

        # An engine on a CPU multiplies by copies: packed ones of the layers, a float32 one of the head.
        for part, factor in (("proj", 1.1), ("embed_tokens", 1.5)):
            scale(learner, part, factor)
            with pytest.raises(CanaryFailed):
                check_canary(await scores(), learner.score(rows), tolerance=TOLERANCE)
            await engine.load_weights(pack_weights(learner.served_state_dict()), NUM_UPDATES + 1)
            check_canary(await scores(), learner.score(rows), tolerance=TOLERANCE)
    finally:
        await engine.shutdown()
