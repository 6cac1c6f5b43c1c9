"""BM25: an index folder of words and weighted postings, memory-mapped, and exact search in it.

    lexical.json        format, k1, b, number of passages, words and postings
    words.arrow         every word, sorted
    starts.npy          int64 [words + 1]: where a word's postings start
    rows.npy            int32 [postings]: the passages of a word, ascending
    weights.npy         float32 [postings]: what the word adds to the passage's score

bm25s works the weights out when the index is built (its "lucene" formula); a search only adds them up.
"""

from __future__ import annotations

import bisect
import itertools
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mempipe.retrieval.encoders import words
from mempipe.retrieval.fusion import Scored
from mempipe.settings import ConfigError

FORMAT = 1
SETTINGS, WORDS, STARTS, ROWS, WEIGHTS = "lexical.json", "words.arrow", "starts.npy", "rows.npy", "weights.npy"
_WORDS = pa.schema([("word", pa.large_string())])


class LexicalIndex:
    """An opened BM25 index; for any number of threads.

    A passage is the words of its title and text, a query a bag of words: one that occurs twice counts twice. Case,
    accents and stop words do not count (`encoders.words`); nothing is stemmed.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        vocabulary: pa.Array,
        starts: npt.NDArray,
        rows: npt.NDArray,
        weights: npt.NDArray,
    ) -> None:
        self._settings = settings
        self._vocabulary = vocabulary
        self._starts, self._rows, self._weights = starts, rows, weights
        self.num_passages: int = settings["num_passages"]

    @classmethod
    def build(cls, batches: Iterable[pa.RecordBatch], folder: str | Path, *, k1: float = 1.2, b: float = 0.75) -> Self:
        """Writes the index of the passages (columns `title` and `text`) into `folder` and opens it.

        The same passages give the same bytes, however they are cut into batches. k1 and b are Lucene's defaults. Raises
        ConfigError for an impossible k1 or b, and when there is no passage or none with a word that counts.
        """
        from bm25s import BM25

        if not (k1 >= 0 and 0 <= b <= 1):
            raise ConfigError(f"BM25: k1 is {k1} and b is {b}; k1 must be >= 0 and b from 0 to 1")
        documents, vocabulary = _read_documents(batches)
        if not len(vocabulary):
            raise ConfigError(
                f"BM25: none of the corpus's {len(documents)} passages has a word that counts; an index needs at "
                "least one"
            )
        bm25: Any = BM25(k1=k1, b=b, method="lucene", csc_backend="scipy")
        postings = bm25.build_index_from_ids(range(len(vocabulary)), documents, show_progress=False)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / STARTS, postings["indptr"].astype(np.int64))
        np.save(folder / ROWS, postings["indices"].astype(np.int32))
        np.save(folder / WEIGHTS, postings["data"].astype(np.float32))
        with pa.OSFile(str(folder / WORDS), "wb") as file, pa.ipc.new_file(file, _WORDS) as writer:
            writer.write_batch(pa.record_batch([vocabulary], schema=_WORDS))
        settings = {
            "format": FORMAT,
            "k1": k1,
            "b": b,
            "num_passages": len(documents),
            "num_words": len(vocabulary),
            "num_postings": len(postings["indices"]),
        }
        (folder / SETTINGS).write_text(json.dumps(settings, indent=1))
        return cls.open(folder)

    @classmethod
    def open(cls, folder: str | Path, *, mmap: bool = True) -> Self:
        """Raises ConfigError, naming the file, when one is missing, damaged, or not as long as `lexical.json` says."""
        folder = Path(folder)
        settings = _read_settings(folder / SETTINGS)
        num_words, num_postings = settings["num_words"], settings["num_postings"]
        vocabulary = _read_words(folder / WORDS, num_words, mmap=mmap)
        starts = _read_array(folder / STARTS, np.int64, num_words + 1, mmap=mmap)
        rows = _read_array(folder / ROWS, np.int32, num_postings, mmap=mmap)
        weights = _read_array(folder / WEIGHTS, np.float32, num_postings, mmap=mmap)
        if starts[0] != 0 or starts[-1] != num_postings or (np.diff(starts) < 0).any():
            raise ConfigError(f"{folder / STARTS} does not rise from 0 to {num_postings}; build the index again")
        return cls(settings, vocabulary, starts, rows, weights)

    def spec(self) -> dict[str, Any]:
        """What an index's manifest keeps of it."""
        return dict(self._settings)

    def search(self, queries: Sequence[str], depth: int, rows: tuple[int, int] | None = None) -> list[Scored]:
        """For every query the best `depth` passages of the row range (None: all) that share a word with it; ties by
        row.

        An answer does not depend on the other queries, nor on the order of a query's words.
        """
        first, last = rows if rows is not None else (0, self.num_passages)
        return [_best(self._scores(query, first, last), first, depth) for query in queries]

    def _scores(self, query: str, first: int, last: int) -> npt.NDArray[np.float32]:
        """The scores of rows `first` to `last`, which is not included."""
        scores = np.zeros(last - first, dtype=np.float32)
        for word, count in sorted(Counter(words(query)).items()):  # sorted: float32 sums depend on the order
            start, stop = self._postings(word)
            start, stop = start + np.searchsorted(self._rows[start:stop], (first, last))
            scores[self._rows[start:stop] - first] += self._weights[start:stop] * np.float32(count)
        return scores

    def _postings(self, word: str) -> tuple[int, int]:
        """Where the word's postings start and end; nothing for an unknown word."""
        place = bisect.bisect_left(range(len(self._vocabulary)), word, key=lambda i: self._vocabulary[i].as_py())
        if place == len(self._vocabulary) or self._vocabulary[place].as_py() != word:
            return 0, 0
        return int(self._starts[place]), int(self._starts[place + 1])


