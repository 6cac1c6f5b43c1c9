"""Checks whether a chain of trainings can start or resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mempipe.checks.evaluation import check_benchmark
from mempipe.checks.findings import Finding
from mempipe.checks.machine import Devices
from mempipe.checks.run import check_run
from mempipe.config import RunConfig
from mempipe.runs import saved_state
from mempipe.settings import ConfigError
from mempipe.studies.chain import ALONE, ChainConfig, chain_runs, chain_table, check_rows, check_stages, of_each_seed


def check_chain(chain: ChainConfig, *, devices: Devices | None = None) -> list[Finding]:
    """Returns all findings about a chain; `devices` as in `check_run`. Raises ConfigError for settings that are wrong,
    and for a stage that was begun with another model than the stage before it has left."""
    parts = list(of_each_seed(chain).values())
    for part in parts:
        check_stages(part, chain_runs(part))
        _check_begun(chain_runs(part))
    runs = chain_runs(parts[0])  # seeds differ in nothing else that could be wrong
    findings = [
        replace(finding, text=f"stages: {run.name}: {finding.text}")
        for run in runs
        if not run.name.endswith(ALONE)  # which has the settings of its stage
        for finding in check_run(_with_a_model(run, runs[0]), resume="auto", devices=devices)
    ]
    chain_table(parts[0], runs, chain.tracking)  # raises ConfigError where no set is named
    check_rows(chain)
    return findings + [check_benchmark(benchmark, data_dir=chain.data_dir) for benchmark in chain.benchmarks]


def _check_begun(runs: Sequence[RunConfig]) -> None:
    """Raises ConfigError, naming the run, for a run that was begun with other settings."""
    for run in runs:
        try:
            saved_state(_with_a_model(run, runs[0]), resume="auto")
        except ConfigError as error:
            raise ConfigError(f"stages: {run.name}: {error}", absent=error.absent) from error


def _with_a_model(run: RunConfig, first: RunConfig) -> RunConfig:
    """Returns the run as it can be checked now: until the stage before it has written a model, the first stage's model
    takes its place. A run that was begun is checked with its own model, since it is resumed with no other."""
    if Path(run.model.path).exists():
        return run
    model = {name: getattr(first.model, name) for name in ("path", "source")}
    return run.model_copy(update={"model": run.model.model_copy(update=model)})
