"""The ledger of memory: no plan that is accepted exceeds a GPU in any phase."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2Config

from mempipe.checks.findings import Finding
from mempipe.checks.machine import Devices
from mempipe.checks.roles import check_roles
from mempipe.config import RunConfig
from mempipe.engines import model as learner_model
from mempipe.loader import load_config
from mempipe.planning.capacity import GIB, KNOWN, ModelShape, trained_parameters, weight_width
from mempipe.planning.ledger import (
    CONTEXT,
    COPIES_OF_LOGITS,
    KERNELS,
    LOGITS,
    PHASES,
    RESERVED,
    SPARE,
    Ledger,
    cache_bytes,
    engine_held,
    engine_needs,
    rank_needs,
    reference_needs,
    share_bounds,
)
from mempipe.planning.placement import Demand, Placement, bundle_gpus, plan
from mempipe.retrieval.build import build_index
from mempipe.retrieval.manifest import read_manifest
from mempipe.settings import ConfigError
from mempipe.types import Passage

CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"
SEVEN = KNOWN["Qwen/Qwen2.5-7B-Instruct"]
H100 = 79.2
EIGHT = ModelShape(
    hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=12288, vocab=151936, tied=False
)


def preset(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"memsearcher_qwen2.5-{name}.yaml", overrides)


def said(config: RunConfig, gpus: int, gib: float = H100) -> list[Finding]:
    return check_roles(config, Devices(num_gpus=gpus, gpu_gib=gib))


def least_needed(config: RunConfig, shape: ModelShape, made: Placement, gpu_bytes: int) -> dict[str, list[int]]:
    """What is on every GPU at least, by phase: weights, states and the engine's share, and nothing of what is assumed.
    Written apart from the ledger, so that both must be wrong to agree on too little."""
    width, trained = weight_width(config.model), trained_parameters(config.model, shape)
    weights = width * shape.num_parameters
    share = int(made.gpu_memory_utilization * gpu_bytes)
    offloads, moments = config.learner.offload_optimizer, 8 * trained // made.num_ranks
    state = 4 * shape.num_parameters // made.num_ranks + moments * (not offloads)
    needed: dict[str, list[int]] = {"score": [], "learn": [], "send": [], "sample": []}
    gathered = width * (shape.root_parameters + shape.layer_parameters) * (config.reference_place == "ranks")
    for bundle in made.bundles:
        rank, engine, reference = ("learner" in bundle, "generator" in bundle, "reference" in bundle)
        always = state * rank + weights * reference
        copied = weights if made.transfer == "ipc" and rank else 0
        needed["score"].append(always + gathered * rank + share * engine * (not made.sleeps))
        tokens = config.learner.max_tokens_per_micro_batch * shape.hidden * shape.layers * width
        needed["learn"].append(
            always
            + (4 * trained // made.num_ranks + max(tokens, moments * offloads)) * rank
            + share * engine * (not made.sleeps)
        )
        receiving = weights // made.tensor_parallel if made.sleeps else share
        needed["send"].append(always + copied + receiving * engine)
        needed["sample"].append(always + share * engine)
    return needed


SHAPES = st.builds(
    lambda hidden, layers, heads, kv, intermediate, vocab, tied: ModelShape(
        hidden=128 * hidden,
        layers=layers,
        heads=kv * heads,
        kv_heads=kv,
        head_dim=128,
        intermediate=256 * intermediate,
        vocab=vocab,
        tied=tied,
    ),
    st.integers(4, 64),
    st.integers(4, 80),
    st.integers(1, 8),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(8, 120),
    st.sampled_from([32_000, 128_256, 152_064]),
    st.booleans(),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    shape=SHAPES,
    gpus=st.integers(1, 16),
    gib=st.sampled_from([24.0, 44.5, 79.2, 139.8, 178.0]),
    ranks=st.integers(1, 8),
    engines=st.integers(1, 6),
    references=st.integers(0, 3),
    tensor_parallel=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    lora_rank=st.sampled_from([0, 0, 32]),
    checkpointing=st.booleans(),
    offloads=st.booleans(),
    on_ranks=st.booleans(),
    placement=st.sampled_from(["auto", "auto", "separate", "colocated"]),
    utilization=st.sampled_from([0.5, 0.85, 0.97]),
)
def test_no_plan_that_is_accepted_exceeds_a_gpu_in_any_phase(
    shape,
    gpus,
    gib,
    ranks,
    engines,
    references,
    tensor_parallel,
    dtype,
    lora_rank,
    checkpointing,
    offloads,
    on_ranks,
    placement,
    utilization,
):
    config = preset(
        "3b",
        "model.path=drawn",
        f"model.dtype={dtype}",
        f"model.lora_rank={lora_rank}",
        f"model.gradient_checkpointing={checkpointing}",
        f"learner.offload_optimizer={offloads}",
        f"learner.num_ranks={ranks}",
        f"generation.num_replicas={engines}",
        f"generation.tensor_parallel={tensor_parallel}",
        f"generation.gpu_memory_utilization={utilization}",
        f"reference.num_replicas={references or 1}",
        f"reference.on_ranks={on_ranks and not lora_rank}",
        f"algorithm.kl_coef={0.001 if references else 0}",
        f"placement={placement}",
    )
    gpu_bytes = int(gib * GIB)
    with patch.dict(KNOWN, {"drawn": shape}):
        try:
            made = plan(config, Demand.of_training(config), [gpus], gpu_bytes=gpu_bytes)
        except ConfigError:
            made = None
    assume(made is not None)
    assert bool(made.seats("reference")) == bool(references and not lora_rank and not on_ranks)
    limit = (1 - SPARE) * gpu_bytes
    for phase, cards in least_needed(config, shape, made, gpu_bytes).items():
        assert max(cards) <= limit, phase
    ledger = made.ledger(config, shape, gpu_bytes=gpu_bytes)
    assert len(ledger.cards) == sum(map(bundle_gpus, made.bundles)) == sum(made.places)
    if made.kind == "colocated":
        assert made.num_ranks == made.num_engines * made.tensor_parallel == made.num_engines * made.span
    assert all(card.total(phase) <= limit for card in ledger.cards for phase in PHASES)


def test_colocated_engines_that_sleep_leave_room_for_the_copy_that_is_sent():
    """A 7B on four and an 8B on eight GPUs of 80 GB: the engine once had all that the rank's held state left, and the
    sender's copy came on top."""
    seven = preset("7b", "placement=colocated", "algorithm.kl_coef=0")
    eight = preset("7b", "placement=colocated", "model.path=drawn")
    with patch.dict(KNOWN, {"drawn": EIGHT}):
        for config, shape, gpus in ((seven, SEVEN, 4), (eight, EIGHT, 8)):
            made = plan(config, Demand.of_training(config), [gpus], gpu_bytes=int(H100 * GIB))
            assert made.kind == "colocated" and made.sleeps
            needed = least_needed(config, shape, made, int(H100 * GIB))
            assert max(map(max, needed.values())) <= 0.94 * H100 * GIB
        with_reference = preset("7b", "placement=colocated")
        (problem,) = [finding.text for finding in said(with_reference, 4) if finding.fatal]
    assert "phase send needs" in problem and "reference" in problem and "model.lora_rank" in problem


