"""Where the seconds of a training step go, and what overlapping rollout and learning saves.

    python -m benchmarks.step_breakdown [--steps 12] [--pairs 2] [key=value ...]    runs the quickstart in short
    python -m benchmarks.step_breakdown --run FOLDER [FOLDER ...]                  reads runs that are there

Short runs start from the same warm start and alternate between algorithm.max_off_policy_steps 1 and 0. The first 2
steps of every run do not count: they hold what is done once. `generate`, `retrieve` and `wait` share the time in which
the learner had to wait for groups, by what their trajectories were doing meanwhile; a share that is small means that
rollouts run beside the learner. `checkpoint` is spread over the steps. `other` should stay under 10 %. With `--run` the
runs are grouped by their own max_off_policy_steps.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from mempipe.tracking.tracker import read_metrics
from tools.processes import foreground

CONFIG = Path(__file__).parents[1] / "jobs" / "configs" / "quickstart.yaml"
SETTINGS = [
    "warm_start.num_clean_trajectories=600",
    "warm_start.num_noisy_trajectories=0",
    "world.num_validation_questions=16",
    "checkpoint.every_steps=5",
]
PREPARED = ("world", "index", "model", "warm_start")  # what runs of one seed share
PARTS = ("generate", "retrieve", "wait", "reference", "learn", "sync", "checkpoint", "other")
NUM_SKIPPED = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="learner steps of one run")
    parser.add_argument("--pairs", type=int, default=2, help="runs with each setting")
    parser.add_argument("--run", type=Path, nargs="+", help="folders of runs to read instead")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = arguments.run or make_runs(Path(folder), arguments)
        steps: dict[int, list[dict[str, float]]] = defaultdict(list)
        for run in runs:
            config = yaml.safe_load((run / "config.yaml").read_text())
            steps[config["algorithm"]["max_off_policy_steps"]] += read_steps(run)
    report(steps)


def make_runs(folder: Path, arguments: argparse.Namespace) -> list[Path]:
    """Folders of the short runs, one after the other. Raises CalledProcessError when one fails."""
    runs = []
    for i in range(2 * arguments.pairs):
        lag = 1 - i % 2
        run = folder / f"run-{i}"
        if runs:
            for name in PREPARED:
                shutil.copytree(runs[0] / name, run / name)
        settings = [
            f"output={folder}",
            f"name={run.name}",
            f"algorithm.max_off_policy_steps={lag}",
            f"num_steps={arguments.steps}",
        ]
        command = [
            sys.executable,
            "-m",
            "mempipe.cli",
            "train",
            str(CONFIG),
            *SETTINGS,
            *settings,
            *arguments.overrides,
        ]
        foreground(command, stdout=subprocess.DEVNULL)
        runs.append(run)
    return runs


def read_steps(run: Path) -> list[dict[str, float]]:
    """Returns the seconds of each part and of the whole ("step"), for the steps that count."""
    rows = read_metrics(run / "metrics.jsonl")
    steps = [row for row in rows if "seconds/step" in row][NUM_SKIPPED:]
    if not steps:
        sys.exit(f"{run} has no more than {NUM_SKIPPED} steps on record, which do not count")
    saving = sum(row.get("seconds/checkpoint", 0.0) for row in rows if row["step"] > NUM_SKIPPED) / len(
        steps
    )  # in rows of their own
    found = []
    for row in steps:
        seconds = {part: row[f"seconds/{part}"] for part in PARTS if part != "checkpoint"} | {"checkpoint": saving}
        found.append(seconds | {"step": row["seconds/step"] + saving, "sampled tokens": row["sampled_tokens"]})
    return found


def report(steps: Mapping[int, Sequence[dict[str, float]]]) -> None:
    """Prints one column of medians and shares for every max_off_policy_steps, and the ratio of their step seconds."""
    lags = sorted(steps, reverse=True)
    print(f"{os.cpu_count()} cores; seconds (median) and share of all steps")
    print(f"{'max_off_policy_steps':<22}" + "".join(f"{lag:>10}{'':>8}" for lag in lags))
    for part in (*PARTS, "step"):
        cells = []
        for lag in lags:
            share = sum(one[part] for one in steps[lag]) / sum(one["step"] for one in steps[lag])
            cells.append(f"{statistics.median(one[part] for one in steps[lag]):>10.2f}{share:>8.1%}")
        print(f"{part:<22}" + "".join(cells))
    for name, value in (
        ("sampled tokens", lambda one: one["sampled tokens"]),
        ("tokens per second", lambda one: one["sampled tokens"] / one["step"]),
    ):
        print(f"{name:<22}" + "".join(f"{statistics.median(map(value, steps[lag])):>10.0f}{'':>8}" for lag in lags))
    print(f"{'steps':<22}" + "".join(f"{len(steps[lag]):>10}{'':>8}" for lag in lags))
    if len(lags) == 2:
        seconds = {lag: statistics.median(one["step"] for one in steps[lag]) for lag in lags}
        print(f"a step takes {seconds[lags[0]] / seconds[lags[1]]:.2f} x as long with {lags[0]} as with {lags[1]}")


if __name__ == "__main__":
    main()
