"""Does the quickstart learn on every seed? Runs it once per seed and prints held-out exact match before and after, with
95 % intervals.

    python -m benchmarks.quickstart_seeds [--seeds 1 2 3] [--output runs/seeds] [--plot FILE.svg] [key=value ...]

A seed draws everything anew: worlds, questions, passages, model, script, sampling. A finished run is read, not
repeated. The bar is below 0.30 after the warm start and at least 0.60 after reinforcement learning, greedy, on every
seed; the exit code is 1 if one misses it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import polars as pl

from benchmarks.learning_plot import plot

BAR_BEFORE, BAR_AFTER = 0.30, 0.60
CONFIG = Path(__file__).parents[1] / "jobs" / "configs" / "quickstart.yaml"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", default="runs/seeds")
    parser.add_argument("--plot", default="", help="an SVG of the learning curves and of the context by turn")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    rows = [run(seed, arguments.output, arguments.overrides) for seed in arguments.seeds]
    table = pl.DataFrame(rows)
    with pl.Config(
        tbl_rows=-1,
        tbl_cols=-1,
        tbl_hide_dataframe_shape=True,
        tbl_hide_column_data_types=True,
        fmt_str_lengths=40,
        tbl_width_chars=200,
    ):
        print(table)
    if arguments.plot:
        plot([Path(arguments.output) / f"seed-{seed}" for seed in arguments.seeds], arguments.plot)
    missed = table.filter((pl.col("em before") >= BAR_BEFORE) | (pl.col("em after") < BAR_AFTER))
    print(f"{len(rows) - len(missed)} of {len(rows)} seeds below {BAR_BEFORE} before and at {BAR_AFTER} or above after")
    return int(len(missed) > 0)


def run(seed: int, output: str, overrides: list[str]) -> dict[str, float | str]:
    name = f"seed-{seed}"
    command = [
        sys.executable,
        "-m",
        "mempipe.cli",
        "train",
        str(CONFIG),
        f"seed={seed}",
        f"name={name}",
        f"output={output}",
        "--resume-if-exists",
    ]
    subprocess.run([*command, *overrides], check=True)
    report = json.loads((Path(output) / name / "report.json").read_text())

    def interval(label: str) -> str:
        return f"{report[f'em_{label}_low']:.3f}..{report[f'em_{label}_high']:.3f}"

    return {
        "seed": seed,
        "em before": round(report["em_start"], 3),
        "before, 95 %": interval("start"),
        "em after": round(report["em_end"], 3),
        "after, 95 %": interval("end"),
        **{f"{hops} hops after": round(report[f"em_{hops}_hops_end"], 3) for hops in (1, 2, 3)},
        "kept after": round(report["kept_rate_end"], 3),
        "questions": report["num_questions"],
        "steps": report["num_steps"],
        "minutes": round(report["seconds_total"] / 60, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
