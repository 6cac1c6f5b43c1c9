"""Config of a sweep: the agents of an evaluation under several memory budgets and seeds, each trained or only measured.

A trial is one agent, one budget and one seed. It is a config file (two, where it is trained first) for the commands
that there are anyway, so that it can be repeated by hand, and its results are those of an evaluation. Where an agent is
trained for several budgets at once (budget.memory_choices), all trials of a seed measure one training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, PositiveInt, field_validator, model_validator

from mempipe.agents.budget import Budget, MemoryBudget
from mempipe.agents.registry import agent_spec
from mempipe.config import DEFAULT_AGENT, RunConfig
from mempipe.evaluation.results import SETTINGS, read_result_state
from mempipe.evaluation.suite import EvaluatedRun, EvaluationSuite, merged, resolve_run, run_values
from mempipe.loader import load_values, parse_section, section_values
from mempipe.provenance import completed, differences, model_sha256
from mempipe.settings import ConfigError, Seed
from mempipe.storage.files import write_text
from mempipe.studies.budgets import MARGIN, BudgetStudy, study_runs
from mempipe.studies.measured import measured_runs
from mempipe.tracking.config import TrackingConfig

RUN = "{run}"
SWEEP_FILE = "sweep.yaml"
"""The sweep's settings, in its folder."""
_SUFFIX = "-evaluate.yaml"


class SweepConfig(EvaluationSuite):
    """All of a sweep: an evaluation whose runs are repeated. The folder of the sweep is output/name."""

    FREE = ("tracking", "ray_address")
    """Settings of every trial."""

    output: str = "sweeps"
    """Parent of the sweeps' folders."""
    budgets: list[PositiveInt] = Field(min_length=1)
    """Values of budget.memory_tokens. One above that of a run's config raises memory_message_tokens and context_tokens
    with it, unless the run's settings state them. An agent without memory_tokens, and a control, is a reference: one
    trial for each seed."""
    seeds: list[Seed] = Field([1], min_length=1)
    """Each budget is tried once under each of them."""
    margin: float = Field(MARGIN, gt=0, lt=100)
    """Points (percent) that a budget may lose against the largest one and still be called enough."""
    train: bool = False
    """Every trial trains its agent (runs.config is a run's YAML file) under its budget, then measures it; one with
    budget.memory_choices is trained once for each seed, and measured under every budget. In the file of a benchmark
    {run} stands for the folder of the trial's run."""
    trials_at_once: PositiveInt | None = None
    """Trials side by side; null: as many as the cluster's GPUs hold, and one after another without GPUs."""
    max_failures: int = Field(2, ge=0)
    """How often a trial that died starts again, each time from where it was."""

    @field_validator("budgets", "seeds")
    @classmethod
    def _no_trial_twice(cls, values: list[int]) -> list[int]:
        if twice := {value for value in values if values.count(value) > 1}:
            raise ValueError(f"{min(twice)} occurs twice; every trial needs its own budget and seed")
        return values

    @model_validator(mode="after")
    def _seeds_differ(self) -> SweepConfig:
        if len(self.seeds) > 1 and not self.train and self.sampling.temperature == 0:
            raise ValueError(
                f"seeds has {len(self.seeds)} values, but nothing is trained and sampling.temperature is 0, so that "
                "all of them would answer alike; set a temperature or one seed"
            )
        return self

    @model_validator(mode="after")
    def _runs_can_be_trained(self) -> SweepConfig:
        for run in self.runs:
            measured_only = run.checkpoint or run.endpoint is not None or run.control
            if self.train and (measured_only or not run.config or Path(run.config).is_dir()):
                raise ValueError(
                    f"runs: {run.name}: with train every run has a config, a training run's YAML file, and neither "
                    "checkpoint nor endpoint nor control"
                )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One agent under one budget and seed: an evaluation of a single run, and the training before it."""

    memory_tokens: int | None  # None: a reference, which has no such budget
    training: RunConfig | None
    suite: EvaluationSuite

    @property
    def name(self) -> str:
        return self.suite.name

    @property
    def results(self) -> Path:
        """Returns the folder that holds a folder of results for every set."""
        return self.suite.folder / self.suite.runs[0].name

    @property
    def finished(self) -> bool:
        """Returns whether every question of every set has its row."""
        folders = [self.results / benchmark.label for benchmark in self.suite.benchmarks]
        return all((each / SETTINGS).exists() and read_result_state(each)["finished"] for each in folders)


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Reads the sweep that a YAML file describes, with `key=value` overrides. Raises ConfigError."""
    return parse_section(load_values(path, overrides, kind="sweep"), SweepConfig)


