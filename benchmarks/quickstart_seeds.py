"""Does the quickstart learn on every seed? Runs it once per seed and prints held-out exact match before and after, with
95 % intervals.

    python -m benchmarks.quickstart_seeds [--seeds 1 2 3 4 5] [--output runs/seeds] [--plot FILE.svg]
        [--pages README.md docs/results.md] [key=value ...]

A seed draws everything anew: worlds, questions, passages, model, script, sampling. A finished run is read, not
repeated. The bar is below 0.30 after the warm start and at least 0.60 after reinforcement learning, greedy, on every
seed; the exit code is 1 if one misses it. `--pages` writes the table into these pages.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from benchmarks.learning_plot import plot
from mempipe.evaluation.statistics import t_interval
from tools.processes import foreground

BAR_BEFORE, BAR_AFTER = 0.30, 0.60
MARKS = "<!-- the table of benchmarks.quickstart_seeds -->\n", "<!-- its end -->\n"
"""What the table stands between in a page."""
CONFIG = Path(__file__).parents[1] / "jobs" / "configs" / "quickstart.yaml"


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--output", default="runs/seeds")
    parser.add_argument("--plot", default="", help="an SVG of the learning curves and of the context by turn")
    parser.add_argument("--pages", type=Path, nargs="+", default=[], help="pages whose table of seeds is written anew")
    parser.add_argument("overrides", nargs="*", help="settings of the trainings, key=value")
    # Without the overrides: argparse would take one after --seeds for a number.
    arguments = parser.parse_args([word for word in words if word not in overrides])
    rows = [run(seed, arguments.output, overrides) for seed in arguments.seeds]
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
    folders = [Path(arguments.output) / f"seed-{seed}" for seed in arguments.seeds]
    if arguments.plot:
        plot(folders, arguments.plot)
    reports = {seed: report(folder) for seed, folder in zip(arguments.seeds, folders, strict=True)}
    for page in arguments.pages:
        write_table(page, reports)
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
    try:
        foreground([*command, *overrides])
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"seed {seed}: the training ended with exit code {error.returncode}; the reason is above, and the same "
            "command resumes from there"
        ) from error
    found = report(Path(output) / name)

    def interval(label: str) -> str:
        return f"{found[f'em_{label}_low']:.3f}..{found[f'em_{label}_high']:.3f}"

    return {
        "seed": seed,
        "em before": round(found["em_start"], 3),
        "before, 95 %": interval("start"),
        "em after": round(found["em_end"], 3),
        "after, 95 %": interval("end"),
        **{f"{hops} hops after": round(found[f"em_{hops}_hops_end"], 3) for hops in hops_of(found)},
        **({"kept after": round(found["kept_rate_end"], 3)} if "kept_rate_end" in found else {}),
        "questions": found["num_questions"],
        "steps": found["num_steps"],
        "minutes": round(found["seconds_total"] / 60, 1),
    }


def hops_of(found: Mapping[str, float]) -> list[int]:
    """Returns the numbers of hops that were asked."""
    return sorted(int(name.split("_")[1]) for name in found if re.fullmatch(r"em_\d+_hops_end", name))


def report(folder: Path) -> dict[str, float]:
    """Returns the report of a finished run."""
    return json.loads((folder / "report.json").read_text())


def table_lines(reports: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Returns the table of a page, a row for each seed, and the means of several with their t-intervals."""
    lines = [
        "| seed | before reinforcement learning | after 30 steps | 1 / 2 / 3 hops | facts it found and wrote down | "
        "prompt tokens per turn (with the full history) |",
        "|---|---|---|---|---|---|",
    ]
    for seed, found in sorted(reports.items()):

        def with_interval(label: str, mark: str, found: Mapping[str, float] = found) -> str:
            low, high = found[f"em_{label}_low"], found[f"em_{label}_high"]
            return f"{mark}{found[f'em_{label}']:.3f}{mark} ({low:.3f} to {high:.3f})"

        hops = " / ".join(f"{found[f'em_{number}_hops_end']:.2f}" for number in hops_of(found))
        kept = f"{found['kept_rate_start']:.2f} → {found['kept_rate_end']:.2f}"
        tokens = f"{found['context_tokens_per_turn']:.0f} ({found['full_history_tokens_per_turn']:.0f})"
        cells = [with_interval("start", ""), with_interval("end", "**"), hops, kept, tokens]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    if len(reports) > 1:
        means = []
        for label, mark in (("start", ""), ("end", "**")):
            mean = t_interval([found[f"em_{label}"] for found in reports.values()])
            low, high = max(mean.low, 0.0), min(mean.high, 1.0)
            means.append(f"{mark}{mean.value:.3f}{mark} ({low:.3f} to {high:.3f} over trainings)")
        lines.append(f"| mean | {' | '.join(means)} | | | |")
    return lines


def write_table(page: Path, reports: Mapping[int, Mapping[str, float]]) -> None:
    """Replaces the table between the MARKS of a page. Raises ValueError for a page without them."""
    first, last = MARKS
    made = "\n".join(table_lines(reports)) + "\n"
    text, number = re.subn(f"{first}.*?{last}", f"{first}{made}{last}", page.read_text(), flags=re.DOTALL)
    if number != 1:
        raise ValueError(f"{page} holds {number} tables between {first.strip()} and {last.strip()}, expected one")
    page.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
