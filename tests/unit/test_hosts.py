"""The memory of machines: what ranks keep there, and what all roles need without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from mempipe.checks import machine
from mempipe.checks.findings import Finding
from mempipe.checks.machine import Devices
from mempipe.checks.roles import check_roles
from mempipe.config import RunConfig
from mempipe.loader import load_config
from mempipe.planning.capacity import GIB, KNOWN, ModelShape
from mempipe.planning.hosts import all_on_cpus, offloaded, usable_memory
from mempipe.settings import ConfigError

PRESET = Path(__file__).parents[2] / "jobs" / "configs" / "memsearcher_qwen2.5-7b.yaml"
FOURTEEN = KNOWN["Qwen/Qwen2.5-14B-Instruct"]
EVEN = ModelShape(hidden=1024, layers=4, heads=8, kv_heads=8, head_dim=128, intermediate=4096, vocab=32768, tied=False)
"""Every matrix has a power of two of elements."""
BOTH = ("learner.offload_optimizer=true", "reference.on_ranks=true")


def preset(*overrides: str) -> RunConfig:
    return load_config(PRESET, ["model.path=Qwen/Qwen2.5-14B-Instruct", *overrides])


def test_a_rank_keeps_its_part_of_moments_and_reference():
    kept = offloaded(preset(*BOTH), EVEN, num_ranks=4)
    assert kept == {"moments of AdamW": 8 * EVEN.num_parameters // 4, "reference": 2 * EVEN.num_parameters // 4}
    assert offloaded(preset(BOTH[0], "algorithm.kl_coef=0"), EVEN, num_ranks=4).keys() == {"moments of AdamW"}
    assert offloaded(preset(BOTH[1]), EVEN, num_ranks=4).keys() == {"reference"}
    assert offloaded(preset(), EVEN, num_ranks=4) == {}


def test_moments_of_an_adapter_are_those_of_its_matrices():
    kept = offloaded(preset("model.lora_rank=16", "model.lora_targets=[down_proj]", BOTH[0]), EVEN, num_ranks=2)
    assert kept == {"moments of AdamW": 8 * 16 * 4 * (4096 + 1024) // 2}


def test_pinned_blocks_are_rounded_up_to_powers_of_two():
    """The parts of three ranks are no powers of two, and each takes the next one: a half instead of a third."""
    three, two = (offloaded(preset(*BOTH), EVEN, num_ranks=number) for number in (3, 2))
    assert three == two
    kept = offloaded(preset(*BOTH), FOURTEEN, num_ranks=8)
    assert 1 < 8 * kept["moments of AdamW"] / (8 * FOURTEEN.num_parameters) < 2


def of_hosts(config: RunConfig, host_gib: float, gpus: int = 8) -> Finding:
    findings = check_roles(config, Devices(num_gpus=gpus, host_gib=host_gib))
    (found,) = [finding for finding in findings if "pinned memory" in finding.text]
    return found


def test_doctor_compares_what_is_offloaded_with_the_machine():
    needed = 8 * sum(offloaded(preset(*BOTH), FOURTEEN, num_ranks=8).values()) / GIB
    enough, unknown = of_hosts(preset(*BOTH), needed + 1), of_hosts(preset(*BOTH), 0.0)
    assert not enough.fatal and f"keep {needed:.1f} GiB" in enough.text and "moments of AdamW " in enough.text
    assert not unknown.fatal and unknown.text.endswith("if all 8 are on one machine")
    small = of_hosts(preset(*BOTH), needed - 1)
    assert small.fatal and f"but this machine has {needed - 1:.0f} GiB" in small.text
    assert "set learner.offload_optimizer or reference.on_ranks to false" in small.text
    assert not any("pinned memory" in f.text for f in check_roles(preset("algorithm.kl_coef=0"), Devices(num_gpus=16)))


@pytest.mark.parametrize(
    ("overrides", "references"),
    [
        (("algorithm.kl_coef=0",), 0),
        (("reference.num_replicas=1",), 1),
        (("reference.num_replicas=3",), 3),
        (("reference.on_ranks=true",), 1),
    ],
)
def test_all_roles_on_cpus(overrides, references):
    config = preset("generation.num_replicas=2", *overrides)
    p = EVEN.num_parameters
    engines = 2 * (2 * p + config.generation.cpu_kv_cache_gib * GIB)
    assert all_on_cpus(config, EVEN, training=False) == engines
    assert all_on_cpus(config, EVEN, training=True) == engines + 16 * p + references * 2 * p


@pytest.mark.parametrize(
    ("groups", "own", "expected"),
    [
        ({"memory.max": "max"}, "0::/", None),
        ({"job_7/step_0/memory.max": "max", "job_7/memory.max": "3000000"}, "0::/job_7/step_0", 3000000),  # Slurm
        ({"memory.max": "2000000"}, "0::/docker/abc", 2000000),  # a container sees its group as the root
        ({"memory/docker/memory.limit_in_bytes": "1000000"}, "5:cpu:/docker\n4:hugetlb,memory:/docker", 1000000),
        ({"memory/memory.limit_in_bytes": str(2**63 - 4096)}, "4:memory:/", None),
        ({}, "", None),
    ],
)
def test_the_limit_of_a_control_group_is_the_memory_that_may_be_used(tmp_path, groups, own, expected):
    for name, limit in groups.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(f"{limit}\n")
    (tmp_path / "own").write_text(f"{own}\n" if own else "")
    assert usable_memory(tmp_path / "groups", tmp_path / "own") == (expected or psutil.virtual_memory().total)


def test_a_system_without_control_groups_has_the_memory_of_its_machine(tmp_path):
    assert usable_memory(tmp_path / "none", tmp_path / "neither") == psutil.virtual_memory().total


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Makes an nvidia-smi that shows two GPUs after some seconds."""

    def make(seconds: float, *, memory: str = "81559") -> None:
        file = tmp_path / "nvidia-smi"
        file.write_text(f"#!/bin/sh\nsleep {seconds}\necho '{memory}'\necho '{memory}'\n")
        file.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return make


def test_the_gpus_of_a_slow_driver_are_found(nvidia_smi, monkeypatch):
    monkeypatch.setattr(machine, "TIMEOUT_S", 0.1)
    nvidia_smi(0.5)
    assert machine.devices_here().num_gpus == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machine.devices_here().num_gpus == 1


@pytest.mark.parametrize(("visible", "sizes"), [("1", [80]), ("1,0", [80, 8]), ("2", []), ("GPU-5e,GPU-6f", [8, 80])])
def test_the_memory_is_that_of_the_gpus_that_are_visible(monkeypatch, visible, sizes):
    monkeypatch.setattr(machine, "_gpu_gib", lambda: [8, 80])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = machine.devices_here()
    assert (found.num_gpus, found.gpu_gib) == (len(sizes), min(sizes, default=machine.DEFAULT_GPU_GIB))


def test_a_gpu_that_shares_the_memory_of_its_machine_is_a_gpu(nvidia_smi):
    nvidia_smi(0, memory="[N/A]")
    found = machine.devices_here()
    assert found.num_gpus == 2 and found.gpu_gib == found.host_gib
    nvidia_smi(0, memory="No devices were found")
    assert machine.devices_here().num_gpus == 0


def test_a_driver_that_gives_no_answer_is_no_machine_without_gpus(nvidia_smi, monkeypatch):
    monkeypatch.setattr(machine, "NVIDIA_SMI_S", 0.1)
    nvidia_smi(3)
    with pytest.raises(ConfigError, match=r"nvidia-smi gave no answer within 0\.1 s"):
        machine.devices_here()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.devices_here().num_gpus == 0
