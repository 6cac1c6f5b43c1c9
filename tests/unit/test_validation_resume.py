"""A run that continues: which policy and questions a kept validation belongs to, and which groups are streamed. Roles
are stand-ins; pipeline, folder and files are real."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from result_builders import answered

from mempipe.config import RunConfig
from mempipe.data.qa import QuestionTable
from mempipe.data.trajectories import read_made_of, read_trajectories, write_trajectories
from mempipe.engines.checkpoint import Position, position_of
from mempipe.loader import parse_config
from mempipe.runs import Run
from mempipe.settings import ConfigError
from mempipe.stop import StopRequest
from mempipe.training import validation
from mempipe.training.validation import Validation
from mempipe.types import EndReason, Group, Question, Trajectory
from pipelines import train

QUESTIONS = [Question(id=str(i), text="q", golden_answers=["a"]) for i in range(4)]


class Roles:
    """Engines whose policy scores `em` at every question."""

    references = learners = None

    def __init__(self, config: RunConfig, *, em: float, weights: str) -> None:
        self.config, self.em, self.weights_sha256 = config, em, weights

    def driver_spec(self, **_: Any) -> float:
        return self.em


class Tracker:
    def __init__(self) -> None:
        self.rows: list[tuple[int, float]] = []

    def log_metrics(self, metrics: dict[str, float], *, step: int) -> None:
        self.rows.append((step, metrics["validation/em"]))

    def restart_at(self, step: int) -> None:
        pass


class Exports:
    """Notes what is asked of it."""

    def __init__(self, done: list[str]) -> None:
        self._done = done

    def trained(self, step: int) -> None:
        self._done.append(f"export {step}")

    def validated(self, groups: list[Group], *, step: int) -> None:
        self._done.append(f"best {step}")


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(em: float, rows: list[tuple[str, Question]]) -> Iterator[Group]:
        for name, question in rows:
            attempt = Trajectory(
                id=name, group_id=name, member=0, contexts=[], end_reason=EndReason.ANSWERED, answer="a", em=em
            )
            yield Group(id=name, question=question, trajectories=[attempt])

    monkeypatch.setattr(validation, "stream_groups", stream)


def config(output: Path, **values: Any) -> RunConfig:
    given = {"output": str(output), "name": "r", "num_steps": 20, "data": {"train": "t", "validation": "v"}}
    return parse_config(given | {"algorithm": {"kl_coef": 0}, "evaluation": {"every_steps": 5}} | values)


def evaluate(run: Run, *, em: float, weights: str, step: int = 5, questions: list[Question] = QUESTIONS) -> float:
    roles: Any = Roles(run.config, em=em, weights=weights)
    tracker: Any = Tracker()
    groups = Validation(run, questions, tracker).evaluate(roles, label=f"step-{step:08d}", step=step)
    assert [group.question.id for group in groups] == [question.id for question in questions]
    assert len(tracker.rows) <= 1 and all(row[0] == step for row in tracker.rows)
    return groups[0].trajectories[0].em


def test_a_validation_names_its_policy_questions_and_settings(tmp_path):
    run = Run(config(tmp_path))
    run.check_inputs({"agent.prompts": "p", "retrieval.index": "i"})
    evaluate(run, em=1.0, weights="w")
    record = read_made_of(run.folder / "evaluation" / "step-00000005.parquet")
    assert record is not None
    assert {name: record[name] for name in ("step", "weights", "prompts", "index", "temperature")} == {
        "step": 5,
        "weights": "w",
        "prompts": "p",
        "index": "i",
        "temperature": 0.0,
    }
    assert (
        len(record["questions"]) == 16 and record["agent"]["name"] == "memsearcher" and "max_turns" in record["budget"]
    )


def test_a_validation_of_the_same_policy_is_read_back(tmp_path):
    run = Run(config(tmp_path))
    assert evaluate(run, em=1.0, weights="w") == 1.0
    assert evaluate(run, em=0.0, weights="w") == 1.0, "it was not asked again"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"weights": "of the restart"}, "weights"),
        ({"questions": [Question(id="new", text="q", golden_answers=["a"])]}, "questions"),
        ({"questions": [Question(id=str(i), text="q", golden_answers=["b"]) for i in range(4)]}, "questions"),
    ],
    ids=["weights", "questions", "golden answers"],
)
def test_a_validation_of_something_else_is_set_aside_and_made_again(tmp_path, capsys, changed, named):
    run = Run(config(tmp_path))
    evaluate(run, em=1.0, weights="w")
    assert evaluate(run, **{"em": 0.0, "weights": "w", **changed}) == 0.0
    (old,) = read_trajectories(run.folder / "replaced" / "1" / "evaluation" / "step-00000005.parquet")[:1]
    assert old.trajectories[0].em == 1.0
    said = capsys.readouterr().out
    assert f"is of other {named}: evaluation/step-00000005.parquet is now in {run.folder / 'replaced' / '1'}" in said


def test_a_validation_of_an_earlier_version_without_a_record_is_made_again(tmp_path):
    run = Run(config(tmp_path))
    write_trajectories(run.folder / "evaluation" / "step-00000005.parquet", answered([True]))
    assert evaluate(run, em=0.0, weights="w") == 0.0


@pytest.fixture
def due(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    monkeypatch.setattr(train, "Exports", lambda *_, **__: Exports(done))
    monkeypatch.setattr(Validation, "_kept", lambda _, label, made_of: done.append(label) or [])
    return done


def of(run: Run) -> Validation:
    return Validation(run, QUESTIONS, Tracker())  # pyrefly: ignore


class Learning(Exception):
    """The loop is about to begin."""


def go_on(run: Run, step: int) -> None:
    roles: Any = Roles(run.config, em=0.0, weights="w")

    def begin(**_: Any) -> None:
        raise Learning

    roles.new_admission = begin
    with pytest.raises(Learning):
        train.learn(run, roles, [], of(run), Position(step=step), Tracker())  # pyrefly: ignore


@pytest.mark.parametrize(
    ("step", "done"),
    [
        (10, ["export 10", "step-00000010", "best 10"]),
        (7, ["export 7"]),
        (20, ["export 20"]),  # the evaluation after the last step is "after"
        (0, []),
    ],
)
def test_what_was_due_at_the_restored_step_is_done_before_the_next_one(tmp_path, due, step, done):
    go_on(Run(config(tmp_path)), step)
    assert due == done


def test_promise_7_a_resumed_run_streams_no_group_that_was_trained_dropped_or_kept(tmp_path, monkeypatch):
    streamed: list[str] = []
    monkeypatch.setattr(train, "stream_groups", lambda spec, rows, references: streamed.extend(dict(rows)))
    algorithm = {"kl_coef": 0, "filter_zero_variance": True}
    run = Run(config(tmp_path, algorithm=algorithm, data={"train": "t", "num_epochs": 2}))
    position = Position(step=1, trained=[["0/0"]], dropped=["0/1"])
    kept: Any = [SimpleNamespace(id="0/2")]
    roles: Any = Roles(run.config, em=0.0, weights="w")
    train._remaining_groups(roles, QuestionTable(QUESTIONS), position, kept, admission="a")
    assert sorted(streamed) == ["0/3", "1/0", "1/1", "1/2", "1/3"]


@pytest.mark.parametrize("is_filtered", [False, True])
def test_promise_7_a_resumed_run_streams_the_rest_of_the_order_of_a_run_that_never_stopped(
    tmp_path, monkeypatch, is_filtered
):
    """Three of eight steps are done, and a group of the fourth is kept."""
    streamed: list[str] = []
    monkeypatch.setattr(train, "stream_groups", lambda spec, rows, references: streamed.extend(dict(rows)))
    algorithm = {"kl_coef": 0, "groups_per_step": 3, "filter_zero_variance": is_filtered}
    run = Run(config(tmp_path, num_steps=8, algorithm=algorithm, data={"train": "t", "num_epochs": 3}))
    roles: Any = Roles(run.config, em=0.0, weights="w")
    questions = QuestionTable([replace(QUESTIONS[0], id=str(i)) for i in range(9)])

    def remaining(position: Position, *kept: Any) -> list[str]:
        streamed.clear()
        train._remaining_groups(roles, questions, position, kept, admission="a")
        return [*streamed]

    order = remaining(Position())
    assert len(order) == (27 if is_filtered else 8 * 3), "filtered groups are replaced as long as there are questions"
    first, second = (
        [group_id.removeprefix(f"{epoch}/") for group_id in order[9 * epoch : 9 * epoch + 9]] for epoch in (0, 1)
    )
    assert sorted(first) == sorted(second) == [str(i) for i in range(9)] and first != second
    position = Position(step=3, trained=[order[:3], order[3:6], order[6:9]])
    assert remaining(position, SimpleNamespace(id=order[10])) == [order[9], *order[11:]]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What `_train` evaluates: (label, step). The learner restores the step that the folder `checkpoints` names."""
    evaluated: list[tuple[str, int]] = []

    def evaluate(_: Validation, roles: Any, *, label: str, step: int) -> list[Group]:
        evaluated.append((label, step))
        return []

    monkeypatch.setattr(Validation, "evaluate", evaluate)
    monkeypatch.setattr(train, "learn", lambda *_: None)
    monkeypatch.setattr(train, "load_tokenizer", lambda _: None)
    return evaluated


