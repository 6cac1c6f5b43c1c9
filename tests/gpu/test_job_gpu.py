"""The quickstart in miniature on the GPUs of this machine, placed as `doctor` says."""

from __future__ import annotations

import subprocess
import sys

import pytest
from miniature import QUICKSTART, train_command
from shapes import GPU, played_anywhere

from mempipe.tracking.tracker import read_metrics
from tools.processes import ROOT, Marked, run

pytestmark = [pytest.mark.gpu, played_anywhere]


def test_a_run_is_placed_as_doctor_says_and_trains_what_it_samples(tmp_path, measured):
    dtype = ["model.dtype=bfloat16"] if GPU else []  # as `make quickstart`
    doctor = [sys.executable, "-m", "mempipe.cli", "doctor", str(QUICKSTART), f"output={tmp_path}", *dtype]
    said = subprocess.run(doctor, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    done = run(train_command(tmp_path, dtype), marked=Marked(), cwd=ROOT, writes=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (plan,) = [line.split("(", 1)[1].rstrip(")") for line in done.stdout.splitlines() if "roles are up" in line]
    assert plan in said and ("GPU" in plan) == GPU
    rows = [row for row in read_metrics(tmp_path / "quickstart" / "metrics.jsonl") if "reward" in row]
    assert len(rows) == 4
    measured["canary mean"] = max(row["canary_mean_difference"] for row in rows)
    measured["canary max"] = max(row["canary_max_difference"] for row in rows)
    if "learner/model_flops_utilization" in rows[-1]:
        measured["MFU"] = rows[-1]["learner/model_flops_utilization"]
