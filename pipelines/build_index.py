"""From a corpus to an index folder: `mempipe index build`."""

from __future__ import annotations

from mempipe.actors.cluster import connected
from mempipe.data.corpus import corpus_files
from mempipe.progress import Progress, say
from mempipe.retrieval.build import IndexBuild, make_index
from mempipe.retrieval.config import IndexConfig
from mempipe.retrieval.encoders import make_encoder
from mempipe.retrieval.manifest import Manifest
from mempipe.streams.segments import stream_segments


def main(config: IndexConfig) -> Manifest:
    """Builds the index, or continues with a build that was interrupted.
    Raises ConfigError, before anything starts where it can.
    """
    files = corpus_files(config.corpus)
    encoder = make_encoder(config.encoder) if config.encoder else None
    if encoder:
        make_index(config.faiss, encoder.dimension)  # refuses a wrong factory now, not after hours of encoding
    build = IndexBuild(config, files)
    say("connecting to Ray, starting encoders")
    with connected(config.ray_address, name="index"), Progress("passages", total=None) as progress:
        if known := sum(segment.count for segment in build.segments()):
            progress.note(f"continuing with {build.folder}, where {known} passages were read")
        for count in stream_segments(config, files, folder=build.folder):
            progress.advance(count)
    return build.finish(encoder, note=say)
