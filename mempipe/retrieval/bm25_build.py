"""Builds a BM25 index in memory that hardly grows with the corpus.

The build counts words in blocks of passages and writes each block to disk with its words in order. Then it reads all
blocks side by side, a range of words at a time, and merges them into the files of `mempipe.retrieval.bm25`. Memory
holds one block, later one range, and always 4 bytes for every passage (its length) and the words of the corpus.

The weight of a word in a passage is Lucene's: ln(1 + (N - n + 0.5) / (n + 0.5)) · f / (f + k1 (1 - b + b l / L)) for a
word in n of N passages, f times in this one, whose length is l of L on average, in words that count.
"""

from __future__ import annotations

import bisect
import itertools
import json
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from mempipe.retrieval.bm25 import FORMAT, ROWS, SETTINGS, STARTS, WEIGHTS, WORDS, WORDS_SCHEMA, LexicalIndex
from mempipe.retrieval.encoders import WORD_RULES, words
from mempipe.settings import ConfigError

pc: Any = pyarrow.compute  # its functions are made at run time, which no type checker sees

BLOCK_WORDS = 2**22
"""Words (with repetitions) counted at once; a block takes about 50 bytes for each."""
RANGE_POSTINGS = 2**22
"""Postings merged at once; more only where a single word has more."""

Ints = npt.NDArray[np.int64]


def build_lexical(
    batches: Iterable[pa.RecordBatch], folder: str | Path, *, k1: float = 1.2, b: float = 0.75
) -> LexicalIndex:
    """Writes the index of the passages (columns `title` and `text`) into `folder` and returns it opened.

    The same passages give the same bytes, however they are cut into batches and blocks. k1 and b are Lucene's defaults.
    Raises ConfigError for an impossible k1 or b, and when there is no passage or none with a word that counts.
    """
    if not (k1 >= 0 and 0 <= b <= 1):
        raise ConfigError(f"BM25: k1 is {k1} and b is {b}; k1 must be >= 0 and b from 0 to 1")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="blocks-", dir=folder) as scratch:
        lengths = array("i")
        blocks = [
            _write_block(Path(scratch), number, word_ids, ids, block_lengths, first=len(lengths) - len(block_lengths))
            for number, (word_ids, ids, block_lengths) in enumerate(_read_blocks(batches, lengths))
        ]
        num_postings = sum(block.num_postings for block in blocks)
        if not num_postings:
            raise ConfigError(
                f"BM25: none of the corpus's {len(lengths)} passages has a word that counts; an index needs at least "
                "one"
            )
        per_passage = np.frombuffer(lengths, dtype=np.int32)
        norms = (k1 * (1 - b + b * per_passage / per_passage.mean())).astype(np.float32)
        num_words = _merge(blocks, folder, norms, num_postings)
    settings = {
        "format": FORMAT,
        "word_rules": WORD_RULES,
        "k1": k1,
        "b": b,
        "num_passages": len(lengths),
        "num_words": num_words,
        "num_postings": num_postings,
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=1))
    return LexicalIndex.open(folder)


def _read_blocks(
    batches: Iterable[pa.RecordBatch], lengths: array[int]
) -> Iterator[tuple[array[int], dict[str, int], array[int]]]:
    """Yields for each block its words as ids, the ids, and its passages' lengths, which are added to `lengths`."""
    word_ids, ids, block_lengths = array("i"), {}, array("i")
    for batch in batches:
        for title, text in zip(batch["title"].to_pylist(), batch["text"].to_pylist(), strict=True):
            before = len(word_ids)
            word_ids.extend(ids.setdefault(word, len(ids)) for word in itertools.chain(words(title), words(text)))
            block_lengths.append(len(word_ids) - before)
            lengths.append(len(word_ids) - before)
            if len(word_ids) >= BLOCK_WORDS:
                yield word_ids, ids, block_lengths
                word_ids, ids, block_lengths = array("i"), {}, array("i")
    if len(block_lengths):
        yield word_ids, ids, block_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """The postings of consecutive passages on disk: word i has those from starts[i] to starts[i + 1].

    The words are memory-mapped; numbers are read, since mapped pages would count as memory of the process.
    """

    words: pa.Array
    num_postings: int
    files: dict[str, Path]

    def starts(self, first: int, last: int) -> Ints:
        """Returns starts[first] to starts[last], which is included."""
        return self._read("starts", np.int64, first, min(last, len(self.words)) + 1)

    def postings(self, name: str, first: int, last: int) -> npt.NDArray[np.int32]:
        """Returns the `name` (rows or counts) of the postings from `first` to `last`, which is not included."""
        return self._read(name, np.int32, first, last)

    def _read(self, name: str, dtype: type[np.generic], first: int, last: int) -> npt.NDArray[Any]:
        return np.fromfile(self.files[name], dtype, last - first, offset=first * np.dtype(dtype).itemsize)


