"""Training stages, each from the model that the one before it left, and the question whether the first one helped: the
later stages are also trained without it, and both are evaluated on the same sets. One YAML file, `mempipe chain`.

With `seeds` all of this is repeated under each seed, and `mempipe.studies.over_seeds` puts the evaluations together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from mempipe.agents.memagent import MemAgentConfig
from mempipe.config import RunConfig
from mempipe.engines.checkpoint import latest
from mempipe.engines.config import SamplingConfig
from mempipe.evaluation.suite import Benchmark, Bootstrap, EvaluatedRun, EvaluationSuite, merged
from mempipe.loader import load_values, parse_section
from mempipe.provenance import model_sha256
from mempipe.runs import saved_inputs
from mempipe.settings import ConfigError, FolderName, Section, Seed
from mempipe.tracking.config import TrackingConfig

ALONE = "-alone"
CONTINUED = "-continued"
EVALUATION = "evaluation"


class Stage(Section):
    """A training run."""

    config: str
    """Its YAML file."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of a run, nested as in its file, that replace those of `config`."""


class TableRow(Section):
    """A further row of the table: an agent with a model that the chain has anyway."""

    name: FolderName
    """The row's name in the table."""
    after: str = ""
    """The stage whose model plays; empty: the model that the chain's reinforcement learning began with."""
    config: str = ""
    """A run's YAML file with the agent that plays; empty: that of the last stage."""
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
    compare: Literal[True, False, "continued"] = True
    """Train the later stages without the first one too, from the model that its reinforcement learning began with.
    continued: in addition train the last stage without the first one for the steps of both together, so that both sides
    of the comparison have taken as many steps."""
    seeds: list[Seed] = Field(default_factory=list)
    """Repeat the whole chain under each of these seeds, and make one table over them; empty: once, with the seeds of
    the stages' own configs."""
    rows: list[TableRow] = Field(default_factory=list)
    """Further rows of the table, such as the first stage's model alone."""
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
            if name == EVALUATION or name.endswith((ALONE, CONTINUED)):
                raise ValueError(f"stages: {name} is a folder of the chain itself; choose another name")
        return stages

    @field_validator("seeds")
    @classmethod
    def _no_seed_twice(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"seeds is {seeds}; every seed occurs in it once")
        return seeds

    @model_validator(mode="after")
    def _rows_follow_stages(self) -> ChainConfig:
        last = list(self.stages)[-1]
        taken = {last, last + ALONE, last + CONTINUED}
        for row in self.rows:
            if row.name in taken:
                raise ValueError(f"rows: {row.name} is the name of another row of the table; choose another")
            taken.add(row.name)
            if row.after and row.after not in self.stages:
                raise ValueError(
                    f"rows: {row.name} is after {row.after!r}; expected a stage ({', '.join(self.stages)}), or nothing "
                    "for the model that the chain begins with"
                )
        return self


def of_each_seed(chain: ChainConfig) -> dict[int | None, ChainConfig]:
    """Returns the chain under each of its seeds, each in a separate folder; the chain itself where it has none."""
    if not chain.seeds:
        return {None: chain}
    return {seed: _under_seed(chain, seed) for seed in chain.seeds}


def _under_seed(chain: ChainConfig, seed: int) -> ChainConfig:
    stages = {
        name: stage.model_copy(update={"settings": {**stage.settings, "seed": seed}})
        for name, stage in chain.stages.items()
    }
    changes = {"name": f"seed-{seed}", "output": str(chain.folder), "seeds": [], "stages": stages}
    return chain.model_copy(update=changes)


def chain_runs(chain: ChainConfig, tracking: TrackingConfig | None = None) -> list[RunConfig]:
    """Returns the runs of a chain, in order: its stages, then those without the first one, then the one of all steps.
    Those without it begin with the first stage's warm start where it has one, so that the table says what its
    reinforcement learning was worth.

    Raises ConfigError, which names the stage, also for stages that show chunk and memory in different orders: what one
    stage has learned about its prompt would not hold in the next.
    """
    names = list(chain.stages)
    before: dict[str, str] = {}
    runs = [_run(chain, names[0], names[0], model={}, tracking=tracking)]
    for name in names[1:]:
        runs.append(_run(chain, name, name, model=_export_of(runs[-1]), tracking=tracking))
    _check_layout({f"stages: {run.name}": run for run in runs})
    if chain.compare:
        model = _beginning_of(runs[0])
        for name in names[1:]:
            before, model = model, _export_of(_add(runs, chain, name, name + ALONE, model=model, tracking=tracking))
        if chain.compare == "continued":
            steps = {"num_steps": runs[0].num_steps + runs[-1].num_steps}
            _add(runs, chain, names[-1], names[-1] + CONTINUED, model=before, tracking=tracking, settings=steps)
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


