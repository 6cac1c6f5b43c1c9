"""Corpus to index folder: `mempipe index build`, `mempipe index adopt` and `mempipe index search`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mempipe.actors.indexing import stream_segments
from mempipe.actors.launch import connected
from mempipe.data.corpus import corpus_files
from mempipe.progress import Progress
from mempipe.retrieval.build import IndexBuild, adopt_index, make_index
from mempipe.retrieval.config import IndexConfig
from mempipe.retrieval.encoders import make_encoder
from mempipe.retrieval.manifest import Manifest
from mempipe.retrieval.retriever import Query, Retriever
from mempipe.settings import ConfigError


def main(config: IndexConfig) -> Manifest:
    """Builds the index, or goes on with a build that was interrupted.
    Raises ConfigError, before anything starts where it can.
    """
    files = corpus_files(config.corpus)
    encoder = make_encoder(config.encoder) if config.encoder else None
    if encoder:
        make_index(config.faiss, encoder.dimension)  # refuses a wrong factory now, not after hours of encoding
    build = IndexBuild(config, files)
    with connected(config.ray_address, name="index"), Progress("passages", total=None) as progress:
        if known := sum(segment.count for segment in build.segments()):
            progress.note(f"going on with {build.folder}, where {known} passages were read")
        for count in stream_segments(config, files, folder=build.folder):
            progress.advance(count)
    return build.finish(encoder, note=print)


def adopt(index: Path, corpus: Path, output: Path, *, encoder: dict[str, Any], search: str = "") -> Manifest:
    """Makes other people's faiss index and jsonl corpus an index folder; see `mempipe.retrieval.build.adopt_index`."""
    return adopt_index(index, corpus, output, encoder=make_encoder(encoder), search=search)


def search(
    index: Path, query: str, *, num_passages: int, partition: str = "", mode: str = "auto"
) -> list[dict[str, Any]]:
    """The best passages, best first, as rows of id, title, text, score and partition.
    Raises ConfigError for an impossible search.
    """
    retriever = Retriever(index, mode=mode)
    request = Query(text=query, num_passages=num_passages, partition=partition)
    try:
        retriever.check(request)
    except ValueError as error:
        raise ConfigError(f"index {index}: {error}") from error
    (result,) = retriever.search([request])
    return [asdict(passage) for passage in result.passages]
