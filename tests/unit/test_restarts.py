"""Checkpoints of a loop that fails, and which failures another start can mend."""

from __future__ import annotations

import errno
import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    OwnerDiedError,
    RayTaskError,
    UserCodeException,
)

from mempipe.actors import launch
from mempipe.actors.launch import ask_all, wait_for
from mempipe.actors.lost import ClusterLost, LaunchError, LearnerFailed, LearnerLost, RoleLost, is_lost, one_line
from mempipe.engines.checkpoint import CheckpointError, Position
from mempipe.engines.generator import EngineDead, EngineFault
from mempipe.engines.proof import SamplingMismatch, StaleWeights
from mempipe.loader import parse_config
from mempipe.settings import ConfigError
from mempipe.stop import Interrupted
from mempipe.streams.groups import StepGroups
from mempipe.training import repair
from mempipe.training.repair import Checkpoints, KeptGroups, Supervisor, newest_usable
from mempipe.types import Context, EndReason, Group, Question, Trajectory

UPDATES_PER_STEP = 2


class Learners:
    """Counts updates, and keeps what it was told to save."""

    def __init__(self) -> None:
        self.num_updates = 0
        self.num_under_way = 0
        self.saved: list[Position] = []
        self.kept: list[int] = []
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
        self.kept.append(keep)
        self._writing = position

    def save_failed(self) -> bool:
        return self._writing is not None and self.write_failure is not None

    def finish_save(self) -> None:
        written, self._writing = self._writing, None
        if written is None:
            return
        if self.write_failure is not None:
            raise self.write_failure
        self.saved.append(written)


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


@pytest.fixture
def run_within(learners, tracker, tmp_path) -> tuple[Checkpoints, Position]:
    """A run that resumed between two updates of its first step, and where it did."""
    within = Position(num_updates=1, under_way=["g1"])
    write_checkpoint(tmp_path, 1, within)
    KeptGroups(tmp_path / "kept_groups").write(within, [group("g1")])
    learners.num_updates = 1
    config = parse_config({"algorithm": {"updates_per_step": UPDATES_PER_STEP}})
    run: Any = SimpleNamespace(folder=tmp_path)
    roles: Any = SimpleNamespace(config=config, learners=learners)
    return Checkpoints(run, roles, tracker, position=within), within


def write_checkpoint(run_folder: Path, num_updates: int, position: Position) -> None:
    folder = run_folder / "checkpoints" / f"step-{num_updates:08d}"
    folder.mkdir(parents=True)
    state = {"num_updates_done": num_updates, "ranks": "1 cpu", "position": asdict(position)}
    (folder / "state.json").write_text(json.dumps(state))


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
    assert "ending after the update in flight" in capsys.readouterr().out
    assert tracker.rows[1].items() >= {"reward": 0.25, "sampled_tokens": 1, "staleness_max": 0}.items()


def test_a_step_that_was_not_saved_is_not_on_record(checkpoints, learners, tracker, capsys):
    learners.write_failure = CheckpointError("No space left on device")
    with pytest.raises(SystemExit), checkpoints.kept():
        train(checkpoints, learners, 0)
        raise SystemExit(15)
    assert "reward" not in tracker.rows.get(1, {})
    assert "step 1 could not be saved: No space left on device" in capsys.readouterr().out


@pytest.mark.parametrize(("num_steps", "saved"), [(5, 5), (3, 3)])
def test_a_checkpoint_that_could_not_be_written_does_not_keep_the_last_position_from_being_saved(
    checkpoints, learners, capsys, monkeypatch, num_steps, saved
):
    """The disk was full while the checkpoint of step 3 was written in the background, and has room again."""
    finish_save, failures = learners.finish_save, [LearnerFailed("checkpoint: No space left on device")]

    def finish_once() -> None:
        if learners._writing is not None and failures:
            learners._writing = None
            raise failures.pop()
        finish_save()

    monkeypatch.setattr(learners, "finish_save", finish_once)
    with pytest.raises(SystemExit), checkpoints.kept():
        for number in range(num_steps):
            train(checkpoints, learners, number)
            checkpoints.finish()
        raise SystemExit(15)
    assert steps(learners) == [saved]
    said = capsys.readouterr().out
    assert "checkpoint: No space left on device" in said and f"saved step {saved} before the run ended" in said


