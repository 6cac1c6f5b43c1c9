"""Training stages, each from the model that the one before it left, and the question whether the first one helped: the
later stages are also trained without it, and both are evaluated on the same sets. One YAML file, `mempipe chain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from mempipe.config import RunConfig
from mempipe.engines.checkpoint import latest
from mempipe.engines.config import SamplingConfig
from mempipe.evaluation.suite import Benchmark, Bootstrap, EvaluatedRun, EvaluationSuite, merged
from mempipe.loader import load_values, parse_section
from mempipe.provenance import model_sha256
from mempipe.runs import saved_inputs
from mempipe.settings import ConfigError, FolderName, Section
from mempipe.tracking.config import TrackingConfig

ALONE = "-alone"
EVALUATION = "evaluation"


class Stage(Section):
    """A training run."""

    config: str
    """Its YAML file."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of a run, nested as in its file, that replace those of `config`."""


class ChainConfig(Section):
    """All of a chain; its folder is output/name, with one folder per stage and one for the evaluation."""

    name: FolderName = "chain"
    """The folder of the chain is output/name."""
    output: str = "runs"
    """Parent of the chains' folders."""
    stages: dict[FolderName, Stage] = Field(min_length=2)
    """The runs by name, in order. The first one begins with its own model, every other with the one before."""
    compare: bool = True
    """Train the later stages without the first one too, from the model that its reinforcement learning began with."""
    benchmarks: list[Benchmark] = Field(default_factory=list)
    """Question sets of the table; empty: the held-out questions of the last stage."""
    data_dir: str = ""
    """Folder of the sets that are named without a file."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    """How the table's answers are sampled."""
    bootstrap: Bootstrap = Bootstrap()
    ray_address: str = ""
    """A running cluster; empty: the job's own cluster, or a local one."""
    tracking: TrackingConfig = TrackingConfig()
    """MLflow: the chain is a run, and its stages and the evaluation are children of it."""

    @property
    def folder(self) -> Path:
        return Path(self.output) / self.name

    @field_validator("stages")
    @classmethod
    def _names_are_free(cls, stages: dict[str, Stage]) -> dict[str, Stage]:
        for name in stages:
            if name == EVALUATION or name.endswith(ALONE):
                raise ValueError(f"stages: {name} is a folder of the chain itself; choose another name")
        return stages


def load_chain(path: str | Path, overrides: Sequence[str] = ()) -> ChainConfig:
    """Reads the chain that a YAML file describes, with `key=value` overrides. Raises ConfigError."""
    return parse_section(load_values(path, overrides, kind="chain"), ChainConfig)


def chain_runs(chain: ChainConfig, tracking: TrackingConfig | None = None) -> list[RunConfig]:
    """Returns the runs of a chain, in order: its stages, then those without the first one. The latter begin with the
    first stage's warm start where it has one, so that the table says what its reinforcement learning was worth.

    Raises ConfigError, which names the stage.
    """
    names = list(chain.stages)
    runs = [_run(chain, name, name, model={}, tracking=tracking) for name in names[:1]]
    for name in names[1:]:
        runs.append(_run(chain, name, name, model=_export_of(runs[-1]), tracking=tracking))
    if chain.compare:
        model = _beginning_of(runs[0])
        for name in names[1:]:
            runs.append(_run(chain, name, name + ALONE, model=model, tracking=tracking))
            model = _export_of(runs[-1])
    return runs


def check_stages(chain: ChainConfig, runs: Sequence[RunConfig]) -> None:
    """Raises ConfigError when a run of the chain was begun with another model than the stage before it has left: its
    results would be taken for those of the present one."""
    for run in runs:
        model = Path(run.model.path)
        if not model.is_relative_to(chain.folder):
            continue
        before, now = saved_inputs(run.folder).get("model.path", ""), model_sha256(str(model))
        has_learnt = latest(run.folder / "checkpoints") is not None  # all that a run of an earlier version tells
        if before != now if before else has_learnt and not now:
            raise ConfigError(
                f"stages: {run.name} was begun with the model {model}, which {'was made again' if now else 'is gone'} "
                f"since; move {run.folder} away to train it again, or put that model back"
            )


def chain_table(chain: ChainConfig, runs: Sequence[RunConfig], tracking: TrackingConfig) -> EvaluationSuite:
    """Returns the evaluation of the last stage, with and without the first one."""
    last = list(chain.stages)[-1]
    compared = [run.folder for run in runs if run.name in (last, last + ALONE)]
    benchmarks = chain.benchmarks or [_held_out(compared[0], runs)]
    return EvaluationSuite(
        name=EVALUATION,
        output=str(chain.folder),
        ray_address=chain.ray_address,
        data_dir=chain.data_dir,
        runs=[EvaluatedRun(name=folder.name, config=str(folder)) for folder in compared],
        benchmarks=benchmarks,
        sampling=chain.sampling,
        bootstrap=chain.bootstrap,
        tracking=tracking,
    )


def _run(
    chain: ChainConfig, stage: str, name: str, *, model: dict[str, str], tracking: TrackingConfig | None
) -> RunConfig:
    where = {"name": name, "output": str(chain.folder), "ray_address": chain.ray_address}
    kept = {} if tracking is None else {"tracking": tracking.model_dump()}
    try:
        values = merged(load_values(chain.stages[stage].config, kind="run"), chain.stages[stage].settings)
        return parse_section(merged(values, {**where, "model": model, **kept}), RunConfig)
    except ConfigError as error:
        raise ConfigError(f"stages: {stage}: {error}") from error


def _beginning_of(run: RunConfig) -> dict[str, str]:
    """Returns the model with which the run's reinforcement learning begins."""
    if run.warm_start is not None:
        return {"path": str(run.folder / "warm_start"), "source": ""}
    return {"path": run.model.path, "source": run.model.source}


def _export_of(run: RunConfig) -> dict[str, str]:
    return {"path": str(run.folder / "huggingface"), "source": ""}


def _held_out(folder: Path, runs: Sequence[RunConfig]) -> Benchmark:
    """Returns the held-out questions of the run in this folder: those that it made itself, or data.validation."""
    (run,) = (run for run in runs if run.folder == folder)
    if run.world is not None:
        return Benchmark(name="held-out", file=str(folder / "world" / "validation.parquet"))
    if run.cloze is not None:
        return Benchmark(name="held-out", file=str(folder / "questions" / "test.parquet"))
    if not run.data.validation:
        raise ConfigError(f"benchmarks is empty, and the stage {folder.name} has no data.validation; name a set")
    return Benchmark(name="held-out", file=run.data.validation, columns=run.data.columns)
