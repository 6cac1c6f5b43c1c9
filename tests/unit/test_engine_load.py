"""What engines count between two syncs, and what is said when a run waits."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mempipe.actors import launch
from mempipe.actors.launch import Roles
from mempipe.actors.memory import held_gib
from mempipe.engines.engine_load import EngineLoad, load_metrics
from mempipe.engines.proof import HeldWeights, Proof
from mempipe.loader import parse_config
from mempipe.progress import watched


def test_extremes_are_over_engines_and_means_over_all_steps_and_prompts():
    busy, idle = EngineLoad(drain_seconds=2.0, load_seconds=0.5), EngineLoad(load_seconds=1.0)
    for running, waiting, cache_use in ((8, 3, 0.5), (2, 0, 0.25)):
        busy.count_step(running=running, waiting=waiting, cache_use=cache_use)
    busy.count_prompt(100, 20)
    busy.count_prompt(60, 60)
    assert load_metrics([busy, idle]) == {
        "engine/running_mean": 5.0,
        "engine/waiting_max": 3.0,
        "engine/kv_cache_use_max": 0.5,
        "engine/prefix_hit_rate": 0.5,
        "sync/drain_seconds": 2.0,
        "sync/load_seconds": 1.0,
    }
    busy.count_guesses(guessed=8, right=2)
    idle.count_guesses(guessed=8, right=6)
    assert load_metrics([busy, idle])["engine/guessed_right"] == 0.5
    idle = EngineLoad()
    assert not {"engine/running_mean", "engine/prefix_hit_rate"} & set(load_metrics([idle]))


def test_memory_is_of_the_process_and_those_that_it_started():
    code = "import sys; held = b'x' * 1_000_000_000; print(flush=True); sys.stdin.read()"
    before = held_gib()
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        assert held_gib() - before > 0.84 and held_gib(children=False) - before < 0.1
    finally:
        child.communicate()


class Actor:
    """Answers how much is in flight, unless it hangs."""

    def __init__(self, under_way: int | None) -> None:
        self.under_way = SimpleNamespace(remote=lambda: under_way)


def waited_for(monkeypatch: pytest.MonkeyPatch, *, engines: list[int | None], retrievers: list[int | None]) -> str:
    def get(answer: int | None, *, timeout: float) -> int:
        if answer is None:
            raise launch.GetTimeoutError("late")
        return answer

    monkeypatch.setattr(launch.ray, "get", get)
    roles: Any = SimpleNamespace(
        generators={f"generator-{i}": Actor(count) for i, count in enumerate(engines)},
        retrievers={f"retriever-{i}": Actor(count) for i, count in enumerate(retrievers)},
    )
    return Roles.waited_for(roles)


def test_a_stall_names_the_role_that_has_the_work(monkeypatch):
    assert waited_for(monkeypatch, engines=[3, 4], retrievers=[0]) == "7 completions in the engines"
    both = waited_for(monkeypatch, engines=[1], retrievers=[5])
    assert both == "5 searches in the retrievers, 1 completions in the engines"
    assert waited_for(monkeypatch, engines=[0], retrievers=[0]).startswith("the reference or the code of agent")
    assert waited_for(monkeypatch, engines=[2, None], retrievers=[0]).startswith("generator-1, without an answer")


class Immediate:
    """An actor whose calls return what they are told, at once."""

    def __init__(self, **answers: Any) -> None:
        for name, answer in answers.items():
            setattr(self, name, SimpleNamespace(remote=lambda *args, answer=answer: answer))


def test_a_sync_logs_bytes_and_seconds(monkeypatch):
    monkeypatch.setattr(launch.ray, "get", lambda answer, **kwargs: answer)
    proof = Proof(held=HeldWeights(version=3, checksums={"w": 1}, packed_modules={}), scores=[[-1.0]])
    load = EngineLoad(drain_seconds=2.0, load_seconds=0.5)
    learners = SimpleNamespace(
        weights=lambda: np.zeros(1, np.uint8),
        num_served_bytes=lambda: 5_000_000,
        checksums=lambda: {"w": 1},
        score=lambda canary: [[-1.0]],
        ranks=[Immediate(__ray_call__=0.5), Immediate(__ray_call__=0.75)],
    )
    roles: Any = Roles(
        config=parse_config({}),
        plan=SimpleNamespace(transfer="mempipe_shm", sleeps=False, bundles=[]),  # pyrefly: ignore[bad-argument-type]
        namespace="",
        generators={"generator-0": Immediate(load_weights=None, prove=proof, take_load=load, __ray_call__=2.0)},
        retrievers={},
        store=Immediate(put=None),
        learners=learners,  # pyrefly: ignore[bad-argument-type]
        references=None,
        canary=[[1, 2]],
    )
    logged = roles.sync(3)
    assert logged["sync/megabytes"] == 5.0 and logged["canary_mean_difference"] == 0.0
    assert (logged["sync/drain_seconds"], logged["sync/load_seconds"]) == (2.0, 0.5)
    assert (logged["memory/generator_gib"], logged["memory/learner_gib"]) == (2.0, 0.75)
    assert "memory/retriever_gib" not in logged and logged["memory/run_gib"] > 0
    assert logged["sync/send_seconds"] >= 0 and logged["sync/check_seconds"] >= 0


def test_what_is_late_is_said_and_what_is_not_is_not(capsys):
    asked = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        assert asked.wait(10)
        yield 2

    def waited_for() -> str:
        asked.set()
        return "the engines"

    assert list(watched(items(), waited_for=waited_for, after_s=0.05)) == [1, 2]
    assert capsys.readouterr().out.count("waiting for the engines") >= 1
    assert list(watched(iter([1, 2]), waited_for=waited_for, after_s=60)) == [1, 2]
    assert capsys.readouterr().out == ""


def test_an_error_of_the_items_passes_through():
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        list(watched(items(), waited_for=str, after_s=60))