def test_a_checkpoint_that_could_not_be_written_is_tried_again_after_the_next_step(checkpoints, learners, capsys):
    """A disk that was full for a while: the run continues, and does not wait for the next checkpoint that is due."""
    with checkpoints.kept():
        for number in range(6):
            train(checkpoints, learners, number)
            learners.write_failure = LearnerFailed("checkpoint: No space left on device") if number == 3 else None
            checkpoints.finish()
    assert steps(learners) == [4, 6]
    assert capsys.readouterr().out.count("No space left on device") == 1


def test_a_run_ends_when_a_checkpoint_is_due_and_none_since_the_last_could_be_written(checkpoints, learners, capsys):
    with pytest.raises(LearnerFailed, match="No space left"), checkpoints.kept():
        for number in range(9):
            train(checkpoints, learners, number)
            learners.write_failure = LearnerFailed("checkpoint: No space left on device") if number > 2 else None
            checkpoints.finish()
    assert steps(learners) == []
    assert capsys.readouterr().out.count("checkpoint: No space left on device") >= 2


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


def test_a_run_that_is_told_to_stop_while_its_last_checkpoint_is_written_finishes_that(
    checkpoints, learners, monkeypatch
):
    finish_save, interruptions = learners.finish_save, [Interrupted(15)]

    def interrupted_once() -> None:
        if learners._writing is not None and interruptions:
            raise interruptions.pop()
        finish_save()

    monkeypatch.setattr(learners, "finish_save", interrupted_once)
    with pytest.raises(Interrupted), checkpoints.kept():
        train(checkpoints, learners, 0)
        checkpoints.finish()
    assert steps(learners) == [1]


def test_a_step_that_was_learnt_but_did_not_reach_the_engines_is_saved(checkpoints, learners):
    with pytest.raises(RoleLost), checkpoints.kept():
        train(checkpoints, learners, 0)
        raise RoleLost("sending weights")
    assert steps(learners) == [1] and learners.saved[0].dropped == ["d0"]


def test_promise_7_the_groups_of_a_step_that_was_learnt_are_not_kept_for_another_one(checkpoints, learners, tmp_path):
    with pytest.raises(RoleLost), checkpoints.kept():
        train(checkpoints, learners, 0)
        raise RoleLost("sending weights")
    assert learners.saved[0].trained == [["g0"]]
    assert KeptGroups(tmp_path / "kept_groups").read(learners.saved[0]) == []


def test_a_step_that_is_half_learnt_is_not_saved(checkpoints, learners, capsys):
    with pytest.raises(LearnerFailed), checkpoints.kept():
        train(checkpoints, learners, 0)
        checkpoints.finish()
        train(checkpoints, learners, 1, updates=1)
        raise LearnerFailed("gradient norm is nan")
    assert learners.saved == []
    assert "stopped during step 2" in capsys.readouterr().out


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


def attempts(failures: list[Exception], *, max_restarts: int, seconds_between: float = 1.0) -> int:
    """How many attempts were made; each of the first ones fails."""
    made = 0

    def attempt() -> int:
        nonlocal made
        made += 1
        if made <= len(failures):
            raise failures[made - 1]
        return made

    return Supervisor(max_restarts, clock=lambda: made * seconds_between).attempt(attempt)


def test_a_lost_role_costs_a_restart(capsys):
    assert attempts([RoleLost("generator-0 died"), LearnerLost("a rank died")], max_restarts=2) == 3
    said = [line.split("] ")[1] for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "restart 1 of max_restarts 2 an hour: generator-0 died",
        "restart 2 of max_restarts 2 an hour: a rank died",
    ]


