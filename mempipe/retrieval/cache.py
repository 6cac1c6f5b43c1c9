"""Caches of passages and search results that keep to a number of bytes, however long the passages are."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from mempipe.types import Passage, SearchResult

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
ENTRY_BYTES = 500
"""Approximate bytes of a small record in addition to its texts, including its key and its entry in the cache."""


class SizedCache(Generic[K, V]):
    """Keeps the values used last, at most `max_bytes` of them as `size_of` counts; for any number of threads.

    A value of more than `max_bytes` is not kept.
    """

    def __init__(self, max_bytes: int, *, size_of: Callable[[V], int]) -> None:
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def get(self, key: K) -> V | None:
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        with self._lock:
            if (old := self._values.pop(key, None)) is not None:
                self.num_bytes -= self._size_of(old)
            if self._size_of(value) > self._max_bytes:  # all others would make room for it in vain
                return
            self._values[key] = value
            self.num_bytes += self._size_of(value)
            while self.num_bytes > self._max_bytes:
                _, oldest = self._values.popitem(last=False)
                self.num_bytes -= self._size_of(oldest)


def passage_bytes(passage: Passage) -> int:
    """Returns about the memory that a passage takes."""
    texts = (passage.id, passage.title, passage.text, passage.partition)
    return ENTRY_BYTES + sum(map(sys.getsizeof, texts))


def result_bytes(result: SearchResult) -> int:
    """Returns about the memory that a result takes when nothing else holds its passages."""
    return ENTRY_BYTES + sum(map(passage_bytes, result.passages))
