"""Reading and encoding a corpus as a Ray Data stream.

One reader walks the corpus and writes segments; a row of the stream is the number of one. A pool of encoders, on GPUs
if there are any, processes them in any order. Texts and vectors are exchanged as files in the index's folder, which all
nodes share, so that finished work survives a kill.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray

from mempipe.data.corpus import CorpusFile
from mempipe.retrieval.build import IndexBuild, encode_segment
from mempipe.retrieval.config import IndexConfig
from mempipe.retrieval.encoders import make_encoder
from mempipe.streams.pools import SOURCE_CPUS, StagePool, stream_tables

CPUS_PER_ENCODER = 2
ROW = pa.schema([("number", pa.int64()), ("count", pa.int64()), ("needs_vectors", pa.bool_())])


class SegmentEncoder:
    """Writes the vectors of the segments that it receives."""

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

    def read() -> Iterator[pa.Table]:
        build = IndexBuild(config, files, lock=False)
        for segment in build.read():
            row = {"number": segment.number, "count": segment.count, "needs_vectors": build.needs_vectors(segment)}
            yield pa.Table.from_pylist([row], schema=ROW)

    pools = [] if config.encoder is None else [_encoders(config, folder)]
    for table in stream_tables(read, pools, rows="segments"):
        yield from table.column("count").to_pylist()


def _encoders(config: IndexConfig, folder: Path) -> StagePool:
    gpus = int(ray.cluster_resources().get("GPU", 0))
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    cpus = max(min(CPUS_PER_ENCODER, max(nodes)), 1)  # an encoder that fits on no node would be waited for without end
    size = config.num_encoders or gpus or max(sum(count // cpus for count in nodes), 1)
    options = {"num_gpus": 1, "num_cpus": 1} if gpus else {"num_cpus": cpus - SOURCE_CPUS}
    return StagePool(stage=SegmentEncoder, arguments=[folder, config.encoder], size=size, options=options)
