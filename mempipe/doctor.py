"""`mempipe doctor`: finds the kind of a config and makes the checks that its command makes before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mempipe.checks.findings import Finding, fatal
from mempipe.checks.machine import Devices
from mempipe.config import RunConfig
from mempipe.data.config import DataConfig
from mempipe.engines.gpus import GPUS
from mempipe.loader import load_job
from mempipe.runs import Resume, check_place
from mempipe.settings import ConfigError


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
        if not (Path(path) / "config.yaml").is_file():
            raise ConfigError(
                f"{path} holds no run (no config.yaml); give the folder of a run, or a YAML file, whose model.path may "
                "be the folder of a model"
            )
        path, resume = str(Path(path) / "config.yaml"), "always" if resume == "never" else resume
    if num_gpus is not None and num_gpus < 0:
        raise ConfigError(f"--devices is {num_gpus}; expected a number of GPUs, 0 or more")
    if gpu and num_gpus is None:
        raise ConfigError(f"--gpu {gpu} says the type of the GPUs, but not their number; say so by --devices N")
    devices = None
    if num_gpus is not None:
        devices = Devices(num_gpus=num_gpus, gpu=gpu, **({"gpu_gib": GPUS[gpu].usable_gib} if gpu else {}))
    kind, config = load_job(path, overrides)
    check_place(path, config, resume=resume)
    findings = kind.findings(config, devices=devices, resume=resume)
    if not isinstance(config, RunConfig):
        return findings
    model_is_made = config.makes_model or config.model.source
    if not model_is_made and not any(finding.fatal for finding in findings):
        findings += _inputs(config)
    return findings


def _inputs(config: RunConfig) -> list[Finding]:
    """Checks what needs the tokenizer. Its imports take seconds, so this comes when all else is right. Questions that
    the run makes are not there yet."""
    from mempipe.checks.inputs import check_inputs

    if config.world is not None or config.cloze is not None:
        config = config.model_copy(update={"data": DataConfig()})
    try:
        return check_inputs(config)
    except ConfigError as error:
        return [fatal(str(error))]
