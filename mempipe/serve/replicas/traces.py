"""Records a sample of the answered questions as MLflow traces, as training records a sample of its trajectories."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mempipe.agents.registry import AgentSpec
from mempipe.serve.served_run import ServedRun
from mempipe.tracking.background import BackgroundWriter
from mempipe.tracking.mlflow_writer import MlflowRun
from mempipe.tracking.traces import Wording
from mempipe.tracking.tracker import last_run_id, without_credentials
from mempipe.types import Group

MAX_WAITING = 64
"""Traces, and the config, that wait for a slow server; further ones are skipped, so that memory stays bounded."""
FINISH_TIMEOUT_S = 5.0


class SampledTraces:
    """Writes the traces from a separate thread: an answer never waits for MLflow."""

    def __init__(self, served: ServedRun, *, share: float, decode: Callable[[Sequence[int]], str]) -> None:
        """`share` of the questions are recorded, in the MLflow run of the service, which its folder remembers."""
        settings: dict[str, Any] = without_credentials(served.main.model_dump(mode="json"))
        run = MlflowRun(
            served.main.tracking,
            folder=served.state,
            run_name=f"service of {served.name}",
            run_config=settings,
            resume_run_id=last_run_id(served.state),
        )
        self._writer = BackgroundWriter(run)
        self._writer.add_call(lambda run: run.log_config())
        self._share = share
        self._decode = decode

    def record(self, group: Group, spec: AgentSpec, metadata: Mapping[str, str]) -> None:
        """Records the trajectories of one question, with what its request said of itself, if the die says so and there
        is room.
        """
        if random.random() >= self._share or self._writer.num_waiting >= MAX_WAITING:
            return
        wording = Wording(decode=self._decode, thought=spec.thought)
        asking = uuid.uuid4().hex  # a client may give several requests the same `x-request-id`
        self._writer.add_call(
            lambda run: run.log_trace(group, step=0, wording=wording, metadata=metadata, asking=asking)
        )

    def close(self) -> None:
        """Writes the waiting traces, for FINISH_TIMEOUT_S at most."""
        self._writer.add_call(lambda run: run.terminate("FINISHED"))
        self._writer.finish(FINISH_TIMEOUT_S)