def test_a_reference_on_the_gpu_of_a_rank_counts_with_it():
    """A 7B with two ranks, an engine and a reference on three GPUs puts rank and reference on one, which is too
    small."""
    config = preset(
        "7b", "learner.num_ranks=2", "generation.num_replicas=1", "reference.num_replicas=1", "placement=auto"
    )
    (problem,) = [finding.text for finding in said(config, 3) if finding.fatal]
    assert "of a GPU of 79.2 GiB at most 74.4 are planned" in problem


def test_the_part_of_an_engine_is_the_largest_that_fits_and_is_found_in_a_few_tries(monkeypatch):
    tried = []
    ledger = Placement.ledger

    def counted(made: Placement, *args: Any, **kwargs: Any) -> Ledger:
        tried.append(made.gpu_memory_utilization)
        return ledger(made, *args, **kwargs)

    monkeypatch.setattr(Placement, "ledger", counted)
    config, gpu_bytes = preset("3b"), int(139.8 * GIB)
    made = plan(config, Demand.of_training(config), [1], gpu_bytes=gpu_bytes)
    assert len(tried) <= 8, tried
    more = replace(made, gpu_memory_utilization=round(made.gpu_memory_utilization + 0.01, 2))
    shape = KNOWN[config.model.path]
    assert made.gpu_memory_utilization < config.generation.gpu_memory_utilization
    assert not made.ledger(config, shape, gpu_bytes=gpu_bytes).excess()
    assert more.ledger(config, shape, gpu_bytes=gpu_bytes).excess()


