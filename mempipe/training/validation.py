"""The held-out questions of a training run, and its evaluations of them (`evaluation/LABEL.parquet` in its folder)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from mempipe.actors.launch import RolloutActors
from mempipe.beacons import reached
from mempipe.config import RunConfig
from mempipe.data.qa import draw_questions, read_questions
from mempipe.data.trajectories import read_made_of, read_trajectories, write_trajectories
from mempipe.engines.config import SamplingConfig
from mempipe.evaluation.rollout_metrics import rollout_metrics
from mempipe.progress import Progress, say
from mempipe.provenance import differences, questions_sha256
from mempipe.runs import Run
from mempipe.streams.groups import stream_groups
from mempipe.training.tracker_front import TrackerFront
from mempipe.types import Group, Question


def held_out_questions(config: RunConfig) -> list[Question]:
    """Returns the questions of every evaluation of a run; none when data.validation is empty. Raises ConfigError."""
    if not config.data.validation:
        return []
    questions = read_questions(config.data.validation, columns=config.data.columns)
    return draw_questions(questions, config.evaluation.num_questions, seed=config.seed)


class Validation:
    """Evaluates a run on its held-out questions. An evaluation of the same weights, questions and settings is read back
    instead of repeated.
    """

    def __init__(self, run: Run, questions: Sequence[Question], tracker: TrackerFront) -> None:
        self._run, self._questions, self._tracker = run, questions, tracker

    def evaluate(self, roles: RolloutActors, *, label: str, step: int) -> list[Group]:
        """Plays one attempt at every held-out question under the served weights, which are those after `step`. An
        evaluation with this label of other weights, questions or settings is set aside.
        """
        if not self._questions:
            return []
        made_of = self._made_of(roles.config, step=step, weights=roles.weights_sha256)
        if (kept := self._kept(label, made_of)) is not None:
            return kept
        path = self._path(label)
        if path.exists():
            others = ", ".join(name for name, *_ in differences(read_made_of(path) or {}, made_of))
            say(
                f"evaluation {label!r} is made again, since the one that is there is of other {others}: "
                f"{self._run.set_aside([path])}"
            )
        groups = self._play(roles, label)
        write_trajectories(path, groups, made_of=made_of)
        metrics = rollout_metrics(groups, growing=not roles.config.has_memory) | _em_by_source(groups)
        self._tracker.log_metrics({f"validation/{name}": value for name, value in metrics.items()}, step=step)
        return groups

    def is_missing(self, label: str, config: RunConfig, *, step: int, weights: str) -> bool:
        """Returns whether `evaluate` would ask the questions; False when there are none."""
        return bool(self._questions) and self._kept(label, self._made_of(config, step=step, weights=weights)) is None

    def before(self) -> list[Group]:
        """Returns the evaluation under the weights that training started from, which a resumed run cannot repeat."""
        path = self._path("before")
        if path.exists():
            return read_trajectories(path)
        if self._questions:
            say(
                "the held-out questions were not asked before the first step, so the report has nothing to compare with"
            )
        return []

    def _play(self, roles: RolloutActors, label: str) -> list[Group]:
        groups: list[Group] = []
        reached("evaluate", label=label, groups=0)
        spec = roles.driver_spec(sampling=SamplingConfig(temperature=roles.config.evaluation.temperature), group_size=1)
        rows = [(f"{label}/{question.id}", question) for question in self._questions]
        with self._run.phase(f"evaluate_{label}"), Progress(f"evaluate {label}", total=len(rows)) as progress:
            for group in stream_groups(spec, rows):
                groups.append(group)
                reached("evaluate", label=label, groups=len(groups))
                progress.advance(em=fmean(g.trajectories[0].em for g in groups))
        return groups

    def _path(self, label: str) -> Path:
        return self._run.folder / "evaluation" / f"{label}.parquet"

    def _kept(self, label: str, made_of: Mapping[str, Any]) -> list[Group] | None:
        """Returns the evaluation of that label when it was made of the same; else None."""
        path = self._path(label)
        return read_trajectories(path) if path.exists() and read_made_of(path) == made_of else None

    def _made_of(self, config: RunConfig, *, step: int, weights: str) -> dict[str, Any]:
        """Returns the record of an evaluation as plain values: the policy after a step, the questions, and the settings
        of the agent that is asked."""
        return {
            "step": step,
            "weights": weights,
            "questions": questions_sha256(self._questions),
            "prompts": self._run.inputs.get("agent.prompts", ""),
            "index": self._run.inputs.get("retrieval.index", ""),
            "temperature": config.evaluation.temperature,
            "agent": config.agent.model_dump(mode="json"),
            "budget": config.budget.model_dump(mode="json"),
        }


def _em_by_source(groups: Sequence[Group]) -> dict[str, float]:
    """Returns the exact match of each source of the questions; nothing for a single source."""
    by_source: dict[str, list[float]] = {}
    for group in groups:
        by_source.setdefault(group.question.source, []).append(group.trajectories[0].em)
    if len(by_source) < 2:
        return {}
    return {f"{source or 'unnamed'}/em": fmean(values) for source, values in by_source.items()}
