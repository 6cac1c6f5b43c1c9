"""The quickstart in miniature on the GPUs of this machine, placed as `doctor` says."""

from __future__ import annotations

import subprocess
import sys

import pytest
from miniature import FEW_PROCESSES, QUICKSTART, train_command
from shapes import GPU, needs_gpus, played_anywhere

from mempipe.tracking.tracker import read_metrics
from tools.processes import ROOT, Marked, run

pytestmark = [pytest.mark.gpu, played_anywhere]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([], id="as doctor places it"),
        pytest.param([*FEW_PROCESSES, "placement=separate"], id="weights by nccl", marks=needs_gpus(2)),
        pytest.param(["placement=colocated"], id="ranks with weights by ipc", marks=needs_gpus(2)),
        pytest.param(
            ["placement=colocated", "generation.tensor_parallel=2"],
            id="an engine on the GPUs of two ranks",
            marks=needs_gpus(2),
        ),
        pytest.param(
            [*FEW_PROCESSES, "placement=separate", "generation.tensor_parallel=2"],
            id="an engine of two GPUs",
            marks=needs_gpus(3),
        ),
    ],
)
def test_a_run_is_placed_as_doctor_says_and_trains_what_it_samples(tmp_path, measured, settings):
    settings = [*settings, *(["model.dtype=bfloat16"] if GPU else [])]  # as `make quickstart`
    doctor = [sys.executable, "-m", "mempipe.cli", "doctor", str(QUICKSTART), f"output={tmp_path}", *settings]
    said = subprocess.run(doctor, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    done = run(train_command(tmp_path, settings), marked=Marked(), cwd=ROOT, writes=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (plan,) = [line.split("(", 1)[1].rstrip(")") for line in done.stdout.splitlines() if "roles are up" in line]
    assert plan in said and ("GPU" in plan) == GPU
    rows = [row for row in read_metrics(tmp_path / "quickstart" / "metrics.jsonl") if "reward" in row]
    assert len(rows) == 4
    measured["canary mean"] = max(row["canary_mean_difference"] for row in rows)
    measured["canary max"] = max(row["canary_max_difference"] for row in rows)
    if "learner/model_flops_utilization" in rows[-1]:
        measured["MFU"] = rows[-1]["learner/model_flops_utilization"]
