"""ReAct, MemAgent and MemTrain through the whole real job in miniature: a short warm start, two learner steps,
evaluations, and the export.

MEM1 is trained by test_repair.py, MemSearcher by test_main_job.py, MemTrain on documents by test_memtrain_job.py.
"""

from __future__ import annotations

import pytest
from miniature import FEW_PROCESSES, QUICKSTART, train_command
from trained import GRAMMAR, check_trained

from mempipe.data.trajectories import read_trajectories
from mempipe.tracking.tracker import read_metrics
from tools.processes import ROOT, Marked, run

pytestmark = pytest.mark.jobs  # `make test` has each agent on an engine and a learner (tests/engines/test_agents.py)
NUM_STEPS = 2
# The reference scores MemTrain's recall samples too, and no group may be dropped. Its answers quote facts as its
# memories do, and it takes longer until a box ends them.
MEMTRAIN = [
    "algorithm.kl_coef=0.001",
    "algorithm.filter_zero_variance=false",
    "agent.num_recalls=2",
    "warm_start.num_clean_trajectories=1200",
    "warm_start.num_noisy_trajectories=0",
    "world.num_train_worlds=10",
]
ON_RANKS = ["algorithm.kl_coef=0.001", "reference.on_ranks=true"]


@pytest.mark.parametrize(
    "agent, config, overrides",
    [
        ("react", "quickstart_react", ON_RANKS),
        ("memagent", "quickstart_memagent", []),
        ("memtrain", "tiny_memtrain", MEMTRAIN),
        ("full_text", "quickstart_full_text", []),
    ],
)
def test_an_agent_learns_its_grammar_from_the_script_and_is_trained_on(agent, config, overrides, tmp_path):
    settings = [*FEW_PROCESSES, *GRAMMAR, f"num_steps={NUM_STEPS}", "name=run", *overrides]
    command = train_command(tmp_path, settings, config=QUICKSTART.with_name(f"{config}.yaml"))
    done = run(command, marked=Marked(), cwd=ROOT, writes=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "run"
    check_trained(folder, agent, num_steps=NUM_STEPS)
    steps = [row for row in read_metrics(folder / "metrics.jsonl") if "reward" in row]
    if overrides is ON_RANKS:
        assert 0 <= steps[0]["learner/kl_ref"] < 1, (
            "the reference is the model of the warm start, not the untrained one"
        )
        assert all(row["seconds/reference"] == row["learner/reference_seconds"] > 0 for row in steps)
    if agent == "memtrain":
        groups = read_trajectories(folder / "trajectories.parquet")
        assert {len(trajectory.recalls) for group in groups for trajectory in group.trajectories} <= {0, 2}
        assert all("measure/recall" in row for row in steps)
        assert 0 <= steps[0]["learner/kl_ref"] < 0.1, "the policy has hardly moved from the reference yet"