class Learners:
    """Ranks that restore the step which a checkpoint's folder names."""

    def load(self, path: Path, *, verified: bool = False) -> Position:
        return position_of(path)

    def export(self, folder: Path, *, source: str) -> None:
        folder.mkdir(exist_ok=True)


def train_on(run: Run) -> None:
    """Trains the run on roles that are stand-ins."""
    roles: Any = Roles(run.config, em=0.0, weights="w")
    roles.learners, roles.plan = Learners(), "stand-ins"
    roles.load_policy = roles.sync = lambda _: None
    train._train(run, roles, [], of(run), Tracker(), StopRequest(30.0))  # pyrefly: ignore


def restored_at(run: Run, step: int) -> None:
    folder = run.folder / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    state = {"num_updates_done": step, "ranks": "1 cpu", "position": asdict(Position(step=step))}
    (folder / "state.json").write_text(json.dumps(state))


def test_nothing_is_evaluated_as_before_training_under_later_weights(tmp_path, trained, capsys):
    run = Run(config(tmp_path))
    restored_at(run, 50)
    train_on(run)
    assert trained == [("after", 50)]
    assert "were not asked before the first step" in capsys.readouterr().out


def test_a_run_from_its_beginning_is_evaluated_before_and_after(tmp_path, trained):
    run = Run(config(tmp_path))
    train_on(run)
    assert trained == [("before", 0), ("after", 0)]


