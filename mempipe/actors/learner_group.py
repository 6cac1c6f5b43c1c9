"""The learner: FSDP rank actors behind one typed front that hands every rank its micro-batches and waits for all of them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError

from mempipe.config import RunConfig
from mempipe.engines.learner import Learner
from mempipe.rl.packing import MicroBatch
from mempipe.types import TrainingSample


class LearnerFailed(RuntimeError):
    """A rank died or did not finish a phase in time; the run goes on from its checkpoint with --resume."""


class LearnerActor(Learner):
    """One rank. Learner has no Ray in it; this adds what only an actor knows, its address."""

    @staticmethod
    def free_address() -> tuple[str, int]:
        """Where rank 0 can be met: this node's address and a port that is free on it."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]


class LearnerGroup:
    """All ranks as one learner."""

    def __init__(self, ranks: Sequence[ActorHandle], config: RunConfig) -> None:
        self.ranks = list(ranks)
        self._timeout_s = config.learner.timeout_s

    def step(self, updates: Sequence[Sequence[Sequence[MicroBatch]]]) -> list[dict[str, float]]:
        """One optimiser update after another; `updates[u][rank]` are the micro-batches of that rank. Returns the metrics of each update."""
        shares = [ray.put([update[rank] for update in updates]) for rank in range(len(self.ranks))]
        return self._all("optimiser step", [rank.step.remote(share) for rank, share in zip(self.ranks, shares, strict=True)])[0]

    def _all(self, phase: str, references: list[ray.ObjectRef]) -> list[Any]:
        try:
            return ray.get(references, timeout=self._timeout_s)
        except GetTimeoutError as error:
            raise LearnerFailed(f"{phase}: not all ranks finished within learner.timeout_s {self._timeout_s:g} s") from error
        except RayActorError as error:
            raise LearnerFailed(f"{phase}: a rank died: {error}") from error