def check_rows(chain: ChainConfig) -> None:
    """Raises ConfigError, which names the row, for the settings of a further row that are wrong, and for another layout
    of its prompts than that of the stages."""
    last = list(chain.stages.values())[-1]
    settings = {f"stages: {run.name}": run for run in chain_runs(chain)}
    for row in chain.rows:
        stage = Stage(config=row.config) if row.config else last
        try:
            values = merged(load_values(stage.config, kind="run"), stage.settings)
            settings[f"rows: {row.name}"] = parse_section(merged(values, row.settings), RunConfig)
        except ConfigError as error:
            raise ConfigError(f"rows: {row.name}: {error}", absent=error.absent) from error
    _check_layout(settings)


def chain_table(chain: ChainConfig, runs: Sequence[RunConfig], tracking: TrackingConfig) -> EvaluationSuite:
    """Returns the evaluation of the last stage, with and without the first one, and of the further rows. Raises
    ConfigError for sets that it cannot tell apart, and where there are none."""
    last = list(chain.stages)[-1]
    compared = [run.folder for run in runs if run.name in (last, last + ALONE, last + CONTINUED)]
    benchmarks = chain.benchmarks or [_held_out(compared[0], runs)]
    values = {
        "name": EVALUATION,
        "output": str(chain.folder),
        "ray_address": chain.ray_address,
        "data_dir": chain.data_dir,
        "runs": [
            *(EvaluatedRun(name=folder.name, config=str(folder)) for folder in compared),
            *(_further(row, runs, last=compared[0]) for row in chain.rows),
        ],
        "benchmarks": benchmarks,
        "sampling": chain.sampling,
        "bootstrap": chain.bootstrap,
        "tracking": tracking,
    }
    return parse_section(values, EvaluationSuite)


def compared_rows(chain: ChainConfig) -> list[tuple[str, str]]:
    """Returns the rows of the table whose difference says what the first stage was worth, (with it, without)."""
    last = list(chain.stages)[-1]
    suffixes = {False: [], True: [ALONE], "continued": [ALONE, CONTINUED]}[chain.compare]
    return [(last, last + suffix) for suffix in suffixes]


def untrained_rows(chain: ChainConfig) -> set[str]:
    """Returns the names of the rows whose weights are the same under every seed. A warm start, and a model that the
    run makes itself, are not."""
    first = chain_runs(chain)[0]
    is_given = first.warm_start is None and bool(first.model.path or first.model.source)
    return {row.name for row in chain.rows if not row.after} if is_given else set()


def _further(row: TableRow, runs: Sequence[RunConfig], *, last: Path) -> EvaluatedRun:
    stage = next((run for run in runs if run.name == row.after), None)
    begin = _beginning_of(runs[0])["path"] or str(runs[0].folder / "model")  # which a run makes that names none
    model = begin if stage is None else str(stage.folder)
    return EvaluatedRun(name=row.name, config=row.config or str(last), settings=row.settings, checkpoint=model)


def _add(runs: list[RunConfig], chain: ChainConfig, stage: str, name: str, **options: Any) -> RunConfig:
    runs.append(_run(chain, stage, name, **options))
    return runs[-1]


def _run(
    chain: ChainConfig,
    stage: str,
    name: str,
    *,
    model: dict[str, str],
    tracking: TrackingConfig | None,
    settings: Mapping[str, Any] | None = None,
) -> RunConfig:
    where = {"name": name, "output": str(chain.folder), "ray_address": chain.ray_address, **(settings or {})}
    kept = {} if tracking is None else {"tracking": tracking.model_dump()}
    try:
        values = merged(load_values(chain.stages[stage].config, kind="run"), chain.stages[stage].settings)
        return parse_section(merged(values, {**where, "model": model, **kept}), RunConfig)
    except ConfigError as error:
        raise ConfigError(f"stages: {stage}: {error}", absent=error.absent) from error


def _check_layout(runs: Mapping[str, RunConfig]) -> None:
    """Raises ConfigError unless all agents that read have their prompts in one order; the keys name stages and rows."""
    reading = [(name, run.agent.chunk_first) for name, run in runs.items() if isinstance(run.agent, MemAgentConfig)]
    for name, chunk_first in reading[1:]:
        first, wanted = reading[0]
        if chunk_first != wanted:
            raise ConfigError(
                f"{name}: agent.chunk_first is {str(chunk_first).lower()}, and {first.partition(': ')[2]} has "
                f"{str(wanted).lower()}; one chain has one layout, so set agent.chunk_first={str(wanted).lower()} in "
                f"the settings of the {name.partition('s:')[0]}"
            )


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