def trials(sweep: SweepConfig, *, tracking: TrackingConfig | None = None) -> list[Trial]:
    """Returns every trial of the sweep, agent by agent and budget by budget; all of them record as `tracking` says
    (None: as the sweep).

    Raises ConfigError when an agent's config cannot be read, or does not allow one of the budgets, and when there are
    references only.
    """
    recorded = (tracking or sweep.tracking).model_dump()
    planned = [
        _trial(sweep, run, tokens, seed, recorded)
        for run in sweep.runs
        for tokens in (sweep.budgets if _has_memory_budget(run) else [None])
        for seed in sweep.seeds
    ]
    if all(trial.memory_tokens is None for trial in planned):
        names = ", ".join(run.name for run in sweep.runs)
        raise ConfigError(
            f"budgets is {sweep.budgets}, but none of the runs ({names}) has budget.memory_tokens, which it sets; name "
            "an agent that writes a memory of that limit, such as memsearcher or memagent"
        )
    return planned


def trial_name(run: EvaluatedRun, memory_tokens: int | None, seed: int) -> str:
    """Returns the name of a trial, and of its folder."""
    budget = "" if memory_tokens is None else f"-memory-{memory_tokens}"
    return f"{run.name}{budget}-seed-{seed}"


def study_sweep(folder: Path, *, metric: str = "em", margin: float | None = None) -> BudgetStudy:
    """Returns the study of a sweep's folder, wherever it lies. `margin` is in points; None: the sweep's. Trials that
    the sweep does not list any more have no part in it (`left_out`).

    Raises ConfigError while trials are missing.
    """
    sweep = load_sweep(folder / SWEEP_FILE)
    planned = _planned(folder, sweep)
    if missing := [name for name in planned if not (folder / "trials" / name).is_dir()]:
        raise ConfigError(f"{folder}: {', '.join(missing)} were never started; `mempipe sweep` --resume continues")
    runs = []
    for name in planned:
        suite = parse_section(load_values(folder / "configs" / f"{name}{_SUFFIX}"), EvaluationSuite)
        measured = list(measured_runs(folder / "trials" / name))
        for benchmark in suite.benchmarks:
            if not any(benchmark.label in run.sets for run in measured):
                raise ConfigError(
                    f"{folder}: {name} has no results of {benchmark.label}; `mempipe sweep` --resume continues"
                )
        training = suite.seed if sweep.train else None
        runs += [replace(run, agent=run.name, training=training) for run in measured]
    return study_runs(runs, metric=metric, margin=sweep.margin if margin is None else margin, seed=sweep.seed)


def left_out(folder: Path) -> str:
    """Returns a sentence about the trials in a sweep's folder that the sweep does not list any more; "" without any."""
    names = _names(load_sweep(folder / SWEEP_FILE))
    others = [name for name in _begun(folder) if name not in names]
    return f"not in the report, since {SWEEP_FILE} does not list them any more: {', '.join(others)}" if others else ""


