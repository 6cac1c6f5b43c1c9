"""Corpus to index folder, and a search in it: `mempipe index build` and `mempipe index search`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mempipe.data.corpus import read_corpus
from mempipe.engines.retrieval import Encoder, HashingEncoder, HFEncoder, Query, Retriever, build_index


def main(corpus: Path, output: Path, *, encoder: str = "hashing") -> None:
    """Builds the index of `corpus` at `output`; `encoder` is "hashing" or the folder of a Hugging Face encoder."""
    chosen: Encoder = HashingEncoder() if encoder == "hashing" else HFEncoder(encoder)
    manifest = build_index(read_corpus(corpus), output, encoder=chosen)
    print(f"{manifest['num_passages']} passages, {chosen.dimension} dimensions, in {output}")


def search(index: Path, query: str, *, num_passages: int, partition: str = "") -> list[dict[str, Any]]:
    """The best passages, best first, as rows of id, title, text and score."""
    (result,) = Retriever(index).search([Query(query, num_passages, partition)])
    return [asdict(passage) for passage in result.passages]
