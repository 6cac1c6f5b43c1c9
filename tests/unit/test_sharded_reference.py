"""The reference on the learner's ranks: the numbers of the separate reference, with one rank and with two."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from learner_setup import make_learner, pack, run_two_ranks, samples, save_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from mempipe.engines.checkpoint import Position
from mempipe.engines.config import ModelConfig
from mempipe.engines.learner import Learner
from mempipe.engines.model import loss_token_logprobs
from mempipe.engines.reference import ReferenceModel
from mempipe.loader import parse_config
from mempipe.rl.packing import MicroBatch
from mempipe.settings import ConfigError
from mempipe.types import TrainingSample
from pipelines.train import step_seconds

LENGTHS = (5, 23, 9, 14, 8, 2, 17, 11, 29)  # of two ranks one has a filler


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("models"))


def step_samples(seed: int) -> list[TrainingSample]:
    """Contexts that no reference has scored."""
    return [dataclasses.replace(sample, ref_logprobs=[]) for sample in samples(seed, LENGTHS)]


def packed(step: list[TrainingSample], rank: int, num_ranks: int, **settings: bool) -> list[MicroBatch]:
    return pack(step, num_ranks=num_ranks, max_tokens=30, **settings)[rank]


def separate_model(folder: Path, dtype: str) -> ReferenceModel:
    model = ModelConfig(path=str(folder), dtype=dtype)  # pyrefly: ignore
    return ReferenceModel(model, temperature=0.7, max_tokens=100)


def with_references(model: ReferenceModel, batches: list[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches with the separate reference's log-probs, computed in the same rows."""
    found = []
    for batch in batches:
        with torch.no_grad():
            logprobs, _ = loss_token_logprobs(model._policy, batch, temperature=0.7)
        found.append(dataclasses.replace(batch, ref_logprobs=logprobs.numpy()))
    return found


def references(learner: Learner) -> list[np.ndarray]:
    """Those of the step that was begun."""
    return [batch.ref_logprobs for update, _ in learner._step for batch in update]


def shards(learner: Learner) -> dict[str, Tensor]:
    """Copies of this rank's shards of the weights and of AdamW's state."""
    return {name: getattr(t, "_local_tensor", t).clone() for name, t in learner._tensors().items()}


def compare_on_ranks(rank: int, port: int, folder: Path, out: Path, num_ranks: int) -> None:
    """Compares in float32 and in bfloat16; all learners share the ranks' process group."""
    first, *_ = [compare(rank, port, folder, out / dtype, num_ranks, dtype) for dtype in ("float32", "bfloat16")]
    first.close()


