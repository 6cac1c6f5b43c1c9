"""Dense retrieval: an encoder, a faiss index, passages on disk, and a batching front for many concurrent searches.

An index is a folder that appears whole or not at all:

    index.faiss       one vector per passage, inner product of L2-normalised vectors
    passages.arrow    the passages in the same order, memory-mapped
    manifest.json     encoder, dimension, counts, row range of every partition, sha256 of the other two
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import faiss
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mempipe.config import ConfigError, RetrievalConfig
from mempipe.types import Passage, SearchResult

Vectors = npt.NDArray[np.float32]

FORMAT = 1
ENCODE_BATCH = 4096
CACHE_SIZE = 100_000
_COLUMNS = pa.schema([("id", pa.string()), ("title", pa.string()), ("text", pa.string()), ("partition", pa.string())])


class RetrievalError(RuntimeError):
    """A search could not be made; the query itself was fine."""


class Encoder(Protocol):
    """Texts to L2-normalised vectors, float32 [n, dimension]."""

    dimension: int

    def spec(self) -> dict[str, Any]:
        """What the manifest keeps; `make_encoder` makes the same encoder of it."""
        ...

    def encode_queries(self, queries: Sequence[str]) -> Vectors: ...

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors: ...


class HashingEncoder:
    """Hashed bags of words: deterministic, nothing to download, finds passages by the rare words that query and passage share.

    A word counts 1 + log(occurrences), and the title's words `title_weight` times more, so that the passage about an entity comes
    before those that mention it.
    """

    def __init__(self, *, dimension: int = 1024, title_weight: float = 3.0) -> None:
        from sklearn.feature_extraction.text import HashingVectorizer

        vectorizer: Any = HashingVectorizer  # its stubs know no norm=None
        self.dimension = dimension
        self.title_weight = title_weight
        self._words = vectorizer(
            n_features=dimension, alternate_sign=True, norm=None, lowercase=True, token_pattern=r"(?u)\b\w+\b", stop_words=list(STOP_WORDS)
        )

    def spec(self) -> dict[str, Any]:
        return {"kind": "hashing", "dimension": self.dimension, "title_weight": self.title_weight}

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        return _normalized(self._counts(queries).toarray())

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        texts, titles = self._counts([p.text for p in passages]), self._counts([p.title for p in passages])
        return _normalized((texts + self.title_weight * titles).toarray())

    def _counts(self, texts: Sequence[str]) -> Any:
        counts = self._words.transform([text.encode("utf-8", "replace").decode() for text in texts])
        counts.eliminate_zeros()  # two words that hash to opposite signs of one place
        counts.data = np.sign(counts.data) * (1 + np.log(np.abs(counts.data)))
        return counts


STOP_WORDS = (
    "a",
    "an",
    "and",
    "at",
    "by",
    "for",
    "from",
    "in",
    "is",
    "it",
    "of",
    "on",
    "s",
    "that",
    "the",
    "to",
    "was",
    "what",
    "who",
    "with",
)


class HFEncoder:
    """A Hugging Face encoder with mean pooling and prefixes, as E5 wants it: "query: ", "passage: ", 256 tokens."""

    def __init__(
        self, path: str, *, query_prefix: str = "query: ", passage_prefix: str = "passage: ", max_tokens: int = 256, batch_size: int = 64
    ) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
            self._model = AutoModel.from_pretrained(path).eval()
        except (OSError, ValueError) as error:
            raise ConfigError(f"encoder {path!r} is not a Hugging Face encoder: {' '.join(str(error).split())}") from error
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model.to(self._device)
        if self._device.type == "cuda":
            self._model.half()
        self._settings = {"path": path, "query_prefix": query_prefix, "passage_prefix": passage_prefix, "max_tokens": max_tokens}
        self._batch_size = batch_size
        self.dimension = self._model.config.hidden_size

    def spec(self) -> dict[str, Any]:
        return {"kind": "huggingface", "dimension": self.dimension, **self._settings}

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        return self._encode([self._settings["query_prefix"] + query for query in queries])

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        return self._encode([f"{self._settings['passage_prefix']}{p.title}\n{p.text}" for p in passages])

    def _encode(self, texts: Sequence[str]) -> Vectors:
        import torch

        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # little padding
        for start in range(0, len(texts), self._batch_size):
            rows = by_length[start : start + self._batch_size]
            inputs = self._tokenizer(
                [texts[i] for i in rows], padding=True, truncation=True, max_length=self._settings["max_tokens"], return_tensors="pt"
            ).to(self._device)
            with torch.inference_mode():
                states = self._model(**inputs).last_hidden_state
                mask = inputs["attention_mask"].unsqueeze(-1).to(states.dtype)
                vectors[rows] = ((states * mask).sum(1) / mask.sum(1)).float().cpu().numpy()
        return _normalized(vectors)


def make_encoder(spec: dict[str, Any]) -> Encoder:
    """The encoder that a manifest's `encoder` describes."""
    if spec.get("kind") == "hashing":
        return HashingEncoder(dimension=spec["dimension"], title_weight=spec["title_weight"])
    if spec.get("kind") == "huggingface":
        return HFEncoder(**{key: spec[key] for key in ("path", "query_prefix", "passage_prefix", "max_tokens")})
    raise ConfigError(f"encoder kind is {spec.get('kind')!r}; it must be 'hashing' or 'huggingface'")


