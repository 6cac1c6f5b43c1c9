"""Reading and encoding a corpus as a Ray Data stream.

One reader walks the corpus and writes segments; a row of the stream is the number of one. A pool of encoders, on GPUs
where there are any, takes them up in any order. Texts and vectors go through the index's folder, which all nodes see,
so that finished work survives a kill.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.exceptions import RayTaskError

from mempipe.data.corpus import CorpusFile
from mempipe.retrieval.build import IndexBuild, encode_segment
from mempipe.retrieval.config import IndexConfig
from mempipe.retrieval.encoders import make_encoder
from mempipe.settings import ConfigError

READER_CPUS = 0.01  # fractional CPU: the reader is mostly idle and must be scheduled while encoders hold all CPUs
CPUS_PER_ENCODER = 2
ROW = pa.schema([("number", pa.int64()), ("count", pa.int64()), ("needs_vectors", pa.bool_())])


class SegmentSource(Datasource):
    """The segments of a corpus, written as they are asked for; one row and one block each."""

    def __init__(self, config: IndexConfig, files: list[CorpusFile]) -> None:
        self._config = config
        self._files = files

    def get_name(self) -> str:
        return "Segments"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *args: Any, **kwargs: Any) -> list[ReadTask]:
        config, files = self._config, self._files

        def read() -> Iterator[pa.Table]:
            build = IndexBuild(config, files, lock=False)
            for segment in build.read():
                row = {"number": segment.number, "count": segment.count, "needs_vectors": build.needs_vectors(segment)}
                yield pa.Table.from_pylist([row], schema=ROW)

        return [ReadTask(read, BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None))]


class SegmentEncoder:
    """Writes the vectors of the segments that come by."""

    def __init__(self, folder: Path, encoder: dict[str, Any]) -> None:
        self._folder = folder
        self._encoder = make_encoder(encoder)

    def __call__(self, batch: pa.Table) -> pa.Table:
        for row in batch.to_pylist():
            if row["needs_vectors"]:
                encode_segment(self._folder, row["number"], self._encoder)
        return batch


def stream_segments(config: IndexConfig, files: list[CorpusFile], *, folder: Path) -> Generator[int, None, None]:
    """Reads and encodes; yields the number of passages of every segment that is done.
    Raises ConfigError as `IndexBuild.read` does.
    """
    context = DataContext.get_current().copy()
    context.execution_no_progress_timeout_s = -1  # a segment may take longer than any timeout
    context.target_max_block_size = 1  # a block is one row
    context.target_min_block_size = 1
    context.enable_progress_bars = False
    with DataContext.current(context):
        dataset = ray.data.read_datasource(SegmentSource(config, files), override_num_blocks=1, num_cpus=READER_CPUS)
        if config.encoder is not None:
            dataset = dataset.map_batches(
                SegmentEncoder,
                fn_constructor_args=[folder, config.encoder],
                batch_format="pyarrow",
                batch_size=None,
                **_encoder_resources(config),
            )
    try:
        for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            yield from table.column("count").to_pylist()
    except RayTaskError as error:  # Ray Data wraps the exception; only the text still tells what it was
        failed = re.search(rf"{ConfigError.__name__}: (.+)", str(error))
        if failed is None:
            raise
        raise ConfigError(failed[1]) from error


def _encoder_resources(config: IndexConfig) -> dict[str, Any]:
    gpus, cpus = (int(ray.cluster_resources().get(kind, 0)) for kind in ("GPU", "CPU"))
    size = config.num_encoders or gpus or max(math.floor(cpus / CPUS_PER_ENCODER), 1)
    resources = {"num_gpus": 1, "num_cpus": 1} if gpus else {"num_cpus": min(CPUS_PER_ENCODER, cpus) - READER_CPUS}
    return resources | {"compute": ActorPoolStrategy(size=size)}
