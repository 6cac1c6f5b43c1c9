"""Builds an index in a process of its own, which dies on the way.

A module to itself, since every such process imports it: what it needs is loaded once, in the server they fork from.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

from mempipe.data.corpus import corpus_files
from mempipe.retrieval.build import IndexBuild, encode_segment
from mempipe.retrieval.config import IndexConfig
from mempipe.retrieval.encoders import make_encoder
from mempipe.retrieval.manifest import Manifest

PRELOADED = ["mempipe.retrieval.build", "bm25s"]


def build(config: IndexConfig) -> Manifest:
    job = IndexBuild(config, corpus_files(config.corpus))
    encoder = make_encoder(config.encoder) if config.encoder else None
    for segment in job.read():
        if encoder and job.needs_vectors(segment):
            encode_segment(job.folder, segment.number, encoder)
    return job.finish(encoder)


def build_and_die(config: IndexConfig, num_renames: int) -> None:
    """Builds in this process, which dies right before one more file would get its name."""
    rename, done = os.replace, iter(range(num_renames))

    def replace(*args: Any, **kwargs: Any) -> None:
        if next(done, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*args, **kwargs)

    os.replace = replace
    build(config)


def run_and_die(config: IndexConfig, num_renames: int) -> bool:
    """Whether the process was killed; otherwise it finished the index."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=build_and_die, args=(config, num_renames))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0