def build_index(passages: Iterable[Passage], folder: str | Path, *, encoder: Encoder) -> dict[str, Any]:
    """Encodes the passages and writes the index folder; returns its manifest.

    Passages of one partition must come one after the other. Raises ConfigError when they do not, or when there are none.
    """
    folder = Path(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        index = faiss.IndexFlatIP(encoder.dimension)
        partitions: dict[str, list[int]] = {}
        with pa.OSFile(str(partial / "passages.arrow"), "wb") as file, pa.ipc.new_file(file, _COLUMNS) as writer:
            for batch in _batches(passages, ENCODE_BATCH):
                for row, passage in enumerate(batch, start=index.ntotal):
                    _extend(partitions, passage.partition, row)
                index.add(encoder.encode_passages(batch))
                columns = [[getattr(passage, name) for passage in batch] for name in _COLUMNS.names]
                writer.write_batch(pa.record_batch(columns, schema=_COLUMNS))
        if not index.ntotal:
            raise ConfigError("the corpus holds no passage")
        faiss.write_index(index, str(partial / "index.faiss"))
        manifest = {
            "format": FORMAT,
            "encoder": encoder.spec(),
            "metric": "inner_product",
            "num_passages": index.ntotal,
            "partitions": partitions,
            "sha256": {name: _sha256(partial / name) for name in ("index.faiss", "passages.arrow")},
        }
        (partial / "manifest.json").write_text(json.dumps(manifest))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
        return manifest
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Query:
    """One search: at most `num_passages` passages of `partition` ("" = the whole corpus)."""

    text: str
    num_passages: int
    partition: str = ""


class Retriever:
    """An opened index. Not thread-safe: one search at a time."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ConfigError when a file is missing, truncated, or not what the manifest says."""
        folder = Path(folder)
        manifest = _manifest(folder)
        self.snapshot = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
        self._partitions: dict[str, list[int]] = manifest["partitions"]
        try:
            self._index = faiss.read_index(str(folder / "index.faiss"), faiss.IO_FLAG_MMAP_IFC)
            self._passages = pa.ipc.open_file(pa.memory_map(str(folder / "passages.arrow"))).read_all()
        except (RuntimeError, pa.ArrowInvalid, OSError) as error:
            raise ConfigError(f"index {folder} is damaged: {' '.join(str(error).split())[:200]}; build it again") from error
        self._encoder = make_encoder(manifest["encoder"])
        for what, found, expected in (
            ("index.faiss holds {} vectors", self._index.ntotal, manifest["num_passages"]),
            ("passages.arrow holds {} passages", self._passages.num_rows, manifest["num_passages"]),
            ("the encoder makes {} dimensions", self._encoder.dimension, self._index.d),
        ):
            if found != expected:
                raise ConfigError(f"index {folder}: {what.format(found)}, the manifest says {expected}; build it again")
        self._cache: OrderedDict[Query, SearchResult] = OrderedDict()

    def search(self, queries: Sequence[Query]) -> list[SearchResult]:
        """The results in the order of `queries`; equal queries are searched once. Raises ValueError for an unknown partition."""
        missing = list(dict.fromkeys(query for query in queries if query not in self._cache))
        for query in missing:
            if query.partition and query.partition not in self._partitions:
                raise ValueError(f"partition {query.partition!r} is not in the index (it has {len(self._partitions)})")
        found = dict(zip(missing, self._search(missing), strict=True)) if missing else {}
        results = [found[query] if query in found else self._cached(query) for query in queries]
        for query, result in found.items():
            self._cache[query] = result
        while len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)
        return results

    def _cached(self, query: Query) -> SearchResult:
        self._cache.move_to_end(query)
        return self._cache[query]

    def _search(self, queries: Sequence[Query]) -> list[SearchResult]:
        vectors = self._encoder.encode_queries([query.text for query in queries])
        results: list[SearchResult | None] = [None] * len(queries)
        by_partition: dict[str, list[int]] = {}
        for i, query in enumerate(queries):
            by_partition.setdefault(query.partition, []).append(i)
        for partition, members in by_partition.items():
            start, stop = self._partitions[partition] if partition else (0, self._index.ntotal)
            depth = min(max(queries[i].num_passages for i in members), stop - start)
            parameters = _within(start, stop) if partition else None
            scores, rows = self._index.search(vectors[members], depth, params=parameters)
            for i, row_scores, row_ids in zip(members, scores, rows, strict=True):
                hits = [(int(r), float(s)) for r, s in zip(row_ids, row_scores, strict=True) if r >= 0]  # faiss pads with -1
                passages = [self._passage(row, score) for row, score in hits[: queries[i].num_passages]]
                results[i] = SearchResult(passages=passages, snapshot=self.snapshot)
        return [result for result in results if result is not None]

    def _passage(self, row: int, score: float) -> Passage:
        values = {name: self._passages.column(name)[row].as_py() for name in _COLUMNS.names}
        return Passage(**values, score=score)


