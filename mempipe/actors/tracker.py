"""The one writer of metrics and traces, in an actor of its own: a step hands its numbers over and goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import ray

from mempipe.actors.handles import start_actor
from mempipe.config import RunConfig
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.tracking.traces import Wording
from mempipe.tracking.tracker import Tracker, TrackingSummary, last_run_id
from mempipe.types import Group

FLUSH_TIMEOUT_S = 10.0
FINISH_TIMEOUT_S = 120.0


class TrackerActor(Tracker):
    def __init__(self, config: RunConfig, *, resume_run_id: str | None) -> None:
        super().__init__(
            config.tracking,
            folder=config.folder,
            run_name=config.name,
            run_config=config.model_dump(mode="json"),
            resume_run_id=resume_run_id,
            wording=Wording(decode=load_tokenizer(config.model.path).decode, thought=config.agent_spec.thought),
        )


class TrackerFront:
    """Typed front of the tracker actor. Only `flush` and `finish` wait."""

    def __init__(self, config: RunConfig) -> None:
        config = config.model_copy(update={"output": str(Path(config.output).absolute())})
        self._actor = start_actor(TrackerActor, {"num_cpus": 0}, config, resume_run_id=last_run_id(config.folder))

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._actor.log_metrics.remote(metrics, step)

    def log_trajectories(self, groups: Sequence[Group], *, step: int) -> None:
        self._actor.log_trajectories.remote(groups, step)

    def log_artifact(self, path: Path) -> None:
        self._actor.log_artifact.remote(path.absolute())

    def flush(self) -> None:
        """Waits until every metric is in the file and, as far as it takes them within a few seconds, in MLflow."""
        ray.get(self._actor.flush.remote(FLUSH_TIMEOUT_S))

    def finish(self, status: str) -> TrackingSummary:
        """Writes what is left and says what became of it. `status` is MLflow's: FINISHED, FAILED or KILLED."""
        return ray.get(self._actor.finish.remote(status), timeout=FINISH_TIMEOUT_S)