def test_restarts_are_counted_within_an_hour():
    with pytest.raises(LaunchError, match=r"third; max_restarts is 2 an hour\..* --resume continues"):
        attempts([RoleLost("first"), RoleLost("second"), RoleLost("third")], max_restarts=2)
    assert attempts([RoleLost("one an hour")] * 9, max_restarts=2, seconds_between=1900.0) == 10


def test_settings_that_were_right_before_a_restart_are_waited_for(monkeypatch, capsys):
    pauses: list[float] = []
    monkeypatch.setattr(repair.time, "sleep", pauses.append)
    away = ConfigError("data.train: /mnt/train.parquet does not exist")
    assert attempts([RoleLost("a rank died"), away, away], max_restarts=3) == 4
    assert pauses == [5.0, 10.0]
    assert "restart 2 of max_restarts 3 an hour: data.train: /mnt/train.parquet" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="does not exist"):  # at first it is the user's mistake
        attempts([away], max_restarts=3)


@pytest.mark.parametrize("error", [LaunchError("wrong file"), LearnerFailed("full disk"), ValueError("a bug")])
def test_what_would_come_again_ends_the_run(error):
    with pytest.raises(type(error), match=str(error)):
        attempts([error], max_restarts=5)


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (EngineDead("it ended"), RoleLost),
        (OwnerDiedError("ab" * 28, None, ""), RoleLost),  # of the weights that it was to load
        (EngineFault("odd"), LaunchError),
    ],
)
def test_an_engine_that_lost_something_in_a_call_is_a_role_that_is_lost(monkeypatch, cause, kind):
    def get(reference: object, *, timeout: float) -> None:
        raise RayTaskError("prove", "", cause)

    monkeypatch.setattr(launch.ray, "get", get)
    with pytest.raises(LaunchError, match="checking weights: generator-0: ") as caught:
        wait_for({"generator-0": None}, phase="checking weights", timeout_s=1.0)
    assert type(caught.value) is kind


def test_a_step_that_there_is_no_time_for_is_saved_between_its_updates(checkpoints, learners, tmp_path, capsys):
    with pytest.raises(Interrupted), checkpoints.kept():
        train(checkpoints, learners, 0)
        checkpoints.finish()
        train(checkpoints, learners, 1, updates=1)
        raise Interrupted(15)
    assert learners.saved == [Position(step=1, trained=[["g0"]], dropped=["d0", "d1"], num_updates=1, under_way=["g1"])]
    assert "saved step 1 and 1 updates of the next one" in capsys.readouterr().out
    kept = KeptGroups(tmp_path / "kept_groups").read(learners.saved[0])
    assert [each.id for each in kept] == ["g1"] and kept[0].started_at == 0


def test_a_checkpoint_between_updates_does_not_displace_the_last_one_of_a_whole_step(checkpoints, learners):
    keep = checkpoints._config.checkpoint.keep
    with pytest.raises(Interrupted), checkpoints.kept():
        for number in range(3):
            train(checkpoints, learners, number)
            checkpoints.finish()
        train(checkpoints, learners, 3, updates=1)
        raise Interrupted(15)
    assert [position.num_updates for position in learners.saved] == [0, 1]
    assert learners.kept == [keep, keep + 1]


def test_several_checkpoints_between_updates_do_not_displace_it_either(learners, tracker, tmp_path):
    """A run that is interrupted again and again within one long step."""
    config = parse_config({"algorithm": {"updates_per_step": 4}, "checkpoint": {"keep": 1}})
    run: Any = SimpleNamespace(folder=tmp_path)
    roles: Any = SimpleNamespace(config=config, learners=learners)
    write_checkpoint(tmp_path, 4, Position(step=1, trained=[["g0"]]))
    for done in (1, 2, 3):
        within = Position(step=1, trained=[["g0"]], num_updates=done, under_way=["g1"])
        checkpoints = Checkpoints(run, roles, tracker, position=Position())
        checkpoints.position = within
        checkpoints.save()
        write_checkpoint(tmp_path, 4 + done, within)
    assert learners.kept == [2, 3, 4]


