"""BM25: an index folder of words and weighted postings, memory-mapped, and exact search in it.

    lexical.json        format, word_rules, k1, b, number of passages, words and postings
    words.arrow         every word, sorted
    starts.npy          int64 [words + 1]: where a word's postings start
    rows.npy            int32 [postings]: the passages of a word, ascending
    weights.npy         float32 [postings]: what the word adds to the passage's score

`mempipe.retrieval.bm25_build` works the weights out; a search only adds them up.
"""

from __future__ import annotations

import bisect
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mempipe.retrieval.encoders import WORD_RULES, words
from mempipe.retrieval.fusion import Scored
from mempipe.settings import ConfigError

FORMAT = 1
SETTINGS, WORDS, STARTS, ROWS, WEIGHTS = "lexical.json", "words.arrow", "starts.npy", "rows.npy", "weights.npy"
WORDS_SCHEMA = pa.schema([("word", pa.large_string())])


class LexicalIndex:
    """An opened BM25 index; for any number of threads.

    A passage is the words of its title and text, a query a bag of words: one that occurs twice counts twice. Case,
    accents and stop words do not count (`encoders.words`); nothing is stemmed. The words of a query are found by the
    rules that the index was built with.
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
        self._word_rules: int = settings.get("word_rules", 1)

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
        """Returns the settings that an index's manifest keeps."""
        return dict(self._settings)

    def search(self, queries: Sequence[str], depth: int, rows: tuple[int, int] | None = None) -> list[Scored]:
        """Returns for every query the best `depth` passages of the row range (None: all) that share a word with it.

        Equal scores are in the order of rows. An answer depends neither on the other queries nor on the order of a
        query's words.
        """
        first, last = rows if rows is not None else (0, self.num_passages)
        return [_best(self._scores(query, first, last), first, depth) for query in queries]

    def _scores(self, query: str, first: int, last: int) -> npt.NDArray[np.float32]:
        """Returns the scores of the rows from `first` up to, not including, `last`."""
        scores = np.zeros(last - first, dtype=np.float32)
        for word, count in sorted(
            Counter(words(query, self._word_rules)).items()
        ):  # sorted: float32 sums depend on the order
            start, stop = self._postings(word)
            start, stop = start + np.searchsorted(self._rows[start:stop], (first, last))
            scores[self._rows[start:stop] - first] += self._weights[start:stop] * np.float32(count)
        return scores

    def _postings(self, word: str) -> tuple[int, int]:
        """Returns where the word's postings start and end; nothing for an unknown word."""
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
    if (rules := settings.get("word_rules", 1)) not in range(1, WORD_RULES + 1):
        raise ConfigError(f"{path} has word_rules {rules!r}, this version knows {WORD_RULES}; build the index again")
    for name in ("num_passages", "num_words", "num_postings"):
        if type(settings.get(name)) is not int or settings[name] < 1:
            raise ConfigError(
                f"{path}: {name} is {settings.get(name)!r}; it must be a whole number >= 1; build the index again"
            )
    return settings


def _read_words(path: Path, count: int, *, mmap: bool) -> pa.Array:
    try:
        with pa.memory_map(str(path)) if mmap else pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as reader:
            if not reader.schema.equals(WORDS_SCHEMA) or reader.num_record_batches != 1:
                raise ConfigError(
                    f"{path} holds {reader.schema.names}, expected one batch of {WORDS_SCHEMA.names}; build the index "
                    "again"
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
    return values.view(np.ndarray)  # a slice of a memmap takes ten times as long
