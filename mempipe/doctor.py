"""`mempipe doctor`: finds the kind of a config and makes the checks that its command makes before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mempipe.checks.chain import check_chain
from mempipe.checks.evaluation import check_suite
from mempipe.checks.findings import Finding, fatal, ok
from mempipe.checks.machine import Devices
from mempipe.checks.retrieval import check_build, check_documents, check_service
from mempipe.checks.run import check_run
from mempipe.checks.sweep import check_sweep
from mempipe.config import RunConfig
from mempipe.engines.gpus import GPUS
from mempipe.evaluation.suite import load_suite
from mempipe.loader import (
    kind_of,
    load_config,
    load_documents_config,
    load_index_config,
    load_service_config,
    load_values,
)
from mempipe.runs import Resume
from mempipe.settings import ConfigError
from mempipe.studies.chain import load_chain
from mempipe.studies.sweep import load_sweep


def examine(
    path: str,
    overrides: Sequence[str] = (),
    *,
    resume: Resume = "never",
    num_gpus: int | None = None,
    gpu: str = "",
) -> list[Finding]:
    """Returns all findings about a config of any kind, or about a run's folder. `num_gpus` are those of a cluster that
    is elsewhere, and `gpu` is their type, a name of `mempipe.engines.gpus`.

    Raises ConfigError when the settings themselves are wrong.
    """
    if Path(path).is_dir():  # of a run, which is there already
        path, resume = str(Path(path) / "config.yaml"), "always" if resume == "never" else resume
    if gpu and num_gpus is None:
        raise ConfigError(f"--gpu {gpu} says the type of the GPUs, but not their number; say so by --devices N")
    devices = None
    if num_gpus is not None:
        devices = Devices(num_gpus=num_gpus, gpu=gpu, **({"gpu_gib": GPUS[gpu].gib} if gpu else {}))
    kind = kind_of(load_values(path))
    if kind == "chain":
        return check_chain(load_chain(path, overrides), devices=devices)
    if kind == "evaluation":
        return check_suite(load_suite(path, overrides), devices=devices)
    if kind == "sweep":
        return check_sweep(load_sweep(path, overrides), devices=devices)
    if kind == "index":
        return check_build(load_index_config(path, overrides))
    if kind == "service":
        return check_service(load_service_config(path, overrides))
    if kind == "documents":
        return check_documents(load_documents_config(path, overrides))
    if kind == "agent service":
        from mempipe.serve.deployed import check_deployment

        return check_deployment(path, overrides, devices=devices)
    config = load_config(path, overrides)
    findings = check_run(config, resume=resume, devices=devices)
    made_by_the_run = config.world is not None or config.cloze is not None or config.model.source
    if not made_by_the_run and not any(finding.fatal for finding in findings):
        findings.append(_inputs(config))
    return findings


def _inputs(config: RunConfig) -> Finding:
    """Checks what needs the tokenizer. Its imports take seconds, so this comes when all else is right."""
    from mempipe.checks.inputs import check_inputs

    try:
        return ok(check_inputs(config))
    except ConfigError as error:
        return fatal(str(error))
