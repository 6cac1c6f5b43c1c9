"""Config of an evaluation: agents with their weights, question sets and sampling. One YAML file, `mempipe evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import Field, field_validator, model_validator

from mempipe.agents.budget import MemoryBudget
from mempipe.config import RunConfig
from mempipe.data.config import Columns
from mempipe.engines.config import EndpointConfig, SamplingConfig
from mempipe.loader import load_values, parse_section, section_values
from mempipe.provenance import read_record
from mempipe.rollout import Control
from mempipe.runs import unfinished
from mempipe.settings import ConfigError, FolderName, Section, Seed
from mempipe.tracking.config import TrackingConfig

_RUN_FOLDER = ("state.json", "huggingface")
AGENT_FILE, PROMPTS_FILE = "mempipe.yaml", "prompts.yaml"
"""Files of an exported agent in addition to its weights (`mempipe.reports.agent_folder`)."""
NOT_EVALUATED = ("world", "cloze", "warm_start")
"""Sections of a run that only its training reads."""
_HELD_OUT = {"world": "world/validation.parquet", "cloze": "questions/test.parquet"}
"""The held-out questions in the folder of a run that made them itself, by the section that asked for them."""


class EvaluatedRun(Section):
    """An agent under certain weights: a row of the table."""

    name: FolderName
    """The row's name in the table."""
    config: str = ""
    """A run's YAML file, or the folder of a trained run: agent, prompts, budget, retrieval and engines are as there."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of a run, nested as in its file, that replace those of `config`."""
    checkpoint: str = ""
    """A Hugging Face folder or name, or the folder of a trained run (its export); empty: the config's model.path."""
    endpoint: EndpointConfig | None = None
    """A server that completes instead of our own engines; its tokenizer is then the model's."""
    control: Control | None = None
    """Plays without memory (every memory is emptied) or without search (nothing is found): what it still answers the
    model knows anyway."""

    @model_validator(mode="after")
    def _one_model(self) -> EvaluatedRun:
        if self.checkpoint and self.endpoint is not None:
            raise ValueError(f"runs: {self.name} has a checkpoint and an endpoint; it is served by one of them")
        if self.endpoint is not None and not self.endpoint.tokenizer:
            raise ValueError(
                f"runs: {self.name} has an endpoint without tokenizer; agents send token ids, so name the model's "
                "tokenizer"
            )
        return self


class Benchmark(Section):
    """A question set: a column of the table."""

    name: FolderName
    """One of the seven search-QA sets (nq, triviaqa, popqa, hotpotqa, 2wikimultihopqa, musique, bamboogle),
    webquestions, complexwebquestions, ruler_hqa, or any name.
    """
    file: str = ""
    """A question file; empty:
    DATA_DIR/NAME/test.jsonl or dev.jsonl (or .json), for ruler_hqa DATA_DIR/ruler_hqa/test_NUMDOCS.parquet or .json.
    """
    columns: Columns = Columns()
    """Fields of the file's rows; empty ones are found by their names."""
    num_docs: int = Field(0, ge=0)
    """Documents in a context of ruler_hqa."""
    num_questions: int = Field(0, ge=0)
    """The first N questions (of joined ones if there are several objectives); 0: all."""
    objectives: int = Field(1, ge=1, le=16)
    """Neighbouring questions that are asked as one (MEM1, arXiv 2506.15841)."""
    pair_seed: int | None = None
    """Shuffles the questions before neighbours are joined; null: the order of the file, as published."""

    @property
    def label(self) -> str:
        """Names it among the others, and names its folder."""
        length = f"_{self.num_docs}" if self.num_docs else ""
        return f"{self.name}{length}" + (f"_x{self.objectives}" if self.objectives > 1 else "")


class Bootstrap(Section):
    """Intervals around the scores."""

    num_resamples: int = Field(2000, ge=100)
    """Resamples of the questions."""
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """Share of resamples that an interval covers."""


