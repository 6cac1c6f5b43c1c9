"""Settings of searches and of the indexes that they search."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from mempipe.settings import Section


class RetrievalConfig(Section):
    """Says where agents search, and how much a search returns."""

    index: str = ""
    """Folder made by `mempipe index build`: passages, faiss index, manifest."""
    url: str = ""
    """Address of a running service (`mempipe index serve`, or Search-R1's server) that is searched instead of an
    index folder.
    """
    mode: Literal["auto", "dense", "lexical", "fusion"] = "auto"
    """Search by vectors, by words (BM25), by both (reciprocal rank fusion), or by all that the index has."""
    encoder_path: str = ""
    """Path of the index's encoder on this cluster; empty: the path at build time."""
    num_passages: int = Field(5, ge=1)
    """Passages per search when the call names no number; the tool schema says it and the retriever uses it."""
    max_passages: int = Field(10, ge=1)
    """The most passages that a call may ask for."""
    max_query_chars: int = Field(1000, ge=1)
    """Longer queries are invalid calls."""
    num_replicas: int = Field(1, ge=1)
    """Actors that answer searches, each with encoder, caches and passages."""
    shard_actors: int = Field(0, ge=0)
    """Actors among which the vectors are split; 0: every replica holds all of them, memory-mapped and shared on one
    machine.
    """
    num_gpus: int = Field(0, ge=0)
    """GPUs of every actor that holds vectors; its shards are spread over them in float16. 0: CPUs search."""
    num_threads: int = Field(0, ge=0)
    """CPU threads with which one actor encodes and searches; 0: all cores that it may use."""
    batch_wait_ms: float = Field(2.0, ge=0)
    """How long a search waits for others to share its batch."""
    timeout_s: float = Field(60.0, gt=0)
    """Deadline of one search, waiting and retries included."""

    @model_validator(mode="after")
    def _default_allowed(self) -> RetrievalConfig:
        if self.num_passages > self.max_passages:
            raise ValueError(
                f"retrieval.num_passages is {self.num_passages}, more than retrieval.max_passages {self.max_passages}"
            )
        return self

    @model_validator(mode="after")
    def _one_source(self) -> RetrievalConfig:
        if self.index and self.url:
            raise ValueError(
                f"retrieval.index is {self.index!r} and retrieval.url is {self.url!r}; a run searches one of them"
            )
        try:
            address = urlsplit(self.url)
            is_right = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
        except ValueError:  # of a port that is not a number, and of half an IPv6 address
            is_right = False
        if self.url and not is_right:
            raise ValueError(f"retrieval.url is {self.url!r}; an address is of the form http://host:8000")
        return self


class ServiceConfig(RetrievalConfig):
    """A retrieval service; `num_passages` and the `max_` settings hold for its callers."""

    num_passages: int = Field(10, ge=1)
    """Passages per query when a request names no number (MemSearcher's server: 10)."""
    max_passages: int = Field(100, ge=1)
    """The most passages that a query may ask for."""
    max_query_chars: int = Field(4096, ge=1)
    """Longer queries are refused."""
    max_queries: int = Field(512, ge=1)
    """The most queries of one request."""
    max_body_bytes: int = Field(8 * 2**20, ge=1)
    """The largest request body."""
    max_in_flight: int = Field(64, ge=1)
    """Requests that one replica works on at the same time; further ones get 503 at once."""

    @model_validator(mode="after")
    def _can_serve(self) -> ServiceConfig:
        if not self.index:
            raise ValueError("index is empty; a retrieval service searches an index folder")
        if self.shard_actors:
            raise ValueError(
                f"shard_actors is {self.shard_actors}; every replica of a service holds all vectors, so it must be 0"
            )
        return self


class FaissConfig(Section):
    """Says how vectors are kept and searched."""

    factory: str = "Flat"
    """faiss factory string: Flat, SQfp16 (half the memory), IVF4096,Flat, IVF65536_HNSW32,PQ64, HNSW32, ..."""
    search: str = ""
    """faiss search parameters, e.g. nprobe=64 or efSearch=128."""
    train_passages: int = Field(1_000_000, ge=1)
    """Passages drawn at random to train the kinds that need it (IVF, PQ, SQ8)."""
    shard_passages: int = Field(4_000_000, ge=1)
    """Passages in one faiss file, a shard. The build holds one shard in memory; actors on several nodes can share the
    shards of a search.
    """
    graph_threads: int = Field(1, ge=1)
    """Threads that add to an HNSW graph. With more than one the graph and its checksum differ from build to build."""


class IndexConfig(Section):
    """An index to be built: `mempipe index build`."""

    FREE = ("output", "max_bad_rows", "num_encoders", "ray_address")

    corpus: list[str]
    """Files or folders of passages (.jsonl, .jsonl.gz, .parquet), paths or fsspec URLs; or texts that passages are made
    of: .txt, .md, .html, .pdf, a folder of them, .csv, .json, wikipedia-leads, python-reference (docs/data.md).
    """
    output: str
    """The folder of the finished index; all nodes of the cluster must see it."""
    encoder: dict[str, Any] | None = {"kind": "hashing"}
    """kind (hashing, huggingface, sentence_transformers) and its settings, path above all; null: no vectors."""
    lexical: bool = False
    """A BM25 index, for lexical search or, in addition to vectors, for their fusion."""
    faiss: FaissConfig = FaissConfig()
    passage_words: int = Field(100, ge=10)
    """Words of a passage that is cut from a text; rows are passages already."""
    segment_passages: int = Field(16_384, ge=1)
    """Passages read, encoded and written together: the most that a killed build loses, for each encoder."""
    num_encoders: int = Field(0, ge=0)
    """Actors that encode; 0: one for every GPU of the cluster, or for every two CPUs."""
    max_bad_rows: int = Field(0, ge=0)
    """Rows that may be skipped because they are not passages (not JSON, no text, a repeated id, ...);
    one more is an error.
    """
    max_line_bytes: int = Field(2**20, ge=1)
    """A longer line of jsonl is a bad row."""
    seed: int = Field(1, ge=0)
    """Seed of the passages drawn for training and for measuring recall."""
    ray_address: str = ""
    """A running cluster; empty: the job's own cluster, or a local one."""

    @field_validator("corpus", mode="before")
    @classmethod
    def _one_is_a_list(cls, corpus: object) -> object:
        return [corpus] if isinstance(corpus, str) else corpus

    @model_validator(mode="after")
    def _something_to_search(self) -> IndexConfig:
        if self.encoder is None and not self.lexical:
            raise ValueError("encoder is null and lexical is false: there would be nothing to search; set one of them")
        return self