def test_a_gpu_that_all_roles_share_is_never_full():
    """The 3B preset on one H200 once filled 139.0 of 139.8 GiB."""
    config = preset("3b")
    made = plan(config, Demand.of_training(config), [1], gpu_bytes=int(139.8 * GIB))
    ledger = made.ledger(config, KNOWN[config.model.path], gpu_bytes=int(139.8 * GIB))
    (card,) = ledger.cards
    assert set(card.needs) == {"learner", "generator", "reference"}
    assert 0.8 * 139.8 < max(card.total(phase) for phase in PHASES) / GIB <= 0.94 * 139.8


def test_an_engine_takes_no_more_than_the_cache_that_it_can_use():
    config = preset("3b", "model.path=Qwen/Qwen2.5-0.5B-Instruct", "generation.max_num_seqs=32")
    shape = KNOWN[config.model.path]
    made = plan(config, Demand.of_training(config), [1], gpu_bytes=int(H100 * GIB))
    useful = engine_held(config, shape, tensor_parallel=1) + KERNELS + 2 * cache_bytes(config, shape, contexts=32)
    assert not made.sleeps
    assert useful <= made.gpu_memory_utilization * H100 * GIB < useful + 0.01 * H100 * GIB


def test_a_share_that_leaves_nothing_for_the_weights_that_arrive_is_refused():
    (problem,) = [f.text for f in said(preset("3b", "generation.gpu_memory_utilization=0.97", "placement=separate"), 8)]
    assert "phase send needs" in problem and "generation.gpu_memory_utilization" in problem


def vectors_on(gpus: int, index: Path, *, actors: int = 0) -> RunConfig:
    """The preset's eight roles, and actors with so many GPUs each that hold vectors."""
    return preset("3b", f"retrieval.index={index}", f"retrieval.num_gpus={gpus}", f"retrieval.shard_actors={actors}")


@pytest.mark.parametrize("factory", ["Flat", "SQfp16"])
def test_vectors_take_their_float16_copies_of_the_gpus_that_hold_them(factory, tmp_path):
    """Ten vectors in shards of four, four and two: an actor with two GPUs has the first and the last on one of them."""
    passages = [Passage(id=str(i), title=f"T{i}", text=f"word{i} word{i + 1}") for i in range(10)]
    shards_of_four = {"faiss": {"factory": factory, "shard_passages": 4}, "segment_passages": 2}
    build_index(passages, tmp_path / "index", **shards_of_four)
    vectors = read_manifest(tmp_path / "index")[0].vectors
    assert vectors is not None
    for actors, gpus, rows, shards in ((0, 1, 10, 3), (0, 2, 6, 2), (2, 1, 6, 2), (3, 1, 4, 1)):
        config = vectors_on(gpus, tmp_path / "index", actors=actors)
        made = plan(config, Demand.of_training(config), [16], gpu_bytes=int(H100 * GIB))
        ledger = made.ledger(config, KNOWN[config.model.path], gpu_bytes=int(H100 * GIB))
        cards = [card for card in ledger.cards if "retrieval" in card.needs]
        assert len(cards) == max(actors, 1) * gpus
        (needed,) = {card.total(phase) for card in cards for phase in PHASES}
        assert needed - CONTEXT - shards * 2**28 == pytest.approx(2 * rows * vectors.dimension, rel=0.05)
    shown = "\n".join(finding.text for finding in said(vectors_on(2, tmp_path / "index"), 10))
    assert "2 x retrieval" in shown and "not estimated" not in shown


