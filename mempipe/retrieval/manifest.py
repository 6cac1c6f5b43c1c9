"""The folder of an index: its manifest, and checks that the files are still what it says.

    manifest.json     counts, encoder, faiss kind, row range of every partition; size and checksum of every file
    passages/         id, title, text and partition of every passage, as Arrow files in row order
    vectors/          faiss indexes, one a shard, in row order
    lexical/          a BM25 index

`vectors` or `lexical` may be absent, not both. Files may lie elsewhere: an adopted index names other people's by their
absolute path. The hash of the manifest is the snapshot that every search result carries.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from mempipe.settings import ConfigError
from mempipe.storage.checksums import FileRecord, changed_files, verify_once
from mempipe.storage.json_files import parse_object, without_checksum, write_object

FORMAT = 2
MANIFEST = "manifest.json"
EXHAUSTIVE = re.compile(r"Flat|SQ\w+|PQ\d+(x\d+)?|Index(Flat|ScalarQuantizer|PQ)(IP)?")
"""Kinds of index that compare every vector: faiss' factory strings, and its classes in an adopted index."""
GPU_SCRATCH_BYTES = 2**28
"""Scratch memory of one shard on a GPU; faiss takes 1.5 GB unless told."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PassageFiles(_Part):
    kind: Literal["arrow", "jsonl"]
    files: list[str]
    """arrow: in row order; jsonl: the corpus and the offsets of its lines."""
    count: int
    partitions: dict[str, tuple[int, int]] = {}
    """Name of a partition: its rows, from the first up to, not including, the second."""
    skipped: dict[str, int] = {}
    """Rows of the corpus that were skipped, by reason."""


class VectorFiles(_Part):
    encoder: dict[str, Any]
    """Arguments of `mempipe.retrieval.encoders.make_encoder`."""
    dimension: int
    factory: str
    """faiss' name of the index's kind."""
    search: str = ""
    """faiss search parameters, e.g. "nprobe=64"."""
    files: list[str]
    """Shards in row order."""
    recall_at_10: float | None = None
    """For an index that is not exact: the share of the 10 nearest passages that it finds, measured at build time."""
    num_recall_queries: int = 0

    @field_validator("encoder")
    @classmethod
    def _first_word_rules(cls, encoder: dict[str, Any]) -> dict[str, Any]:
        """Returns the encoder with the rules that words were found by before an index named them."""
        return {"word_rules": 1, **encoder} if encoder.get("kind") == "hashing" else encoder


class LexicalFiles(_Part):
    spec: dict[str, Any]
    folder: str


class Manifest(_Part):
    format: int = FORMAT
    passages: PassageFiles
    vectors: VectorFiles | None = None
    lexical: LexicalFiles | None = None
    files: dict[str, FileRecord]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_object(folder / MANIFEST, manifest.model_dump())


def open_manifest(folder: Path) -> tuple[Manifest, str]:
    """Does what `read_manifest` does, and compares the files with the manifest's checksums unless that was done since
    they last changed (`mempipe.storage.checksums`).

    Raises ConfigError for a file that was changed, so that no byte of another one becomes an answer.
    """
    manifest, snapshot = read_manifest(folder)
    verify_once(folder, manifest.files, refuse=lambda name: _changed(folder, name))
    return manifest, snapshot


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """Returns the manifest and its hash. Raises ConfigError unless all files are there and as long as it says."""
    try:
        text = (folder / MANIFEST).read_bytes()
        values = parse_object(text)
    except OSError as error:
        raise ConfigError(
            f"retrieval.index {str(folder)!r} holds no index: {MANIFEST}: {error.strerror}",
            absent="" if folder.exists() else str(folder),
        ) from error
    except ValueError as error:
        raise ConfigError(f"index {folder}: {MANIFEST} is truncated or changed: {error}; build it again") from error
    found = values.get("format")
    if found != FORMAT:
        raise ConfigError(f"index {folder} has format {found!r}, this version reads {FORMAT}; build it again")
    try:
        manifest = Manifest.model_validate(without_checksum(values))
    except ValidationError as error:
        problems = ", ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(
            f"index {folder}: {MANIFEST} is not what this version writes ({problems}); build it again"
        ) from error
    except ValueError as error:
        raise ConfigError(f"index {folder}: {MANIFEST} is damaged: {error}; build it again") from error
    if manifest.vectors is None and manifest.lexical is None:
        raise ConfigError(f"index {folder}: {MANIFEST} names neither vectors nor a lexical index; build it again")
    for name, record in manifest.files.items():
        if not (folder / name).is_file():
            raise ConfigError(f"index {folder} lacks {name}; build it again")
        if (size := (folder / name).stat().st_size) != record.bytes:
            raise ConfigError(
                f"index {folder}: {name} has {size} bytes, its manifest says {record.bytes}; build it again"
            )
    return manifest, hashlib.sha256(text).hexdigest()[:16]


def index_sha256(path: str) -> str:
    """Returns the hash of an index's manifest, which holds that of every file; "" without an index. Raises ConfigError
    as `read_manifest` does."""
    return read_manifest(Path(path))[1] if path else ""


def check_index(folder: str | Path, *, mode: str = "auto", shard_actors: int = 0, num_gpus: int = 0) -> None:
    """Raises ConfigError unless the files of an index match its manifest, and can be searched with these settings.

    `num_gpus` are those of every actor that holds vectors. It reads the manifest only, and all files once after they
    changed (`open_manifest`).
    """
    folder = Path(folder)
    manifest, _ = open_manifest(folder)
    search_mode(mode, manifest, folder)
    files = vector_files(manifest, folder, part=0, num_parts=max(shard_actors, 1))
    if num_gpus > max(len(files), 1):
        raise ConfigError(
            f"retrieval.num_gpus is {num_gpus}, but an actor holds {len(files)} shards of index {folder}, each on one "
            "GPU; lower it, or build the index with a smaller faiss.shard_passages"
        )


def search_mode(wanted: str, manifest: Manifest, folder: Path) -> str:
    """Returns the wanted mode, or the one that "auto" stands for.

    Raises ConfigError when the index lacks what it needs.
    """
    natural = "lexical" if manifest.vectors is None else "dense" if manifest.lexical is None else "fusion"
    if wanted not in ("auto", natural) and natural != "fusion":
        raise ConfigError(
            f"retrieval.mode is {wanted!r}, but index {folder} was built for {natural!r} alone; build it with both"
        )
    return natural if wanted == "auto" else wanted


def vector_files(manifest: Manifest, folder: Path, *, part: int, num_parts: int) -> list[Path]:
    """Returns the shards of one part of the vectors; parts follow one another in row order.

    Raises ConfigError when there are fewer shards than parts.
    """
    files = manifest.vectors.files if manifest.vectors else []
    if num_parts > max(len(files), 1):
        raise ConfigError(
            f"retrieval.shard_actors is {num_parts}, but index {folder} has {len(files)} shards; "
            "lower it, or build the index with a smaller faiss.shard_passages"
        )
    first, last = (len(files) * i // num_parts for i in (part, part + 1))
    return [folder / name for name in files[first:last]]


def gpu_bytes(folder: str | Path, *, num_parts: int, num_gpus: int) -> int | None:
    """Returns the float16 copies and the scratch memory on the fullest GPU, when each of `num_parts` actors spreads its
    shards over `num_gpus` (`mempipe.retrieval.vectors.open_shards`).

    None where it cannot be known from here: the index is not there, or does not compare every vector.
    """
    folder = Path(folder)
    try:
        manifest, _ = read_manifest(folder)
        parts = [vector_files(manifest, folder, part=i, num_parts=num_parts) for i in range(num_parts)]
    except ConfigError:
        return None
    if manifest.vectors is None or not EXHAUSTIVE.fullmatch(manifest.vectors.factory):
        return None
    sizes = {folder / name: manifest.files[name].bytes for name in manifest.vectors.files}
    copies = 2 * manifest.passages.count * manifest.vectors.dimension
    on_gpus = [part[gpu::num_gpus] for part in parts for gpu in range(num_gpus)]
    return max(
        copies * sum(sizes[file] for file in files) // sum(sizes.values()) + GPU_SCRATCH_BYTES * len(files)
        for files in on_gpus
    )


def verify(folder: str | Path) -> None:
    """Compares the files with the manifest's checksums, whatever a stamp says. Raises ConfigError for a file that was
    changed.
    """
    folder = Path(folder)
    manifest, _ = read_manifest(folder)
    if changed := changed_files(folder, manifest.files):
        raise _changed(folder, changed[0])


def _changed(folder: Path, name: str) -> ConfigError:
    return ConfigError(f"index {folder}: {name} was changed since it was built; build it again")
