"""ReAct, MEM1, MemAgent and MemTrain through the whole real job in miniature:
a short warm start, two learner steps, evaluations, export.
"""

from __future__ import annotations

from collections import Counter

import pytest
from miniature import FEW_PROCESSES, QUICKSTART, train_command

from mempipe.data.trajectories import read_trajectories
from mempipe.evaluation.rollout_metrics import context_tokens_by_turn
from mempipe.tracking.tracker import read_metrics
from mempipe.types import EndReason
from tools.processes import ROOT, Marked, run

NUM_STEPS = 2
SCRIPT_ENDS = {EndReason.ANSWERED, EndReason.MAX_TURNS}
"""How attempts end that keep to the grammar of the script; others have not learned it yet."""


@pytest.mark.parametrize("agent", ["react", "mem1", "memagent", "memtrain"])
def test_an_agent_learns_its_grammar_from_the_script_and_is_trained_on(agent, tmp_path):
    overrides = [
        *FEW_PROCESSES,
        f"num_steps={NUM_STEPS}",
        "name=run",
        "warm_start.num_clean_trajectories=900",
        "warm_start.tokens_per_step=1024",
    ]
    if agent == "memtrain":  # the reference scores its recall samples too, and no group may be dropped
        overrides += ["algorithm.kl_coef=0.001", "algorithm.filter_zero_variance=false", "agent.num_recalls=2"]
        # Its answers quote facts as its memories do, and it takes longer until a box ends them.
        longer = ["warm_start.num_clean_trajectories=2000", "warm_start.num_noisy_trajectories=0"]
        overrides += [*longer, "world.num_train_worlds=10"]
    config = "tiny_memtrain" if agent == "memtrain" else f"quickstart_{agent}"
    command = train_command(tmp_path, overrides, config=QUICKSTART.with_name(f"{config}.yaml"))
    done = run(command, marked=Marked(), cwd=ROOT, writes=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward" in row]
    assert len(steps) == NUM_STEPS
    assert all(row["learner/grad_norm"] > 0 for row in steps if row["advantage_std"] > 0)
    assert (tmp_path / "run" / "huggingface" / "model.safetensors").exists()

    trajectories = [
        t for group in read_trajectories(tmp_path / "run" / "trajectories.parquet") for t in group.trajectories
    ]
    assert len(trajectories) == 2 * 12, "before and after"
    ends = Counter(trajectory.end_reason for trajectory in trajectories)
    assert sum(ends[end] for end in SCRIPT_ENDS) >= 0.5 * len(trajectories), ends
    contexts = {"react": {1}, "memagent": {5}, "memtrain": {5}}.get(agent, set(range(1, 7)))
    assert {len(trajectory.contexts) for trajectory in trajectories} <= contexts
    turns = [len(context_tokens_by_turn(trajectory, growing=agent == "react")) for trajectory in trajectories]
    assert max(turns) > 1
    if agent == "memtrain":
        assert {len(trajectory.recalls) for trajectory in trajectories} <= {0, 2}
        assert all("measure/recall" in row for row in steps)
        assert 0 <= steps[0]["learner/kl_ref"] < 0.1, "the policy has hardly moved from the reference yet"