class EvaluationSuite(Section):
    """All of an evaluation; its folder is output/name, with one folder per run and set in it."""

    name: FolderName = "evaluation"
    """The folder of the evaluation is output/name."""
    output: str = "evaluations"
    """Parent of the evaluations' folders."""
    seed: Seed = 1
    """Seed of the engines and of the bootstrap."""
    ray_address: str = ""
    """A running cluster; empty: the job's own cluster, or a local one."""
    data_dir: str = ""
    """Folder of the sets that are named without a file."""
    runs: list[EvaluatedRun] = Field(min_length=1)
    benchmarks: list[Benchmark] = Field(min_length=1)
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    """Temperature 0 takes the likeliest token."""
    num_samples: int = Field(1, ge=1)
    """Attempts per question; its score is their mean."""
    bootstrap: Bootstrap = Bootstrap()
    questions_per_part: int = Field(32, ge=1)
    """Questions in one result file: what a killed evaluation loses at most."""
    judge: EndpointConfig | None = None
    """A model that judges whether an answer means a gold one: a further metric."""
    recall: EndpointConfig | None = None
    """A model that is asked for needed facts from each attempt's last memory alone (mempipe.evaluation.recall)."""
    tracking: TrackingConfig = TrackingConfig()

    @property
    def folder(self) -> Path:
        return Path(self.output) / self.name

    @property
    def attempts_are_the_same(self) -> bool:
        """Returns whether all attempts at a question take the likeliest token, so that one would do."""
        return self.num_samples > 1 and not self.sampling.temperature

    @field_validator("runs")
    @classmethod
    def _names_differ(cls, runs: list[EvaluatedRun]) -> list[EvaluatedRun]:
        names = [run.name for run in runs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"runs: the name {min(twice)} occurs twice; every row of the table needs its own")
        return runs

    @field_validator("benchmarks")
    @classmethod
    def _labels_differ(cls, benchmarks: list[Benchmark]) -> list[Benchmark]:
        labels = [benchmark.label for benchmark in benchmarks]
        if twice := {label for label in labels if labels.count(label) > 1}:
            raise ValueError(f"benchmarks: {min(twice)} occurs twice; give one of them another name and its file")
        return benchmarks


def load_suite(path: str | Path, overrides: Sequence[str] = ()) -> EvaluationSuite:
    """Reads the evaluation that a YAML file describes, with `key=value` overrides. Raises ConfigError."""
    return parse_section(load_values(path, overrides, kind="evaluation"), EvaluationSuite)


def resolve_run(suite: EvaluationSuite, run: EvaluatedRun) -> RunConfig:
    """Returns the whole config that `run` is evaluated with: its file, its settings over it, its weights.

    Raises ConfigError, which names the run.
    """
    try:
        config = run_config(
            run,
            name=run.name,
            output=str(suite.folder),
            seed=suite.seed,
            ray_address=suite.ray_address,
            ordered=False,
        )
        check_control(run.control, config)
    except ConfigError as error:
        raise ConfigError(f"runs: {run.name}: {error}") from error
    return config


def check_control(control: Control | None, config: RunConfig) -> None:
    """Raises ConfigError for a control that means nothing to the agent."""
    name = config.agent.name
    if control not in (None, *get_args(Control)):
        raise ConfigError(f"control is {control!r}; expected 'no_memory' or 'no_search'")
    if control == "no_memory" and not isinstance(config.budget, MemoryBudget):
        raise ConfigError(f"control is no_memory, but agent.name {name!r} writes no memory that could be emptied")
    if control == "no_search" and not config.agent_spec.searches:
        raise ConfigError(f"control is no_search, but agent.name {name!r} does not search")