def test_the_validations_of_a_policy_that_was_lost_are_gone_from_the_run(tmp_path, trained, capsys):
    run = Run(config(tmp_path))
    restored_at(run, 5)
    for step in (5, 10):
        write_trajectories(run.folder / "evaluation" / f"step-{step:08d}.parquet", answered([True]))
    run.update(num_steps=12, best={"step": 10, "metric": "em", "value": 1.0})
    train_on(run)
    assert [file.name for file in sorted(run.folder.glob("evaluation/*"))] == ["step-00000005.parquet"]
    assert run.state["best"] is None
    assert (
        "steps 6 to 12 are trained again; results of later steps of the earlier start: evaluation/"
        in capsys.readouterr().out
    )


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "prepare", lambda run: run.config)
    monkeypatch.setattr(train, "check_inputs", lambda config: None)


def test_settings_that_are_refused_late_say_what_the_folder_keeps(tmp_path, prepared, monkeypatch):
    """As when a restart finds a smaller cluster, or question file and node are lost together."""

    @contextlib.contextmanager
    def connected(*_: Any, **__: Any) -> Iterator[str]:
        restored_at(SimpleNamespace(folder=tmp_path / "r"), 200)  # pyrefly: ignore
        raise ConfigError("need 8 GPUs, but the cluster has 4")
        yield

    monkeypatch.setattr(train, "connected", connected)
    with pytest.raises(ConfigError) as error:
        train.main(config(tmp_path))
    text = str(error.value)
    assert (
        text.startswith("need 8 GPUs") and "keeps checkpoints (the newest of step 200)" in text and "--resume" in text
    )
    assert (tmp_path / "r" / "checkpoints" / "step-00000200").is_dir() and (tmp_path / "r" / "state.json").exists()


def test_a_run_without_checkpoints_is_not_trained_on_from_zero(tmp_path, prepared):
    Run(config(tmp_path)).update(finished=True, num_steps=20)
    with pytest.raises(ConfigError, match=r"has ended after 20 steps and holds no checkpoint .* as model\.path"):
        train.main(config(tmp_path, num_steps=40), resume="always")


def test_a_damaged_report_of_a_run_that_has_ended_is_written_anew(tmp_path, capsys):
    run = Run(config(tmp_path))
    run.update(finished=True, num_steps=20)
    (run.folder / "report.json").write_text("{")
    train.main(run.config, resume="always")
    assert "report.json is damaged" in capsys.readouterr().out
    assert json.loads((run.folder / "report.json").read_text())["num_steps"] == 20
