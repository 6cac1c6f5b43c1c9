"""Every role in every phase, with every exception that its loss raises there: what follows, and what never does.

The roles are stand-ins (`stand_in_run`); command, loop, checkpoints, collector, admission and record are real.
"""

from __future__ import annotations

import errno
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    OwnerDiedError,
    RaySystemError,
    RayTaskError,
    RpcError,
    TaskCancelledError,
    TaskUnschedulableError,
    UserCodeException,
    WorkerCrashedError,
)
from stand_in_run import GROUPS_PER_STEP, NUM_STEPS, TRAIN, StandInRun, Strike, stand_in_run

from mempipe.actors.lost import LOST_IN_RAY, LearnerFailed, LearnerLost, RoleLost
from mempipe.engines.engine_faults import EngineDead
from mempipe.engines.proof import SamplingMismatch
from mempipe.provenance import write_record
from mempipe.reports.training import write_report
from mempipe.runs import unfinished
from mempipe.training.tracker_front import TrackerFront
from mempipe.user_code import UserCodeError
from pipelines import train

WITH_RANKS = ("load policy", "learn", "sync", "checkpoint", "export")
STREAMS = ("evaluate untrained", "evaluate before", "collect", "evaluate step", "evaluate after")
ANY = ("launch", "wait", "warm start", *STREAMS, "choose", "consume", *WITH_RANKS)
PASSED = {"learn": 3, "sync": 2, "checkpoint": 1, "collect": 5, "choose": 4, "consume": 1}
"""How often a place is passed before the strike, so that there is a checkpoint that could be lost."""


def in_a_task(cause: Exception, text: str = "") -> RayTaskError:
    """What a task or an actor raised, as Ray hands it on."""
    return RayTaskError("function", f'Traceback (most recent call last):\n  File "a.py"\n{text or cause}', cause)


LOSSES: dict[str, tuple[Callable[[], BaseException], tuple[str, ...]]] = {
    "an engine died": (
        lambda: RoleLost("loading weights: generator-0 died"),
        ("launch", "wait", "load policy", *STREAMS, "sync"),
    ),
    "a rank died": (lambda: LearnerLost("optimiser update 1 of 2: a learner rank died"), ("warm start", *WITH_RANKS)),
    "an engine died before its actor": (lambda: in_a_task(EngineDead("its process ended")), ("load policy", "sync")),
    "an actor died": (ActorDiedError, ANY),
    "an actor is away": (lambda: ActorUnavailableError("it does not answer", None), ANY),
    "an actor died in a task": (lambda: in_a_task(ActorDiedError()), ANY),
    "a stream's worker lost an actor": (
        lambda: in_a_task(UserCodeException("x"), "ray.exceptions.ActorDiedError: the actor died unexpectedly"),
        STREAMS,
    ),
    "a stream's worker lost an object": (
        lambda: in_a_task(UserCodeException("x"), "ray.exceptions.OwnerDiedError: the owner of the object died"),
        STREAMS,
    ),
    "a stream's worker died": (WorkerCrashedError, STREAMS),
    "a worker took too much memory": (lambda: OutOfMemoryError("the node ran low on memory"), ("collect",)),
    "a task was cancelled": (TaskCancelledError, ("collect",)),
    "a task has no place": (lambda: TaskUnschedulableError("no node has room"), ("collect",)),
    "an actor has no place": (lambda: ActorUnschedulableError("no node has room"), ("launch",)),
    "a call did not arrive": (lambda: RpcError("unavailable"), ("sync",)),
    "a node died": (lambda: NodeDiedError("the node is gone"), ANY),
    "the raylet died": (LocalRayletDiedError, ("launch", "wait", "load policy", "collect", "learn", "sync", "export")),
    "an object was lost": (lambda: ObjectLostError("ab" * 28, None, ""), ("sync", "learn", *STREAMS)),
    "an object's owner died": (lambda: OwnerDiedError("ab" * 28, None, ""), ("sync", "learn", *STREAMS)),
    "nothing came in time": (lambda: GetTimeoutError("120 s"), ("learn", "sync", "choose", "consume", *STREAMS)),
}
"""By what was lost: the exception, and the places where it is raised. The run continues by itself after each."""