class BatchingRetriever:
    """Concurrent searches of many trajectories, gathered into batches for at most `batch_wait_ms`."""

    def __init__(self, retriever: Retriever, config: RetrievalConfig) -> None:
        self.snapshot = retriever.snapshot
        self._retriever = retriever
        self._wait_s = config.batch_wait_ms / 1000
        self._timeout_s = config.timeout_s
        self._waiting: list[tuple[Query, asyncio.Future[SearchResult]]] = []
        self._flush: asyncio.Task[None] | None = None

    async def search(self, query: str, *, num_passages: int, partition: str = "") -> SearchResult:
        """Raises RetrievalError when the search failed or took longer than `retrieval.timeout_s`."""
        future: asyncio.Future[SearchResult] = asyncio.get_running_loop().create_future()
        self._waiting.append((Query(query, num_passages, partition), future))
        if self._flush is None:
            self._flush = asyncio.create_task(self._run())
        try:
            return await asyncio.wait_for(future, self._timeout_s)
        except TimeoutError as error:
            raise RetrievalError(f"no result within retrieval.timeout_s {self._timeout_s:g} s") from error

    async def _run(self) -> None:
        """Searches batch after batch until nobody waits; while one is searched, the next one gathers."""
        await asyncio.sleep(self._wait_s)
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                results = await asyncio.to_thread(self._retriever.search, [query for query, _ in batch])
            except (RuntimeError, ValueError, OSError) as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(RetrievalError(f"the search failed: {error}"))
                continue
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)
        self._flush = None


def _within(start: int, stop: int) -> Any:
    """Search parameters that admit rows start..stop-1 only."""
    parameters: Any = faiss.SearchParameters  # faiss adds keyword arguments at import
    return parameters(sel=faiss.IDSelectorRange(start, stop))


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except OSError as error:
        raise ConfigError(f"retrieval.index is {str(folder)!r}: it holds no index (manifest.json: {error.strerror})") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"index {folder}: manifest.json is damaged ({error.msg}); build it again") from error
    if manifest.get("format") != FORMAT:
        raise ConfigError(f"index {folder} has format {manifest.get('format')!r}, this version reads {FORMAT}; build it again")
    for name in ("index.faiss", "passages.arrow"):
        if not (folder / name).is_file():
            raise ConfigError(f"index {folder} lacks {name}; build it again")
    return manifest


def verify(folder: str | Path) -> None:
    """Reads every byte and compares it with the manifest's checksums. Raises ConfigError for a file that was changed or cut."""
    for name, expected in _manifest(Path(folder))["sha256"].items():
        if _sha256(Path(folder) / name) != expected:
            raise ConfigError(f"index {folder}: {name} was changed or cut since it was built; build it again")


def _extend(partitions: dict[str, list[int]], partition: str, row: int) -> None:
    if partition not in partitions:
        partitions[partition] = [row, row]
    if partitions[partition][1] != row:
        raise ConfigError(f"passages of partition {partition!r} do not follow one another; sort the corpus by partition")
    partitions[partition][1] = row + 1


def _batches(passages: Iterable[Passage], size: int) -> Iterator[list[Passage]]:
    batch: list[Passage] = []
    for passage in passages:
        batch.append(passage)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _normalized(vectors: npt.NDArray) -> Vectors:
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, np.where(lengths == 0, 1, lengths), dtype=np.float32)


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
