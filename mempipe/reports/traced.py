"""Recorded trajectories with the context that a reader needs: their origin, and the limit of their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mempipe.agents.registry import agent_spec
from mempipe.config import DEFAULT_AGENT
from mempipe.evaluation.recorded import Recorded, read_recorded
from mempipe.loader import parse_section, section_values
from mempipe.reports.steps import UNKNOWN_AGENT, ActionText
from mempipe.settings import ConfigError
from mempipe.types import Question, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One trajectory. `phase` is "before" or "after" the training, or RUN/SET of an evaluation; `memory_budget` is in
    tokens, None where the whole history is carried or the run's settings are not known.
    """

    phase: str
    question: Question
    trajectory: Trajectory
    memory_budget: int | None
    text: ActionText = UNKNOWN_AGENT
    """How the texts of its actions are read."""

    @property
    def key(self) -> str:
        """Returns the trajectory's id, made its own among all phases."""
        own = self.trajectory.id
        return own if own.startswith(f"{self.phase}/") else f"{self.phase}/{own}".lstrip("/")


def read_traced(path: Path) -> list[Traced]:
    """Returns all trajectories that `read_recorded` finds, without their tokens. Raises ConfigError as it does."""
    return [traced for recorded in read_recorded(path, tokens=False) for traced in _traced(recorded)]


def _traced(recorded: Recorded) -> list[Traced]:
    budget, text = _facts(recorded.settings, recorded.place)
    return [
        Traced(
            phase=recorded.phase or group.id.removesuffix(group.question.id).strip("/"),  # PHASE/QUESTION
            question=group.question,
            trajectory=trajectory,
            memory_budget=budget,
            text=text,
        )
        for group in recorded.groups
        for trajectory in group.trajectories
    ]


def _facts(values: Mapping[str, Any], place: Path) -> tuple[int | None, ActionText]:
    if not values:
        return None, UNKNOWN_AGENT
    spec = agent_spec(values.get("agent", {}).get("name", DEFAULT_AGENT))
    try:
        budget = parse_section(section_values(values, "budget"), spec.budget)
    except ConfigError as error:
        raise ConfigError(
            f"the budget of the run that wrote {place} cannot be read ({error}); read it with the version of mempipe "
            "that wrote it"
        ) from error
    return budget.memory_limit, ActionText.of(spec, budget)


def phases_of(traced: Sequence[Traced]) -> list[str]:
    return list(dict.fromkeys(each.phase for each in traced))
