"""An agent, a reward and a tool of the user's own through the whole job: nothing of them is in mempipe, they are found
in the folder that the job starts from, and their errors name the user's file.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from miniature import FEW_PROCESSES

from mempipe.data.trajectories import read_trajectories
from mempipe.engines.tiny import build_model, build_tokenizer
from mempipe.tracking.tracker import read_metrics
from mempipe.types import EndReason
from tools.processes import ROOT, Marked, run

PROMPTS = 'system: ""\nuser: "{question}<notebook>{memory}</notebook>"\n'
BROKEN = "\n\ndef broken(trajectory, question):\n    return 1 / len(trajectory.answer or '')\n"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A user's folder: the example, a model that knows nothing, and prompts that are short enough for it."""
    folder = tmp_path_factory.mktemp("workplace")
    shutil.copytree(ROOT / "examples" / "notebook_agent", folder / "notebook_agent")
    reward = folder / "notebook_agent" / "reward.py"
    reward.write_text(reward.read_text() + BROKEN)
    (folder / "prompts.yaml").write_text(PROMPTS)
    build_tokenizer(folder / "model")
    build_model(folder / "model", seed=1)
    return folder


def train(workplace: Path, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    settings = [
        f"name={name}",
        "num_steps=1",
        "model.path=model",
        "model.dtype=float32",
        "agent.prompts=prompts.yaml",
        "budget.question_tokens=160",
        "budget.action_tokens=24",
        "budget.context_tokens=512",
        "algorithm.groups_per_step=2",
        "algorithm.group_size=2",
        "evaluation.num_questions=2",
        "generation.enforce_eager=true",
        "learner.max_tokens_per_micro_batch=1024",
        *FEW_PROCESSES,
        *overrides,
    ]
    command = [sys.executable, "-m", "mempipe.cli", "train", "notebook_agent/config.yaml", *settings]
    return run(command, marked=Marked(), cwd=workplace)


@pytest.mark.jobs
def test_an_agent_a_reward_and_a_tool_of_ones_own_are_trained(workplace):
    """`make test` has the same agent on an engine and a learner (tests/engines/test_agents.py), and its reward in a
    worker of the stream (tests/ray/test_stream.py)."""
    done = train(workplace, "run")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = workplace / "runs" / "run"
    (step,) = [row for row in read_metrics(folder / "metrics.jsonl") if "reward" in row]
    assert step["reward"] < 0, "only this reward has a price for words"
    assert step["learner/grad_norm"] > 0
    played = [
        trajectory for group in read_trajectories(folder / "trajectories.parquet") for trajectory in group.trajectories
    ]
    assert len(played) == 2 * 2, "before and after"
    for trajectory in played:
        assert trajectory.end_reason in set(EndReason)
        assert {measure.name for measure in trajectory.measures} == {"right", "calls"}
        written = sum(len(context.action) for context in trajectory.contexts)
        assert trajectory.reward == pytest.approx(-written / 10_000)


@pytest.mark.jobs
def test_an_error_of_ones_own_reward_ends_the_run_and_names_the_file(workplace):
    done = train(workplace, "broken", "reward.function=notebook_agent.reward:broken")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "reward.function notebook_agent.reward:broken failed" in done.stderr
    assert "ZeroDivisionError" in done.stderr and "notebook_agent/reward.py, line" in done.stderr
    assert "Traceback" not in done.stderr
    assert not [row for row in read_metrics(workplace / "runs" / "broken" / "metrics.jsonl") if "reward" in row]


def test_a_reward_that_is_not_there_is_refused_before_anything_starts(workplace):
    done = train(workplace, "absent", "reward.function=notebook_agent.reward:absent")
    assert done.returncode == 2
    assert "reward.function is 'notebook_agent.reward:absent', but notebook_agent.reward has no absent" in done.stderr
    assert not (workplace / "runs" / "absent").exists()
