"""Recorded trajectories with what a reader has to know of them: where they are from, how large their memory may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mempipe.agents.registry import agent_spec
from mempipe.config import DEFAULT_AGENT
from mempipe.data.trajectories import read_trajectories
from mempipe.evaluation.results import SETTINGS, read_groups, read_result_state
from mempipe.settings import ConfigError
from mempipe.types import Group, Question, Trajectory

_DEPTH = 3  # folders of an evaluation: EVALUATION/RUN/SET


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One trajectory. `phase` is "before" or "after" the training, or RUN/SET of an evaluation; `memory_budget` is in
    tokens, None where the whole history is carried; `thought` finds the thought in the text of an action.
    """

    phase: str
    question: Question
    trajectory: Trajectory
    memory_budget: int | None
    thought: Callable[[str], str]

    @property
    def key(self) -> str:
        """The trajectory's id, made its own among all phases."""
        own = self.trajectory.id
        return own if own.startswith(f"{self.phase}/") else f"{self.phase}/{own}".lstrip("/")


def read_traced(path: Path) -> list[Traced]:
    """Reads all trajectories of a training run's folder, of an evaluation, or of one run or set of it, or of a Parquet
    file of trajectories.

    Raises ConfigError for what is none of these or cannot be read.
    """
    if path.is_file():
        return _traced(read_trajectories(path), _config_beside(path))
    if not path.is_dir():
        raise ConfigError(f"{path} does not exist; give the folder of a run or an evaluation, or a Parquet file")
    whole = path / "trajectories.parquet"
    files = [whole] if whole.exists() else sorted(path.glob("evaluation/*.parquet"))
    if files:
        return [traced for file in files for traced in _traced(read_trajectories(file), _config_beside(file))]
    folders = sorted(file.parent for depth in range(_DEPTH) for file in path.glob("*/" * depth + SETTINGS))
    found = [traced for folder in folders for traced in _evaluated(folder, path)]
    if not found:
        raise ConfigError(f"{path} holds no trajectories: a run writes them when it evaluates, before its first step")
    return found


def _evaluated(folder: Path, root: Path) -> list[Traced]:
    settings = read_result_state(folder)["settings"]
    phase = "/".join(folder.relative_to(root.parent if folder == root else root).parts)
    return _traced(read_groups(folder), settings["run"], phase=phase)


def _traced(groups: Iterable[Group], values: Mapping[str, Any], *, phase: str = "") -> list[Traced]:
    budget, thought = _facts(values)
    return [
        Traced(
            phase=phase or group.id.removesuffix(group.question.id).strip("/"),  # PHASE/QUESTION in a run's files
            question=group.question,
            trajectory=trajectory,
            memory_budget=budget,
            thought=thought,
        )
        for group in groups
        for trajectory in group.trajectories
    ]


def _config_beside(file: Path) -> Mapping[str, Any]:
    """Returns the settings of the run that wrote the file; none where its config is not there."""
    for folder in (file.parent, file.parent.parent):
        if (folder / "config.yaml").exists():
            return yaml.safe_load((folder / "config.yaml").read_text())
    return {}


def _facts(values: Mapping[str, Any]) -> tuple[int | None, Callable[[str], str]]:
    if not values:
        return None, str.strip
    spec = agent_spec(values.get("agent", {}).get("name", DEFAULT_AGENT))
    return spec.budget.model_validate(values.get("budget", {})).memory_limit, spec.thought


def phases_of(traced: Sequence[Traced]) -> list[str]:
    return list(dict.fromkeys(each.phase for each in traced))