def _best(scores: npt.NDArray[np.float32], first: int, depth: int) -> Scored:
    found = np.flatnonzero(scores)
    if len(found) > depth:
        least = np.partition(scores[found], len(found) - depth)[len(found) - depth]
        found = found[scores[found] >= least]  # with all that tie for the last place
    order = found[np.argsort(-scores[found], kind="stable")][:depth]
    return order + first, scores[order]


class _Documents:
    """The word ids of every passage, in one int32 array: only one passage at a time becomes a list."""

    def __init__(self, word_ids: npt.NDArray[np.int32], ends: npt.NDArray[np.int64]) -> None:
        self._word_ids, self._ends = word_ids, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[list[int]]:
        for start, end in itertools.pairwise([0, *self._ends.tolist()]):
            yield self._word_ids[start:end].tolist()


def _read_documents(batches: Iterable[pa.RecordBatch]) -> tuple[_Documents, pa.Array]:
    """The passages as ids of words, and the words in their sorted order, which the ids follow."""
    ids: dict[str, int] = {}
    word_ids, ends = array("i"), array("q")
    for batch in batches:
        for title, text in zip(batch["title"].to_pylist(), batch["text"].to_pylist(), strict=True):
            word_ids.extend(ids.setdefault(word, len(ids)) for word in itertools.chain(words(title), words(text)))
            ends.append(len(word_ids))
    vocabulary = sorted(ids)
    rank = np.empty(len(ids), dtype=np.int32)
    rank[[ids[word] for word in vocabulary]] = np.arange(len(ids), dtype=np.int32)
    documents = _Documents(rank[np.frombuffer(word_ids, dtype=np.int32)], np.frombuffer(ends, dtype=np.int64))
    return documents, pa.array(vocabulary, type=pa.large_string())


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path.parent} holds no BM25 index: {path.name}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is truncated or changed: {error}; build the index again") from error
    found = settings.get("format") if isinstance(settings, dict) else None
    if found != FORMAT:
        raise ConfigError(f"{path} has format {found!r}, this version reads {FORMAT}; build the index again")
    for name in ("num_passages", "num_words", "num_postings"):
        if type(settings.get(name)) is not int or settings[name] < 1:
            raise ConfigError(
                f"{path}: {name} is {settings.get(name)!r}; it must be a whole number >= 1; build the index again"
            )
    return settings


def _read_words(path: Path, count: int, *, mmap: bool) -> pa.Array:
    try:
        with pa.memory_map(str(path)) if mmap else pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as reader:
            if not reader.schema.equals(_WORDS) or reader.num_record_batches != 1:
                raise ConfigError(
                    f"{path} holds {reader.schema.names}, expected one batch of {_WORDS.names}; build the index again"
                )
            vocabulary = reader.get_batch(0).column(0)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{path} is missing or damaged: {' '.join(str(error).split())[:200]}; build the index again"
        ) from error
    if len(vocabulary) != count:
        raise ConfigError(f"{path} holds {len(vocabulary)} words, {SETTINGS} says {count}; build the index again")
    return vocabulary


def _read_array(path: Path, dtype: type[np.generic], length: int, *, mmap: bool) -> npt.NDArray:
    try:
        values = np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(
            f"{path} is missing or damaged: {' '.join(str(error).split())[:200]}; build the index again"
        ) from error
    if not isinstance(values, np.ndarray) or values.dtype != dtype or values.shape != (length,):
        found = f"{values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else "an archive"
        raise ConfigError(f"{path} is {found}, {SETTINGS} says {np.dtype(dtype)} {[length]}; build the index again")
    return values