ENDS: dict[str, tuple[Callable[[], BaseException], tuple[str, ...], int]] = {
    "Ray's head is gone": (lambda: RaySystemError(ConnectionError("GCS")), ("launch", "collect", "learn"), 1),
    "no connection": (lambda: ConnectionError("connection refused"), ("connected", "launch", "learn"), 1),
    "the disk is full": (
        lambda: OSError(errno.ENOSPC, "No space left on device", "/data/x"),
        ("prepare", "demonstrations", "checkpoint", "export", "report", "evaluate step"),
        1,
    ),
    "a rank's disk is full": (
        lambda: LearnerFailed("checkpoint: cannot write checkpoint x: No space left on device"),
        ("checkpoint", "export"),
        1,
    ),
    "a user's reward failed": (
        lambda: UserCodeError("reward.function own:f failed for trajectory t: ZeroDivisionError (own.py, line 3)"),
        STREAMS,
        1,
    ),
    "Ctrl-C": (KeyboardInterrupt, ("prepare", "connected", "demonstrations", *ANY, "report"), 130),
    "SIGTERM of a library": (lambda: SystemExit(143), ("prepare", "connected", "demonstrations", *ANY, "report"), 143),
}
"""By what happened: the exception, where, and the exit code. The run ends, and --resume continues."""


def of(table: dict[str, tuple]) -> list[tuple[str, str]]:
    return [(name, place) for name, (_, places, *_) in table.items() for place in places]


def struck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Callable[[], BaseException]
) -> StandInRun:
    return stand_in_run(tmp_path, monkeypatch, Strike(place=place, error=error, after=PASSED.get(place, 0)))


def check_finished(run: StandInRun) -> None:
    """The run trained each step and each group once, and its checkpoints are there."""
    assert run.recorded_steps() == [*range(1, NUM_STEPS + 1)]
    groups = run.trained_groups()
    assert len(groups) == len(set(groups)) == NUM_STEPS * GROUPS_PER_STEP
    assert len(run.checkpoints()) >= NUM_STEPS  # and those that were saved between two updates


def check_words(captured: str) -> None:
    """Nothing of what was printed is a traceback or a page of Ray's."""
    assert "Traceback" not in captured and 'File "' not in captured, captured
    assert max(map(len, captured.splitlines()), default=0) <= 400, captured


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "place"), of(LOSSES))
def test_a_run_goes_on_when_a_role_is_lost(tmp_path, monkeypatch, capsys, lost, place):
    run = struck(tmp_path, monkeypatch, place, LOSSES[lost][0])
    code = run.command()
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert run.strike.has_hit
    assert code == 0, said
    check_words(said)
    check_finished(run)
    assert len(re.findall(r"^.*restart \d", captured.out, re.MULTILINE)) == 1, "one line for one restart"
    assert run.num_launches == 2, "all roles start once, and once more after the loss"
    assert set(run.trained_models) == {str(run.run_folder / "warm_start")}


@pytest.mark.slow
@pytest.mark.parametrize(("what", "place"), of(ENDS))
def test_a_run_that_ends_says_why_once_keeps_all_and_goes_on_with_resume(tmp_path, monkeypatch, capsys, what, place):
    run = struck(tmp_path, monkeypatch, place, ENDS[what][0])
    code = run.command()
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert run.strike.has_hit
    assert code == ENDS[what][2], said
    check_words(said)
    if code == 1:
        assert len(re.findall(r"^error: ", captured.err, re.MULTILINE)) == 1, said
    kept = run.checkpoints()
    assert run.run_folder.is_dir()
    if place in ("learn", "sync", "export", "report"):
        assert kept, "a step was saved before"
    assert run.command("--resume") == 0
    assert [name for name in kept if name not in run.checkpoints()] == []
    check_finished(run)
    check_words("".join(capsys.readouterr()))


def test_the_table_has_every_exception_that_restarts_a_run():
    raised = [error() for error, _ in LOSSES.values()]
    assert [kind.__name__ for kind in LOST_IN_RAY if not any(isinstance(error, kind) for error in raised)] == []


@pytest.mark.parametrize(
    ("model", "num_starts"),
    [({}, 1), ({"lora_rank": 4}, 2), ({"lora_rank": 4, "lora_merge": True, "dtype": "float32"}, 1)],
)
def test_all_roles_start_once_for_all_that_a_run_does(tmp_path, monkeypatch, model, num_starts):
    """Only engines that serve an adapter start again: the warm start has given it another base model."""
    run = stand_in_run(tmp_path, monkeypatch, Strike(place="nowhere", error=KeyboardInterrupt))
    run.model = model
    assert run.command() == 0
    check_finished(run)
    assert run.num_launches == num_starts
    order = ["launch", "demonstrations", "wait", "evaluate untrained", "warm start", "load policy", "sync", "collect"]
    assert [place for place in dict.fromkeys(run.seen) if place in order] == order
    assert run.trained_models == [str(run.run_folder / "warm_start")]


def _raise_runtime_error() -> None:
    raise RuntimeError("no such span")


