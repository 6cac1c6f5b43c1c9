"""The evaluation and the sweep of a run or a model that is named by its folder: `mempipe evaluate FOLDER`,
`mempipe sweep FOLDER`.

The evaluation asks whether training helped, and whether memory and search are what it helped: the trained agent, the
one that training started from, and the trained one without memory and without search. The sweep asks how small the
memory of the trained agent may be. Of an exported agent or a model, which nobody trained here, the rows are the agent
itself, and without memory and search.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mempipe.agents.budget import MemoryBudget
from mempipe.config import RunConfig
from mempipe.data.config import UNSEEN_HOPS, UNSEEN_RELATIONS
from mempipe.data.input_files import ROWS, input_files, is_remote
from mempipe.evaluation.suite import (
    AGENT_FILE,
    NOT_EVALUATED,
    EvaluatedRun,
    EvaluationSuite,
    load_suite,
    merged,
    run_config,
)
from mempipe.loader import load_values, parse_overrides, parse_section, section_values
from mempipe.settings import ConfigError, Section
from mempipe.studies.sweep import SweepConfig, load_sweep

NUM_HELD_OUT = 96
"""Held-out questions of each of the run's sets that are asked; of a file that is named all are."""
_OF_A_TRAINING = ("algorithm", "evaluation", "learner", "num_steps", "optimizer")
"""Further sections of a run that only its training reads. In its config they do no harm; whoever gives one with the
command means something else."""
BUDGET_SHARES = (16, 8, 4, 2, 1)
"""A sweep tries the memory's budget divided by each of them."""


def evaluation_of(source: str, words: Sequence[str] = ()) -> EvaluationSuite:
    """Returns the evaluation that a YAML file describes, or that of a folder. `words` are the rest of the command
    line: overrides, and for a folder a question file; there a setting of the run, such as `retrieval.index`, holds for
    every row. Raises ConfigError."""
    if not Path(source).is_dir():
        return load_suite(source, words)
    questions, overrides = _questions_and_overrides(words)
    asked = _asked(overrides, questions)
    agent, overrides = _agent(source, overrides, EvaluationSuite)
    config = run_config(EvaluatedRun.model_validate(agent), name="trained", ordered=False)
    values = _suite(source, config, questions, _rows(source, agent, config), asked)
    return parse_section(merged(values, overrides), EvaluationSuite)