def test_vectors_that_exceed_their_gpus_are_refused_with_what_would_help(tmp_path):
    config = vectors_on(2, tmp_path)
    demand = replace(Demand.of_training(config), vector_bytes=90 * GIB)
    with pytest.raises(
        ConfigError, match=r"phase learn needs 91\.5 GiB \(retrieval 91\.5\), .*; raise retrieval.num_gpus"
    ):
        plan(config, demand, [10], gpu_bytes=int(H100 * GIB))


def test_vectors_of_an_index_that_is_elsewhere_are_not_in_the_ledger_and_doctor_says_so(tmp_path):
    shown = [finding.text for finding in said(vectors_on(2, tmp_path / "away"), 10)]
    assert any("2 GPU for retrieval" in text for text in shown)
    assert any(f"index {tmp_path / 'away'} is not here" in text for text in shown)


def test_doctor_says_that_engines_have_fewer_gpus_than_the_config_wants():
    config = preset("3b", "generation.tensor_parallel=8")
    shown = [finding.text for finding in said(config, 4) if "tensor_parallel" in finding.text]
    assert shown == [
        "generation.tensor_parallel is 8, but engines share their GPUs with the learner, and with 8 of one node each "
        "the roles do not fit, so the plan has 1; with 29 GPUs every role has its own (placement separate)"
    ]
    for gpus in (8, 29):
        assert not [finding.text for finding in said(config, gpus) if "tensor_parallel" in finding.text]


def test_an_engine_of_several_shared_gpus_holds_a_part_of_the_weights_on_each():
    """A 14B on eight GPUs of 80 GB fits with engines of two of them, and on four with the moments away as well."""
    settings = (FOURTEEN, "algorithm.kl_coef=0")
    two = preset("7b", *settings, "generation.tensor_parallel=2")
    assert not any(finding.fatal for finding in said(two, 8))
    shape = KNOWN["Qwen/Qwen2.5-14B-Instruct"]
    made = plan(two, Demand.of_training(two), [8], gpu_bytes=int(H100 * GIB))
    (needs,) = {tuple(card.needs["generator"].items()) for card in made.ledger(two, shape, gpu_bytes=0).cards}
    assert dict(needs)["learn"] == KERNELS
    assert dict(needs)["send"] == KERNELS + shape.num_parameters + 2 * shape.head_parameters
    (refused,) = [f.text for f in said(preset("7b", *settings), 4) if f.fatal]
    assert refused.endswith("It fits with learner.offload_optimizer: true and generation.tensor_parallel: 2")
    fitting = preset("7b", *settings, "learner.offload_optimizer=true", "generation.tensor_parallel=2")
    shown = said(fitting, 4)
    assert not any(finding.fatal for finding in shown)
    assert any("4 x 1 GPU for learner + generator; every engine on 2 of them" in finding.text for finding in shown)


