"""Recorded trajectories with what a reader has to know of them: where they are from, how large their memory may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mempipe.agents.registry import agent_spec
from mempipe.config import DEFAULT_AGENT
from mempipe.evaluation.recorded import Recorded, read_recorded
from mempipe.types import Question, Trajectory


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
    """Returns all trajectories that `read_recorded` finds. Raises ConfigError as it does."""
    return [traced for recorded in read_recorded(path) for traced in _traced(recorded)]


def _traced(recorded: Recorded) -> list[Traced]:
    budget, thought = _facts(recorded.settings)
    return [
        Traced(
            phase=recorded.phase or group.id.removesuffix(group.question.id).strip("/"),  # PHASE/QUESTION
            question=group.question,
            trajectory=trajectory,
            memory_budget=budget,
            thought=thought,
        )
        for group in recorded.groups
        for trajectory in group.trajectories
    ]


def _facts(values: Mapping[str, Any]) -> tuple[int | None, Callable[[str], str]]:
    if not values:
        return None, str.strip
    spec = agent_spec(values.get("agent", {}).get("name", DEFAULT_AGENT))
    return spec.budget.model_validate(values.get("budget", {})).memory_limit, spec.thought


def phases_of(traced: Sequence[Traced]) -> list[str]:
    return list(dict.fromkeys(each.phase for each in traced))