@pytest.mark.parametrize("strike", [_raise_runtime_error, lambda: signal.raise_signal(signal.SIGTERM)])
def test_a_step_that_is_on_record_is_not_logged_again(tmp_path, monkeypatch, strike):
    """The run ends between the step's row in metrics.jsonl and the end of the step."""
    run = stand_in_run(tmp_path, monkeypatch, Strike(place="nowhere", error=KeyboardInterrupt))
    strikes = iter([strike])

    def log_trajectories(tracker, groups, step):
        if step == 2:
            next(strikes, lambda: None)()

    monkeypatch.setattr(TrackerFront, "log_trajectories", log_trajectories)
    assert run.command() != 0
    assert run.recorded_steps() == [1, 2]
    assert run.command("--resume") == 0
    check_finished(run)


def test_a_signal_while_a_step_is_logged_loses_no_row(tmp_path, monkeypatch):
    run = stand_in_run(tmp_path, monkeypatch, Strike(place="nowhere", error=KeyboardInterrupt))
    log_metrics, struck = TrackerFront.log_metrics, []

    def strike_first(tracker, metrics, *, step):
        if step == 2 and "reward" in metrics and not struck:
            struck.append(step)
            signal.raise_signal(signal.SIGTERM)
        log_metrics(tracker, metrics, step=step)

    monkeypatch.setattr(TrackerFront, "log_metrics", strike_first)
    assert run.command() == 143 and struck
    assert run.recorded_steps() == [1, 2]
    assert run.command("--resume") == 0
    check_finished(run)


def test_a_finished_run_that_is_refused_stays_finished(tmp_path, monkeypatch):
    run = stand_in_run(tmp_path, monkeypatch, Strike(place="nowhere", error=KeyboardInterrupt))
    assert run.command() == 0
    write_record(run.run_folder / "inputs.json", {"data.train": "before"})
    monkeypatch.setattr(train, "hash_inputs", lambda _: {"data.train": "changed"})
    assert run.command(f"num_steps={NUM_STEPS + 1}", "--resume") == 2
    assert unfinished(run.run_folder) == ""


def test_a_run_that_is_to_end_before_the_step_it_was_interrupted_in_ends_with_the_policy_of_a_whole_step(
    tmp_path, monkeypatch, capsys
):
    """It was told to stop within step 3, and its user takes what it has."""
    run = stand_in_run(tmp_path, monkeypatch, Strike(place="learn", error=KeyboardInterrupt, after=5))
    assert run.command() == 130 and run.checkpoints()[-1] == "step-00000005"
    assert run.command("--resume", "num_steps=2") == 0
    assert "was saved within step 3, and num_steps is 2" in capsys.readouterr().out
    made_of = json.loads((run.run_folder / "huggingface" / "made_of.json").read_text())
    assert (made_of["step"], made_of["weights"]) == (2, "4"), "of two updates each"
    assert run.checkpoints()[-1] == "step-00000004"
    assert (run.run_folder / "replaced" / "1" / "checkpoints" / "step-00000005").is_dir()


@pytest.mark.parametrize(
    ("model", "algorithm"), [({"lora_rank": 4}, {}), ({}, {"kl_coef": 0.001}), ({}, {"kl_coef": 0})]
)
def test_a_warm_start_that_checkpoints_need_is_not_made_again(tmp_path, monkeypatch, capsys, model, algorithm):
    run = stand_in_run(tmp_path, monkeypatch, Strike(place="learn", error=KeyboardInterrupt, after=5))
    run.model, settings = model, run.settings()
    settings |= {"model": {**settings["model"], **model}, "algorithm": {**settings["algorithm"], **algorithm}}
    monkeypatch.setattr(run, "settings", lambda: settings)
    assert run.command() == 130
    run.seen.clear()
    (run.run_folder / "warm_start").rename(tmp_path / "elsewhere")
    if not model and not algorithm["kl_coef"]:
        assert run.command("--resume") == 0 and "warm start" in run.seen
        return
    assert run.command("--resume") == 2 and "warm start" not in run.seen
    assert "run/warm_start is gone, the model from which the checkpoints of the run were trained; put it back" in (
        capsys.readouterr().err
    )
    (tmp_path / "elsewhere").rename(run.run_folder / "warm_start")
    assert run.command("--resume") == 0
    check_finished(run)


def test_the_seconds_of_a_start_that_was_interrupted_count(tmp_path, monkeypatch):
    run = struck(tmp_path, monkeypatch, "learn", KeyboardInterrupt)
    assert run.command() == 130
    assert json.loads((run.run_folder / "state.json").read_text())["seconds"]["train"] > 0


def test_no_role_waits_for_a_teacher(tmp_path, monkeypatch):
    """Its trajectories may take hours, for which a run must not keep GPUs."""
    run = stand_in_run(tmp_path, monkeypatch, Strike(place="nowhere", error=KeyboardInterrupt))
    run.warm_start = {"teacher": {"url": "http://127.0.0.1:1/v1", "model": "teacher"}}
    assert run.command() == 0
    assert run.num_launches == 1 and run.seen.index("demonstrations") < run.seen.index("launch")


