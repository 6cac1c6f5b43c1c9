"""Corpus to index folder, and a search in it: `mempipe index build` and `mempipe index search`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mempipe.config import ConfigError
from mempipe.data.corpus import read_corpus
from mempipe.engines.encoders import Encoder, HashingEncoder, HFEncoder
from mempipe.engines.retrieval import Query, Retriever, build_index


def main(corpus: Path, output: Path, *, encoder: str = "hashing") -> None:
    """Builds the index of `corpus` at `output`; `encoder` is "hashing" or the folder or name of a Hugging Face encoder."""
    chosen: Encoder = HashingEncoder() if encoder == HashingEncoder.name else HFEncoder(encoder)
    manifest = build_index(read_corpus(corpus), output, encoder=chosen)
    print(f"{manifest['num_passages']} passages, {manifest['dimension']} dimensions, in {output}")


def search(index: Path, query: str, *, num_passages: int, partition: str = "") -> list[dict[str, Any]]:
    """The best passages, best first, as rows of id, title, text, score and partition. Raises ConfigError for an impossible search."""
    retriever = Retriever(index)
    request = Query(text=query, num_passages=num_passages, partition=partition)
    try:
        retriever.check(request)
    except ValueError as error:
        raise ConfigError(f"index {index}: {error}") from error
    (result,) = retriever.search([request])
    return [asdict(passage) for passage in result.passages]
