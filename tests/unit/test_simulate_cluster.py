"""The simulation keeps the promises that the pipeline keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.simulate_cluster import Clock, EngineReplica, Message, Simulation
from mempipe.engines.gpus import GPUS
from mempipe.loader import load_config
from mempipe.planning.capacity import GIB, KNOWN
from mempipe.planning.costs import Engine
from mempipe.planning.placement import Demand, plan

PRESET = Path(__file__).parents[2] / "jobs" / "configs" / "memsearcher_qwen2.5-3b.yaml"
SPEED = Engine(weight_seconds=1.0, cache_seconds=0.5, compute_seconds=0.0, most_sequences=2)


def simulated(*overrides: str) -> Simulation:
    config = load_config(PRESET, ["algorithm.groups_per_step=8", *overrides])
    made = plan(config, Demand.of_training(config), [8], gpu_bytes=80 * GIB)
    run = Simulation(config, KNOWN[config.model.path], made, GPUS["H100"], num_steps=6)
    run.go()
    return run


@pytest.mark.parametrize(("lag", "in_flight"), [(0, "false"), (1, "false"), (3, "false"), (1, "true"), (3, "true")])
def test_no_token_is_older_than_the_lag_allows(lag, in_flight):
    run = simulated(f"algorithm.max_off_policy_steps={lag}", f"generation.updates_in_flight={in_flight}")
    assert len(run.staleness) >= 6 and run.most_stale <= lag
    assert all((mean > 0) == (lag > 0) for mean in run.staleness[3:])


def messages(clock: Clock, engine: EngineReplica, lengths: list[float]) -> list[tuple[float, float, int]]:
    """(length, time of its end, version) of every message."""
    done: list[tuple[float, float, int]] = []
    for length in lengths:
        engine.add(
            Message(prompt=0, tokens=length, then=lambda version, n=length: done.append((n, clock.time, version)))
        )
    return done


def test_sequences_of_an_engine_share_its_steps_and_wait_for_room():
    clock = Clock()
    done = messages(clock, EngineReplica(clock, SPEED, in_flight=False), [10, 20, 10])
    clock.run(until=lambda: False)
    one, two = SPEED.step_seconds(1), SPEED.step_seconds(2)
    assert done == [
        (10, pytest.approx(10 * two), 0),
        (20, pytest.approx(20 * two), 0),
        (10, pytest.approx(20 * two), 0),
    ]
    clock = Clock()
    done = messages(clock, EngineReplica(clock, SPEED, in_flight=False), [10, 20])
    clock.run(until=lambda: False)
    assert done[1][1] == pytest.approx(10 * two + 10 * one)


@pytest.mark.parametrize(("in_flight", "version", "pause"), [(False, 0, 0.0), (True, 1, 7.0)])
def test_new_weights_wait_for_completions_or_make_them_wait(in_flight, version, pause):
    clock = Clock()
    engine = EngineReplica(clock, SPEED, in_flight=in_flight)
    done, served = messages(clock, engine, [10]), []
    clock.after(2.0, lambda: engine.update(1, 7.0, lambda: served.append(clock.time)))
    clock.run(until=lambda: False)
    end = 10 * SPEED.step_seconds(1)
    assert done == [(10, pytest.approx(end + pause), version)]
    assert served == [pytest.approx(2.0 + 7.0 if in_flight else end + 7.0)]