def test_a_rank_by_hand():
    """A 7B over eight ranks, by nccl."""
    config, p = preset("7b"), SEVEN.num_parameters
    needs = rank_needs(config, SEVEN, num_ranks=8, transfer="nccl")
    state = CONTEXT + 12 * p // 8
    assert needs["sample"] == needs["evaluate"] == needs["wake"] == state
    head = 152064 * 3584
    gathered = 2 * head * 9 // 8
    assert needs["send"] - state == pytest.approx(1.1 * (2 * gathered + 2 * GIB), rel=1e-6)
    assert needs["checkpoint"] - state == pytest.approx(1.1 * 4 * head, rel=1e-6)
    learn = 4 * p / 8 + 14 * SEVEN.layer_parameters + 4 * 2 * head + 8 * head
    learn += 16384 * (3584 * 28 + 16 * 3584 + 8 * 18944) * 2 + 4 * 3 * 2**26
    assert needs["learn"] - state == pytest.approx(1.1 * learn, rel=1e-6)
    copy = rank_needs(config, SEVEN, num_ranks=8, transfer="ipc")["send"] - state
    assert copy == pytest.approx(1.1 * (2 * p + gathered), rel=1e-6)


def test_offloaded_moments_are_on_a_gpu_in_the_update_only():
    """A 7B over eight ranks: 8 bytes a parameter less in all phases. In an update they replace the activations; on two
    ranks they are more than those."""
    config, p = preset("7b"), SEVEN.num_parameters
    offloading = preset("7b", "learner.offload_optimizer=true")
    for num_ranks, working in ((8, None), (2, 4 * p / 2 + 8 * p / 2)):
        kept, away = (rank_needs(c, SEVEN, num_ranks=num_ranks, transfer="ipc") for c in (config, offloading))
        moments = 8 * p // num_ranks
        assert all(kept[phase] - away[phase] == pytest.approx(moments, abs=2) for phase in PHASES if phase != "learn")
        expected = kept["learn"] - moments if working is None else CONTEXT + 4 * p / 2 + 1.1 * working
        assert away["learn"] == pytest.approx(expected, rel=1e-6)


FOURTEEN = "model.path=Qwen/Qwen2.5-14B-Instruct"


def test_a_14b_fits_on_eight_gpus_of_80_gb_with_the_settings_that_doctor_names():
    (refused,) = [f.text for f in said(preset("7b", FOURTEEN, "algorithm.kl_coef=0"), 8) if f.fatal]
    assert refused.endswith("It fits with learner.offload_optimizer: true")
    fitting = preset("7b", FOURTEEN, "algorithm.kl_coef=0", "learner.offload_optimizer=true")
    shown = said(fitting, 8)
    assert not any(finding.fatal for finding in shown)
    assert any(finding.text.startswith("memory by phase") for finding in shown)
    (refused,) = [f.text for f in said(preset("7b", FOURTEEN), 8) if f.fatal]
    assert refused.endswith("It fits with learner.offload_optimizer: true and reference.on_ranks: true")
    shown = said(preset("7b", FOURTEEN, "learner.offload_optimizer=true", "reference.on_ranks=true"), 8)
    assert not any(finding.fatal for finding in shown)
    assert any(finding.text.startswith("colocated: 8 x 1 GPU for learner + generator;") for finding in shown)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_reference_on_the_ranks_takes_no_memory_of_a_gpu_beside_gradients(checkpointing):
    """It scores before the updates of a step, which need more than it does."""
    settings = ("learner.offload_optimizer=true", f"model.gradient_checkpointing={checkpointing}")
    holding = preset("7b", "reference.on_ranks=true", *settings)
    without = preset("7b", "algorithm.kl_coef=0", *settings)
    for num_ranks in (1, 2, 8):
        needs = [rank_needs(c, SEVEN, num_ranks=num_ranks, transfer="ipc") for c in (holding, without)]
        assert needs[0] == needs[1]


def test_doctor_names_no_setting_where_none_makes_the_model_fit():
    (refused,) = [f.text for f in said(preset("7b", FOURTEEN, "algorithm.kl_coef=0"), 2) if f.fatal]
    assert "needs" in refused and "It fits with" not in refused


