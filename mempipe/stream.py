"""Questions to scored groups, as a Ray Data stream.

One run is one dataset execution: a lazy source of questions, one row per block, goes through a pool of async drivers that each run many
groups at a time; a group comes out as soon as it is finished, and those before it in its row. Engines and retrievers are named actors
outside the dataset, looked up by the drivers. An `Admission` actor decides when a group may start, so Ray Data's own back-pressure (in
bytes) never matters.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.exceptions import RayTaskError

from mempipe.actors.handles import Handle
from mempipe.actors.pools import GeneratorPool, RetrieverPool
from mempipe.agents import make_agent, stop_texts
from mempipe.agents.protocol import UnfitQuestion
from mempipe.config import AlgorithmConfig, EndpointConfig, RunConfig, SamplingConfig
from mempipe.data.trajectories import arrow_schema, group_to_table, table_to_groups
from mempipe.engines.openai_endpoint import Endpoint
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.faults import InfrastructureFault
from mempipe.rl.advantages import check_group, has_signal
from mempipe.rollout import run_group
from mempipe.types import Group, Question, from_row, to_row

ATTEMPTS_PER_ROW = 16
SOURCE_CPUS = 0.01  # Ray Data needs a positive number; the source does next to nothing


class GroupFailed(RuntimeError):
    """A group could not be finished after all its attempts."""


@dataclass(frozen=True, kw_only=True)
class DriverSpec:
    """All that a driver needs, as small plain values: it may be started again on another node at any time."""

    config: RunConfig
    sampling: SamplingConfig
    group_size: int
    namespace: str
    generators: list[str]
    retrievers: list[str]
    admission: str = ""  # empty: every group may start at once
    endpoint: EndpointConfig | None = None  # completes instead of the generators
    record_failures: bool = False  # of a question that does not fit, or an endpoint: the group says so and has no trajectories


class QuestionSource(Datasource):
    """Rows of up to `groups_per_row` (group id, question) and the position of the first, made as they are asked for, one per block."""

    def __init__(self, rows: Iterable[tuple[str, Question]], *, groups_per_row: int) -> None:
        self._rows = ray.put(rows)  # not in the read task itself: they may be a gigabyte of texts
        self._groups_per_row = groups_per_row

    def get_name(self) -> str:
        return "Questions"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *args: Any, **kwargs: Any) -> list[ReadTask]:
        rows, size = self._rows, self._groups_per_row

        def read() -> Iterator[pa.Table]:
            remaining, position = iter(ray.get(rows)), 0
            while asked := list(itertools.islice(remaining, size)):
                groups = [{"group_id": group_id, "question": to_row(question)} for group_id, question in asked]
                yield pa.Table.from_pylist([{"position": position, "groups": groups}], schema=QUESTION_ROW)
                position += len(asked)

        return [ReadTask(read, BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None))]


_ASKED = pa.struct([("group_id", pa.string()), ("question", pa.struct(arrow_schema(Question)))])
QUESTION_ROW = pa.schema([("position", pa.int64()), ("groups", pa.list_(_ASKED))])


class Driver:
    """Runs groups against the engines. Holds no state that matters: when it dies, Ray Data runs its unfinished groups again."""

    def __init__(self, spec: DriverSpec) -> None:
        config = spec.config
        self._spec = spec
        actors = {name: ray.get_actor(name, spec.namespace) for name in [*spec.generators, *spec.retrievers]}
        tokenizer = load_tokenizer(config.model.path)
        generators: GeneratorPool | Endpoint
        if spec.endpoint is not None:
            generators = Endpoint(spec.endpoint, sampling=spec.sampling, tokenizer=tokenizer, stop_texts=stop_texts(config.agent.name))
        else:
            replicas, stop_token_ids = [actors[name] for name in spec.generators], sorted(tokenizer.stop_token_ids)
            generators = GeneratorPool(replicas, config=config.generation, sampling=spec.sampling, stop_token_ids=stop_token_ids)
        self._retrievers = RetrieverPool([actors[name] for name in spec.retrievers], config=config.retrieval)
        self._agent = make_agent(config, tokenizer=tokenizer, generate=generators.generate, search=self._retrievers.search)
        self._admission = ray.get_actor(spec.admission, spec.namespace) if spec.admission else None

    async def __call__(self, batch: pa.Table) -> AsyncIterator[pa.Table]:
        for row in batch.to_pylist():
            asked = enumerate(row["groups"], start=row["position"])
            tasks = [asyncio.create_task(self._admitted(position, **group)) for position, group in asked]
            try:
                for task in tasks:  # not as they finish: of a row that is run again, Ray keeps what it had by its place in this order
                    yield group_to_table(await task)
            finally:
                for task in tasks:
                    task.cancel()

    async def _admitted(self, position: int, group_id: str, question: dict[str, Any]) -> Group:
        if self._admission is not None:
            await self._admission.ticket.remote(group_id, position)
        return await self._finished(group_id, from_row(Question, question))

    async def _finished(self, group_id: str, question: Question) -> Group:
        attempts = self._spec.config.stream.num_attempts
        faults: list[Exception] = []
        while len(faults) < attempts:
            try:
                group = await run_group(
                    question,
                    self._agent.rollout,
                    group_id=group_id,
                    group_size=self._spec.group_size,
                    reward=self._spec.config.reward,
                    advantage=self._spec.config.algorithm,
                )
                return replace(group, num_retries=len(faults))
            except InfrastructureFault as fault:
                faults.append(fault)
                logging.getLogger(__name__).warning("group %s, attempt %d of %d: %s", group_id, len(faults), attempts, fault)
                await asyncio.sleep(len(faults))
            except UnfitQuestion as error:
                if not self._spec.record_failures:
                    raise
                return Group(id=group_id, question=question, trajectories=[], failed=str(error))
        if self._spec.record_failures and self._spec.endpoint is not None:
            return Group(id=group_id, question=question, trajectories=[], num_retries=attempts, failed=str(faults[-1]))
        raise GroupFailed(f"group {group_id} failed {attempts} times (stream.num_attempts); last: {faults[-1]}")


def stream_groups(spec: DriverSpec, rows: Iterable[tuple[str, Question]]) -> Generator[Group, None, None]:
    """Groups about in the order in which they finish (exactly in the order of `rows` when `config.ordered`).

    Raises GroupFailed when a group cannot be finished.
    """
    stream = spec.config.stream
    # Ray Data handles some 15 blocks a second. Whole groups of training are worth one each; single questions are not.
    alone = bool(spec.admission) or spec.config.ordered
    groups_per_row = 1 if alone else max(min(ATTEMPTS_PER_ROW // spec.group_size, stream.groups_in_flight), 1)
    source = QuestionSource(rows, groups_per_row=groups_per_row)
    context = DataContext.get_current().copy()
    context.execution_options.preserve_order = spec.config.ordered
    context.execution_no_progress_timeout_s = -1  # a learner step may take longer than any timeout
    context.target_max_block_size = 1  # a block is one row
    context.target_min_block_size = 1
    context.enable_progress_bars = False
    with DataContext.current(context):
        dataset = ray.data.read_datasource(source, override_num_blocks=1, num_cpus=SOURCE_CPUS).map_batches(
            Driver,
            fn_constructor_args=[spec],
            batch_format="pyarrow",
            batch_size=None,
            num_cpus=0,
            compute=ActorPoolStrategy(
                size=stream.num_drivers, max_concurrent_calls_per_actor=math.ceil(stream.groups_in_flight / groups_per_row)
            ),
        )
    try:
        for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            yield from table_to_groups(table)
    except RayTaskError as error:  # Ray Data wraps what a driver raised; only the text still tells what it was
        failed = re.search(rf"{GroupFailed.__name__}: (.+)", str(error))
        if failed is None:
            raise
        raise GroupFailed(failed[1]) from error


@dataclass(frozen=True, kw_only=True)
class StepGroups:
    """What one learner step trains on, and what was dropped while it was collected."""

    groups: list[Group]
    dropped: list[Group]
    wait_seconds: float


class Collector:
    """Cuts the stream into steps of exactly `groups_per_step` groups, oldest first, none older than max_off_policy_steps."""

    def __init__(self, groups: Iterator[Group], admission: Handle, algorithm: AlgorithmConfig) -> None:
        self._groups = groups
        self._admission = admission
        self._algorithm = algorithm
        self._waiting: dict[str, Group] = {}

    def next_step(self, policy_version: int) -> StepGroups | None:
        """The groups of the step that ends `policy_version`; None when the questions are used up before the step is full."""
        started = time.perf_counter()
        dropped = []
        while (chosen := ray.get(self._admission.choose.remote(list(self._waiting)))) is None:
            group = next(self._groups, None)
            if group is None:
                return None
            check_group(group, group_size=self._algorithm.group_size)
            if self._algorithm.filter_zero_variance and not has_signal(group):
                dropped.append(group)
                self._consume([group], policy_version)
            else:
                self._waiting[group.id] = group
        return StepGroups(groups=[self._waiting.pop(key) for key in chosen], dropped=dropped, wait_seconds=time.perf_counter() - started)

    def consumed(self, step: StepGroups, *, policy_version: int) -> None:
        """The step was trained and `policy_version` is served: others may start in the place of its groups."""
        self._consume(step.groups, policy_version)

    def _consume(self, groups: list[Group], policy_version: int) -> None:
        ray.get(self._admission.consume.remote([group.id for group in groups], policy_version=policy_version))
