"""A Ray Data stream from questions to scored groups. One run is one execution of a dataset: a lazy source of questions,
one row per block, goes through a pool of async drivers, and each driver plays many groups at a time. A group comes out
when it and the groups before it in its row are finished. Engines and retrievers are named actors outside the dataset,
looked up by the drivers (`mempipe.actors.driver`). An `Admission` actor (`mempipe.actors.admission`) decides when a
group may start, so Ray Data's own back-pressure, which counts bytes, never takes effect.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray

from mempipe.actors.driver import Driver, DriverSpec
from mempipe.actors.handles import Handle, find_actor
from mempipe.actors.lost import GroupFailed, RoleLost
from mempipe.actors.reference import ReferencePool, ReferenceStage
from mempipe.beacons import reached
from mempipe.data.trajectories import arrow_schema, groups_to_table, table_to_groups
from mempipe.rl.advantages import check_group, has_signal
from mempipe.rl.config import AlgorithmConfig
from mempipe.streams.pools import StagePool, stream_tables
from mempipe.types import Group, Question, from_row, to_row
from mempipe.user_code import UserCodeError

ATTEMPTS_PER_ROW = 16
"""Attempts in one row of an evaluation, and a row is a block: Ray Data handles about 15 blocks a second, so blocks of
one attempt would limit the rate. 16 was not tuned."""
GROUPS_PER_BLOCK = 4
"""Groups of such a row in one block that leaves the driver, since a block costs Ray Data milliseconds. A finished group
waits for at most three behind it. The number is fixed: a row that is run again must give the same blocks."""
ROWS_AHEAD = 2
"""Rows given to a driver, as a multiple of the rows it can play at once, if a row holds several groups. The surplus
fills places that are free while the slowest group of a row finishes."""


_ASKED = pa.struct([("group_id", pa.string()), ("question", pa.struct(arrow_schema(Question)))])
QUESTION_ROW = pa.schema([("position", pa.int64()), ("groups", pa.list_(_ASKED))])


class GroupStage:
    """The stage of the dataset that turns rows of questions into groups. It has a driver, and waits for the ticket of
    every group.
    """

    def __init__(self, spec: DriverSpec) -> None:
        self._driver = Driver(spec)
        self._admission = find_actor(spec.admission, spec.namespace) if spec.admission else None
        self._places = asyncio.Semaphore(spec.config.stream.groups_in_flight)

    async def __call__(self, batch: pa.Table) -> AsyncIterator[pa.Table]:
        for row in batch.to_pylist():
            asked = enumerate(row["groups"], start=row["position"])
            tasks = [asyncio.create_task(self._admitted(position, **group)) for position, group in asked]
            try:
                # In the order of the row, not as they finish: when a row is run again, Ray keeps the outputs it had by
                # their place.
                for start in range(0, len(tasks), GROUPS_PER_BLOCK):
                    yield groups_to_table([await task for task in tasks[start : start + GROUPS_PER_BLOCK]])
            finally:
                for task in tasks:
                    task.cancel()

    async def _admitted(self, position: int, group_id: str, question: dict[str, Any]) -> Group:
        if self._admission is not None:
            await self._admission.ticket.remote(group_id, position)
        async with self._places:  # taken only by groups that wait for no other group
            reached("driver.play", group=group_id)
            return await self._driver.play(group_id, from_row(Question, question))


def stream_groups(
    spec: DriverSpec, rows: Iterable[tuple[str, Question]], *, references: ReferencePool | None = None
) -> Generator[Group, None, None]:
    """Yields groups about in the order in which they finish (exactly in the order of `rows` when `config.ordered`).

    Raises GroupFailed when a group cannot be finished, UserCodeError when user-defined code failed.
    """
    stream = spec.config.stream
    # Whole groups of training are worth one block each; single questions are not (ATTEMPTS_PER_ROW).
    alone = bool(spec.admission) or spec.config.ordered
    groups_per_row = 1 if alone else max(min(ATTEMPTS_PER_ROW // spec.group_size, stream.groups_in_flight), 1)
    rows_in_flight = math.ceil(stream.groups_in_flight / groups_per_row) * (1 if groups_per_row == 1 else ROWS_AHEAD)
    pools = [
        StagePool(
            stage=GroupStage,
            arguments=[spec],
            size=stream.num_drivers,
            calls_at_once=rows_in_flight,
            options={"num_cpus": 0},
        )
    ]
    if references is not None:
        pools.append(
            StagePool(stage=ReferenceStage, arguments=[spec.config], size=references.size, options=references.options)
        )
    tables = stream_tables(
        question_rows(rows, groups_per_row=groups_per_row),
        pools,
        rows="trajectories",
        ordered=spec.config.ordered,
        raises=(GroupFailed, RoleLost, UserCodeError),
    )
    for table in tables:
        yield from table_to_groups(table)


def question_rows(rows: Iterable[tuple[str, Question]], *, groups_per_row: int) -> Callable[[], Iterator[pa.Table]]:
    """Returns a function that yields rows of up to `groups_per_row` pairs of group id and question, with the position
    of the first in the stream."""
    kept = ray.put(rows)  # not in the function itself: they may be a gigabyte of texts

    def read() -> Iterator[pa.Table]:
        remaining, position = iter(ray.get(kept)), 0
        while asked := list(itertools.islice(remaining, groups_per_row)):
            groups = [{"group_id": group_id, "question": to_row(question)} for group_id, question in asked]
            yield pa.Table.from_pylist([{"position": position, "groups": groups}], schema=QUESTION_ROW)
            position += len(asked)

    return read


@dataclass(frozen=True, kw_only=True)
class StepGroups:
    """The groups that one learner step trains on, and those that were dropped while it was collected."""

    groups: list[Group]
    dropped: list[Group]
    wait_seconds: float


class Collector:
    """Cuts the stream into steps of exactly `groups_per_step` groups, oldest first, none older than
    max_off_policy_steps.
    """

    def __init__(
        self, groups: Iterator[Group], admission: Handle, algorithm: AlgorithmConfig, *, adopted: Sequence[Group] = ()
    ) -> None:
        """`adopted` are groups that an interrupted run finished; the admission knows them."""
        self._groups = groups
        self._admission = admission
        self._algorithm = algorithm
        self._waiting = {group.id: group for group in adopted}

    @property
    def waiting(self) -> list[Group]:
        """Returns the finished groups that no step has taken yet."""
        return list(self._waiting.values())

    def next_step(self, policy_version: int) -> StepGroups | None:
        """Returns the groups of the step that ends `policy_version`; None when the questions are used up before the
        step is full.
        """
        started = time.perf_counter()
        dropped = []
        while (chosen := ray.get(self._admission.choose.remote(list(self._waiting)))) is None:
            group = next(self._groups, None)
            if group is None:
                return None
            check_group(group, group_size=self._algorithm.group_size)
            if self._algorithm.filter_zero_variance and not has_signal(group, by=self._algorithm.filter_by):
                dropped.append(group)
                self._consume([group], policy_version)
            else:
                self._waiting[group.id] = group
        return StepGroups(
            groups=[self._waiting.pop(key) for key in chosen],
            dropped=dropped,
            wait_seconds=time.perf_counter() - started,
        )

    def take(self, group_ids: Sequence[str]) -> StepGroups:
        """Returns waiting groups as a step that was begun before an interruption."""
        return StepGroups(groups=[self._waiting.pop(key) for key in group_ids], dropped=[], wait_seconds=0.0)

    def consumed(self, step: StepGroups, *, policy_version: int) -> None:
        """Marks the groups of a step as consumed once `policy_version` is served, so that as many new groups may
        start."""
        self._consume(step.groups, policy_version)

    def _consume(self, groups: list[Group], policy_version: int) -> None:
        ray.get(self._admission.consume.remote([group.id for group in groups], policy_version=policy_version))
