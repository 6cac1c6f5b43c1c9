"""Where every second goes: each part of mempipe beside its best peer and beside the limit of this machine.

    python -m benchmarks.limits [--fast] [--only NAME ...] [--model FOLDER] [--run FOLDER]
    python -m benchmarks.limits --compare COMMIT

Each part is a benchmark of its own, run alone in its own process; `--fast` makes all of them short. The service needs
the agent of a trained run and is left out without `--run`. The rows are kept in `--file` with commit and machine.
`--compare` measures nothing: it says which rows of the newest commit on this machine are slower than those of another
commit by more than their spread, and ends with 1 when there are some.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rows import RECORD, Row, read_rows

ROOT = Path(__file__).parents[1]
LEAST_SLOWDOWN = 0.05
"""A row that lost less than this share is not called slower, however small its spread is."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A benchmark, and its arguments for a thorough and for a short measurement."""

    module: str
    thorough: Sequence[str] = ()
    fast: Sequence[str] = ()
    takes_model: bool = False
    """It has `--model FOLDER`."""
    needs_run: bool = False
    """Its first argument is the folder of a trained run."""


PARTS = {
    "learner": Part(module="learner_throughput", fast=("--contexts", "200", "--repeats", "3"), takes_model=True),
    "reference": Part(module="reference_pass", fast=("--contexts", "200", "--rounds", "3"), takes_model=True),
    "engine": Part(module="engine_calls"),
    "agent loop": Part(module="rollout_throughput", thorough=("--skewed", "0"), fast=("--skewed", "0", "--steps", "3")),
    "evaluation": Part(module="evaluation_throughput", fast=("--questions", "300")),
    "retrieval": Part(module="retrieval", thorough=("--seconds", "4"), fast=("--seconds", "2", "--passages", "100000")),
    "driver": Part(
        module="driver_step", thorough=("--groups", "128", "--rounds", "3"), fast=("--groups", "64", "--rounds", "3")
    ),
    "weights": Part(module="weight_copy", takes_model=True),
    "documents": Part(module="memtrain_builder", fast=("--pivots", "32", "--rounds", "2")),
    "service": Part(
        module="serving",
        thorough=("--only", "speed"),
        fast=("--only", "speed", "--rounds", "2", "--seconds", "10"),
        needs_run=True,
    ),
    "start": Part(module="start", thorough=("--rounds", "3")),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="less work in each part")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="NAME", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--model", help="a Hugging Face folder, for the parts that take one")
    parser.add_argument("--run", help="the folder of a trained run, for the service")
    parser.add_argument("--file", type=Path, default=ROOT / "runs" / "limits.jsonl", help="where rows are kept")
    parser.add_argument("--compare", metavar="COMMIT", help="compare kept rows with those of this commit")
    arguments = parser.parse_args(argv)
    if arguments.compare is not None:
        return compare(arguments.file, arguments.compare)
    made_by = {"commit": commit(), "machine": machine(), "fast": arguments.fast, "model": arguments.model or ""}
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    failed, rows = [], []
    names = arguments.only or [name for name, part in PARTS.items() if arguments.run or not part.needs_run]
    if not arguments.run and any(PARTS[name].needs_run for name in names):
        parser.error("the part 'service' needs --run, the folder of a trained run")
    for name in names:
        load = psutil.getloadavg()[0]
        began = time.monotonic()
        print(f"{name} …", end=" ", flush=True)
        try:
            found = measured(PARTS[name], fast=arguments.fast, model=arguments.model, run=arguments.run)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"failed: {error.stderr.strip().splitlines()[-1]}")
            continue
        print(f"{time.monotonic() - began:.0f} s, load {load:.1f} at its start")
        rows += found
        with arguments.file.open("a") as file:
            file.writelines(json.dumps({**made_by, "load": load, "row": asdict(row)}) + "\n" for row in found)
    print(f"\n{made_by['machine']}; commit {made_by['commit']}\n\n{table(rows)}")
    return 1 if failed else 0


def measured(part: Part, *, fast: bool, model: str | None, run: str | None) -> list[Row]:
    """Runs a benchmark in a process of its own; returns its rows. Raises CalledProcessError when it fails."""
    of_model = ("--model", model) if model and part.takes_model else ()
    of_run = (run,) if run and part.needs_run else ()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        command = [
            sys.executable,
            "-m",
            f"benchmarks.{part.module}",
            *of_run,
            *(part.fast if fast else part.thorough),
            *of_model,
        ]
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
            cells += [best, _range(row.ratios(others)) if others else "–"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def compare(file: Path, old: str) -> int:
    """Prints how each row changed since the commit `old`; returns 1 when one is slower by more than the spread."""
    kept = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    here = [each for each in kept if each["machine"] == machine()]
    new = next((each["commit"] for each in reversed(here) if not each["commit"].startswith(old)), "")
    before, after = (_newest(each for each in here if new and each["commit"].startswith(name)) for name in (old, new))
    both = [key for key in after if key in before]
    if not both:
        print(f"{file} has no row of both {old} and another commit on this machine ({machine()})", file=sys.stderr)
        return 2
    print(f"| part | {old} | {new} | change | |\n|---|---|---|---|---|")
    slower = 0
    for key in both:
        verdict, change = judge(before[key].scores, after[key].scores)
        slower += verdict == "slower"
        scores = " | ".join(_range(row.scores) for row in (before[key], after[key]))
        print(f"| {key[0]} | {scores} | {change:+.0%} | {verdict} |")
    return 1 if slower else 0


def _newest(kept: Iterable[dict[str, Any]]) -> dict[tuple[str, bool, str], Row]:
    """Returns the last row of each name, length of measurement and model."""
    return {(each["row"]["name"], each["fast"], each["model"]): Row(**each["row"]) for each in kept}


def judge(before: Sequence[float], after: Sequence[float]) -> tuple[str, float]:
    """Returns "slower", "faster" or "" and the change of the median. A change counts when the ranges over the rounds
    do not meet and the median moved by at least `LEAST_SLOWDOWN`."""
    change = statistics.median(after) / statistics.median(before) - 1
    if change < -LEAST_SLOWDOWN and max(after) < min(before):
        return "slower", change
    return ("faster" if change > LEAST_SLOWDOWN and min(after) > max(before) else ""), change


def commit() -> str:
    """Returns the commit of this checkout, with "+" when files were changed since."""
    name = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, cwd=ROOT)
    return name.stdout.strip() + ("+" if changed.stdout.strip() else "")


def machine() -> str:
    """Returns what a row depends on beside the code."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores of {model}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
