"""The one writer of metrics and traces, in an actor of its own: a step hands its numbers over and goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from mempipe.config import TrackingConfig
from mempipe.tracking import Tracker
from mempipe.types import Group

FINISH_TIMEOUT_S = 120.0


class TrackerFront:
    """Typed front of the tracker actor. Only `start` and `finish` wait."""

    def __init__(self, config: TrackingConfig, folder: Path, *, run_name: str, run_config: Mapping[str, Any], resume_run_id: str | None) -> None:
        self.actor = ray.remote(Tracker).options(num_cpus=0).remote(
            config, folder.absolute(), run_name=run_name, run_config=run_config, resume_run_id=resume_run_id
        )

    def start(self) -> str | None:
        """The MLflow run's id; None when tracking is off."""
        return ray.get(self.actor.run_id.remote())

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.actor.log_metrics.remote(metrics, step)

    def log_trajectories(self, groups: Sequence[Group], *, step: int) -> None:
        self.actor.log_trajectories.remote(groups, step)

    def log_artifact(self, path: Path) -> None:
        self.actor.log_artifact.remote(path.absolute())

    def finish(self, status: str) -> None:
        """Writes what is left. `status` is MLflow's: FINISHED, FAILED or KILLED."""
        ray.get(self.actor.finish.remote(status), timeout=FINISH_TIMEOUT_S)
