"""The real `mempipe evaluate`:
its driver killed after the first part, then the same command again, and a look at all that it leaves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from mempipe.beacons import VARIABLE
from mempipe.cli import EXIT_CONFIG
from mempipe.config import RunConfig
from mempipe.data.qa import read_questions, write_questions
from mempipe.evaluation.results import read_groups, read_results
from mempipe.evaluation.suite import load_suite
from mempipe.settings import ConfigError
from mempipe.storage.files import lock
from mempipe.tracking.tracker import last_run_id
from mempipe.types import Question
from pipelines.evaluate import main
from tools.processes import Marked, Running, run

NUM_SAMPLES, PER_PART = 2, 4
LONG = Question(id="long", text=" ".join(["where"] * 200), golden_answers=["nowhere"])


@dataclass(frozen=True)
class Evaluated:
    suite: Path
    folder: Path
    questions: list[Question]
    parts_at_kill: dict[str, bytes]
    survivors_of_kill: list[str]
    output: str


def command(suite: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "mempipe.cli", "evaluate", str(suite), *overrides]


def parts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("part-*.parquet"))}


def write_suite(folder: Path, world: RunConfig, questions: Path) -> Path:
    """The world's agent under its untrained model: what it writes is noise, so that every kind of ending occurs."""
    settings = world.model_dump(mode="json", include={"model", "agent", "budget", "retrieval", "generation"})
    asked = read_questions(world.data.train)
    write_questions(folder / "pairs.parquet", [each for each in asked if each.partition == asked[0].partition][:12])
    suite = {
        "name": "kill",
        "output": str(folder),
        "runs": [{"name": "noise", "settings": {**settings, "stream": {"groups_in_flight": 2}}}],
        "benchmarks": [
            {"name": "world", "file": str(questions)},
            {"name": "pairs", "file": str(folder / "pairs.parquet"), "objectives": 2},
        ],
        "sampling": {"temperature": 1.0},
        "num_samples": NUM_SAMPLES,
        "questions_per_part": PER_PART,
        "bootstrap": {"num_resamples": 100},
    }
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump(suite))
    return path


@pytest.fixture(scope="module")
def evaluated(world: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluated]:
    folder = tmp_path_factory.mktemp("evaluate")
    questions = [*read_questions(world.data.train)[:23], LONG]
    write_questions(folder / "questions.parquet", questions)
    suite = write_suite(folder, world, folder / "questions.parquet")
    hold = folder / "hold-evaluation.group"
    hold.write_text(json.dumps({"groups": PER_PART + 1}))  # the command stops between its first part and the next
    marked = Marked({VARIABLE: str(folder)})
    try:
        driver = Running(command(suite), marked=marked, cwd=folder)
        first = folder / "kill" / "noise" / "world"
        driver.wait_until(lambda: parts(first), every_s=0.02)
        driver.kill()
        survivors = marked.survivors()
        at_kill = parts(first)
        hold.unlink()
        again = run(command(suite), marked=marked, cwd=folder)
        assert again.returncode == 0, again.stderr[-2000:]
        yield Evaluated(suite, folder / "kill", questions, at_kill, survivors, again.stdout)
    finally:
        marked.end()


def test_promise_7_a_killed_evaluation_ends_with_every_question_once(evaluated):
    rows = read_results(evaluated.folder / "noise" / "world")
    assert 1 == len(evaluated.parts_at_kill) < len(parts(evaluated.folder / "noise" / "world"))
    assert len(rows) == len(evaluated.questions)
    assert {row.question_id for row in rows} == {question.id for question in evaluated.questions}


def test_what_was_written_before_the_kill_stays_as_it_was(evaluated):
    assert parts(evaluated.folder / "noise" / "world").items() >= evaluated.parts_at_kill.items()


def test_a_kill_leaves_no_process(evaluated):
    assert evaluated.survivors_of_kill == []


def test_every_row_has_its_attempts_whole(evaluated):
    folder = evaluated.folder / "noise" / "world"
    for row, group in zip(read_results(folder), read_groups(folder), strict=True):
        assert group.question.id == row.question_id
        assert len(group.trajectories) == len(row.answers) == (0 if row.failed else NUM_SAMPLES)
        for trajectory, tokens in zip(group.trajectories, row.context_tokens_by_turn, strict=True):
            assert [len(context.token_ids) for context in trajectory.contexts] == tokens
            assert all(len(context.token_ids) == len(context.loss_mask) for context in trajectory.contexts)


def test_a_question_that_does_not_fit_fails_by_name_and_counts_with_0(evaluated):
    (failed,) = [row for row in read_results(evaluated.folder / "noise" / "world") if row.failed]
    assert failed.question_id == "long" and "budget.question_tokens" in failed.failed and failed.em == 0.0
    (cell,) = [
        cell for cell in json.loads((evaluated.folder / "report.json").read_text())["cells"] if cell["set"] == "world"
    ]
    assert (cell["num_questions"], cell["num_failed"]) == (len(evaluated.questions), 1)
    assert "1 question failed and counts with 0:\n  1 × question long" in evaluated.output
    assert "question long" in (evaluated.folder / "report.md").read_text()


def test_pairs_are_scored_objective_by_objective(evaluated):
    rows = read_results(evaluated.folder / "noise" / "pairs_x2")
    assert len(rows) == 6 and all(len(row.em_by_objective) == 2 and row.question.count("?") == 2 for row in rows)
    asked = [group.question for group in read_groups(evaluated.folder / "noise" / "pairs_x2")]
    assert {fact.objective for question in asked for fact in question.evidence} == {0, 1}
    for row in rows:
        assert len(row.first_causes) == 2 * NUM_SAMPLES and (row.em > 0 or all(row.first_causes))


def test_the_report_is_there_and_in_mlflow(evaluated):
    for name in ("report.md", "report.html", "context_tokens_by_turn.svg"):
        assert (evaluated.folder / name).stat().st_size > 500
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{evaluated.folder.parent / 'mlflow.db'}")
    run = client.get_run(str(last_run_id(evaluated.folder)))
    assert run.info.status == "FINISHED" and run.data.metrics["noise/world/num_failed"] == 1.0
    assert {"report.html", "report.json"} <= {file.path for file in client.list_artifacts(run.info.run_id)}


def test_a_finished_evaluation_asks_nothing_again_and_other_settings_are_refused(evaluated):
    before = parts(evaluated.folder / "noise" / "world")
    assert len(main(load_suite(evaluated.suite))) == 4
    assert parts(evaluated.folder / "noise" / "world") == before
    with pytest.raises(ConfigError, match=r"holds results of other settings \(num_samples\)"):
        main(load_suite(evaluated.suite, ["num_samples=1"]))
    with pytest.raises(ConfigError, match="nq has no file and data_dir is empty"):
        main(load_suite(evaluated.suite, ["name=x", "benchmarks=[{name: nq}]"]))
    assert not (evaluated.folder.parent / "x").exists()


def test_two_evaluations_do_not_share_a_folder(evaluated):
    lock(evaluated.folder)
    other = run(command(evaluated.suite), marked=Marked(), cwd=evaluated.folder.parent)
    assert other.returncode == EXIT_CONFIG
    assert f"error: another process is at work in {evaluated.folder}" in other.stderr