def test_a_run_that_goes_on_after_its_warm_start_starts_its_roles_once_with_the_model_of_that(tmp_path, monkeypatch):
    run = struck(tmp_path, monkeypatch, "evaluate before", KeyboardInterrupt)
    assert run.command() == 130
    run.num_launches, run.seen = 0, []
    assert run.command("--resume") == 0
    check_finished(run)
    assert run.num_launches == 1 and not {"demonstrations", "evaluate untrained", "warm start"} & {*run.seen}
    assert run.launched_models == [str(tmp_path / "model"), str(run.run_folder / "warm_start")]


def test_a_role_that_is_lost_while_the_run_starts_again_costs_one_more_restart(tmp_path, monkeypatch, capsys):
    class Twice(Strike):
        def at(self, place: str) -> None:
            super().at(place)
            if self.has_hit and place == "restore" and self.place != place:
                self.place, self.has_hit, self.after = place, False, 0
                super().at(place)

    run = stand_in_run(tmp_path, monkeypatch, Twice(place="learn", error=lambda: LearnerLost("a rank died"), after=5))
    assert run.command() == 0
    assert len(re.findall(r"restart \d", capsys.readouterr().out)) == 2
    check_finished(run)


@pytest.mark.parametrize("place", ["learn", "sync", "checkpoint", "evaluate after"])
def test_a_lost_role_while_the_questions_are_away_costs_nothing_that_was_saved(tmp_path, monkeypatch, capsys, place):
    """A mount that goes away together with a node: the run waits for it or ends, and keeps its checkpoints."""
    away = tmp_path / "away.parquet"
    monkeypatch.setattr("time.sleep", lambda _: away.exists() and away.rename(tmp_path / TRAIN))

    def lost_with_the_mount() -> BaseException:
        (tmp_path / TRAIN).rename(away)
        return LearnerLost("a learner rank died")

    run = struck(tmp_path, monkeypatch, place, lost_with_the_mount)
    code = run.command()
    kept = run.checkpoints()
    assert kept and run.run_folder.is_dir()
    if code != 0:
        (tmp_path / "away.parquet").rename(tmp_path / TRAIN)
        assert run.command("--resume") == 0
    check_finished(run)
    check_words("".join(capsys.readouterr()))


def test_a_role_that_is_lost_again_and_again_ends_the_run_with_all_that_was_saved(tmp_path, monkeypatch, capsys):
    class Again(Strike):
        def at(self, place: str) -> None:
            if place == self.place and self.after <= 0:
                raise self.error()
            self.after -= place == self.place

    strike = Again(place="learn", error=lambda: LearnerLost("a learner rank died"), after=4)
    run = stand_in_run(tmp_path, monkeypatch, strike)
    assert run.command() == 1
    said = capsys.readouterr()
    assert len(re.findall(r"restart \d", said.out)) == 3
    assert len(re.findall(r"^error: ", said.err, re.MULTILINE)) == 1 and "a learner rank died" in said.err
    assert run.checkpoints() and run.run_folder.is_dir()


def test_a_run_whose_engines_compute_otherwise_ends_with_a_sentence_and_an_alarm(tmp_path, monkeypatch, capsys):
    run = stand_in_run(
        tmp_path, monkeypatch, Strike(place="learn", error=lambda: SamplingMismatch(0.2, 900, 0.05), after=2)
    )
    monkeypatch.setattr(train, "write_report", write_report)
    assert run.command() == 1
    captured = capsys.readouterr()
    check_words(captured.out + captured.err)
    assert captured.err.count("generation.mismatch_tolerance allows 0.05") == 1
    assert len(run.checkpoints()) == 1, "the step before is kept"
    told = json.loads((run.run_folder / "report.json").read_text())["alarms"]
    assert told.startswith("Engine and learner drift apart: in 1 of 1 steps, first in step 2")
    assert run.command("--resume") == 0
    check_finished(run)
    assert "alarms" not in json.loads((run.run_folder / "report.json").read_text())


def test_the_files_of_a_checkpoint_are_compared_once_when_a_run_is_resumed(tmp_path, monkeypatch):
    """The command does it before anything starts, so the ranks need not. In a later attempt the ranks do."""
    run = struck(tmp_path, monkeypatch, "collect", KeyboardInterrupt)
    assert run.command() != 0
    run.loaded.clear()
    run.strike = Strike(place="sync", error=lambda: LearnerLost("a rank died"))
    assert run.command("--resume") == 0
    (first, verified), (again, unverified) = run.loaded
    assert first == again
    assert verified and not unverified
