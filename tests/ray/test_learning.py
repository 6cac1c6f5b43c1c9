"""The quickstart's first steps: the reward rises through the whole pipeline."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = ["world.num_validation_questions=192", "num_steps=8", "optimizer.schedule=constant"]


@pytest.mark.learning
def test_the_reward_rises(tmp_path):
    command = [sys.executable, "-m", "mempipe.cli", "train", "jobs/configs/quickstart.yaml", *SHORT, f"output={tmp_path}", "name=short"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "short" / "report.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "short" / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert len(rewards) == 8
    assert report["em_start"] < 0.30
    assert report["em_end"] > report["em_start"] + 0.15, report
    assert report["kept_rate_end"] > report["kept_rate_start"] + 0.15
    assert sum(rewards[-5:]) / 5 > sum(rewards[:2]) / 2
