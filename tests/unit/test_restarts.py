"""Checkpoints of a loop that fails, and which failures another start can mend."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from mempipe.actors import launch
from mempipe.actors.launch import LaunchError, RoleLost, wait_for
from mempipe.actors.learner_group import LearnerFailed, LearnerLost
from mempipe.engines.checkpoint import CheckpointError, Position
from mempipe.engines.generator import EngineDead, EngineFault
from mempipe.loader import parse_config
from mempipe.stream import StepGroups
from mempipe.types import Context, EndReason, Group, Question, Trajectory
from pipelines import repair
from pipelines.repair import Checkpoints, with_restarts

UPDATES_PER_STEP = 2


class Learners:
    """Counts updates, and keeps what it was told to save."""

    def __init__(self) -> None:
        self.num_updates = 0
        self.num_under_way = 0
        self.saved: list[Position] = []
        self.failure: Exception | None = None
        self.write_failure: Exception | None = None
        self._writing: Position | None = None

    def updates_done(self, *, finish: bool = False) -> int:
        if self.failure is not None:
            raise self.failure
        if self.num_under_way and not finish:
            raise LearnerLost("counting updates: not all ranks finished within 30 s")
        self.num_updates, self.num_under_way = self.num_updates + self.num_under_way, 0
        return self.num_updates

    def start_save(self, folder: Path, position: Position, *, keep: int) -> None:
        self.finish_save()
        self._writing = position

    def finish_save(self) -> None:
        if self.write_failure is not None:
            raise self.write_failure
        if self._writing is not None:
            self.saved.append(self._writing)
            self._writing = None


class Tracker:
    """Keeps the metrics by their step."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def flush(self) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], *, step: int) -> None:
        self.rows.setdefault(step, {}).update(metrics)


@pytest.fixture
def learners() -> Learners:
    return Learners()


@pytest.fixture
def tracker() -> Tracker:
    return Tracker()


@pytest.fixture
def checkpoints(learners, tracker, tmp_path) -> Checkpoints:
    """Of a run that saves every third step."""
    config = parse_config({"algorithm": {"updates_per_step": UPDATES_PER_STEP}, "checkpoint": {"every_steps": 3}})
    run: Any = SimpleNamespace(folder=tmp_path)
    roles: Any = SimpleNamespace(config=config, learners=learners)
    return Checkpoints(run, roles, tracker, position=Position())


def batch(number: int) -> StepGroups:
    return StepGroups(groups=[group(f"g{number}")], dropped=[group(f"d{number}")], wait_seconds=0.0)


def group(name: str) -> Group:
    """One attempt, rewarded 0.25, of one turn that the policy of version 0 sampled."""
    context = Context(
        index=0,
        token_ids=[1, 2],
        loss_mask=[0, 1],
        logprobs=[0.0, -1.0],
        policy_versions=[-1, 0],
        num_prompt_tokens=1,
        num_question_tokens=1,
        num_memory_tokens=0,
        action="x",
        searches=[],
        memory_before="",
        memory_after="",
        generate_seconds=0.0,
        search_seconds=0.0,
    )
    attempt = Trajectory(
        id=f"{name}/0",
        group_id=name,
        member=0,
        contexts=[context],
        end_reason=EndReason.ANSWERED,
        answer="x",
        reward=0.25,
    )
    return Group(id=name, question=Question(id=name, text="?", golden_answers=["x"]), trajectories=[attempt])


def train(checkpoints: Checkpoints, learners: Learners, number: int, *, updates: int = UPDATES_PER_STEP) -> None:
    checkpoints.begin(batch(number))
    learners.num_updates += updates


def steps(learners: Learners) -> list[int]:
    return [position.step for position in learners.saved]


def test_checkpoints_are_written_when_they_are_due_and_at_the_end(checkpoints, learners):
    with checkpoints.kept():
        for number in range(4):
            train(checkpoints, learners, number)
            checkpoints.finish()
    assert steps(learners) == [3, 4]
    assert learners.saved[-1] == Position(
        step=4, trained=[["g0"], ["g1"], ["g2"], ["g3"]], dropped=["d0", "d1", "d2", "d3"]
    )


def test_the_end_does_not_save_twice(checkpoints, learners):
    with checkpoints.kept():
        for number in range(3):
            train(checkpoints, learners, number)
            checkpoints.finish()
    assert steps(learners) == [3]


@pytest.mark.parametrize(
    "error", [RoleLost("an engine died"), ValueError("a bug"), KeyboardInterrupt(), SystemExit(15)]
)
def test_a_run_that_fails_saves_what_was_learnt_before_it_ends(checkpoints, learners, capsys, error):
    with pytest.raises(type(error)), checkpoints.kept():
        train(checkpoints, learners, 0)
        checkpoints.finish()
        raise error
    assert steps(learners) == [1] and learners.saved[0].trained == [["g0"]]
    assert "saved step 1 before the run ended" in capsys.readouterr().out


def test_a_run_that_is_told_to_stop_waits_for_a_long_update(checkpoints, learners, tracker, capsys):
    with pytest.raises(SystemExit), checkpoints.kept():
        train(checkpoints, learners, 0, updates=1)
        learners.num_under_way = 1
        raise SystemExit(15)
    assert steps(learners) == [1]
    assert "ending after the update under way" in capsys.readouterr().out
    assert tracker.rows[1].items() >= {"reward": 0.25, "sampled_tokens": 1, "staleness_max": 0}.items()


