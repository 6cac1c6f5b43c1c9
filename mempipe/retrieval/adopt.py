"""Makes an index folder of a published faiss index and the corpus of its passages, which stay where they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mempipe.retrieval.encoders import Encoder
from mempipe.retrieval.manifest import Manifest, PassageFiles, VectorFiles, write_manifest
from mempipe.retrieval.passages import JsonlPassages, line_offsets
from mempipe.retrieval.vectors import read_index, set_search_parameters
from mempipe.settings import ConfigError
from mempipe.storage.checksums import record_of
from mempipe.storage.files import whole_folder

_ROWS_TO_READ = 100
"""The rows of a corpus that are read while it is adopted; a search reads the others."""


def adopt_index(index: Path, corpus: Path, output: Path, *, encoder: Encoder, search: str = "") -> Manifest:
    """Makes an index folder of other people's files, a faiss index and the jsonl that it was built from. They stay
    where they are.

    Raises ConfigError when they do not fit together, when the index is not by inner product, when one of the first
    rows is not a passage, and when `output` holds something.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"output is {str(output)!r}, which exists; remove it or choose another")
    for file in (index, corpus):
        if not file.is_file():
            raise ConfigError(f"{file} is not a file")
    if corpus.suffix != ".jsonl":
        raise ConfigError(
            f"{corpus} is not a plain .jsonl file; unpack it first, since passages are read from it where they lie"
        )
    opened = read_index(index)
    if search:
        set_search_parameters(opened, search)
    offsets = line_offsets(corpus)
    if len(offsets) == 1:
        raise ConfigError(f"{corpus} holds no passage")
    if opened.ntotal != len(offsets) - 1:
        raise ConfigError(
            f"{index} holds {opened.ntotal} vectors, but {corpus} has {len(offsets) - 1} lines; they do not belong "
            "together"
        )
    if opened.d != encoder.dimension:
        raise ConfigError(
            f"{index} has {opened.d} dimensions, but the encoder makes {encoder.dimension}; it was built with "
            "another one"
        )
    index, corpus = index.resolve(), corpus.resolve()
    with whole_folder(output) as partial:
        np.save(partial / "offsets.npy", offsets)
        passages = JsonlPassages(corpus, partial / "offsets.npy")
        for row in range(min(len(passages), _ROWS_TO_READ)):
            _ = passages[row]
        records = {str(file): record_of(file, sampled=True) for file in (index, corpus)}
        manifest = Manifest(
            passages=PassageFiles(kind="jsonl", files=[str(corpus), "offsets.npy"], count=len(offsets) - 1),
            vectors=VectorFiles(
                encoder=encoder.spec(),
                dimension=encoder.dimension,
                factory=type(opened).__name__,
                search=search,
                files=[str(index)],
            ),
            files=records | {"offsets.npy": record_of(partial / "offsets.npy")},
        )
        write_manifest(partial, manifest)
    return manifest