def test_an_adapter_needs_masters_but_no_gradients_or_moments_of_the_base():
    config = preset("7b", "model.lora_rank=32")
    needs = rank_needs(config, SEVEN, num_ranks=4, transfer="mempipe_shm")
    adapter = 32 * 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert needs["sample"] - CONTEXT == (4 * SEVEN.num_parameters + 8 * adapter) // 4


def test_contexts_that_share_prefixes_are_whole_in_attention():
    config = preset("7b")
    shared = config.model_copy(update={"learner": config.learner.model_copy(update={"share_prefixes": True})})
    one, other = (rank_needs(c, SEVEN, num_ranks=8, transfer="nccl") for c in (config, shared))
    assert other["learn"] > one["learn"] and other["sample"] == one["sample"]


def test_an_engine_that_sleeps_keeps_what_it_computes_with_and_takes_weights_before_its_cache():
    config = preset("7b")
    share = 40 * GIB
    asleep = engine_needs(config, SEVEN, tensor_parallel=1, share_bytes=share, sleeps=True, transfer="ipc")
    awake = engine_needs(config, SEVEN, tensor_parallel=1, share_bytes=share, sleeps=False, transfer="ipc")
    weights, arriving = 2 * SEVEN.num_parameters, 2 * 152064 * 3584
    assert asleep["learn"] == asleep["gather"] == KERNELS
    assert asleep["send"] == weights + KERNELS + arriving
    assert {asleep[phase] for phase in ("wake", "check", "sample", "evaluate", "checkpoint")} == {share}
    assert awake["learn"] == share and awake["send"] == share + arriving


def test_weights_and_cache_of_an_engine_are_divided_by_tensor_parallelism():
    config = preset("7b")
    one, two = (cache_bytes(config, SEVEN, contexts=16, tensor_parallel=n) for n in (1, 2))
    assert one == 2 * two == 16 * 8192 * 2 * 28 * 4 * 128 * 2
    held = [engine_held(config, SEVEN, tensor_parallel=n) for n in (1, 2)]
    assert held[0] - held[1] == SEVEN.num_parameters


def test_gpus_that_are_more_than_the_heads_of_the_cache_hold_copies():
    """Qwen2.5-3B has two heads of keys and values, and 16 of queries."""
    config, shape = preset("3b"), KNOWN["Qwen/Qwen2.5-3B-Instruct"]
    two, four = (cache_bytes(config, shape, contexts=1, tensor_parallel=n) for n in (2, 4))
    assert two == four == 8192 * 2 * 36 * 128 * 2
    engines = ("generation.num_replicas=1", "placement=separate")
    shown = said(preset("3b", "generation.tensor_parallel=4", *engines), 9)
    assert any("KV cache 0.14 GiB per full context" in finding.text for finding in shown)
    assert any("4 x generator " in finding.text for finding in shown)  # GPUs, not engines
    (problem,) = [f.text for f in said(preset("3b", "generation.tensor_parallel=3", *engines), 8) if f.fatal]
    assert problem == "generation.tensor_parallel is 3, which does not divide the 16 attention heads of the model"


@pytest.mark.parametrize(
    ("shape", "parts", "reason"),
    [
        (SEVEN, 7, "neither divides nor repeats the 4 heads of keys and values"),
        (replace(SEVEN, heads=24, kv_heads=12), 3, "does not divide the intermediate size 18944"),
        (replace(SEVEN, heads=24, kv_heads=12, intermediate=6144, vocab=151936), 3, "padded vocabulary 151936"),
        (replace(SEVEN, heads=24, kv_heads=12, intermediate=6144, vocab=50_250), 3, ""),  # 50,304 are divisible
        (SEVEN, 4, ""),
        (KNOWN["Qwen/Qwen2.5-3B-Instruct"], 8, ""),
    ],
)
def test_engines_are_refused_that_vllm_cannot_split_over_their_gpus(shape, parts, reason):
    config = preset("7b", f"generation.tensor_parallel={parts}", "placement=separate")
    with patch("mempipe.checks.roles.model_shape", return_value=shape):
        problems = [finding.text for finding in said(config, 128) if finding.fatal]
    assert len(problems) == bool(reason) and all(reason in problem for problem in problems)


