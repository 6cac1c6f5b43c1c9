"""Where roles go, for clusters of every size: pure arithmetic, no cluster."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from mempipe.config import RunConfig
from mempipe.loader import load_config
from mempipe.planning.capacity import GIB
from mempipe.planning.placement import Demand, Placement, bundle_gpus, plan
from mempipe.settings import ConfigError

CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"
H100 = 79 * GIB


def planned(config: RunConfig, *gpus_per_node: int, gib: int | None = 79) -> Placement:
    memory = None if gib is None else gib * GIB
    return plan(config, Demand.of_training(config), gpus_per_node, gpu_bytes=memory)


def quickstart(*overrides: str) -> RunConfig:
    """Two ranks, one engine, one reference."""
    return load_config(CONFIGS / "quickstart.yaml", overrides)


def preset(*overrides: str) -> RunConfig:
    """Qwen2.5-3B: four ranks, three engines, one reference."""
    return load_config(CONFIGS / "memsearcher_qwen2.5-3b.yaml", overrides)


@pytest.mark.parametrize(
    ("gpus", "kind", "transfer", "ranks", "engines", "unused"),
    [
        (0, "cpu", "mempipe_shm", 2, 1, 0),
        (1, "colocated", "ipc", 1, 1, 0),
        (2, "colocated", "ipc", 2, 2, 0),
        (3, "separate", "nccl", 2, 1, 0),  # the reference shares a rank's GPU
        (4, "separate", "nccl", 2, 1, 0),
        (8, "separate", "nccl", 2, 1, 4),
    ],
)
def test_the_quickstart_has_a_plan_for_any_number_of_gpus(gpus, kind, transfer, ranks, engines, unused):
    found = planned(quickstart(), *([gpus] if gpus else []), gib=None)
    assert (found.kind, found.transfer, found.unused_gpus) == (kind, transfer, unused)
    assert (found.num_ranks, found.num_engines, found.tensor_parallel) == (ranks, engines, 1)
    applied = found.applied(quickstart())
    assert (applied.learner.num_ranks, applied.generation.num_replicas) == (ranks, engines)


@pytest.mark.parametrize("gpus", range(1, 13))
@pytest.mark.parametrize("config", [quickstart(), preset(), preset("generation.tensor_parallel=2")], ids=str)
@pytest.mark.parametrize("placement", ["auto", "colocated"])
def test_no_plan_takes_more_gpus_than_there_are_and_no_gpu_is_given_twice(gpus, config, placement):
    config = config.model_copy(update={"placement": placement})
    found = planned(config, gpus, gib=141)
    assert sum(map(bundle_gpus, found.bundles)) + found.unused_gpus == gpus
    for bundle in found.bundles:
        assert sum(bundle.values()) <= bundle_gpus(bundle)
    assert len(found.seats("learner")) == found.num_ranks >= 1
    assert len(found.seats("generator")) == found.num_engines >= 1
    assert len(found.seats("reference")) == 1
    assert all(gpus == found.tensor_parallel for _, gpus in found.seats("generator") if found.kind == "separate")
    assert sum(found.places) == sum(map(bundle_gpus, found.bundles))
    ranks, engines = ([place for place, _ in found.seats(role)] for role in ("learner", "generator"))
    for place, gpus in enumerate(found.places):  # by Ray's count no role of a shared place finds another GPU
        assert engines.count(place) <= 1
        if place in engines and place in ranks:
            assert ranks.count(place) == gpus == found.tensor_parallel
            assert gpus == 1 or all(0.5 < share < 1 for i, share in found.seats("learner") if i == place)


def test_colocated_puts_a_rank_and_an_engine_on_every_gpu():
    found = planned(quickstart("placement=colocated"), 4)
    places = Counter(tuple(bundle) for bundle in found.bundles)
    assert places == {("learner", "generator"): 3, ("learner", "generator", "reference"): 1}
    assert found.transfer == "ipc"
    assert planned(quickstart("placement=colocated"), 8).unused_gpus == 4  # it asked for four


def test_the_reference_shares_with_a_rank_before_anything_else_does():
    found = planned(preset(), 7)
    assert found.seats("reference") == [(3, 0.2)] and found.seats("learner")[3] == (3, 0.8)
    assert found.seats("generator") == [(4, 1), (5, 1), (6, 1)]


def test_several_references_have_a_gpu_each():
    config = preset("reference.num_replicas=2")
    assert planned(config, 9).seats("reference") == [(7, 1), (8, 1)]
    assert planned(config, 8).seats("reference") == [(2, 0.2), (3, 0.2)]  # on the GPUs of two ranks
    assert (
        planned(config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"kl_coef": 0.0})}), 8).seats(
            "reference"
        )
        == []
    )


def test_separate_is_refused_where_gpus_are_few():
    words = "placement is 'separate', and the roles need 4 GPUs (learner 2, generator 1, reference 1), but the cluster"
    with pytest.raises(ConfigError, match=re.escape(words)):
        planned(quickstart("placement=separate"), 3)


def test_an_engine_of_several_gpus_needs_them_on_one_node():
    config = preset("generation.tensor_parallel=4", "generation.num_replicas=1", "learner.num_ranks=3")
    assert planned(config, 8).seats("generator") == [(3, 4)]
    assert planned(config, 4, 4).kind == "separate"
    scattered = planned(config, 2, 2, 2, 2)
    assert scattered.kind == "colocated" and scattered.tensor_parallel == 1
    with pytest.raises(ConfigError, match=re.escape("has 8 on nodes of 2 + 2 + 2 + 2; lower")):
        planned(config.model_copy(update={"placement": "separate"}), 2, 2, 2, 2)


def test_an_engine_of_several_gpus_shares_them_with_ranks_of_its_node():
    config = preset("placement=colocated", "generation.tensor_parallel=2")
    found = planned(config, 8)
    assert (found.num_ranks, found.num_engines, found.tensor_parallel) == (8, 4, 2)
    assert found.places == [2, 2, 2, 2] and found.transfer == "ipc"
    assert [place for place, _ in found.seats("learner")] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [place for place, _ in found.seats("generator")] == [0, 1, 2, 3]
    assert found.seats("reference") == [(3, 0.2)]
    assert "every engine on 2 of them" in str(found)
    applied = found.applied(config)
    assert (applied.learner.num_ranks, applied.generation.num_replicas, applied.generation.tensor_parallel) == (8, 4, 2)
    assert planned(config, 3, 3, 1).places == [2, 2]  # a node has one engine, and two GPUs are unused
    assert planned(config, 3, 3, 1).unused_gpus == 3
    vectors = planned(preset("placement=colocated", "generation.tensor_parallel=2", "retrieval.index=x",
                             "retrieval.num_gpus=2"), 8)  # fmt: skip
    assert vectors.places == [2, 2, 2, 2] and vectors.seats("retrieval") == [(3, 2)]


def test_an_engine_has_a_gpu_alone_where_those_of_several_leave_too_little():
    """On three GPUs an engine of two leaves one unused, and two ranks are too few for a 7B."""
    config = load_config(
        CONFIGS / "memsearcher_qwen2.5-7b.yaml",
        ["generation.tensor_parallel=2", "algorithm.kl_coef=0"],
    )
    assert planned(config, 2, gib=100).tensor_parallel == 2
    assert planned(config, 3, gib=79).tensor_parallel == 1


def test_an_engine_sleeps_where_memory_asks_for_it():
    small = planned(quickstart("model.path=Qwen/Qwen2.5-0.5B-Instruct", "model.dtype=bfloat16"), 1)
    assert not small.sleeps and small.gpu_memory_utilization < 0.12  # what its short contexts can use
    full = planned(preset(), 1, gib=79)
    assert full.sleeps and 0.1 < full.gpu_memory_utilization < 0.4
    lora = planned(preset("model.lora_rank=32"), 1, gib=79)
    assert lora.transfer == "mempipe_shm" and not lora.sleeps
    config = preset()
    assert full.applied(config).generation.timeout_s == config.generation.timeout_s + config.learner.timeout_s
    assert lora.applied(config).generation.timeout_s == config.generation.timeout_s


def test_what_fits_on_no_gpu_even_in_turns_is_refused_with_what_would_help():
    with pytest.raises(ConfigError, match=r"a GPU of 24 GiB .* model.lora_rank"):
        planned(preset(), 1, gib=24)


def test_unknown_sizes_take_turns():
    found = planned(quickstart(), 1, gib=None)
    assert found.sleeps and found.gpu_memory_utilization == 0.4


def test_actors_that_hold_vectors_keep_gpus_of_their_own():
    config = quickstart("retrieval.index=x", "retrieval.num_gpus=2")
    assert planned(config, 6).seats("retrieval") == [(4, 2)]
    assert planned(config, 4).kind == "colocated" and planned(config, 4).seats("retrieval") == [(2, 2)]
    with pytest.raises(ConfigError, match="retrieval 2"):
        planned(config, 2)


def test_engines_alone_are_as_many_as_there_are_gpus_for():
    config = preset("generation.tensor_parallel=2", "generation.num_replicas=4")
    demand = Demand.of_rollouts(config)
    assert plan(config, demand, [8]).num_engines == 4
    fewer = plan(config, demand, [5])
    assert (fewer.num_engines, fewer.tensor_parallel, fewer.transfer) == (2, 2, "mempipe_shm")
    with pytest.raises(ConfigError, match="generator 8"):
        plan(config, demand, [1])


def test_learners_alone_are_as_many_as_there_are_gpus():
    config = preset()
    demand = Demand(learners=4)
    assert plan(config, demand, [1]).num_ranks == 1
    assert plan(config, demand, [8]).seats("learner") == [(0, 1), (1, 1), (2, 1), (3, 1)]
