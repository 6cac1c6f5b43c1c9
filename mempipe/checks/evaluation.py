"""Checks whether an evaluation can start: its folder, question files, and every run's config, weights and index."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mempipe.checks.findings import Finding, fatal, ok, refused
from mempipe.checks.machine import Devices, check_cluster, check_writable
from mempipe.checks.models import check_hub, check_model
from mempipe.checks.run import check_agent, check_retrieval, place_roles
from mempipe.config import RunConfig
from mempipe.data.input_files import is_remote
from mempipe.data.qa import understood
from mempipe.evaluation.benchmarks import find_file, read_benchmark
from mempipe.evaluation.suite import Benchmark, EvaluatedRun, EvaluationSuite, resolve_run
from mempipe.settings import ConfigError
from mempipe.storage.files import is_local_path


def check_suite(suite: EvaluationSuite, *, devices: Devices | None = None) -> list[Finding]:
    """Returns all findings about an evaluation; `devices` as in `check_run`."""
    findings = [check_writable(suite.folder, setting="output")]
    findings += [check_benchmark(benchmark, data_dir=suite.data_dir) for benchmark in suite.benchmarks]
    configs: list[tuple[EvaluatedRun, RunConfig]] = []
    for run in suite.runs:
        try:
            configs.append((run, resolve_run(suite, run)))
        except ConfigError as error:
            findings.append(refused(error))
    for run, config in configs:
        findings += _of_run(run, _run_here(run, config, devices))
    if any(finding.fatal for finding in findings):
        return findings
    if suite.ray_address:
        findings += check_cluster(suite.ray_address)
    asked = {config.model.path: run for run, config in configs}  # each model once
    return findings + [
        finding for path, run in asked.items() for finding in _of_run(run, check_hub(path, setting=_setting(run)))
    ]


def check_benchmark(benchmark: Benchmark, *, data_dir: str) -> Finding:
    """Checks that the set's file is there and begins with a question."""
    setting = f"benchmarks: {benchmark.label}"
    try:
        file = find_file(benchmark, data_dir=data_dir)
        if is_remote(file):
            return ok(f"{setting}: {file}, to be read when the evaluation starts")
        next(read_benchmark(benchmark, file), None)  # raises if the first questions cannot be asked as one
        return ok(f"{setting}: {file} ({understood(file, columns=benchmark.columns)})")
    except ConfigError as error:
        return refused(error)


def _run_here(run: EvaluatedRun, config: RunConfig, devices: Devices | None) -> list[Finding]:
    if run.endpoint is not None:
        return [*_tokenizer(config.model.path), *check_agent(config), *check_retrieval(config)]
    room = config.budget.context_tokens
    return [
        *check_model(config.model.path, setting=_setting(run), context_tokens=room),
        *check_agent(config),
        *check_retrieval(config),
        *place_roles(config, devices, training=False),
    ]


def _tokenizer(path: str) -> list[Finding]:
    if not is_local_path(path) or (Path(path) / "tokenizer.json").is_file():
        return [ok(f"endpoint.tokenizer: {path}")]
    absent = "" if Path(path).exists() else path
    return [fatal(f"endpoint.tokenizer is {path!r}, which holds no tokenizer.json", absent=absent)]


def _setting(run: EvaluatedRun) -> str:
    if run.endpoint is not None:
        return "endpoint.tokenizer"
    return "checkpoint" if run.checkpoint else "model.path"


def _of_run(run: EvaluatedRun, findings: list[Finding]) -> list[Finding]:
    return [replace(finding, text=f"runs: {run.name}: {finding.text}") for finding in findings]