def test_the_largest_share_is_the_setting_itself():
    """100 * 0.57 is 56.99... in binary."""
    config = preset("3b", "generation.gpu_memory_utilization=0.57")
    assert share_bounds(config, KNOWN["Qwen/Qwen2.5-3B-Instruct"], gpu_bytes=int(H100 * GIB))[1] == 57


def test_a_reference_holds_its_weights_in_every_phase():
    needs = reference_needs(preset("7b"), SEVEN)
    working = 16384 * (8 * 3584 + 4 * 18944) * 2 + 4 * 3 * 2**26
    (always,) = set(needs.values())
    assert set(needs) == {*PHASES}
    assert always == pytest.approx(CONTEXT + 2 * SEVEN.num_parameters + (1 + RESERVED) * working)


class LargeTensors(TorchDispatchMode):
    """Counts the tensors of at least so many bytes that exist at the same time."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.most = 0
        self._num_bytes = num_bytes
        self._living: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= self._num_bytes:
                self._living.add(StorageWeakRef(tensor.untyped_storage()))
        self._living = {each for each in self._living if not each.expired()}
        self.most = max(self.most, len(self._living))
        return result


@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_logits_are_those_that_the_learner_makes_at_once(entropy_gradient):
    """In float32, so without the 16-bit copy of the gradient that the ledger has besides."""
    assert LOGITS == learner_model.MAX_LOGITS
    rows, vocab = 200, 400
    head = torch.nn.Linear(8, vocab, bias=False)
    lm: Any = SimpleNamespace(config=Qwen2Config(), get_output_embeddings=lambda: head)
    policy = learner_model.PolicyModel(lm)
    policy.entropy_gradient = entropy_gradient
    states, targets = torch.randn(3 * rows, 8, requires_grad=True), torch.randint(vocab, (3 * rows,))
    with LargeTensors(4 * rows * vocab) as counted:
        chunks = [
            checkpoint(policy._score, states[i : i + rows], targets[i : i + rows], 0.7, None, use_reentrant=False)
            for i in range(0, 3 * rows, rows)
        ]
        sum((logprobs + entropies).sum() for logprobs, entropies in chunks).backward()
    assert counted.most == COPIES_OF_LOGITS - 1


def test_doctor_shows_the_ledger_and_names_the_tightest_phase():
    (table,) = [finding.text for finding in said(preset("3b"), 1) if finding.text.startswith("memory by phase")]
    lines = table.splitlines()
    assert lines[1].split()[4:] == list(PHASES)
    assert [line.split()[0] for line in lines[3:6]] == ["learner", "generator", "reference"]
    total, parts = (lines[2].split()[-len(PHASES) :], [line.split()[1:] for line in lines[3:6]])
    for column in range(len(PHASES)):
        assert float(total[column]) == pytest.approx(sum(float(part[column]) for part in parts), abs=0.2)
    assert lines[-1].strip().startswith("tightest: ") and "of 79.2 GiB" in lines[-1]
    alone = check_roles(preset("3b"), Devices(num_gpus=8, gpu_gib=H100), training=False)
    assert any("evaluate on generator" in finding.text for finding in alone)


def test_the_ledger_of_more_ranks_is_never_larger():
    config = preset("7b")
    few, many = (rank_needs(config, SEVEN, num_ranks=n, transfer="ipc") for n in (4, 8))
    assert all(many[phase] < few[phase] for phase in PHASES)
    wider = rank_needs(config, replace(SEVEN, layers=32), num_ranks=8, transfer="ipc")
    assert all(wider[phase] > many[phase] for phase in PHASES)
