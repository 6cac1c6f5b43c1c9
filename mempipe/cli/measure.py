"""The commands that measure trained agents and read what they did."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from mempipe.cli.commands import add_command, add_resume
from mempipe.cli.run import run_job
from mempipe.settings import ConfigError


def add_commands(commands: Any) -> None:
    """Adds the commands that measure trained agents."""
    evaluate = add_command(
        commands, "evaluate", run_job, "measure agents on question sets: FOLDER [QUESTIONS] or CONFIG", continues=True
    )
    evaluate.set_defaults(kind="evaluation")
    evaluate.add_argument(
        "config",
        metavar="FOLDER_OR_CONFIG",
        help="the folder of a trained run (the trained agent, the one before training, and without memory and search) "
        "or of a model, or a YAML file, e.g. jobs/configs/evaluate_search_qa.yaml",
    )
    evaluate.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="QUESTIONS",
        help="for a folder a question file (default: the run's held-out questions); and key=value, e.g. num_samples=4, "
        "num_questions=50, or retrieval.index=FOLDER to search other documents than the run's",
    )

    compare = add_command(commands, "compare", _compare, "compare two evaluated runs, question by question")
    compare.add_argument("first", metavar="A", help="the folder of an evaluated run, e.g. evaluations/search-qa/base")
    compare.add_argument("second", metavar="B", help="another one of the same evaluation")
    compare.add_argument("--metric", default="em", help="em, f1, ... (default: em)")

    sweep = add_command(
        commands,
        "sweep",
        run_job,
        "measure agents under several memory budgets, and find how much is enough: FOLDER [QUESTIONS] or CONFIG",
        continues=True,
    )
    sweep.set_defaults(kind="sweep")
    sweep.add_argument(
        "config",
        metavar="FOLDER_OR_CONFIG",
        help="the folder of a trained run (its memory, a half of it, a quarter, ...), or a YAML file, e.g. "
        "jobs/configs/tiny_sweep.yaml",
    )
    sweep.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="QUESTIONS",
        help="for a run a question file (default: its held-out questions); and key=value, e.g. budgets=[512,1024] or "
        "num_questions=50",
    )
    add_resume(sweep)
    _add_budgets(commands)
    _add_trace(commands)


def _add_budgets(commands: Any) -> None:
    budgets = add_command(
        commands,
        "budgets",
        _budgets,
        "say how much memory is enough, from a sweep or an evaluation under several budgets",
    )
    budgets.add_argument("evaluation", help="its folder, e.g. sweeps/tiny-sweep")
    budgets.add_argument("--metric", default="em", help="em, f1, ... (default: em)")
    budgets.add_argument(
        "--margin",
        type=float,
        metavar="POINTS",
        help="percent points that a budget may lose and still be enough (default: that of the sweep, or 2)",
    )


def _add_trace(commands: Any) -> None:
    trace = add_command(
        commands, "trace", _trace, "read the trajectories of a run or an evaluation, turn by turn, or rate them by hand"
    )
    trace.add_argument("run", nargs="?", default="", help="a folder of a run or an evaluation, or a Parquet file")
    trace.add_argument("--question", default="", help="only questions whose id or text contains this")
    trace.add_argument("--phase", default="", help="only this phase: before, after, or RUN/SET of an evaluation")
    trace.add_argument("--limit", type=int, help="trajectories printed (default: one question before and after)")
    trace.add_argument("--html", metavar="FILE", help="write a page with all trajectories, for a browser")
    trace.add_argument("--svg", metavar="FILE", help="draw one question, by default before and after, as a picture")
    trace.add_argument(
        "--sheet",
        nargs=2,
        metavar=("N", "FILE"),
        help="write a sheet on which a person rates the memories of N trajectories: .html for a browser, or .csv",
    )
    trace.add_argument(
        "--ratings",
        nargs="+",
        metavar="CSV",
        help="print shares, agreement and quality by turn of filled sheets, one for each person; with RUN also the "
        "agreement of the automatic rates with them",
    )


def _compare(arguments: argparse.Namespace) -> None:
    from mempipe.evaluation.table import percent_text
    from mempipe.reports.terminal import console, table
    from mempipe.studies.compare import compare_runs, warnings

    first, second = Path(arguments.first), Path(arguments.second)
    comparisons = compare_runs(first, second, metric=arguments.metric)
    columns = ("set", "questions", "A", "B", "B - A", "McNemar on em")
    shown = table(*columns, title=f"{arguments.metric}, percent")
    for each in comparisons:
        means = [f"{100 * value:.2f}" for value in (each.first, each.second)]
        shown.add_row(each.label, str(each.num_shared), *means, percent_text(each.difference), each.verdict)
    out = console()
    out.print(shown)
    out.print(f"A is {first}, B is {second}", soft_wrap=True)
    for line in warnings(first, second, comparisons):
        out.print(f"note {line}", soft_wrap=True)


def _budgets(arguments: argparse.Namespace) -> None:
    from mempipe.reports.budgets import budget_lines, write_budget_report
    from mempipe.studies.budgets import not_ended, study_evaluation
    from mempipe.studies.sweep import SWEEP_FILE, left_out, study_sweep

    folder = Path(arguments.evaluation)
    is_sweep = (folder / SWEEP_FILE).exists()
    study_folder = study_sweep if is_sweep else study_evaluation
    study = study_folder(folder, metric=arguments.metric, margin=arguments.margin)
    if not study.whole.curves:
        raise ConfigError(
            f"{folder} has no agent that was measured under two memory budgets; add one to the sweep's budgets, and "
            "`mempipe sweep` --resume measures it"
        )
    paths = write_budget_report(folder, study, name=folder.resolve().name)
    sentence = left_out(folder) if is_sweep else not_ended(folder)
    print("\n".join([*budget_lines(study), *filter(None, [sentence]), f"Written: {', '.join(map(str, paths))}"]))


def _trace(arguments: argparse.Namespace) -> None:
    if arguments.ratings:
        _print_ratings(arguments)
        return
    if not arguments.run:
        raise ConfigError("trace needs the folder of a run or an evaluation, e.g. runs/quickstart")
    from mempipe.reports.trace import choose, select, trace_lines
    from mempipe.reports.traced import read_traced

    traced = read_traced(Path(arguments.run))
    for name, suffix in (("html", ".html"), ("svg", ".svg")):
        file = getattr(arguments, name)
        if file and not file.endswith(suffix):
            raise ConfigError(f"--{name} writes {file}; expected a name that ends in {suffix}")
    if arguments.html:
        from mempipe.reports.viewer import write_viewer

        fitting = select(traced, question=arguments.question, phase=arguments.phase, limit=arguments.limit)
        count = write_viewer(Path(arguments.html), fitting, title=Path(arguments.run).resolve().name)
        print(f"{count:,} of {len(traced):,} trajectories in {arguments.html}")
    elif arguments.svg:
        from mempipe.reports.transcript import write_transcript

        shown = choose(traced, question=arguments.question, phase=arguments.phase, limit=arguments.limit)
        write_transcript(Path(arguments.svg), shown)
        print(f"{len(shown)} of {len(traced):,} trajectories in {arguments.svg}")
    elif arguments.sheet:
        from mempipe.reports.rating_sheet import write_sheet

        number, file = arguments.sheet
        fitting = select(traced, question=arguments.question, phase=arguments.phase)
        count = write_sheet(Path(file), fitting, num_trajectories=number, title=Path(arguments.run).resolve().name)
        run = shlex.quote(str(arguments.run))
        print(f"{count} trajectories to be rated in {file}; then: mempipe trace {run} --ratings A.csv B.csv")
    else:
        shown = choose(traced, question=arguments.question, phase=arguments.phase, limit=arguments.limit)
        print("\n".join(trace_lines(shown, total=len(traced))))


def _print_ratings(arguments: argparse.Namespace) -> None:
    from mempipe.evaluation.ratings import read_ratings
    from mempipe.reports.rating_sheet import automatic_counts
    from mempipe.reports.ratings import rating_lines
    from mempipe.reports.traced import read_traced

    turns = read_ratings([Path(file) for file in arguments.ratings])
    automatic = automatic_counts(read_traced(Path(arguments.run))) if arguments.run else None
    print("\n".join(rating_lines(turns, automatic)))
