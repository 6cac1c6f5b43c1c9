"""Sweep memory budgets: every agent under every budget and seed, then how much memory is enough.

    plan        every trial's config, before anything starts
    trials      `mempipe train` and `mempipe evaluate` of each, as trials of Ray Tune; without training, a trial uses
                the engines and retrievers of the one before it where they fit
    report      curves, the smallest budget that is enough, MLflow

The same command with --resume runs the missing trials: a trial whose questions all have their rows is left alone, any
other one resumes from its newest checkpoint and its last row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from mempipe.actors.cluster import connected
from mempipe.actors.reservation import cluster_gpus
from mempipe.actors.trials import TrialCommands, run_trials
from mempipe.beacons import reached
from mempipe.evaluation.suite import resolve_run
from mempipe.planning.placement import Demand, bundle_gpus, plan
from mempipe.progress import say
from mempipe.reports.budgets import write_budget_report
from mempipe.reports.closing import closing_study
from mempipe.runs import Resume, unfinished
from mempipe.settings import ConfigError
from mempipe.storage.files import lock, write_text
from mempipe.studies.sweep import (
    SWEEP_FILE,
    SweepConfig,
    Trial,
    check_same,
    left_out,
    study_sweep,
    trials,
    write_configs,
)
from mempipe.tracking.tracker import Tracker
from mempipe.training.parent_run import parent_run


class TrialsFailed(RuntimeError):
    """Trials ended without all of their results; the others are complete."""


def main(sweep: SweepConfig, *, resume: Resume = "never") -> list[Path]:
    """Runs the missing trials of the sweep and returns the report's files. Raises ConfigError before anything starts,
    and TrialsFailed when a trial failed for good."""
    begin(sweep, trials(sweep), resume=resume)
    with parent_run(sweep.tracking, folder=sweep.folder, name=sweep.name, settings=sweep) as (tracker, tracking):
        run_missing(sweep, trials(sweep, tracking=tracking))
        return report(sweep, tracker)


def begin(sweep: SweepConfig, planned: Sequence[Trial], *, resume: Resume) -> None:
    """Locks the sweep's folder. Raises ConfigError when it may not start there."""
    settings = sweep.folder / SWEEP_FILE
    if resume == "never" and settings.exists():
        raise ConfigError(
            f"{sweep.folder} holds a sweep already: continue it with --resume, use another `name`, or delete the folder"
        )
    begun = [name for name in ("configs", "runs", "trials") if (sweep.folder / name).exists()]
    if begun and resume != "always" and not settings.exists():
        raise ConfigError(
            f"{sweep.folder} holds the {', '.join(begun)} of a sweep that has lost its {SWEEP_FILE}: --resume "
            "continues it with the same settings; or use another `name`, or delete the folder"
        )
    if resume == "always" and not begun and not settings.exists():
        raise ConfigError(f"--resume: {sweep.folder} holds no sweep (no {SWEEP_FILE})")
    check_same(sweep.folder, planned)
    try:
        lock(sweep.folder)
        write_text(settings, yaml.safe_dump(sweep.model_dump(mode="json"), sort_keys=False))
    except OSError as error:
        raise ConfigError(f"cannot write to the sweep's folder {sweep.folder}: {error.strerror}") from error