def _write_block(
    folder: Path, number: int, word_ids: array[int], ids: dict[str, int], lengths: array[int], *, first: int
) -> _Block:
    """Writes the block whose passages begin with row `first`, its words sorted; returns it."""
    vocabulary = sorted(ids)
    rank = np.empty(len(ids), dtype=np.int64)
    rank[[ids[word] for word in vocabulary]] = np.arange(len(ids))
    rows = np.repeat(np.arange(len(lengths), dtype=np.int64), np.frombuffer(lengths, dtype=np.int32))
    keys = rank[np.frombuffer(word_ids, dtype=np.int32)] * len(lengths) + rows
    keys, counts = np.unique(keys, return_counts=True)
    owners, rows = np.divmod(keys, len(lengths))
    starts = np.searchsorted(owners, np.arange(len(ids) + 1))
    columns = {
        "starts": starts.astype(np.int64),
        "rows": (rows + first).astype(np.int32),
        "counts": counts.astype(np.int32),
    }
    files = {name: folder / f"{number}.{name}" for name in columns}
    for name, values in columns.items():
        values.tofile(files[name])
    words_file = folder / f"{number}.{WORDS}"
    write_words(words_file, pa.array(vocabulary, type=pa.large_string()))
    with pa.memory_map(str(words_file)) as source, pa.ipc.open_file(source) as reader:
        return _Block(words=reader.get_batch(0).column(0), num_postings=len(keys), files=files)


def write_words(path: Path, vocabulary: pa.Array) -> None:
    """Writes sorted words as one batch, which can be memory-mapped."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, WORDS_SCHEMA) as writer:
        writer.write_batch(pa.record_batch([vocabulary], schema=WORDS_SCHEMA))


def _merge(blocks: Sequence[_Block], folder: Path, norms: npt.NDArray[np.float32], num_postings: int) -> int:
    """Writes the index's arrays and words; returns the number of words. `norms` [passages] is k1 (1 - b + b l / L)."""
    vocabulary: list[pa.Array] = []
    frequencies: list[Ints] = []
    with (folder / ROWS).open("wb") as rows_file, (folder / WEIGHTS).open("wb") as weights_file:
        _write_header(rows_file, np.int32, num_postings)
        _write_header(weights_file, np.float32, num_postings)
        for bounds in _ranges(blocks):
            range_words, passages_with_it, rows, counts = _merged_range(blocks, bounds)
            rows.tofile(rows_file)
            _weights(passages_with_it, rows, counts, norms).tofile(weights_file)
            vocabulary.append(range_words)
            frequencies.append(passages_with_it)
    starts = np.concatenate([[0], np.cumsum(np.concatenate(frequencies))]).astype(np.int64)
    np.save(folder / STARTS, starts)
    write_words(folder / WORDS, pa.concat_arrays(vocabulary))
    return len(starts) - 1


def _write_header(file: BinaryIO, dtype: type[np.generic], length: int) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, header)


def _ranges(blocks: Sequence[_Block]) -> Iterator[list[tuple[int, int]]]:
    """Yields ranges of words in ascending order as the places [first, last) that each block has of them.

    Every block offers the words of its next postings; the range ends with the smallest last word on offer, so that no
    block has a word of the range outside of it.
    """
    offer = max(RANGE_POSTINGS // len(blocks), 1)
    places = [0] * len(blocks)
    while any(place < len(block.words) for place, block in zip(places, blocks, strict=True)):
        last_words = [
            block.words[_last_on_offer(block, place, offer)]
            for place, block in zip(places, blocks, strict=True)
            if place < len(block.words)
        ]
        end = min(word.as_py() for word in last_words)
        ends = [
            bisect.bisect_right(
                range(len(block.words)), end, lo=place, key=lambda i, block=block: block.words[i].as_py()
            )
            for place, block in zip(places, blocks, strict=True)
        ]
        yield list(zip(places, ends, strict=True))
        places = ends


def _last_on_offer(block: _Block, place: int, offer: int) -> int:
    """Returns the place of the last word from `place` on that ends within `offer` postings; at least `place`."""
    starts = block.starts(place, place + offer)
    return place + max(int(np.searchsorted(starts, starts[0] + offer, side="right")) - 2, 0)


def _merged_range(
    blocks: Sequence[_Block], bounds: Sequence[tuple[int, int]]
) -> tuple[pa.Array, Ints, npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Returns the words of the range, in how many passages each is, and the rows and counts of their postings."""
    parts = [(block, first, last) for block, (first, last) in zip(blocks, bounds, strict=True) if first < last]
    encoded = pa.concat_arrays([block.words.slice(first, last - first) for block, first, last in parts])
    encoded = encoded.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    owners = rank[encoded.indices.to_numpy()]  # of each (block, word): the place of the word in the range
    starts = [block.starts(first, last) for block, first, last in parts]
    sizes = np.concatenate([np.diff(of_block) for of_block in starts])
    rows, counts = (
        np.concatenate(
            [
                block.postings(name, of_block[0], of_block[-1])
                for (block, *_), of_block in zip(parts, starts, strict=True)
            ]
        )
        for name in ("rows", "counts")
    )
    # Blocks stay in their order within a word, so that its rows ascend.
    by_word = np.argsort(owners, kind="stable")
    sources = np.concatenate([[0], np.cumsum(sizes)])[:-1][by_word]
    targets = np.concatenate([[0], np.cumsum(sizes[by_word])])
    gather = np.repeat(sources - targets[:-1], sizes[by_word]) + np.arange(targets[-1])
    passages_with_it = np.bincount(owners, weights=sizes, minlength=len(order)).astype(np.int64)
    return encoded.dictionary.take(pa.array(order)), passages_with_it, rows[gather], counts[gather]


def _weights(
    passages_with_it: Ints, rows: npt.NDArray[np.int32], counts: npt.NDArray[np.int32], norms: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    rarity = np.log1p((len(norms) - passages_with_it + 0.5) / (passages_with_it + 0.5)).astype(np.float32)
    return np.repeat(rarity, passages_with_it) * (counts / (counts + norms[rows])).astype(np.float32)
