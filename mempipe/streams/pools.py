"""One way through Ray Data: rows are made as they are asked for, and pools of actors turn them into other rows.

A row is a block, so rows lost with a worker are created again singly. Errors that an actor or the source raised
reach the caller under their own name, since Ray Data leaves only their text.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.exceptions import RayActorError, RayTaskError
from ray.util.annotations import RayDeprecationWarning

from mempipe.actors.lost import RoleLost, is_lost, one_line, refusal
from mempipe.settings import ConfigError

SOURCE_CPUS = 0.01
"""Ray Data needs a positive number. The source must start although the pools hold every CPU."""


@dataclass(frozen=True, kw_only=True)
class StagePool:
    """Actors that each call `stage(*arguments)` once and what it returns for every row: a table in, a table out (or
    several, from an async generator)."""

    stage: type
    arguments: Sequence[Any]
    size: int
    calls_at_once: int | None = None
    """Rows that an actor works on at the same time; None leaves it to Ray. Ray sends it no further rows: a row that
    waits for another row would wait for ever if that row was behind it in the actor's queue, which a restart can
    cause."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Resources of an actor on its node: `num_cpus`, `num_gpus`, ..."""


def stream_tables(
    read: Callable[[], Iterable[pa.Table]],
    pools: Sequence[StagePool],
    *,
    rows: str,
    ordered: bool = False,
    raises: Sequence[type[Exception]] = (ConfigError,),
) -> Generator[pa.Table, None, None]:
    """Yields the tables that the last pool returns, in any order unless `ordered`.

    `read` runs in a worker and yields one table for every row; `rows` names them in messages. Raises errors of the
    kinds `raises` as they were raised, OSError for a fault of the disk, and RoleLost when the stream lost an actor.
    """
    context = DataContext.get_current().copy()
    context.execution_options.preserve_order = ordered
    context.execution_no_progress_timeout_s = -1  # a row, or a learner step, may take longer than any timeout
    context.target_max_block_size = context.target_min_block_size = 1  # a block is one row
    context.enable_progress_bars = False
    warnings.filterwarnings("ignore", message="The minimum number of concurrent actors")  # of a pool for few rows
    with DataContext.current(context):
        dataset = ray.data.read_datasource(_Source(read, rows), override_num_blocks=1, num_cpus=SOURCE_CPUS)
        for pool in pools:
            with warnings.catch_warnings():  # Ray Data has no parameter of its own yet for where an actor is placed
                warnings.simplefilter("ignore", RayDeprecationWarning)
                dataset = dataset.map_batches(
                    pool.stage,
                    fn_constructor_args=list(pool.arguments),
                    batch_format="pyarrow",
                    batch_size=1,  # a block; for actors with GPUs Ray Data insists on a number
                    compute=ActorPoolStrategy(
                        size=pool.size,
                        max_concurrent_calls_per_actor=pool.calls_at_once,
                        max_tasks_in_flight_per_actor=pool.calls_at_once,
                    ),
                    **pool.options,
                )
    try:
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
    except RayTaskError as error:
        for kind in raises:
            # With its list of bad rows. The last one: those before it may be in the frame of a group of errors.
            if failed := re.findall(rf"{kind.__name__}: (.+(?:\n  .+)*)", str(error)):
                raise kind(failed[-1]) from error
        if is_lost(error):
            raise RoleLost(f"the stream of {rows} lost an actor: {one_line(error)}") from error
        if failed := re.search(r"OSError: (\[Errno \d+\] .+)", str(error)):  # a full disk, above all
            raise OSError(failed[1]) from error
        raise
    except RayActorError as error:
        if refused := refusal(error):
            raise ConfigError(refused) from error
        raise


class _Source(Datasource):
    """Rows that a function yields, read in one task."""

    def __init__(self, read: Callable[[], Iterable[pa.Table]], rows: str) -> None:
        self._read = read
        self._rows = rows

    def get_name(self) -> str:
        return self._rows.capitalize()

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *args: Any, **kwargs: Any) -> list[ReadTask]:
        read = self._read

        def tables() -> Iterator[pa.Table]:
            yield from read()

        return [ReadTask(tables, BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None))]