def compare(rank: int, port: int, folder: Path, out: Path, num_ranks: int, dtype: str) -> Learner:
    """Trains two steps with the reference on the ranks and with given log-probs, and resumes the first from a
    checkpoint. Returns the first learner that was made."""
    place: dict[str, Any] = {"rank": rank, "world_size": num_ranks, "master_port": port}
    place |= {"dtype": dtype, "temperature": 0.7, "updates_per_step": 2, "kl_coef": 0.1}
    holding = make_learner(folder, holds_reference=True, **place)
    given = make_learner(folder, **place)
    separate = separate_model(folder, dtype)
    steps = [[packed(step_samples(seed), rank, num_ranks) for seed in seeds] for seeds in ((0, 1), (2, 3))]
    assert num_ranks == 1 or any(batch.is_filler for other in (0, 1) for batch in packed(step_samples(0), other, 2))
    for step in steps:
        expected = [with_references(separate, update) for update in step]
        reports = holding.step(step)
        wanted = [batch.ref_logprobs for update in expected for batch in update]
        for mine, other in zip(references(holding), wanted, strict=True):
            np.testing.assert_array_equal(mine, other)
        assert [report["loss"] for report in reports] == [report["loss"] for report in given.step(expected)]
        assert reports[0]["reference_seconds"] > 0 and "reference_seconds" not in reports[1]
    assert reports[-1]["kl_ref"] > 0, "the policy has moved"
    trained = shards(given)
    assert all(torch.equal(shard, trained[name]) for name, shard in shards(holding).items())

    # Nothing of the reference leaves the ranks.
    assert holding._tensors().keys() == given._tensors().keys()
    assert holding.num_served_bytes == given.num_served_bytes
    assert holding.checksums() == given.checksums()
    served = given.served_state_dict()
    for name, weight in holding.served_state_dict().items():
        assert torch.equal(weight, served.pop(name)), name
    assert not served

    path = holding.save(out, Position(), keep=1)
    resumed = make_learner(folder, holds_reference=True, seed=9, **place)
    resumed.load(path)
    resumed.begin_step(steps[1])
    for mine, other in zip(references(resumed), wanted, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert holding._reference is not None
    assert all(isinstance(p, DTensor) for p in holding._reference._policy.parameters()), "none is left gathered"
    return holding


def test_one_rank_scores_as_the_separate_reference_to_the_last_digit(qwen2, tmp_path):
    compare_on_ranks(0, 29500, qwen2, tmp_path, 1)


@pytest.mark.slow
def test_two_ranks_score_as_the_separate_reference_to_the_last_digit(qwen2, tmp_path):
    run_two_ranks(compare_on_ranks, qwen2, tmp_path, 2)


@pytest.fixture
def holding(qwen2):
    learner = make_learner(qwen2, holds_reference=True, temperature=0.7, updates_per_step=2)
    yield learner
    learner.close()


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_other_rows_give_the_same_numbers_up_to_rounding(qwen2, holding, share_prefixes):
    """Actors score a group in rows of its own contexts, ranks in the rows that they train."""
    step = step_samples(4)
    rows = separate_model(qwen2, "float32").logprobs(step)
    scored = [dataclasses.replace(sample, ref_logprobs=row) for sample, row in zip(step, rows, strict=True)]
    holding.begin_step([packed(step, 0, 1, share_prefixes=share_prefixes)])
    for mine, batch in zip(references(holding), packed(scored, 0, 1, share_prefixes=share_prefixes), strict=True):
        np.testing.assert_allclose(mine, batch.ref_logprobs, rtol=1e-6, atol=1e-6)


def test_a_step_that_goes_on_scores_the_updates_that_are_left(holding):
    step = [packed(step_samples(seed), 0, 1) for seed in (5, 6)]
    holding.begin_step(step, first=1)
    (done, _), (left, _) = holding._step
    assert not any(batch.ref_logprobs.any() for batch in done)
    assert all(batch.ref_logprobs.any() for batch in left)
    assert holding.update(1)["reference_seconds"] > 0


def test_a_warm_start_holds_no_reference(qwen2):
    assert make_learner(qwen2, holds_reference=True, objective="sft")._reference is None


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({}, "actors"),
        ({"reference": {"on_ranks": True}}, "ranks"),
        ({"reference": {"on_ranks": True}, "algorithm": {"kl_coef": 0}}, "none"),
        ({"model": {"lora_rank": 8}}, "none"),
        ({"algorithm": {"kl_coef": 0, "kl_reward_coef": 0.1}}, "actors"),
    ],
)
def test_there_is_a_second_model_only_where_one_is_needed(values, place):
    assert parse_config(values).reference_place == place


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"algorithm": {"kl_reward_coef": 0.1}}, "reference.on_ranks is true and algorithm.kl_reward_coef 0.1"),
        ({"model": {"lora_rank": 8}}, "with the adapter off is the reference"),
    ],
)
def test_a_reference_on_the_ranks_is_refused_where_it_comes_too_late_or_is_not_needed(values, said):
    with pytest.raises(ConfigError, match=said):
        parse_config({"reference": {"on_ranks": True}, **values})


def test_the_seconds_of_a_reference_on_the_ranks_are_those_of_the_reference():
    context = SimpleNamespace(generate_seconds=3.0, search_seconds=1.0)
    trajectory = SimpleNamespace(contexts=[context])
    batch: Any = SimpleNamespace(
        groups=[SimpleNamespace(trajectories=[trajectory], reference_seconds=0.0, seconds=4.0)], wait_seconds=8.0
    )
    metrics = {"seconds/learn": 5.0, "seconds/sync": 1.0, "learner/reference_seconds": 2.0, "sampled_tokens": 32.0}
    found = step_seconds(metrics, batch, total=16.0)
    assert found["seconds/reference"] == 2.0 and found["seconds/generate"] == 6.0
    assert found["seconds/other"] == pytest.approx(16.0 - 8.0 - 5.0 - 1.0 - 2.0)