def sweep_of(source: str, words: Sequence[str] = ()) -> SweepConfig:
    """Returns the sweep over memory budgets that a YAML file describes, or that of a folder. `words` as in
    `evaluation_of`. Raises ConfigError."""
    if not Path(source).is_dir():
        return load_sweep(source, words)
    questions, overrides = _questions_and_overrides(words)
    asked = _asked(overrides, questions)
    agent, overrides = _agent(source, overrides, SweepConfig)
    config = run_config(EvaluatedRun.model_validate(agent), name="trained", ordered=False)
    tokens = config.budget.memory_limit
    if not config.budget.can_be_swept or tokens is None:
        raise ConfigError(
            f"agent.name of {source} is {config.agent.name!r}, which has no budget.memory_tokens to sweep"
        )
    values = _suite(source, config, questions, [agent], asked)
    values |= {"budgets": sorted({max(1, tokens // share) for share in BUDGET_SHARES})}
    return parse_section(merged(values, overrides), SweepConfig)


def _questions_and_overrides(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    files = [word for word in words if "=" not in word or Path(word).exists()]
    if len(files) > 1:
        raise ConfigError(f"{files[1]!r} is neither key=value nor the question file, which is {files[0]!r} already")
    return next(iter(files), ""), parse_overrides([word for word in words if word not in files])


def _asked(overrides: dict[str, Any], questions: str) -> dict[str, Any]:
    """Takes the settings of a benchmark out of the overrides: `num_questions`, and with a question file `data.columns`,
    which name its fields, not those of the run's questions."""
    data, asked = overrides.get("data"), {"num_questions": 0 if questions else NUM_HELD_OUT}
    if questions and isinstance(data, dict) and "columns" in data:
        asked["columns"] = data.pop("columns")
    return asked | ({"num_questions": overrides.pop("num_questions")} if "num_questions" in overrides else {})


def _agent(folder: str, overrides: dict[str, Any], study: type[Section]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the row of the agent in the folder, with those overrides that are settings of a run, such as
    `retrieval.index`, and the overrides of the study itself, which are all others. Raises ConfigError for a folder
    that holds no agent, and for a setting that only a training reads."""
    for key in NOT_EVALUATED:
        if key in overrides and key not in study.model_fields:
            raise ConfigError(f"{key} is read by a training only; name a question file to ask other questions")
    if key := next((key for key in _OF_A_TRAINING if key in overrides), ""):
        raise ConfigError(
            f"{key} is read by a training only; the settings of an evaluation are num_questions, num_samples and "
            "sampling"
        )
    settings = {
        key: each for key, each in overrides.items() if key in RunConfig.model_fields.keys() - study.model_fields
    }
    others = {key: each for key, each in overrides.items() if key not in settings}
    if (Path(folder) / "config.yaml").is_file():
        return {"name": "trained", "config": folder, "settings": settings}, others
    if any((Path(folder) / name).is_file() for name in (AGENT_FILE, "config.json")):
        return {"name": Path(folder).resolve().name, "checkpoint": folder, "settings": settings}, others
    raise ConfigError(
        f"{folder} holds no run (config.yaml) and no model (config.json); give the folder of a run or model, or a YAML "
        "file"
    )


def _rows(folder: str, agent: dict[str, Any], config: RunConfig) -> list[dict[str, Any]]:
    """Returns the rows of the table that the run or model has files and settings for."""
    rows = [agent]
    start, made = Path(folder) / "warm_start", Path(folder) / "model"
    if start.is_dir():
        rows.append({**agent, "name": "warm start", "checkpoint": str(start)})
    elif "config" in agent:
        # A config names a model that the run made as it was when the run began: the run may have been moved since.
        named = section_values(load_values(Path(folder) / "config.yaml"), "model").get("path")
        if named:
            rows.append({**agent, "name": "untrained", "checkpoint": str(made) if made.is_dir() else named})
    if isinstance(config.budget, MemoryBudget):
        rows.append({**agent, "name": "no memory", "control": "no_memory"})
    if config.agent_spec.searches:
        rows.append({**agent, "name": "no search", "control": "no_search"})
    return rows


def _suite(
    folder: str, config: RunConfig, questions: str, rows: list[dict[str, Any]], asked: dict[str, Any]
) -> dict[str, Any]:
    """Returns the settings of the evaluation; `asked` are those of every benchmark."""
    file = questions or config.data.validation
    if not file:
        raise ConfigError(
            f"{folder} has no held-out questions (data.validation is empty); name a question file after the folder"
        )
    if not (Path(file).exists() or is_remote(file)):
        raise ConfigError(f"the question file {file} does not exist")
    name = Path(folder).resolve().name
    measured = Path(file).name.partition(".")[0] or "questions"
    sets = {measured: file} if questions else _held_out(folder, file)
    return {
        "name": f"{name}-{measured}" if questions else name,
        "runs": rows,
        "benchmarks": [
            {"name": label, "file": path, "columns": {} if questions else config.data.columns.model_dump(), **asked}
            for label, path in sets.items()
        ],
    }


def _held_out(folder: str, file: str) -> dict[str, str]:
    """Returns the held-out question files of a run by set: one, or that of the trained kind and those of what a world
    never trained. The former then has the name of the training's set, which a gap is measured from. A folder of several
    files has a set for each, so that every set is asked and has its own column."""
    unseen = {name: Path(folder) / "world" / f"{name}.parquet" for name in (UNSEEN_RELATIONS, UNSEEN_HOPS)}
    if there := {name: str(path) for name, path in unseen.items() if path.exists()}:
        return {"world": file, **there}
    files = input_files(file, suffixes=ROWS) if Path(file).is_dir() else []
    by_name = {each.name.partition(".")[0]: each.url for each in files}
    return by_name if len(by_name) == len(files) > 1 else {"held-out": file}
