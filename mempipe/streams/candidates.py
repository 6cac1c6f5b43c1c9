"""Finds candidates for questions in a corpus, as a Ray Data stream: one reader, and a pool of entity finders."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import polars as pl
import pyarrow as pa
import ray

from mempipe.data.corpus import CorpusFile, read_segments
from mempipe.masking.cloze import find_candidates
from mempipe.masking.config import ClozeConfig
from mempipe.masking.entities import make_finder
from mempipe.streams.pools import SOURCE_CPUS, StagePool, stream_tables
from mempipe.types import Passage

PASSAGES_AT_ONCE = 512
"""In a row of the stream."""


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
    size = max(int(ray.cluster_resources().get("CPU", 1)), 1)
    finders = StagePool(stage=CandidateFinder, arguments=[config], size=size, options={"num_cpus": 1 - SOURCE_CPUS})

    def read() -> Iterator[pa.Table]:
        for batch, _ in read_segments(files, size=PASSAGES_AT_ONCE):
            passages = pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))
            yield pa.table({"passages": pa.ListArray.from_arrays([0, len(passages)], passages)})

    for table in stream_tables(read, [finders], rows="passages"):
        frame = pl.from_arrow(table)
        assert isinstance(frame, pl.DataFrame), "a table has columns"
        for row in range(len(frame)):
            yield frame["num_passages"][row], frame["found"][row].struct.unnest()
