"""Checks whether a chain of trainings can start: every stage as if it began with the first one's model."""

from __future__ import annotations

from dataclasses import replace

from mempipe.checks.evaluation import check_benchmark
from mempipe.checks.findings import Finding
from mempipe.checks.machine import Devices
from mempipe.checks.run import check_run
from mempipe.studies.chain import ChainConfig, chain_runs, chain_table


def check_chain(chain: ChainConfig, *, devices: Devices | None = None) -> list[Finding]:
    """Returns all findings about a chain; `devices` as in `check_run`. Raises ConfigError for settings that are wrong.

    The model with which a later stage begins is not there yet, so the first one's stands for it.
    """
    runs = chain_runs(chain)
    model = {name: getattr(runs[0].model, name) for name in ("path", "source")}
    findings = [
        replace(finding, text=f"stages: {run.name}: {finding.text}")
        for run in runs[: len(chain.stages)]
        for finding in check_run(
            run.model_copy(update={"model": run.model.model_copy(update=model)}), resume="auto", devices=devices
        )
    ]
    chain_table(chain, runs, chain.tracking)  # raises ConfigError where no set is named
    return findings + [check_benchmark(benchmark, data_dir=chain.data_dir) for benchmark in chain.benchmarks]