def run_config(run: EvaluatedRun, **changes: Any) -> RunConfig:
    """Returns the config of an agent under certain weights: its file, its settings over it, its weights, and `changes`.
    Raises ConfigError.
    """
    values = merged(run_values(run), run.settings)
    for name in NOT_EVALUATED:
        values.pop(name, None)
    budget, model = section_values(values, "budget"), section_values(values, "model")
    budget.pop("memory_choices", None)  # only training draws a limit
    if path := run.endpoint.tokenizer if run.endpoint is not None else _weights(run.checkpoint):
        model |= {"path": path, "source": ""}
    # Weights that are not trained are whole: the engine needs no room for an adapter.
    values |= {"budget": budget, "model": {**model, "lora_rank": 0, "lora_merge": False}}
    config = parse_section({**values, **changes}, RunConfig)
    if not config.model.path:
        raise ConfigError("no model is named; set checkpoint, endpoint or model.path")
    return config


def run_values(run: EvaluatedRun) -> dict[str, Any]:
    """Returns the settings of the config file; of a trained run, with the index, the held-out questions and the weights
    that it made itself."""
    source = run.config or (run.checkpoint if _is_run(run.checkpoint) else "")
    if not source:
        return _exported_values(Path(run.checkpoint), run.settings) if run.checkpoint else {}
    folder = Path(source)
    if not folder.is_dir():
        return load_values(source, kind="run")
    if not run.checkpoint and not _is_run(source) and (problem := unfinished(folder)):
        raise ConfigError(f"{source} is {problem}")
    values = load_values(folder / "config.yaml", kind="run")
    if made := next((name for name in _HELD_OUT if values.get(name) is not None), None):
        values["retrieval"] = {**section_values(values, "retrieval"), "index": str(folder / "index")}
        values["data"] = {**section_values(values, "data"), "validation": str(folder / _HELD_OUT[made])}
    if not run.checkpoint and _is_run(source):
        values["model"] = {**section_values(values, "model"), "path": _weights(source), "source": ""}
    return values


def trained_on(run: EvaluatedRun) -> dict[str, int] | None:
    """Returns the sets that the run's own training asked questions of, with their numbers; None where the weights are
    not those of a run that says so. The data of a model's pretraining is unknown."""
    source = run.checkpoint or run.config
    if run.endpoint is not None or not _is_run(source):
        return None
    return read_record(Path(source) / "state.json", mends="bring the run's folder back").get("trained_on")


def _exported_values(folder: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of an exported agent; none for a model without them. Raises ConfigError if they name a
    program to be started and `changes` do not: the folder may come from anywhere."""
    if not (folder / AGENT_FILE).is_file():
        return {}
    values = load_values(folder / AGENT_FILE, kind="run")
    agent = section_values(values, "agent")
    if agent.get("prompts") == PROMPTS_FILE:
        values["agent"] = {**agent, "prompts": str(folder / PROMPTS_FILE)}
    servers, program = agent.get("mcp_servers") or [], agent.get("program")
    started = {
        "mcp_servers": [each["command"] for each in servers if isinstance(each, dict) and each.get("command")],
        "program": program[:1] if isinstance(program, list) else [],
    }
    for name, commands in started.items():
        if commands and name not in section_values(changes, "agent"):
            raise ConfigError(
                f"{folder / AGENT_FILE}: agent.{name} starts the command {commands[0]!r} on this machine; if you trust "
                f"it, give the setting agent.{name} yourself, with the same value"
            )
    return values


def _weights(checkpoint: str) -> str:
    """Returns where the weights lie: a trained run's export, or what `checkpoint` names itself.
    Raises ConfigError for a run that has no export yet."""
    if checkpoint and not _is_run(checkpoint) and (problem := unfinished(Path(checkpoint))):
        raise ConfigError(f"{checkpoint} is {problem}")
    return str(Path(checkpoint) / "huggingface") if _is_run(checkpoint) else checkpoint


def _is_run(path: str) -> bool:
    return bool(path) and all((Path(path) / name).exists() for name in _RUN_FOLDER)


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns `values` with `changes` over them, section by section."""
    result = dict(values)
    for name, change in changes.items():
        both = isinstance(change, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], change) if both else change
    return result