def test_a_step_that_was_not_saved_is_not_on_record(checkpoints, learners, tracker, capsys):
    learners.write_failure = CheckpointError("No space left on device")
    with pytest.raises(SystemExit), checkpoints.kept():
        train(checkpoints, learners, 0)
        raise SystemExit(15)
    assert "reward" not in tracker.rows.get(1, {})
    assert "step 1 could not be saved: No space left on device" in capsys.readouterr().out


def test_a_step_that_cannot_be_described_is_saved(checkpoints, learners, capsys, monkeypatch):
    monkeypatch.setattr(repair, "rollout_metrics", lambda *_, **__: [][0])
    with pytest.raises(SystemExit), checkpoints.kept():
        train(checkpoints, learners, 0)
        raise SystemExit(15)
    assert steps(learners) == [1]
    said = capsys.readouterr().out
    assert "saved step 1" in said and "step 1 could not be put on record: list index out of range" in said


def test_a_run_that_failed_does_not_wait_for_a_learner_that_says_nothing(checkpoints, learners, capsys):
    with pytest.raises(RoleLost), checkpoints.kept():
        train(checkpoints, learners, 0, updates=1)
        learners.num_under_way = 1
        raise RoleLost("an engine died")
    assert learners.saved == []
    assert "could not be saved: counting updates" in capsys.readouterr().out


def test_a_checkpoint_that_is_being_written_is_finished_before_the_run_ends(checkpoints, learners):
    with pytest.raises(ValueError, match="a bug"), checkpoints.kept():
        for number in range(3):
            train(checkpoints, learners, number)
            checkpoints.finish()
        assert learners.saved == []
        raise ValueError("a bug")
    assert steps(learners) == [3]


def test_a_step_that_was_learnt_but_did_not_reach_the_engines_is_saved(checkpoints, learners):
    with pytest.raises(RoleLost), checkpoints.kept():
        train(checkpoints, learners, 0)
        raise RoleLost("sending weights")
    assert steps(learners) == [1] and learners.saved[0].dropped == ["d0"]


def test_a_step_that_is_half_learnt_is_not_saved(checkpoints, learners, capsys):
    with pytest.raises(LearnerFailed), checkpoints.kept():
        train(checkpoints, learners, 0)
        checkpoints.finish()
        train(checkpoints, learners, 1, updates=1)
        raise LearnerFailed("gradient norm is nan")
    assert learners.saved == []
    assert "in the middle of step 2" in capsys.readouterr().out


def test_a_step_that_never_began_to_be_learnt_changes_nothing(checkpoints, learners):
    with pytest.raises(RoleLost), checkpoints.kept():
        train(checkpoints, learners, 0)
        checkpoints.finish()
        checkpoints.begin(batch(1))
        raise RoleLost("the reference died")
    assert steps(learners) == [1]


def test_a_learner_that_is_gone_does_not_hide_why_the_run_failed(checkpoints, learners, capsys):
    learners.failure = LearnerLost("a rank died")
    with pytest.raises(ValueError, match="the first reason"), checkpoints.kept():
        train(checkpoints, learners, 0)
        checkpoints.finish()
        raise ValueError("the first reason")
    assert learners.saved == []
    assert "step 1 could not be saved: a rank died" in capsys.readouterr().out


def attempts(failures: list[Exception], *, max_restarts: int) -> int:
    """How many attempts were made; each of the first ones fails."""
    run: Any = SimpleNamespace(config=parse_config({"max_restarts": max_restarts}))
    made = 0

    def attempt() -> None:
        nonlocal made
        made += 1
        if made <= len(failures):
            raise failures[made - 1]

    with_restarts(run, attempt)
    return made


def test_a_lost_role_costs_a_restart(capsys):
    assert attempts([RoleLost("generator-0 died"), LearnerLost("a rank died")], max_restarts=2) == 3
    said = capsys.readouterr().out.splitlines()
    assert said == ["restart 1 of max_restarts 2: generator-0 died", "restart 2 of max_restarts 2: a rank died"]


def test_restarts_are_counted():
    with pytest.raises(RoleLost, match="second"):
        attempts([RoleLost("first"), RoleLost("second")], max_restarts=1)


@pytest.mark.parametrize("error", [LaunchError("wrong file"), LearnerFailed("full disk"), ValueError("a bug")])
def test_what_would_come_again_ends_the_run(error):
    with pytest.raises(type(error), match=str(error)):
        attempts([error], max_restarts=5)


@pytest.mark.parametrize(("cause", "kind"), [(EngineDead("it ended"), RoleLost), (EngineFault("odd"), LaunchError)])
def test_an_engine_that_died_in_a_call_is_a_role_that_is_lost(monkeypatch, cause, kind):
    def get(reference: object, *, timeout: float) -> None:
        raise RayTaskError("prove", "", cause)

    monkeypatch.setattr(launch.ray, "get", get)
    with pytest.raises(LaunchError, match="checking weights: generator-0: ") as caught:
        wait_for({"generator-0": None}, phase="checking weights", timeout_s=1.0)
    assert type(caught.value) is kind
