"""Finding what can be asked about a corpus, as a Ray Data stream: one reader, a pool of finders of entities."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from typing import Any

import polars as pl
import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.exceptions import RayTaskError

from mempipe.data.corpus import CorpusFile, read_segments
from mempipe.masking.cloze import ClozeConfig, find_candidates
from mempipe.masking.entities import make_finder
from mempipe.settings import ConfigError
from mempipe.types import Passage

PASSAGES_AT_ONCE = 512
READER_CPUS = 0.01  # it must start although the finders hold every CPU


class PassageSource(Datasource):
    """The passages of a corpus, read as they are asked for; a row, and a block, is a list of `PASSAGES_AT_ONCE`."""

    def __init__(self, files: list[CorpusFile]) -> None:
        self._files = files

    def get_name(self) -> str:
        return "Passages"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *args: Any, **kwargs: Any) -> list[ReadTask]:
        files = self._files

        def read() -> Iterator[pa.Table]:
            for batch, _ in read_segments(files, size=PASSAGES_AT_ONCE):
                passages = pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))
                yield pa.table({"passages": pa.ListArray.from_arrays([0, len(passages)], passages)})

        return [ReadTask(read, BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None))]


class CandidateFinder:
    """Turns a row of passages into one row: their number, and the list of their candidates."""

    def __init__(self, config: ClozeConfig) -> None:
        self._config = config
        self._finder = make_finder(config.entities)

    def __call__(self, batch: pa.Table) -> pa.Table:
        passages = [Passage(**row) for rows in batch.column("passages").to_pylist() for row in rows]
        found = find_candidates(passages, self._finder, self._config)
        return pl.DataFrame({"num_passages": [len(passages)], "found": [found.to_struct()]}).to_arrow()


def stream_candidates(files: list[CorpusFile], config: ClozeConfig) -> Generator[tuple[int, pl.DataFrame], None, None]:
    """Yields numbers of passages, and their candidates (`mempipe.masking.cloze.SCHEMA`), in any order.

    Raises ConfigError as `read_segments` does, and for a finder that is not installed.
    """
    context = DataContext.get_current().copy()
    context.execution_no_progress_timeout_s = -1
    context.target_max_block_size = 1  # a block is one row
    context.target_min_block_size = 1
    context.enable_progress_bars = False
    with DataContext.current(context):
        dataset = ray.data.read_datasource(
            PassageSource(files), override_num_blocks=1, num_cpus=READER_CPUS
        ).map_batches(
            CandidateFinder,
            fn_constructor_args=[config],
            batch_format="pyarrow",
            batch_size=None,
            num_cpus=1 - READER_CPUS,
            compute=ActorPoolStrategy(size=max(int(ray.cluster_resources().get("CPU", 1)), 1)),
        )
    try:
        for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            frame = pl.from_arrow(table)
            assert isinstance(frame, pl.DataFrame), "a table has columns"
            for row in range(len(frame)):
                yield frame["num_passages"][row], frame["found"][row].struct.unnest()
    except RayTaskError as error:  # Ray Data wraps the exception; only the text still tells what it was
        failed = re.search(rf"{ConfigError.__name__}: (.+)", str(error))
        if failed is None:
            raise
        raise ConfigError(failed[1]) from error
