"""The arithmetic of seconds, against figures worked out by hand, and how it answers to more GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mempipe.cli import main
from mempipe.doctor import examine
from mempipe.engines.gpus import GPUS
from mempipe.loader import load_config
from mempipe.planning.capacity import GIB, KNOWN
from mempipe.planning.costs import (
    COMPUTE_SHARE,
    MEMORY_SHARE,
    StepCosts,
    Workload,
    engine_speed,
    step_costs,
    sync_seconds,
)
from mempipe.planning.placement import Demand, Placement, plan

CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"
THREE = KNOWN["Qwen/Qwen2.5-3B-Instruct"]
H100 = GPUS["H100"]


def planned(*overrides: str, gpus: int = 8, preset: str = "memsearcher_qwen2.5-3b") -> tuple[StepCosts, Placement]:
    config = load_config(CONFIGS / f"{preset}.yaml", overrides)
    made = plan(config, Demand.of_training(config), [gpus], gpu_bytes=80 * GIB)
    return step_costs(made.applied(config), KNOWN[config.model.path], made, H100), made


@pytest.mark.parametrize(
    "preset, gpus",
    [
        ("memsearcher_qwen2.5-3b", 8),
        ("react_qwen2.5-3b", 8),
        ("memsearcher_qwen2.5-7b", 16),
        ("mem1_qwen2.5-7b", 16),
        ("memtrain_qwen3-4b", 16),
        ("memagent_qwen2.5-7b", 32),
        ("full_text_qwen2.5-7b", 32),
    ],
)
def test_a_preset_on_the_gpus_that_it_names_waits_for_its_learner_alone(preset, gpus):
    costs, _ = planned(preset=preset, gpus=gpus)
    assert costs.bottleneck == "the learner"
    assert f"{gpus} GPUs of 80 GB" in (CONFIGS / f"{preset}.yaml").read_text()


def test_an_average_trajectory_takes_half_of_every_limit_and_whole_chunks():
    searching = Workload.of(load_config(CONFIGS / "memsearcher_qwen2.5-3b.yaml"))
    assert (searching.contexts, searching.context_tokens) == (3, (695 + 1024 + 1024 + 3000 + 1088) / 2)
    assert (searching.sampled_tokens, searching.most_sampled_tokens) == ((1024 + 1088) / 2, 5 * (1024 + 1088))
    reading = Workload.of(load_config(CONFIGS / "memagent_qwen2.5-7b.yaml"))
    assert (reading.contexts, reading.context_tokens) == (9, 5000 + (695 + 1024 + 1024) / 2)
    memtrain = CONFIGS / "memtrain_qwen3-4b.yaml"
    recalling, alone = (Workload.of(load_config(memtrain, [f"agent.num_recalls={number}"])) for number in (8, 0))
    assert (recalling.contexts, alone.contexts) == (9 + 8, 9)
    assert recalling.most_sampled_tokens == alone.most_sampled_tokens
    growing = Workload.of(load_config(CONFIGS / "react_qwen2.5-3b.yaml"))
    assert growing.contexts == 1


def test_the_learner_needs_six_operations_a_weight_and_token_and_two_more_to_recompute():
    costs, made = planned()
    tokens = 256 * 5 * 3 * 3415.5
    attention = 36 * 16 * 128 * 3415.5
    by_hand = 8 * tokens * (THREE.num_parameters + attention) / (4 * 989e12 * COMPUTE_SHARE)
    assert costs.tokens == tokens and costs.learn == pytest.approx(by_hand)
    assert costs.reference == pytest.approx(2 * tokens * THREE.num_parameters / (989e12 * COMPUTE_SHARE))
    config = load_config(CONFIGS / "memsearcher_qwen2.5-3b.yaml", ["model.gradient_checkpointing=false"])
    kept = step_costs(made.applied(config), THREE, made, H100)
    assert kept.learn == pytest.approx(costs.learn * 6 / 8)


def test_a_reference_on_the_ranks_is_two_operations_more_of_the_learner():
    (costs, _), (holding, made) = planned(), planned("reference.on_ranks=true", gpus=7)
    assert holding.learn == pytest.approx(costs.learn * 10 / 8) and holding.reference == 0
    assert (made.kind, made.unused_gpus, made.seats("reference")) == ("separate", 0, [])


def test_an_engine_is_bound_by_memory_with_few_sequences_and_by_operations_with_many():
    config = load_config(CONFIGS / "memsearcher_qwen2.5-3b.yaml")
    _, made = planned()
    engine = engine_speed(config, THREE, made, H100, context_tokens=100)
    weights = 2 * THREE.num_parameters / (3.35e12 * MEMORY_SHARE)
    assert engine.step_seconds(1) == pytest.approx(weights + 0.003, rel=0.01)
    many = 100_000 * 2 * THREE.num_parameters / (989e12 * COMPUTE_SHARE)
    assert engine.step_seconds(100_000) == pytest.approx(many + 0.003)
    assert engine.most_sequences == config.generation.max_num_seqs


def test_a_cache_that_is_small_bounds_the_sequences():
    config = load_config(CONFIGS / "memsearcher_qwen2.5-3b.yaml")
    _, made = planned()
    room = 79.2 * GIB * 0.85 - 2 * THREE.num_parameters - 2 * GIB
    engine = engine_speed(config, THREE, made, H100, context_tokens=8192)
    assert engine.most_sequences == int(room / (2 * 36 * 2 * 128 * 2 * 8192))


def test_weights_travel_twice_and_an_adapter_is_small():
    config = load_config(CONFIGS / "memsearcher_qwen2.5-3b.yaml")
    _, made = planned()
    by_hand = 2 * 2 * THREE.num_parameters / (450e9 * MEMORY_SHARE)
    assert sync_seconds(config, THREE, made, H100) == pytest.approx(by_hand)
    lora = load_config(CONFIGS / "memsearcher_qwen2.5-3b.yaml", ["model.lora_rank=16"])
    assert sync_seconds(lora, THREE, replace(made, transfer="mempipe_shm"), H100) < 1


def test_what_a_step_waits_for_changes_with_the_number_of_each_role():
    assert planned()[0].bottleneck == "the learner"
    more_ranks, _ = planned("learner.num_ranks=16", "reference.num_replicas=4", gpus=23)
    assert more_ranks.bottleneck == "the engines" and more_ranks.total < planned()[0].total
    engines, _ = planned("learner.num_ranks=64", "reference.num_replicas=64", "generation.num_replicas=64", gpus=192)
    assert engines.bottleneck == "the longest trajectory"
    one = planned("reference.num_replicas=1", preset="memagent_qwen2.5-7b", gpus=32)[0]
    assert one.bottleneck == "the reference"


def test_without_lag_rollout_and_learning_come_one_after_the_other():
    beside, after = planned()[0], planned("algorithm.max_off_policy_steps=0")[0]
    assert beside.total == pytest.approx(
        max(beside.generate, beside.reference, beside.learn + beside.driver) + beside.sync
    )
    assert after.total == pytest.approx(max(after.generate, after.reference) + after.learn + after.driver + after.sync)
    shared, made = planned(gpus=1)
    assert made.kind == "colocated" and shared.total > shared.generate + shared.learn


def test_updates_in_flight_wait_for_no_completion():
    assert planned("generation.updates_in_flight=true")[0].sync < 0.1 < planned()[0].sync


def test_doctor_tells_memory_seconds_and_what_a_step_waits_for():
    found = [str(finding) for finding in examine(str(CONFIGS / "memsearcher_qwen2.5-3b.yaml"), num_gpus=8, gpu="H100")]
    said = "\n".join(found)
    assert "4 x learner" in said and "1 x reference" in said and "tightest: " in said
    assert "a step on 8 x H100: about" in said and "it waits for the learner" in said
    without = "\n".join(map(str, examine(str(CONFIGS / "memsearcher_qwen2.5-3b.yaml"), num_gpus=8)))
    assert "a step on" not in without


PRESETS = {
    "MemSearcher 3B": "memsearcher_qwen2.5-3b",
    "MemSearcher 7B": "memsearcher_qwen2.5-7b",
    "MEM1 7B": "mem1_qwen2.5-7b",
    "MemTrain 4B": "memtrain_qwen3-4b",
    "MemAgent 7B": "memagent_qwen2.5-7b",
}


def seconds_rows() -> list[list[str]]:
    """Returns the cells of the table of presets in docs/scale.md."""
    page = (CONFIGS.parents[1] / "docs" / "scale.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| Mem") or "| MEM1" in line]
    return [row for row in rows if row[0] in PRESETS and len(row) == 11]


def test_the_page_has_the_seconds_of_every_preset():
    assert {row[0] for row in seconds_rows()} == {*PRESETS}


@pytest.mark.parametrize("row", seconds_rows(), ids=lambda row: f"{row[0]} on {row[1]}")
def test_the_seconds_in_the_page_are_those_of_doctor(row):
    preset, gpus, _, *numbers, waits_for = row
    config = load_config(CONFIGS / f"{PRESETS[preset]}.yaml")
    made = plan(config, Demand.of_training(config), [int(gpus)], gpu_bytes=int(H100.usable_gib * GIB))
    costs = step_costs(made.applied(config), KNOWN[config.model.path], made, H100)
    seconds = [costs.generate, costs.longest, costs.reference, costs.learn, costs.sync, costs.total]
    assert [*numbers, waits_for] == [*(f"{each:.0f}" for each in (costs.tokens / 1e6, *seconds)), costs.bottleneck]


def more_gpus_rows() -> list[list[str]]:
    """Returns the cells of the table of docs/scale.md that adds GPUs to one preset."""
    page = (CONFIGS.parents[1] / "docs" / "scale.md").read_text().partition("## More GPUs")[2]
    return [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ") and line[2].isdigit()]


def test_the_page_adds_gpus_five_times():
    assert [row[0] for row in more_gpus_rows()] == ["8", "16", "32", "64", "128"]


@pytest.mark.parametrize("row", more_gpus_rows(), ids=lambda row: f"{row[0]} GPUs")
def test_the_seconds_of_more_gpus_in_the_page_are_those_of_doctor(row):
    gpus, roles, *numbers, waits_for = row
    ranks, engines, references = map(int, roles.split(", "))
    costs, _ = planned(
        f"learner.num_ranks={ranks}",
        f"generation.num_replicas={engines}",
        f"reference.num_replicas={references}",
        f"stream.num_drivers={gpus}",
        gpus=int(gpus),
    )
    seconds = [costs.generate, costs.longest, costs.reference, costs.learn, costs.sync, costs.total]
    gpu_hours = costs.total * 664 * int(gpus) / 3600
    assert [*numbers, waits_for] == [*(f"{each:.0f}" for each in (*seconds, gpu_hours)), costs.bottleneck]


def test_a_type_without_a_number_is_refused(capsys):
    assert main(["doctor", str(CONFIGS / "memsearcher_qwen2.5-3b.yaml"), "--gpu", "H100"]) == 2
    assert "--devices N" in capsys.readouterr().err
