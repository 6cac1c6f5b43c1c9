"""Do the papers' claims hold here? Trains what a claim needs under several seeds, evaluates it, and writes figures and
verdict into docs/claims.md and docs/claims_memtrain.md.

    python -m benchmarks.claims [--claim N ...] [--seeds 1 2 3] [--output runs/claims] [--list] [key=value ...]

`benchmarks.claim_table` has the claims; without --claim all are run, which takes days on two cores. Each seed has a
folder OUTPUT/seed-N with its trainings, which claims share, its question files and one evaluation. The same command
resumes where it stopped: finished trainings and answered questions are kept. key=value is a setting of every training;
give another --output with it, and --page for a page to write into.

A claim is shown if the 95 % t-interval over trainings of each deciding difference lies above 0 (above minus its
margin), contradicted if one lies below, and not shown otherwise. Plots are in `images` next to the page.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import yaml

from benchmarks.claim_table import CLAIMS, ROWS, SETS, TRAININGS, Claim, Difference, trainings_of
from benchmarks.pictures import pyplot, save
from mempipe.data.objectives import join_objectives
from mempipe.data.qa import read_questions, write_questions
from mempipe.data.world import make_questions, make_worlds
from mempipe.evaluation.results import read_results
from mempipe.evaluation.statistics import Interval
from mempipe.evaluation.suite import Bootstrap
from mempipe.evaluation.table import AVERAGE
from mempipe.reports.over_seeds import write_seed_report
from mempipe.storage.files import write_text
from mempipe.studies.over_seeds import Evaluated, SeedCell, SeedTable, on_sets, over_seeds
from pipelines.prepare import NUM_HELD_OUT_WORLDS
from tools.processes import foreground

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "jobs" / "configs"
PAGE = ROOT / "docs" / "claims.md"
EVALUATION = "evaluation"
SHOWN, NOT_SHOWN, CONTRADICTED = "shown", "not shown", "contradicted"

Run = Callable[[Sequence[str]], None]
"""Runs Python with these arguments. Raises CalledProcessError when it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A difference as it was measured."""

    difference: Difference
    cell: SeedCell

    @property
    def verdict(self) -> str:
        over, margin = self.cell.trainings, self.difference.margin
        if over is None or not over.is_bounded:
            return NOT_SHOWN
        return SHOWN if over.low > -margin else CONTRADICTED if over.high < -margin else NOT_SHOWN


def main(words: Sequence[str] | None = None, *, run: Run | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--claim", type=int, nargs="+", choices=CLAIMS, default=[*CLAIMS], metavar="N")
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="default: those of the claim")
    parser.add_argument("--output", type=Path, default=Path("runs/claims"))
    parser.add_argument("--questions", type=int, default=384, help="held-out questions of each set and seed")
    parser.add_argument("--page", type=Path, help="default: docs/claims.md, and no page with key=value")
    parser.add_argument("--list", action="store_true", help="print what each claim needs and predicts; run nothing")
    words = sys.argv[1:] if words is None else words
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    arguments = parser.parse_args([word for word in words if word not in overrides])
    arguments.overrides = overrides  # argparse would take one after --claim for a number
    if arguments.page is None and not arguments.overrides:
        arguments.page = PAGE
    chosen = {number: CLAIMS[number] for number in arguments.claim}
    if arguments.list:
        print("\n".join(described(number, claim) for number, claim in chosen.items()))
        return
    if arguments.page is not None:
        try:
            for number in (number for number, claim in chosen.items() if not claim.command):
                with_claim(pages_of(arguments.page), number, NOT_SHOWN, [])
        except ValueError as error:  # said now, and not after hours of training
            parser.error(f"--page: {error}")
    for number, claim in chosen.items():
        try:
            if claim.command:
                (run or python)(claim.command)
            else:
                measure(number, claim, arguments, run=run or python)
        except subprocess.CalledProcessError as error:
            raise SystemExit(
                f"claim {number}: `{shlex.join(error.cmd)}` ended with exit code {error.returncode}; the reason is "
                "above, and the same command resumes from there"
            ) from error


def described(number: int, claim: Claim) -> str:
    needed = ", ".join(trainings_of(claim)) or f"python {' '.join(claim.command)}"
    lines = (claim.title, f"outcome: {claim.outcome}", f"prediction: {claim.prediction}", f"needs: {needed}")
    return f"{number:>2}  " + "\n    ".join(lines)


def measure(number: int, claim: Claim, arguments: argparse.Namespace, *, run: Run) -> None:
    """Runs what is missing of a claim, and writes report, plot and page."""
    seeds = arguments.seeds or claim.seeds
    folders = {seed: arguments.output / f"seed-{seed}" for seed in seeds}
    for seed, folder in folders.items():
        for name in trainings_of(claim):
            train(folder, name, seed, arguments.overrides, run)
        run(["-m", "mempipe.cli", "evaluate", str(write_suite(folder, number, claim, seed, arguments.questions))])
    evaluated: Evaluated = {
        seed: {
            row: {label: read_results(folder / EVALUATION / row / label) for label in claim.sets} for row in claim.rows
        }
        for seed, folder in folders.items()
    }
    table = compared(evaluated, claim.sets)
    deciding, also = ([found(evaluated, claim, each) for each in part] for part in (claim.decides, claim.also))
    report, *_ = write_seed_report(arguments.output / f"claim-{number}", [table], name=f"claim-{number}")
    picture = (arguments.page or report).parent / "images" / f"claim_{number}.svg"
    plot(table, claim.title, picture)
    hours = sum(
        json.loads((folder / name / "report.json").read_text())["seconds_total"] / 3600
        for folder in folders.values()
        for name in trainings_of(claim)
    )
    verdict = verdict_of(deciding)
    settings = f", with {' '.join(arguments.overrides)}" if arguments.overrides else ""
    block = [
        f"**{verdict.capitalize()}**: {'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}, "
        f"{num_asked(evaluated, arguments.questions)} questions{settings}, {hours:.1f} hours of training.",
        "",
        *markdown(deciding, also),
        "",
        f"![{claim.title}: exact match by set](images/{picture.name})",
    ]
    if arguments.page is not None:
        for file, text in with_claim(pages_of(arguments.page), number, verdict, block).items():
            write_text(file, text)
    print("\n".join(block), f"\nall rows: {report}")


def train(folder: Path, name: str, seed: int, overrides: Sequence[str], run: Run) -> None:
    """Runs a training, or what is missing of it. An override of a section that the training goes without is left out,
    since it would bring the section back."""
    training = TRAININGS[name]
    absent = tuple(f"{word.removesuffix('=null')}." for word in training.settings if word.endswith("=null"))
    overrides = [word for word in overrides if not word.startswith(absent)]
    begins = [f"model.path={folder / training.begins}"] if training.begins else []
    where = [f"output={folder}", f"name={name}", f"seed={seed}", "--resume-if-exists"]
    config = str(CONFIGS / f"{training.config}.yaml")
    run(["-m", "mempipe.cli", "train", config, *training.settings, *overrides, *begins, *where])


def write_suite(folder: Path, number: int, claim: Claim, seed: int, num_questions: int) -> Path:
    """Writes the question files of a claim and its evaluation. All claims of a seed share one evaluation folder, so a
    row that another claim has asked the same questions is not asked again."""
    suite = {
        "name": EVALUATION,
        "output": str(folder),
        "runs": [
            {
                "name": name,
                "config": str(folder / (ROWS[name].agent or ROWS[name].trainings[0])),
                "checkpoint": str(folder / ROWS[name].model),
                "settings": dict(ROWS[name].settings),
                "control": ROWS[name].control or None,
            }
            for name in claim.rows
        ],
        "benchmarks": [
            {"name": label, "file": str(question_file(folder, label, seed, num_questions))} for label in claim.sets
        ],
        "sampling": {"temperature": 0.0},
    }
    path = folder / f"claim-{number}.yaml"
    write_text(path, yaml.safe_dump(suite, sort_keys=False))
    return path


def question_file(folder: Path, label: str, seed: int, num_questions: int) -> Path:
    """Returns the question file of a set, and writes it unless a training left it."""
    asked = SETS[label]
    if asked.file and not asked.most:
        return folder / asked.file
    path = folder / "sets" / f"{label}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    if asked.file:
        single = read_questions(folder / asked.file)
        joined = join_objectives(single, objectives=asked.objectives, seed=seed)
        write_questions(path, islice(joined, min(asked.most, num_questions)))
        return path
    _, worlds = make_worlds(
        0,
        num_held_out=NUM_HELD_OUT_WORLDS,
        seed=seed,
        document_passages=asked.passages,
        evidence_order=asked.order,
    )
    write_questions(
        path, make_questions(worlds, num_questions, seed=seed, hops=asked.hops, objectives=asked.objectives)
    )
    return path


def num_asked(evaluated: Evaluated, wanted: int) -> str:
    """Returns the number of questions of a set: `wanted`, or that of the file that a training left, from the least to
    the most over seeds."""
    of_files = {
        len(rows)
        for runs in evaluated.values()
        for sets in runs.values()
        for label, rows in sets.items()
        if SETS[label].file
    }
    return " to ".join(map(str, sorted({min(of_files), max(of_files)} if of_files else {wanted})))


def compared(evaluated: Evaluated, sets: Sequence[str], pairs: Sequence[tuple[str, str]] = ()) -> SeedTable:
    return over_seeds(on_sets(evaluated, sets), metric="em", compared=pairs, bootstrap=Bootstrap())


def found(evaluated: Evaluated, claim: Claim, difference: Difference) -> Finding:
    """Returns what a difference is on its sets, each weighing the same."""
    pair = (difference.row, difference.other)
    table = compared(evaluated, difference.sets or claim.sets, [pair])
    return Finding(difference=difference, cell=table.differences[" - ".join(pair)][table.columns[-1]])


def verdict_of(deciding: Iterable[Finding]) -> str:
    verdicts = {finding.verdict for finding in deciding}
    return CONTRADICTED if CONTRADICTED in verdicts else NOT_SHOWN if NOT_SHOWN in verdicts else SHOWN


def markdown(deciding: Sequence[Finding], also: Sequence[Finding]) -> list[str]:
    """Returns the differences as the lines of a table; those that decide first."""
    lines = [
        "| difference in exact match | sets | over trainings | over questions | by seed |",
        "|---|---|---|---|---|",
    ]
    for finding in (*deciding, *also):
        given, cell = finding.difference, finding.cell
        pair = f"{given.row} - {given.other}" + (f", margin {given.margin:g}" if given.margin else "")
        name = f"**{pair}**" if finding in deciding else pair
        over = cell.trainings if cell.trainings is not None and cell.trainings.is_bounded else None
        trainings = "one training" if over is None else interval(over)
        by_seed = ", ".join(f"{value:.3f}" for value in cell.by_seed)
        sets = ", ".join(given.sets) or "all"
        lines.append(f"| {name} | {sets} | {trainings} | {interval(cell.questions)} | {by_seed} |")
    return lines


def interval(value: Interval) -> str:
    return f"{value.value:.3f} ({value.low:.3f} to {value.high:.3f})"


def pages_of(page: Path) -> dict[Path, str]:
    """Returns the texts of the page and of those next to it whose names begin with its name: the list of all claims is
    in one of them, and the measured parts are in all."""
    return {file: file.read_text() for file in sorted(page.parent.glob(f"{page.stem}*{page.suffix}"))}


def with_claim(pages: Mapping[Path, str], number: int, verdict: str, lines: Sequence[str]) -> dict[Path, str]:
    """Returns the pages with the measured part of a claim replaced, and its verdict in the list of all claims. Raises
    ValueError for pages without them."""
    start, end = markers(number)
    block, changed = "\n".join([start, *lines, end]), dict[Path, str]()
    num_blocks = num_listed = 0
    for file, text in pages.items():
        text, found = re.subn(f"{re.escape(start)}.*?{re.escape(end)}", lambda _: block, text, flags=re.DOTALL)
        text, listed = re.subn(rf"^(\| {number} \|[^|]*\|)[^|]*", rf"\g<1> {verdict} ", text, flags=re.MULTILINE)
        num_blocks, num_listed, changed[file] = num_blocks + found, num_listed + listed, text
    if not (num_blocks == num_listed == 1):
        raise ValueError(
            f"{', '.join(map(str, pages)) or 'no page'} has {num_blocks} blocks {start} and {num_listed} lines of "
            f"claim {number}; expected one each"
        )
    return changed


def markers(number: int) -> tuple[str, str]:
    return f"<!-- measured: claim {number} -->", f"<!-- end of claim {number} -->"


def plot(table: SeedTable, title: str, file: Path) -> None:
    """Draws exact match by set, with intervals over trainings; of one set each row has its own place on the axis."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(10, 3.6), layout="constrained")
    columns = [column for column in table.columns if column != AVERAGE]
    is_one = len(columns) == 1
    for place, (name, cells) in enumerate(table.rows.items()):
        first = place if is_one else 0.08 * (place - len(table.rows) / 2)
        values = [cells[column].mean for column in columns]
        over = [cells[column].trainings for column in columns]
        reach = [each.high - each.value if each is not None and each.is_bounded else 0.0 for each in over]
        places = [number + first for number in range(len(columns))]
        axes.errorbar(places, values, reach, fmt="o", capsize=3, label=name, color="C0" if is_one else None)
    axes.set(title=title, ylabel="exact match", ylim=(0, 1))
    if is_one:
        axes.set_xticks(range(len(table.rows)), list(table.rows))
    else:
        axes.set_xticks(range(len(columns)), columns)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    file.parent.mkdir(parents=True, exist_ok=True)
    save(figure, file)
    plt.close(figure)


def python(words: Sequence[str]) -> None:
    foreground([sys.executable, *words])


if __name__ == "__main__":
    main()
