"""The commands that come after a run, as the terminal and the report name them."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mempipe.agents.budget import MemoryBudget
from mempipe.config import RunConfig
from mempipe.data.partitions import example_questions, first_questions, main_partition
from mempipe.evaluation.suite import EvaluatedRun, run_config
from mempipe.settings import ConfigError
from mempipe.tracking.mlflow_database import sqlite_uri
from mempipe.types import Question

OWN_REWARD = "examples/own_reward/config.yaml"


def next_steps(folder: Path, settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns commands about the run in `folder`, as they can be typed here, and what each is for.

    `settings` are the run's, as nested plain values.
    """
    mempipe, run = program(), shlex.quote(str(folder))
    steps = [(f"{mempipe} trace {run}", "read attempts turn by turn")]
    config = _trained(folder)
    if config is not None:
        steps = [*_asking(mempipe, run, config), *steps, (f"{mempipe} evaluate {run}", _rows(folder, config))]
        if config.budget.can_be_swept:
            steps.append((f"{mempipe} sweep {run}", "find out how small its memory may be"))
    if Path(OWN_REWARD).exists() and folder == Path("runs/quickstart"):  # whose files the example starts from
        steps.append((f"{mempipe} train {OWN_REWARD}", "train it with your own reward"))
    more = 2 * max(1, settings.get("num_steps", 1))
    steps.append((f"{mempipe} train {run}/config.yaml num_steps={more} --resume", "train on from the last checkpoint"))
    return [*steps, *_curves(folder, settings.get("tracking", {}))]


def _curves(folder: Path, tracking: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the commands that show the data of the run's metrics writers."""
    run, writers = shlex.quote(str(folder)), tracking.get("writers", ["mlflow"])
    if "mlflow" in writers:
        uri = tracking.get("uri") or sqlite_uri(folder.parent / "mlflow.db")
        command = uri if uri.startswith("http") else f"{program('mlflow')} ui --backend-store-uri {shlex.quote(uri)}"
        yield command, "see curves and traces"
    if "tensorboard" in writers:
        yield f"{program('tensorboard')} --logdir {run}/tensorboard", "see curves in TensorBoard"
    if "wandb" in writers and any(folder.glob("wandb/offline-run-*")):
        yield f"{program('wandb')} sync {run}/wandb/offline-run-*", "send the run to Weights & Biases"


def program(name: str = "mempipe") -> str:
    """Returns the word that calls a program of this environment in a shell: its name if the shell finds it, else its
    path."""
    own, found = Path(sys.prefix) / "bin" / name, shutil.which(name)
    if not own.exists() or (found is not None and Path(found).parent.resolve() == own.parent.resolve()):
        return name
    here = Path.cwd()
    return shlex.quote(str(own.relative_to(here) if own.is_relative_to(here) else own))


def _trained(folder: Path) -> RunConfig | None:
    """Returns the config that the trained agent is asked with; None for a run that has not exported it yet."""
    if not (folder / "state.json").exists():
        return None
    try:
        return run_config(EvaluatedRun(name="trained", config=str(folder)), name="trained", ordered=False)
    except ConfigError:
        return None


def _asking(mempipe: str, run: str, config: RunConfig) -> list[tuple[str, str]]:
    serving = (f"{mempipe} serve {run}", "ask it in a browser, or over HTTP")
    question = None if config.agent_spec.reads else _question(config)
    if question is None:
        return [serving]
    meaning = f"ask it; the right answer is {' or '.join(question.golden_answers)}"
    return [(f"{mempipe} ask {run} {_quoted(question.text)}", meaning), serving]


def _quoted(text: str) -> str:
    """Returns the text as one word of a shell, in double quotes where nothing in it means something there."""
    return shlex.quote(text) if set(text) & set('"$`\\!') else f'"{text}"'


def _question(config: RunConfig) -> Question | None:
    """Returns a held-out question about the part of the corpus that is searched when none is named."""
    try:
        questions = first_questions(config.data.validation, columns=config.data.columns)
    except ConfigError:  # the file has changed since: a finished run does not fail for an example
        return None
    return next(iter(example_questions(questions, partition=main_partition(questions))), None)


def _rows(folder: Path, config: RunConfig) -> str:
    rows = ["trained", "before training" if not (folder / "warm_start").is_dir() else "warm start"]
    rows += ["without memory"] * isinstance(config.budget, MemoryBudget)
    rows += ["without search"] * config.agent_spec.searches
    return f"compare it: {', '.join(rows)}"
