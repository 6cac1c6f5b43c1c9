"""The reference model as a stage of the trajectory stream: it scores every group as soon as that is finished."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from mempipe.beacons import reached
from mempipe.config import RunConfig
from mempipe.data.trajectories import groups_to_table, table_to_groups
from mempipe.garbage import no_collections
from mempipe.rl.advantages import has_signal
from mempipe.rl.samples import to_samples
from mempipe.types import Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePool:
    """Says how many actors score, and with which Ray options."""

    size: int
    options: dict[str, Any] = field(default_factory=dict)


class ReferenceStage:
    """Adds `ref_logprobs` to every context. When an actor dies, another one scores its groups again."""

    def __init__(self, config: RunConfig) -> None:
        with no_collections():  # torch is imported only in the process that scores
            from mempipe.engines.reference import ReferenceModel

        learner = config.learner
        self._model = ReferenceModel(
            config.model,
            temperature=config.sampling.temperature,
            max_tokens=learner.max_tokens_per_micro_batch,
            num_threads=learner.num_threads,
        )
        self._algorithm = config.algorithm

    def __call__(self, batch: pa.Table) -> pa.Table:
        return groups_to_table(map(self.scored, table_to_groups(batch)))

    def scored(self, group: Group) -> Group:
        """Adds the reference's log-probs to the group; a group that will be dropped stays as it is."""
        if self._algorithm.filter_zero_variance and not has_signal(group, by=self._algorithm.filter_by):
            return group
        reached("reference.score", group=group.id)
        started = time.perf_counter()
        rows = iter(self._model.logprobs([s for trajectory in group.trajectories for s in to_samples(trajectory)]))
        trajectories = [_with_logprobs(trajectory, rows) for trajectory in group.trajectories]
        return replace(group, trajectories=trajectories, reference_seconds=time.perf_counter() - started)


def _with_logprobs(trajectory: Trajectory, rows: Iterator[list[float]]) -> Trajectory:
    """Returns the trajectory with the next rows as its reference log-probs, in the order of `to_samples`."""
    contexts = [replace(context, ref_logprobs=next(rows)) for context in trajectory.contexts]
    recalls = [
        replace(recall, context=replace(recall.context, ref_logprobs=next(rows))) for recall in trajectory.recalls
    ]
    return replace(trajectory, contexts=contexts, recalls=recalls)