def test_a_checkpoint_between_updates_is_not_saved_without_its_groups(checkpoints, learners, monkeypatch, capsys):
    """It would displace the last one that a run can resume from (`checkpoint.keep` 1)."""

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(KeptGroups, "write", no_space)
    with pytest.raises(Interrupted), checkpoints.kept():
        train(checkpoints, learners, 0)
        checkpoints.finish()
        checkpoints.save()
        train(checkpoints, learners, 1, updates=1)
        raise Interrupted(15)
    assert [position.num_updates for position in learners.saved] == [0]
    assert "No space left on device" in capsys.readouterr().out


def test_groups_stay_until_no_checkpoint_needs_them(checkpoints, learners, tmp_path):
    """The next checkpoint may fail to be written after `save` has begun it."""
    within = Position(step=0, num_updates=1, under_way=["g1"])
    gone = Position(step=7)
    write_checkpoint(tmp_path, 1, within)
    kept = KeptGroups(tmp_path / "kept_groups")
    for position in (within, gone):
        kept.write(position, [group("g1")])
    with checkpoints.kept():
        train(checkpoints, learners, 0)
        checkpoints.finish()
        checkpoints.save()
    assert [len(kept.read(position)) for position in (within, gone)] == [1, 0]


WAITING, IN_FLIGHT = "w0", "g1"


@pytest.mark.parametrize(
    ("error", "groups"),
    [
        (SamplingMismatch(0.3, 640, 0.05), []),
        (StaleWeights("generator-0 holds others"), []),
        (LearnerFailed("gradient norm is nan"), [WAITING]),
        (LearnerLost("a rank died"), [IN_FLIGHT, WAITING]),
        (ValueError("a bug"), [IN_FLIGHT, WAITING]),
    ],
)
def test_what_ended_the_run_is_not_kept_to_end_the_next_one(checkpoints, learners, tmp_path, error, groups):
    checkpoints._waiting = lambda: [group(WAITING)]
    kept = KeptGroups(tmp_path / "kept_groups")
    kept.write(Position(step=1, trained=[["g0"]]), [group("of an earlier start")])
    with pytest.raises(type(error)), checkpoints.kept():
        train(checkpoints, learners, 0)
        checkpoints.finish()
        checkpoints.begin(batch(1))
        raise error
    assert [each.id for each in kept.read(learners.saved[-1])] == groups


def test_the_groups_of_a_checkpoint_within_a_step_are_never_replaced_by_others(run_within, learners, tmp_path):
    """A signal may come between the moment that they leave the collector and the beginning of their step."""
    checkpoints, within = run_within
    with pytest.raises(Interrupted), checkpoints.kept():
        raise Interrupted(15)
    assert [each.id for each in KeptGroups(tmp_path / "kept_groups").read(within)] == ["g1"]


def test_groups_that_no_step_took_are_kept_for_the_run_that_goes_on(checkpoints, learners, tmp_path):
    checkpoints._waiting = lambda: [group("w0"), group("w1")]
    with pytest.raises(RoleLost), checkpoints.kept():
        train(checkpoints, learners, 0)
        checkpoints.finish()
        raise RoleLost("an engine died")
    kept = KeptGroups(tmp_path / "kept_groups")
    assert [each.id for each in kept.read(learners.saved[-1])] == ["w0", "w1"]
    assert kept.read(Position()) == []


def test_kept_groups_that_cannot_be_read_are_played_again(tmp_path, capsys):
    kept = KeptGroups(tmp_path)
    kept.write(Position(step=3), [group("w0")])
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    assert kept.read(Position(step=3)) == []
    assert f"{file} cannot be read" in capsys.readouterr().out


