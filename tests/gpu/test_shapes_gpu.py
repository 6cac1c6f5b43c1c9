"""Learner, reference and checkpoint at the shapes of the presets; they need torch, but neither vLLM nor Ray."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from shapes import (
    CONTEXT_TOKENS,
    CONTEXTS,
    GPU,
    LARGE,
    SMALL,
    make_learner,
    make_model,
    make_samples,
    make_siblings,
    run_config,
    shape_of,
    start_afresh,
)

from mempipe.engines.checkpoint import Position
from mempipe.engines.proof import check_canary
from mempipe.engines.reference import ReferenceModel
from mempipe.planning.capacity import GIB
from mempipe.planning.ledger import rank_needs, reference_needs
from mempipe.rl.packing import MicroBatch, pack_step

pytestmark = pytest.mark.gpu
TAUGHT = pytest.StashKey[dict[str, tuple[float, float]]]()
"""Loss and gradient norm of the siblings' first update, by model, as the first way of computing it gave them."""


@pytest.fixture(scope="module", params=[SMALL, LARGE], ids=["0.5B", "3B"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = make_model(tmp_path_factory.mktemp("model"), request.param)
    yield request.param, folder
    shutil.rmtree(folder)


def micro_batch(name: str) -> MicroBatch:
    tokens = CONTEXTS * CONTEXT_TOKENS
    ((batch,),) = pack_step(make_samples(shape_of(name)), num_ranks=1, max_tokens=tokens, aggregation="token")
    return batch


def skip_unless_it_fits(num_bytes: int) -> None:
    if GPU and (there := torch.cuda.get_device_properties(0).total_memory) < num_bytes:
        pytest.skip(f"needs {num_bytes / GIB:.0f} GiB by arithmetic, the device has {there / GIB:.0f}")


@pytest.mark.parametrize(
    "setting",
    ["model.lora_rank=0", "model.lora_rank=64", "learner.offload_optimizer=true", "reference.on_ranks=true"],
)
def test_updates_fit_in_what_doctor_says_and_move_the_model(model, setting, measured):
    name, folder = model
    config = run_config(folder, setting)
    expected = rank_needs(config, shape_of(name), num_ranks=1, transfer="ipc")["learn"]
    skip_unless_it_fits(expected)
    learner, batch = make_learner(config), micro_batch(name)
    try:
        before = learner.logprobs(batch)
        updates = learner.step([[batch]] * 3)
        assert not np.array_equal(before, learner.logprobs(batch)), "three updates at 1e-6 are seen in bfloat16"
    finally:
        learner.close()
    last = updates[-1]
    assert all(np.isfinite(update["loss"]) and update["grad_norm"] > 0 for update in updates)
    assert not GPU or last["peak_memory_gib"] * GIB < expected, f"the arithmetic says {expected / GIB:.1f} GiB"
    measured["tokens/s"] = last["tokens_per_second"]
    if "model_flops_utilization" in last:
        measured["MFU"] = last["model_flops_utilization"]


@pytest.mark.parametrize("share", [False, True], ids=["learner.share_prefixes=false", "learner.share_prefixes=true"])
def test_siblings_that_share_a_prefix_cost_less_and_teach_the_same(model, share, measured, request):
    name, folder = model
    config = run_config(folder, f"learner.share_prefixes={share}")
    skip_unless_it_fits(rank_needs(config, shape_of(name), num_ranks=1, transfer="ipc")["learn"])
    siblings = make_siblings(shape_of(name))
    ((batch,),) = pack_step(
        siblings, num_ranks=1, max_tokens=CONTEXTS * CONTEXT_TOKENS, aggregation="token", share_prefixes=share
    )
    learner = make_learner(config)
    try:
        first, last = (learner.step([[batch]])[0] for _ in range(2))
    finally:
        learner.close()
    measured["tokens/s"] = sum(len(sample.token_ids) for sample in siblings) / last["seconds"]
    seen = request.config.stash.setdefault(TAUGHT, {})
    loss, norm = seen.setdefault(name, (first["loss"], first["grad_norm"]))
    assert first["loss"] == pytest.approx(loss, rel=0.02)
    assert first["grad_norm"] == pytest.approx(norm, rel=0.05)


def test_the_reference_scores_as_the_learner_does(model, measured):
    name, folder = model
    config, samples = run_config(folder, "model.gradient_checkpointing=false"), make_samples(shape_of(name))
    skip_unless_it_fits(rank_needs(run_config(folder), shape_of(name), num_ranks=1, transfer="ipc")["learn"])
    tokens = config.learner.max_tokens_per_micro_batch
    learner = make_learner(config)
    try:
        trained = learner.score([sample.token_ids for sample in samples])
    finally:
        learner.close()
        del learner
    start_afresh()
    holding = make_learner(run_config(folder, "reference.on_ranks=true"))
    try:
        holding.begin_step([[micro_batch(name)]])
        ((scored,),) = [batches for batches, _ in holding._step]
    finally:
        holding.close()
        del holding
    start_afresh()
    reference = ReferenceModel(config.model, temperature=1.0, max_tokens=tokens)
    frozen = [row[1:] for row in reference.logprobs(samples)]
    gap = check_canary(frozen, trained, tolerance=config.canary_tolerance)
    measured |= {"canary mean": gap.mean, "canary max": gap.maximum}
    ends = np.cumsum(scored.sequence_lengths - 1)[:-1]  # contexts of one length stay in the order of their ids
    sharded = [part.tolist() for part in np.split(scored.ref_logprobs, ends)]
    check_canary(sharded, frozen, tolerance=config.canary_tolerance)
    if GPU:
        expected, peak = reference_needs(config, shape_of(name))["sample"], torch.cuda.max_memory_reserved()
        assert peak < expected, f"{peak / GIB:.1f} GiB; the arithmetic says {expected / GIB:.1f}"


@pytest.mark.parametrize("lora_rank", [0, 64])
def test_a_checkpoint_gives_back_what_was_trained(model, lora_rank, tmp_path):
    name, folder = model
    if name == LARGE and not lora_rank:
        pytest.skip("37 GB of disk; the small model has the same tensors")
    config, batch = run_config(folder, f"model.lora_rank={lora_rank}"), micro_batch(name)
    learner = make_learner(config)
    try:
        learner.step([[batch]])
        path, expected = learner.save(tmp_path, Position(step=1), keep=1), learner.logprobs(batch)
    finally:
        learner.close()
        del learner
    again = make_learner(config)
    try:
        assert again.load(path) == Position(step=1)
        np.testing.assert_array_equal(again.logprobs(batch), expected)
    finally:
        again.close()
