"""A whole run with a real language model on real text: questions, supervised start, a GRPO step, evaluation."""

from __future__ import annotations

import json
import sys

import pytest
from miniature import QUICKSTART

from mempipe.data.trajectories import read_trajectories
from mempipe.tracking.tracker import read_metrics
from tools.processes import ROOT, Marked, run

# `make test` has the same model on an engine and a learner (tests/engines/test_smollm2.py).
pytestmark = pytest.mark.jobs
SMALL = [
    "data.corpus=python-reference",
    "cloze.test_share=0.3",
    "warm_start.num_clean_trajectories=3",
    "warm_start.num_noisy_trajectories=1",
    "warm_start.num_held_out=1",
    "warm_start.tokens_per_step=1024",
    "num_steps=1",
    "algorithm.groups_per_step=2",
    "algorithm.group_size=4",
    "algorithm.entropy_coef=0.001",  # so that every context is trained, whatever it earned
    "evaluation.num_questions=2",
    "budget.max_turns=2",
]


@pytest.fixture(scope="module")
def folder(smollm2, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs")
    config = QUICKSTART.with_name("smollm2_cloze_search.yaml")
    settings = [*SMALL, "name=run", f"output={output}", "model.source=''", f"model.path={smollm2}"]
    command = [sys.executable, "-m", "mempipe.cli", "train", str(config), *settings]
    done = run(command, marked=Marked(), cwd=ROOT, writes=output)
    assert done.returncode == 0, done.stdout + done.stderr
    return output / "run"


def test_a_step_trains_what_the_engine_sampled(folder):
    (step,) = [row for row in read_metrics(folder / "metrics.jsonl") if "reward" in row]
    assert step["canary_max_difference"] < 1e-3, "the engine serves the learner's weights"
    assert step["sampled_tokens"] > 0 and abs(step["learner/ratio"] - 1) < 1e-3, "the learner scores as the engine did"
    assert step["advantage_std"] == 0 or step["learner/grad_norm"] > 0


def test_the_same_held_out_questions_are_answered_three_times(folder):
    asked = {}
    for label in ("untrained", "before", "after"):
        groups = read_trajectories(folder / "evaluation" / f"{label}.parquet")
        asked[label] = sorted(group.question.id for group in groups)
    assert len(asked["after"]) == 2 and asked["untrained"] == asked["before"] == asked["after"]


def test_demonstrations_are_kept_and_judged_on_others(folder):
    shown = {part: read_trajectories(folder / "demonstrations" / f"{part}.parquet") for part in ("clean", "held_out")}
    assert len(shown["clean"]) == 3 and all(group.trajectories[0].em == 1 for group in shown["clean"])
    assert {g.question.id for g in shown["clean"]}.isdisjoint(g.question.id for g in shown["held_out"])
    losses = json.loads((folder / "warm_start.json").read_text())
    assert losses["losses"] and losses["held_out"][-1]["updates"] == len(losses["losses"])


def test_no_question_of_the_evaluation_is_about_a_passage_that_was_trained_on(folder):
    from mempipe.data.qa import read_questions

    used = {
        split: {e.passage_id for q in read_questions(folder / "questions" / f"{split}.parquet") for e in q.evidence}
        for split in ("train", "test")
    }
    assert used["train"] and used["train"].isdisjoint(used["test"])