def test_a_checkpoint_within_a_step_needs_the_groups_of_that_step(tmp_path, capsys):
    run: Any = SimpleNamespace(folder=tmp_path, config=parse_config({"num_steps": 2}))
    whole = Position(step=1, trained=[["g0"]])
    within = Position(step=1, trained=[["g0"]], num_updates=1, under_way=["g1"])
    for updates, position in ((2, whole), (3, within)):
        write_checkpoint(tmp_path, updates, position)
    assert newest_usable(run) == tmp_path / "checkpoints" / "step-00000002"
    assert "whose groups are gone" in capsys.readouterr().out
    KeptGroups.of(run).write(within, [group("g1")])
    assert newest_usable(run) == tmp_path / "checkpoints" / "step-00000003"
    run.config = parse_config({"num_steps": 1})
    assert newest_usable(run) == tmp_path / "checkpoints" / "step-00000002"
    assert "saved within step 2, and num_steps is 1; the checkpoint before it is taken" in capsys.readouterr().out


def test_what_ray_data_wraps_around_a_lost_actor_is_a_lost_role():
    text = (
        'ray::MapBatches(GroupStage)()\n  File "stream.py", line 90\n'
        "    await self._admission.ticket.remote(group_id, position)\n"
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n\tclass_name: X"
    )
    error = RayTaskError("MapBatches", text, UserCodeException("UDF failed"))
    assert is_lost(error)
    assert one_line(error) == "ActorDiedError: The actor died unexpectedly before finishing this task."
    assert not is_lost(RayTaskError("MapBatches", "KeyError: 'ActorDiedError'", KeyError("x")))
    assert not is_lost(ClusterLost("the head is gone"))


ADVICE = """
The above exception was the direct cause of the following exception:

ray::MapWorker(MapBatches(GroupStage)).submit() (pid=1, ip=127.0.0.1)
ray.exceptions.UserCodeException: UDF failed to process a data block.
Failed to apply UDF transform after 1/1 attempts (total backoff 0.0s).
To change retry attempts, backoff, or which errors are retried, configure `ray.data.DataContext.get_current()`.
"""


def test_a_worker_that_finds_no_actor_under_its_name_has_lost_a_role():
    text = (
        "ValueError: Failed to look up actor with name 'generator-0'. This could because 1. You are trying to look up"
    )
    error = RayTaskError(
        "submit", f'ray::MapWorker()\n  File "a.py", line 7\n{text}\n{ADVICE}', UserCodeException("UDF")
    )
    assert is_lost(error)
    assert one_line(error) == text


def test_of_an_error_in_a_worker_the_line_is_told_that_says_what_it_was():
    text = f'ray::MapWorker()\n  File "a.py", line 7\nmempipe.faults.Odd: the answer was 7\n{ADVICE}'
    error = RayTaskError("submit", text, UserCodeException("UDF"))
    assert one_line(error) == "mempipe.faults.Odd: the answer was 7"
    assert not is_lost(error)


