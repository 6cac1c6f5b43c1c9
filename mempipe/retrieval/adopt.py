"""Makes an index folder of a published faiss index and the corpus of its passages, which stay where they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from mempipe.retrieval.encoders import Encoder
from mempipe.retrieval.manifest import Manifest, PassageFiles, VectorFiles, write_manifest
from mempipe.retrieval.passages import JsonlPassages, Passages, line_offsets
from mempipe.retrieval.vectors import read_index, set_search_parameters
from mempipe.settings import ConfigError
from mempipe.storage.checksums import record_of
from mempipe.storage.files import check_new_folder, whole_folder
from mempipe.types import Passage

_ROWS_TO_READ = 100
"""The rows of a corpus that are read while it is adopted; a search reads the others."""
_EQUAL = 1e-3
"""The part of a similarity by which vectors of equal texts may differ."""
_ROWS_TO_ENCODE = 32
"""The rows, spread over the corpus, whose vectors are compared with the encoder's."""


def adopt_index(index: Path, corpus: Path, output: Path, *, encoder: Encoder, search: str = "") -> Manifest:
    """Makes an index folder of other people's files, a faiss index and the jsonl that it was built from. They stay
    where they are.

    Raises ConfigError when they do not fit together, when the index is not by inner product or calls its vectors by
    other numbers than their lines, when one of the first rows is not a passage, when the encoder makes other vectors,
    and when `output` holds something.
    """
    check_new_folder(output, setting="output")
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
    _check_numbers(index, opened)
    if opened.d != encoder.dimension:
        raise ConfigError(
            f"{index} has {opened.d} dimensions, but the encoder makes {encoder.dimension}; it was built with "
            "another one"
        )
    index, corpus = index.absolute(), corpus.absolute()  # as they are called: what a link leads to may have no suffix
    with whole_folder(output) as partial:
        np.save(partial / "offsets.npy", offsets)
        passages = JsonlPassages(corpus, partial / "offsets.npy")
        for row in range(min(len(passages), _ROWS_TO_READ)):
            _ = passages[row]
        _check_vectors(index, opened, passages, encoder)
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


def _check_vectors(file: Path, index: Any, passages: Passages, encoder: Encoder) -> None:
    """Raises ConfigError when most of some vectors are further from the encoder's vectors of their lines than from
    those of other lines. An index that returns no vector without a search is not compared.
    """
    read = dict[int, Passage]()
    for row in np.unique(np.linspace(0, len(passages) - 1, _ROWS_TO_ENCODE, dtype=np.int64)).tolist():
        with suppress(ConfigError):  # a search names a line that is not a passage
            read[row] = passages[row]
    try:
        stored = np.stack([index.reconstruct(row) for row in read])
    except RuntimeError:
        return
    made = encoder.encode_passages([*read.values()])
    lengths = np.linalg.norm(stored, axis=1, keepdims=True)
    similar = made @ (stored / np.where(lengths == 0, 1, lengths)).T
    wrong = similar.diagonal() < similar.max(axis=1) - _EQUAL
    if 2 * wrong.sum() > len(read):
        raise ConfigError(
            f"{file}: {wrong.sum()} of {len(read)} vectors are nearer to other lines of the corpus than to their own; "
            "the index was made by another encoder, of another corpus or in another order"
        )


def _check_numbers(file: Path, index: Any) -> None:
    """Raises ConfigError unless the numbers by which the index calls its vectors are those of lines, from 0 on: a
    search would return the passages of other lines.
    """
    for numbers in _own_numbers(index):
        if len(wrong := numbers[(numbers < 0) | (numbers >= index.ntotal)]):
            raise ConfigError(
                f"{file} calls a vector {wrong[0]}; expected the numbers of lines, 0 to {index.ntotal - 1}: make the "
                "index again, without ids, in the order of the corpus"
            )


def _own_numbers(index: Any) -> Iterator[npt.NDArray[np.int64]]:
    """Yields the numbers of an index that was given some, or of inverted lists; other kinds count."""
    if isinstance(index, faiss.IndexIDMap | faiss.IndexIDMap2):
        yield faiss.vector_to_array(index.id_map)
    elif (inverted := faiss.try_extract_index_ivf(index)) is not None:
        lists: Any = inverted.invlists
        for number in range(inverted.nlist):
            if size := lists.list_size(number):
                yield faiss.rev_swig_ptr(lists.get_ids(number), size)