def write_configs(folder: Path, trial: Trial) -> list[tuple[str, Path]]:
    """Writes the trial's configs and returns the commands that run it: the command's name and its file."""
    written = []
    for command, config in _configs(trial):
        file = _config_file(folder, trial, command)
        write_text(file, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        written.append((command, file))
    return written


def check_same(folder: Path, planned: Sequence[Trial]) -> None:
    """Raises ConfigError when a trial that is already in the folder was another one, or its results are of another
    training than the one that is there now."""
    for trial in planned:
        for command, config in _configs(trial):
            file = _config_file(folder, trial, command)
            if not file.exists():
                continue
            kept, wanted = completed(_kept(file), type(config)), config.model_dump(mode="json")
            if differing := [*differences(kept, wanted, free=SweepConfig.FREE)]:
                listed = ", ".join(f"{name} {now!r} (was {before!r})" for name, before, now in differing)
                run = "" if trial.training is None else f", {trial.training.folder}"
                raise ConfigError(
                    f"{trial.name} was started with other settings: {listed}; give the sweep another name, or delete "
                    f"{file}{run} and {trial.suite.folder}"
                )
        _check_measured(trial)


def _kept(file: Path) -> dict[str, Any]:
    try:
        return load_values(file)
    except ConfigError as error:
        raise ConfigError(f"{error}; delete it, and --resume writes it again") from error


def _check_measured(trial: Trial) -> None:
    if trial.training is None:
        return
    model = model_sha256(str(trial.training.folder / "huggingface"))
    for folder in sorted(file.parent for file in trial.results.glob(f"*/{SETTINGS}")):
        measured = read_result_state(folder)["settings"].get("model_sha256")
        if model and measured and measured != model:
            raise ConfigError(
                f"{folder} was measured with another model than {trial.training.folder} holds now, which has been "
                f"trained again; delete {trial.suite.folder}, and --resume measures it again"
            )


def _begun(folder: Path) -> list[str]:
    """Returns the names of the trials that have a config in the folder, in order."""
    return sorted(file.name.removesuffix(_SUFFIX) for file in (folder / "configs").glob(f"*{_SUFFIX}"))


def _planned(folder: Path, sweep: SweepConfig) -> list[str]:
    """Returns the names of the sweep's trials, in order. Whether a run has budgets is known from its trials that were
    begun, since a copy of the folder may lack the run's config. A run without such a trial is listed by its name."""
    begun, planned = set(_begun(folder)), list[str]()
    for run in sweep.runs:
        of_budgets = [trial_name(run, tokens, seed) for tokens in sweep.budgets for seed in sweep.seeds]
        of_reference = [trial_name(run, None, seed) for seed in sweep.seeds]
        planned += next((names for names in (of_budgets, of_reference) if begun.intersection(names)), [run.name])
    return sorted(planned)


def _names(sweep: SweepConfig) -> set[str]:
    """Returns the name of every trial of the sweep, and some more: whether a run has budgets is known from its config,
    which a copy of the folder may lack."""
    budgets = (*sweep.budgets, None)
    return {trial_name(run, tokens, seed) for run in sweep.runs for tokens in budgets for seed in sweep.seeds}


def _configs(trial: Trial) -> Iterator[tuple[str, RunConfig | EvaluationSuite]]:
    if trial.training is not None:
        yield "train", trial.training
    yield "evaluate", trial.suite


def _config_file(folder: Path, trial: Trial, command: str) -> Path:
    return folder / "configs" / f"{trial.name}-{command}.yaml"


def _trial(sweep: SweepConfig, run: EvaluatedRun, tokens: int | None, seed: int, tracking: dict[str, Any]) -> Trial:
    name = trial_name(run, tokens, seed)
    changes: dict[str, Any] = {} if tokens is None else {"budget": _limits(run, tokens)}
    suite = sweep.model_dump(include=set(EvaluationSuite.model_fields))
    suite |= {"name": name, "output": str(sweep.folder / "trials"), "seed": seed, "tracking": tracking}
    if not sweep.train:
        suite["runs"] = [run.model_copy(update={"settings": merged(run.settings, changes)}).model_dump()]
        trial = Trial(memory_tokens=tokens, training=None, suite=parse_section(suite, EvaluationSuite))
        resolve_run(trial.suite, trial.suite.runs[0])  # raises ConfigError for a config that does not allow the budget
        return trial
    training, is_mixed = _training(sweep, run, name, changes, seed, tracking)
    suite["runs"] = [{"name": run.name, "config": str(training.folder), "settings": changes if is_mixed else {}}]
    suite["benchmarks"] = [
        benchmark | {"file": benchmark["file"].replace(RUN, str(training.folder))} for benchmark in suite["benchmarks"]
    ]
    return Trial(memory_tokens=tokens, training=training, suite=parse_section(suite, EvaluationSuite))


def _training(
    sweep: SweepConfig, run: EvaluatedRun, name: str, changes: dict[str, Any], seed: int, tracking: dict[str, Any]
) -> tuple[RunConfig, bool]:
    """Returns the training of the trial of that name, and whether it is one for several budgets."""
    values = merged(load_values(run.config, kind="run"), run.settings)
    is_mixed = bool(section_values(values, "budget").get("memory_choices"))
    own = {"name": f"{run.name}-mixed-seed-{seed}"} if is_mixed else merged({"name": name}, changes)
    own |= {"output": str(sweep.folder / "runs"), "seed": seed, "ray_address": sweep.ray_address}
    try:
        training = parse_section({**merged(values, own), "tracking": tracking}, RunConfig)
        if is_mixed:  # it is measured under a budget that it was not parsed with
            budget = training.budget.model_dump() | changes["budget"] | {"memory_choices": []}
            parse_section(training.model_dump() | {"budget": budget}, RunConfig)
    except ConfigError as error:
        raise ConfigError(f"runs: {name}: {error}") from error
    return training, is_mixed


def _limits(run: EvaluatedRun, tokens: int) -> dict[str, int]:
    """Returns the limits of a trial that the budget decides; the run's settings decide the ones that they state."""
    kind, named = _named_limits(run)
    try:
        budget = parse_section(named, kind)
    except ConfigError:  # the trial's config is refused with the reason, unless the budget mends it
        return {"memory_tokens": tokens}
    if not isinstance(budget, MemoryBudget):  # of a user-defined agent
        return {"memory_tokens": tokens}
    return budget.under(tokens, fixed=section_values(run.settings, "budget"))


def _has_memory_budget(run: EvaluatedRun) -> bool:
    if run.control is not None:
        return False
    kind, named = _named_limits(run)
    field = kind.model_fields.get("memory_tokens")
    return field is not None and named.get("memory_tokens", field.default) is not None


def _named_limits(run: EvaluatedRun) -> tuple[type[Budget], dict[str, Any]]:
    """Returns the kind of limits that the agent has, and those that its config and settings name."""
    values = merged(run_values(run), run.settings)
    kind = agent_spec(section_values(values, "agent").get("name", DEFAULT_AGENT)).budget
    return kind, section_values(values, "budget")
