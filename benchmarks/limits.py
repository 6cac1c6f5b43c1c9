"""Where every second goes: each part of mempipe beside its best peer and beside the limit of this machine.

    python -m benchmarks.limits [--fast] [--only NAME ...] [--model FOLDER] [--run FOLDER]
    python -m benchmarks.limits --compare COMMIT

Each part is a benchmark of its own, run alone in its own process; `--fast` makes all of them short. With `--model`
learner, reference, weights and documents take that model; with `--run` agent loop, evaluation and service take
the trained agent of a run, without which the service is left out. The rows are kept in `--file` with commit and
machine. `--compare` measures nothing: it says which rows of the newest commit on this machine are slower than those of
another commit by more than chance, and ends with 1 when there are some. Rounds of several runs of a commit count
together. A commit whose files were changed is another one, COMMIT+.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from scipy.stats import mannwhitneyu

from benchmarks.rows import RECORD, Row, read_rows, spread
from tools.guard import leave_nothing_behind

ROOT = Path(__file__).parents[1]
LEAST_SLOWDOWN = 0.05
"""A row that lost less than this share is not called slower, however small its spread is."""
LEAST_ROUNDS = 3
LEVEL = 0.01
"""Probability with which equal commits may be told apart, where there are enough rounds. A table has 30 rows."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A benchmark, and its arguments for a thorough and for a short measurement."""

    module: str
    thorough: Sequence[str] = ()
    fast: Sequence[str] = ()
    of_model: Sequence[str] = ()
    """What precedes the folder of a model, which works longer than a tiny one; empty if the part takes none."""
    of_run: Sequence[str] = ()
    """What precedes the folder of a trained run; empty if the part takes none, or needs one as its first argument."""
    needs_run: bool = False

    def arguments(self, *, fast: bool, model: str, run: str) -> list[str]:
        """Returns what follows the name of the benchmark."""
        words = [run] if self.needs_run else []
        words += self.fast if fast else self.thorough
        words += [*self.of_model, model] if model and self.of_model else []
        return words + ([*self.of_run, run] if run and self.of_run else [])

    def measures(self, *, model: str, run: str) -> str:
        """Returns the folder that decides about the rows: of a model, of a run, or none."""
        return model if model and self.of_model else run if run and (self.of_run or self.needs_run) else ""