def run_missing(sweep: SweepConfig, planned: Sequence[Trial]) -> None:
    """Runs every trial without complete results. Raises TrialsFailed when some trials have none afterwards."""
    missing = [trial for trial in planned if not trial.finished]
    say(f"{len(planned)} trials, {len(missing)} of them to do")
    if not missing:
        return
    model = next((trial.training.model for trial in planned if trial.training is not None), None)
    failed: dict[str, str] = {}
    with connected(sweep.ray_address, name=sweep.name, model=model):
        reached("sweep")
        gpus = cluster_gpus()
        places = trials_at_once(planned, gpus)
        at_once = sweep.trials_at_once or places
        # A training needs the GPUs that the engines of an evaluation would keep, and so do trials without a place.
        in_series = not sweep.train and (not gpus or at_once <= places)
        num_over = 0
        for is_trained, part in zip((False, True), in_order(missing), strict=False):
            if is_trained:
                failed |= {trial.name: "its training did not end" for trial in part if not _has_trained(trial)}
                part = [trial for trial in part if _has_trained(trial)]
            if not part:
                continue
            failed |= run_trials(
                [_commands(sweep, trial, trains=not is_trained, in_series=in_series) for trial in part],
                folder=sweep.folder / "tune",
                at_once=at_once,
                max_failures=sweep.max_failures,
                num_over=num_over,
                num_in_all=len(missing),
            )
            num_over += len(part)
    failed |= {trial.name: "it left questions without a row" for trial in planned if not trial.finished} | failed
    if failed:
        name, error = next(iter(failed.items()))
        raise TrialsFailed(
            f"{len(failed)} of {len(planned)} trials failed ({', '.join(failed)}); {name}: {error}; its output is in "
            f"{sweep.folder / 'logs'}, and --resume continues"
        )


def in_order(missing: Sequence[Trial]) -> list[list[Trial]]:
    """Returns one trial for each training, and then those that measure what another one has trained."""
    first: dict[Path, Trial] = {}
    for trial in missing:
        folder = trial.suite.folder if trial.training is None else trial.training.folder
        first.setdefault(folder, trial)
    then = [trial for trial in missing if trial not in first.values()]
    return [[*first.values()], then] if then else [[*first.values()]]


def trials_at_once(planned: Sequence[Trial], gpus: dict[str, int]) -> int:
    """Returns how many trials the cluster's GPUs (by node) hold side by side, 1 at least."""
    total = sum(gpus.values())
    if not total:
        return 1
    return max(1, total // max(_needed_gpus(trial, list(gpus.values())) for trial in planned))


def _needed_gpus(trial: Trial, gpus_per_node: Sequence[int]) -> int:
    """Returns the GPUs that the trial's plan takes, 1 at least."""
    if trial.training is not None:
        config, demand = trial.training, Demand.of_training(trial.training)
    else:
        run = trial.suite.runs[0]
        config = resolve_run(trial.suite, run)
        demand = Demand.of_rollouts(config)
        demand = demand if run.endpoint is None else replace(demand, engines=0)
    return max(1, sum(map(bundle_gpus, plan(config, demand, gpus_per_node).bundles)))


def report(sweep: SweepConfig, tracker: Tracker) -> list[Path]:
    """Writes the answer of all trials: on disk, in MLflow and on the terminal."""
    study = study_sweep(sweep.folder)
    if sentence := left_out(sweep.folder):
        say(sentence)
    for curve in study.whole.curves:
        for point in curve.points:
            numbers = {
                study.metric: point.measured.score.value,
                "tokens_per_question": point.measured.tokens_per_question,
                "seconds_per_question": point.measured.seconds_per_question,
                "largest_context": point.measured.largest_context,
            }
            if curve.model is not None:
                numbers["kv_cache_bytes"] = point.measured.largest_context * curve.model.cache_bytes_per_token
            named = {f"{curve.agent}/{name}": value for name, value in numbers.items()}
            tracker.log_metrics(named, step=point.memory_tokens)
    paths = write_budget_report(sweep.folder, study, name=sweep.name) if study.whole.curves else []
    for path in paths:
        tracker.log_artifact(path.absolute())
    closing_study(study, paths=paths)
    return paths


def _has_trained(trial: Trial) -> bool:
    return trial.training is None or not unfinished(trial.training.folder)


def _commands(sweep: SweepConfig, trial: Trial, *, trains: bool = True, in_series: bool) -> TrialCommands:
    """Returns the commands of a trial; `trains` is false for one that measures what another trial has trained. Several
    of them run side by side, and a run's folder takes one command at a time.
    """
    log = sweep.folder / "logs" / f"{trial.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    options = {"train": ["--resume-if-exists"]}
    commands = [
        [command, str(file.resolve()), *options.get(command, [])]
        for command, file in write_configs(sweep.folder, trial)
        if trains or command != "train"
    ]
    return TrialCommands(name=trial.name, commands=commands, log=str(log.resolve()), in_series=in_series)
