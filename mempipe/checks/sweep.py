"""Checks whether a sweep can start: every trial, as its own commands would be checked."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from mempipe.checks.evaluation import check_benchmark, check_suite
from mempipe.checks.findings import Finding, refused
from mempipe.checks.machine import Devices, check_writable
from mempipe.checks.run import check_run
from mempipe.settings import ConfigError
from mempipe.studies.sweep import SweepConfig, Trial, trials


def check_sweep(sweep: SweepConfig, *, devices: Devices | None = None) -> list[Finding]:
    """Returns all findings about a sweep; `devices` as in `check_run`. Trials of other seeds need the same. A finding
    of several trials is listed once, and names them unless it applies to all."""
    findings = [check_writable(sweep.folder, setting="output")]
    try:
        planned = trials(sweep.model_copy(update={"seeds": sweep.seeds[:1]}))
    except ConfigError as error:
        return [*findings, refused(error)]
    found: dict[Finding, list[str]] = defaultdict(list)
    for trial in planned:
        for finding in dict.fromkeys(_of(trial, devices)):
            found[finding].append(trial.name)
    return findings + [
        finding if len(names) == len(planned) else replace(finding, text=f"{', '.join(names)}: {finding.text}")
        for finding, names in found.items()
    ]


def _of(trial: Trial, devices: Devices | None) -> list[Finding]:
    if trial.training is None:
        return check_suite(trial.suite, devices=devices)
    own = str(trial.training.folder)  # what the training makes itself is not there yet
    files = [benchmark for benchmark in trial.suite.benchmarks if not benchmark.file.startswith(own)]
    findings = check_run(trial.training, resume="auto", devices=devices)
    return findings + [check_benchmark(benchmark, data_dir=trial.suite.data_dir) for benchmark in files]