PARTS = {
    "learner": Part(
        module="learner_throughput",
        fast=("--contexts", "200", "--repeats", "3"),
        of_model=("--scale", "4", "--contexts", "12", "--trl-rows", "4", "12", "--model"),
    ),
    "reference": Part(
        module="reference_pass",
        fast=("--contexts", "200", "--rounds", "3"),
        of_model=("--contexts", "48", "--model"),
    ),
    "engine": Part(module="engine_calls", fast=("--calls", "384"), of_model=("--calls", "48", "--model")),
    "agent loop": Part(
        module="rollout_throughput",
        thorough=("--skewed", "0"),
        fast=("--skewed", "0", "--steps", "3"),
        of_run=("--groups", "4", "--run"),
    ),
    "evaluation": Part(
        module="evaluation_throughput",
        thorough=("--without-server",),
        fast=("--without-server", "--questions", "200"),
        of_run=("--run",),
    ),
    "retrieval": Part(module="retrieval", fast=("--seconds", "0.5", "--passages", "100000")),
    "driver": Part(
        module="driver_step", thorough=("--groups", "128", "--rounds", "7"), fast=("--groups", "64", "--rounds", "7")
    ),
    "weights": Part(module="weight_copy", of_model=("--model",)),
    "documents": Part(
        module="memtrain_builder", fast=("--pivots", "40", "--rounds", "3", "--workers", "2"), of_model=("--tokenizer",)
    ),
    "service": Part(
        module="serving",
        thorough=("--only", "speed"),
        fast=("--only", "speed", "--rounds", "3", "--seconds", "7"),
        needs_run=True,
    ),
    "start": Part(
        module="start",
        thorough=("--rounds", "3"),
        fast=(
            "jobs/configs/quickstart.yaml",
            "warm_start.num_clean_trajectories=200",
            "warm_start.num_noisy_trajectories=20",
        ),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="less work in each part")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="NAME", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--model", default="", help="a Hugging Face folder, for the parts that take one")
    parser.add_argument("--run", default="", help="the folder of a trained run, for the parts that take one")
    parser.add_argument("--file", type=Path, default=ROOT / "runs" / "limits.jsonl", help="where rows are kept")
    parser.add_argument("--compare", metavar="COMMIT", help="compare kept rows with those of this commit")
    arguments = parser.parse_args(argv)
    if arguments.compare is not None:
        return compare(arguments.file, arguments.compare)
    given = (arguments.model, arguments.run)
    model, run = (str(Path(each).resolve()) if each and Path(each).exists() else each for each in given)
    made_by = {"commit": commit(), "machine": machine(), "fast": arguments.fast}
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    failed, rows = [], []
    names = arguments.only or [name for name, part in PARTS.items() if run or not part.needs_run]
    if not run and any(PARTS[name].needs_run for name in names):
        parser.error("the part 'service' needs --run, the folder of a trained run")
    leave_nothing_behind()
    for name in names:
        load = psutil.getloadavg()[0]
        began = time.monotonic()
        print(f"{name} …", end=" ", flush=True)
        try:
            found = measured(PARTS[name], fast=arguments.fast, model=model, run=run)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            said = error.stderr.strip().splitlines()  # nothing of a process that was killed
            print(f"failed: {said[-1] if said else f'it ended with exit code {error.returncode}'}")
            continue
        print(f"{time.monotonic() - began:.0f} s, load {load:.1f} at its start")
        rows += found
        kept = {**made_by, "model": PARTS[name].measures(model=model, run=run), "load": load}
        with arguments.file.open("a") as file:
            file.writelines(json.dumps({**kept, "row": asdict(row)}) + "\n" for row in found)
    print(f"\n{made_by['machine']}; commit {made_by['commit']}\n\n{table(rows)}")
    return 1 if failed else 0


def measured(part: Part, *, fast: bool, model: str, run: str) -> list[Row]:
    """Runs a benchmark in a process of its own; returns its rows. Raises CalledProcessError when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        words = part.arguments(fast=fast, model=model, run=run)
        command = [sys.executable, "-m", f"benchmarks.{part.module}", *words]
        environment = {**os.environ, RECORD: str(file), "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment)
        return read_rows(file)


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a table in Markdown: medians over the rounds, and the range of each ratio."""
    lines = ["| part | mempipe | peer | mempipe / peer | limit | mempipe / limit |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = [row.name, f"{_number(row.value)} {row.unit}"]
        for name, others in ((row.peer, row.of_peer), (row.limit, row.of_limit)):
            best = f"{name}: {_number(statistics.median(others))}" if others else "–"
            cells += [best, spread(row.ratios(others)) if others else "–"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def compare(file: Path, old: str) -> int:
    """Prints how each row changed since the commit `old`; returns 1 when one is slower by more than the spread."""
    kept = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    here = [each for each in kept if each["machine"] == machine()]
    names = list(dict.fromkeys(each["commit"] for each in reversed(here)))  # newest first
    changed = old.endswith("+")
    digits = _git("rev-parse", "--verify", "--quiet", f"{old.removesuffix('+')}^{{commit}}") or old.removesuffix("+")
    matching = [name for name in names if is_named(name, digits, changed=changed)]
    if len(matching) > 1:
        print(f"{old} is the beginning of several commits in {file}: {', '.join(matching)}", file=sys.stderr)
        return 2
    new = next((name for name in names if name not in matching), "")
    before, after = (_scores(each for each in here if each["commit"] in found) for found in (matching, [new]))
    both = [key for key in after if key in before]
    if not both:
        print(f"{file} has no row of both {old} and another commit on this machine ({machine()})", file=sys.stderr)
        return 2
    print(f"| part | {old} | {new} | change | |\n|---|---|---|---|---|")
    slower = 0
    for key in both:
        verdict, change = judge(before[key], after[key])
        slower += verdict == "slower"
        print(f"| {key[0]} | {spread(before[key])} | {spread(after[key])} | {change:+.0%} | {verdict} |")
    if missing := [key[0] for key in before if key not in after]:
        print(f"not measured at {new}: {'; '.join(missing)}", file=sys.stderr)
    return 1 if slower else 0


def is_named(commit: str, digits: str, *, changed: bool) -> bool:
    """Returns whether a kept commit has this hash, or these first digits of it; with files changed since or not."""
    own = commit.removesuffix("+")
    return commit.endswith("+") == changed and (digits.startswith(own) or own.startswith(digits))


def _scores(kept: Iterable[dict[str, Any]]) -> dict[tuple[str, str, bool, str], list[float]]:
    """Returns the scores of each name, yardstick, length of measurement and model, of all runs together: the spread
    over runs is larger than that within one."""
    found: dict[tuple[str, str, bool, str], list[float]] = defaultdict(list)
    for each in kept:
        row = Row(**each["row"])
        found[row.name, row.yardstick, each["fast"], each["model"]] += row.scores
    return found


def judge(before: Sequence[float], after: Sequence[float]) -> tuple[str, float]:
    """Returns "slower", "faster" or "" and the change of the median. A change counts when the median moved by at least
    `LEAST_SLOWDOWN` and a one-sided rank test of the rounds (Mann-Whitney) tells them apart at `LEVEL`; where the
    rounds are too few for that level, when their ranges do not meet. Fewer than `LEAST_ROUNDS` have no range."""
    change = statistics.median(after) / statistics.median(before) - 1
    if min(len(before), len(after)) < LEAST_ROUNDS:
        return "too few rounds", change
    word, way = ("slower", "less") if change < 0 else ("faster", "greater")
    level = max(LEVEL, 1 / math.comb(len(before) + len(after), len(after)))
    p_value = mannwhitneyu(after, before, alternative=way, method="exact").pvalue
    return (word if abs(change) >= LEAST_SLOWDOWN and p_value <= level * (1 + 1e-9) else ""), change


def commit() -> str:
    """Returns the commit of this checkout, with "+" when files were changed since; "unknown" outside of git."""
    name = _git("rev-parse", "--short=10", "HEAD")
    return name + ("+" if _git("status", "--porcelain", "-uno") else "") if name else "unknown"


def _git(*words: str) -> str:
    """Returns what git says; "" where it fails or is not installed."""
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    except FileNotFoundError:
        return ""


def machine() -> str:
    """Returns what a row depends on beside the code."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores of {model}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