class Engine:
    """Answers the calls one after another: with a value, or by raising."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def call(self) -> Any:
        return self.answers.pop(0)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(answer: Any, *, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(launch.ray, "get", get)
    monkeypatch.setattr(launch.time, "sleep", lambda _: None)


def ask(*answers: Any) -> dict[str, Any]:
    return ask_all({"generator-0": Engine(*answers)}, Engine.call, phase="loading weights", timeout_s=5.0)


@pytest.mark.usefixtures("answered")
def test_an_engine_that_starts_again_is_asked_again():
    starting = ActorUnavailableError("it restarts", None)
    died = RayTaskError("load_weights", "", EngineDead("its process ended"))
    assert ask(died, starting, starting, 7) == {"generator-0": 7}


@pytest.mark.usefixtures("answered")
def test_an_engine_that_starts_no_more_is_a_role_that_is_lost():
    with pytest.raises(RoleLost, match="loading weights: generator-0: The actor died"):
        ask(ActorDiedError())


def test_an_engine_that_gives_no_answer_is_told_with_the_setting_that_limits_it(monkeypatch):
    def get(*_: Any, **__: Any) -> Any:
        raise GetTimeoutError("too late")

    monkeypatch.setattr(launch.ray, "get", get)
    with pytest.raises(RoleLost, match=r"loading weights: generator-0 gave no answer within generation\.timeout_s 5 s"):
        ask(7)
    with pytest.raises(RoleLost, match=r"start: generator-0 gave no answer within 900 s"):
        wait_for({"generator-0": None}, phase="start", timeout_s=900.0)


@pytest.mark.parametrize("call", ["ask", "wait"])
def test_an_engine_that_dies_is_noticed_while_another_one_takes_minutes(monkeypatch, call):
    """Whichever of them was asked first."""
    now = 0.0

    def get(answer: Any, *, timeout: float) -> Any:
        nonlocal now
        if answer == "dead" and now >= 30.0:
            raise ActorDiedError()
        now += timeout
        raise GetTimeoutError("it is busy")

    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(launch.ray, "get", get)
    with pytest.raises(RoleLost, match="generator-1: The actor died"):
        if call == "ask":
            engines = {"generator-0": Engine("busy"), "generator-1": Engine("dead")}
            ask_all(engines, Engine.call, phase="waking engines", timeout_s=600.0)
        wait_for({"generator-0": "busy", "generator-1": "dead"}, phase="start", timeout_s=600.0)
    assert 30.0 <= now < 40.0


def test_an_actor_that_could_not_be_made_says_why():
    made = "The actor died because of an error raised in its creation task, ray::GeneratorActor.__init__()\n  trace\n"
    error = ActorDiedError()
    error.error_msg = f"{made}mempipe.actors.lost.RoleLost: weights is gone"
    assert one_line(error) == "mempipe.actors.lost.RoleLost: weights is gone"


@pytest.mark.usefixtures("answered")
def test_an_engine_that_dies_at_every_call_is_told_with_its_reason():
    died = RayTaskError("prove", "", EngineDead("it failed with RuntimeError: head_dim=16"))
    starting = ActorUnavailableError("it restarts", None)
    with pytest.raises(RoleLost, match="loading weights: generator-0: it failed with RuntimeError: head_dim=16"):
        ask(*[died, starting] * 10)


@pytest.mark.parametrize("ends_after_s", [0.1, 0.9, 1.1])
def test_an_engine_that_died_once_is_not_counted_as_dead_again_before_its_actor_has_ended(monkeypatch, ends_after_s):
    """The actor looks after its engine every second, and answers every call until then that the engine is dead."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def get(*_: Any, **__: Any) -> int:
        if now < ends_after_s:
            raise RayTaskError("load_weights", "", EngineDead("its process ended"))
        if now < ends_after_s + 6:
            raise ActorUnavailableError("it restarts", None)
        return 7

    monkeypatch.setattr(launch, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now))
    monkeypatch.setattr(launch.ray, "get", get)
    found = ask_all({"generator-0": None}, lambda _: None, phase="loading weights", timeout_s=60.0)
    assert found == {"generator-0": 7}


@pytest.mark.usefixtures("answered")
def test_an_actor_that_refuses_a_setting_is_not_made_again():
    """Every restart would end with the same sentence."""
    error = ActorDiedError()
    error.error_msg = (
        "The actor died because of an error raised in its creation task, ray::RetrieverActor.__init__()\n  trace\n"
        "mempipe.settings.ConfigError: retrieval.url: a first search failed"
    )
    with pytest.raises(ConfigError, match=r"^retrieval\.url: a first search failed$"):
        ask(error)


def test_the_line_of_a_dead_actor_names_its_class():
    error = ActorDiedError()
    error.error_msg = "The actor died unexpectedly before finishing this task.\n\tclass_name: Admission\n\tactor_id: ab"
    assert one_line(error) == "Admission: The actor died unexpectedly before finishing this task."
