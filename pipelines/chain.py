"""A chain of trainings and the table of its scores: MemTrain, then a post-training stage, in one job.

    for each seed
        for each stage      pipelines.train, from the model that the stage before it left
        for each but the first, again, from the first one's model        (`compare`)
        evaluate            pipelines.evaluate: the last stage with and without the first one
    over seeds              one table with the interval over trainings

The same command after an interruption resumes where it stopped: a finished stage is kept, an unfinished one resumes
from its newest checkpoint, and one whose beginning was trained again since is refused. In MLflow the chain is a run;
its stages and the evaluations are its children.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mempipe.beacons import reached
from mempipe.evaluation.table import METRICS_OF, family, ordered
from mempipe.progress import say
from mempipe.reports.over_seeds import write_seed_report
from mempipe.studies.chain import (
    ChainConfig,
    chain_runs,
    chain_table,
    check_stages,
    compared_rows,
    of_each_seed,
    untrained_rows,
)
from mempipe.studies.over_seeds import on_sets, over_seeds, read_seeds
from mempipe.tracking.config import TrackingConfig
from mempipe.training.parent_run import parent_run
from pipelines import evaluate, train


def main(chain: ChainConfig) -> list[Path]:
    """Runs the chain to its end, under each of its seeds, and returns the files of the reports.

    Raises ConfigError for a stage that cannot work, before it starts; what else fails raises a RuntimeError or
    OSError, and the same call resumes from there.
    """
    parts = of_each_seed(chain)
    for part in parts.values():
        check_stages(part, chain_runs(part))
    with parent_run(chain.tracking, folder=chain.folder, name=chain.name, settings=chain) as (tracker, tracking):
        paths = [path for part in parts.values() for path in _trained_and_evaluated(part, tracking)]
        over = _over_seeds(chain, parts) if chain.seeds else []
        for path in over or paths:  # the evaluation of a seed has its own record
            tracker.log_artifact(path.absolute())
        return [*over, *paths]


def _trained_and_evaluated(chain: ChainConfig, tracking: TrackingConfig) -> list[Path]:
    runs = chain_runs(chain, tracking)
    for number, run in enumerate(runs, start=1):
        reached("chain", stage=run.name)
        check_stages(chain, [run])  # the stage before it may have been trained on just now
        say(f"{chain.name}: training {number} of {len(runs)}, {run.name}")
        train.main(run, resume="auto")
    return evaluate.main(chain_table(chain, runs, tracking))


def _over_seeds(chain: ChainConfig, parts: Mapping[int | None, ChainConfig]) -> list[Path]:
    """Writes the table over the seeds from their evaluations."""
    suites = {
        seed: chain_table(part, chain_runs(part), part.tracking) for seed, part in parts.items() if seed is not None
    }
    first = next(iter(suites.values()))
    evaluated = read_seeds(
        {seed: suite.folder for seed, suite in suites.items()},
        [run.name for run in first.runs],
        labels=[benchmark.label for benchmark in first.benchmarks],
    )
    families: dict[tuple[str, int], list[str]] = {}
    for label, benchmark in ordered({each.label: each for each in first.benchmarks}).items():
        families.setdefault(family(benchmark), []).append(label)
    tables = [
        over_seeds(
            on_sets(evaluated, labels),
            metric=metric,
            kind=kind,
            compared=compared_rows(chain),
            untrained=sorted(untrained_rows(chain)),
            bootstrap=chain.bootstrap,
        )
        for (kind, _), labels in families.items()
        for metric in METRICS_OF.get(kind, METRICS_OF[""])
    ]
    return write_seed_report(chain.folder, tables, name=chain.name)
