"""MemTrain's documents as a Ray Data stream: a pool of makers, each with the index and a finder of entities.

A row of the stream is a part: the rows of some passages, and the file that a maker writes about them. A part whose file
is there already is kept, so that a build resumes where it was killed. What a part holds depends on its rows alone, not
on who makes it.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from mempipe.engines.tokenizer import CACHED_CHARS, load_tokenizer
from mempipe.masking.documents import CommonEntities, DocumentsConfig, Material, entities_of, make_document
from mempipe.masking.entities import CachedFinder, make_finder
from mempipe.retrieval.retriever import Query, Retriever
from mempipe.storage.parquet import write_table
from mempipe.streams.pools import SOURCE_CPUS, StagePool, stream_tables
from mempipe.types import Passage

DOCUMENT_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.string()),
        ("golden_answers", pa.list_(pa.string())),
        ("context", pa.string()),
        ("recall_targets", pa.list_(pa.list_(pa.string()))),
        ("source", pa.string()),
        ("pivot_id", pa.string()),
        ("pivot_title", pa.string()),
        ("kind", pa.string()),
        ("chunk_tokens", pa.list_(pa.int32())),
        ("num_masks", pa.int32()),
        ("passage_ids", pa.list_(pa.string())),
        ("related_scores", pa.list_(pa.float32())),
    ]
)
REJECTED = b"rejected"
"""Key of a part's metadata: how often each rule rejected, as JSON."""
CACHED_PASSAGES = 2**14
"""Random passages come again in other documents, if the corpus is small."""
CACHED_COUNTS = 2**16
"""Numbers of tokens: of passages, and of the words that nearly every document has."""


class DocumentMaker:
    """Writes the documents of parts, or, without `common`, the entities of their passages."""

    def __init__(self, config: DocumentsConfig, common: CommonEntities | None) -> None:
        self._config = config
        self._common = common
        self._retriever = Retriever(config.index)
        self._finder = CachedFinder(make_finder(config.entities), max_texts=CACHED_PASSAGES)
        self._tokenizer = load_tokenizer(config.tokenizer)
        self._count_cached = functools.lru_cache(maxsize=CACHED_COUNTS)(self._count)

    def __call__(self, batch: pa.Table) -> pa.Table:
        parts = batch.to_pylist()
        for part in parts:
            if not Path(part["file"]).exists():
                self.write(Path(part["file"]), part["first"], part["rows"])
        return pa.table({"count": [len(part["rows"]) for part in parts]})

    def write(self, file: Path, first: int, rows: Sequence[int]) -> None:
        """Writes the documents of passages `rows`, numbered from `first` on."""
        passages = [self._retriever.passage(row) for row in rows]
        if self._common is None:
            table = entities_of(passages, self._finder).to_arrow()
        else:
            table = self._documents(passages, first, self._common)
        write_table(file, table, durable=False)

    def _documents(self, pivots: Sequence[Passage], first: int, common: CommonEntities) -> pa.Table:
        config, documents, rejected = self._config, [], Counter[str]()
        found = self._retriever.search([self._query(pivot) for pivot in pivots]) if config.num_related else []
        for i, pivot in enumerate(pivots):
            similar = found[i].passages if found else []
            related = [passage for passage in similar if passage.id != pivot.id][: config.num_related]
            seed = (config.seed, first + i)
            known = {pivot.id, *(passage.id for passage in related)}
            material = Material(pivot=pivot, related=related, random=self._others(known, seed), seed=seed)
            document = make_document(material, self._finder, common, self._num_tokens, config)
            rejected.update(material.rejected)
            if document is not None:
                documents.append(asdict(document))
        return pa.Table.from_pylist(documents, schema=DOCUMENT_SCHEMA.with_metadata({REJECTED: json.dumps(rejected)}))

    def _query(self, pivot: Passage) -> Query:
        # One more than wanted: the pivot finds itself.
        return Query(
            text=f"{pivot.title} {pivot.text}", num_passages=self._config.num_related + 1, partition=pivot.partition
        )

    def _others(self, known: set[str], seed: tuple[int, int]) -> Iterator[Passage]:
        """Yields passages of the corpus in random order, without those that are `known`, each once."""
        rng = np.random.default_rng((*seed, 1))
        drawn: set[int] = set()
        while len(drawn) < self._retriever.num_passages:
            row = int(rng.integers(self._retriever.num_passages))
            if row not in drawn:
                drawn.add(row)
                passage = self._retriever.passage(row)
                if passage.id not in known:
                    yield passage

    def _num_tokens(self, text: str) -> int:
        return self._count_cached(text) if len(text) <= CACHED_CHARS else self._count(text)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode_text(text))


def stream_parts(
    parts: Sequence[dict[str, Any]], config: DocumentsConfig, common: CommonEntities | None
) -> Generator[int, None, None]:
    """Makes the parts (`file`, `first`, `rows`) that are not there yet; yields the number of passages of each.

    Raises ConfigError for an index, a tokenizer or a finder that cannot be opened on a node of the cluster.
    """
    size = min(config.num_workers or max(int(ray.cluster_resources().get("CPU", 1)), 1), len(parts))
    makers = StagePool(
        stage=DocumentMaker, arguments=[config, common], size=size, options={"num_cpus": 1 - SOURCE_CPUS}
    )
    listed = list(parts)

    def read() -> Iterator[pa.Table]:
        yield from (pa.Table.from_pylist([part]) for part in listed)

    for table in stream_tables(read, [makers], rows="documents"):
        yield from table.column("count").to_pylist()
