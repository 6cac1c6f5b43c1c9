"""What every agent's miniature run must leave behind, whichever test it was started for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from mempipe.data.trajectories import read_trajectories
from mempipe.evaluation.rollout_metrics import context_tokens_by_turn
from mempipe.tracking.tracker import read_metrics
from mempipe.types import EndReason

GRAMMAR = ["warm_start.num_clean_trajectories=900", "warm_start.tokens_per_step=1024"]
"""Demonstrations enough for an agent's grammar, and few enough to be quick."""
NUM_QUESTIONS = 12
CONTEXTS = {"react": {1}, "full_text": {1}, "memagent": {5}, "memtrain": {5}, "mem1": set(range(1, 7))}
"""How many contexts an attempt may have."""
SCRIPT_ENDS = {EndReason.ANSWERED, EndReason.MAX_TURNS}
"""How attempts end that keep to the grammar of the script; others have not learned it yet."""


def check_trained(folder: Path, agent: str, *, num_steps: int, stopped_in: int | None = None) -> None:
    """Asserts that the run in `folder` has updated the agent, and that its attempts are of the agent's form.

    Of the step that the run was stopped in, what the learner said is lost.
    """
    steps = [row for row in read_metrics(folder / "metrics.jsonl") if "reward" in row]
    assert [row["step"] for row in steps] == [*range(1, num_steps + 1)]
    learnt = [row for row in steps if "learner/grad_norm" in row or row["step"] != stopped_in]
    assert all(row["learner/grad_norm"] > 0 for row in learnt if row["advantage_std"] > 0)
    assert (folder / "huggingface" / "model.safetensors").exists()
    trajectories = [t for group in read_trajectories(folder / "trajectories.parquet") for t in group.trajectories]
    assert len(trajectories) == 2 * NUM_QUESTIONS, "before and after"
    ends = Counter(trajectory.end_reason for trajectory in trajectories)
    assert sum(ends[end] for end in SCRIPT_ENDS) >= 0.5 * len(trajectories), ends
    assert {len(trajectory.contexts) for trajectory in trajectories} <= CONTEXTS[agent]
    turns = [len(context_tokens_by_turn(trajectory, growing=agent == "react")) for trajectory in trajectories]
    assert (max(turns) > 1) == (agent != "full_text")
