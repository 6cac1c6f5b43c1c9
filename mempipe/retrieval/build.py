"""Builds an index folder from a corpus in steps: read, encode, assemble, finish. A build that was killed resumes where
it stopped.

    .NAME.building/                 becomes NAME in the end, in one rename
        passages/00000000.arrow     a segment: `segment_passages` passages, in the order of the corpus
        vectors/00000.faiss         a shard: the vectors of some segments
        lexical/                    a BM25 index
        unfinished/                 settings, how far reading came, checksums, vectors that are in no shard yet
    .NAME.finished/                 unfinished/ during the last steps, and what a kill leaves of it

Every file appears by a rename when it is whole and depends on corpus and settings alone, so an interrupted build ends
with the same bytes as an undisturbed one. Its checksum is taken before the rename and compared before it is used by a
later step and at the end, so that a byte which changes meanwhile is noticed. Memory does not grow with the corpus,
except for 16 bytes per passage (ids seen), one shard of vectors, and the BM25 index. This module needs no Ray:
`mempipe.streams.segments` runs `read` and `encode_segment` as a stream.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import faiss
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ValidationError

from mempipe.beacons import reached
from mempipe.data.corpus import PASSAGE_COLUMNS, CorpusFile, CorpusPosition, SeenIds, read_segments
from mempipe.provenance import changed_settings
from mempipe.retrieval.bm25 import LexicalIndex
from mempipe.retrieval.bm25_build import build_lexical
from mempipe.retrieval.config import IndexConfig
from mempipe.retrieval.encoders import Encoder, HashingEncoder, Vectors
from mempipe.retrieval.faiss_build import (
    adding_threads,
    blocks_of,
    exact_nearest,
    faiss_faults,
    make_index,
    train_index,
    write_faiss,
)
from mempipe.retrieval.manifest import (
    EXHAUSTIVE,
    MANIFEST,
    LexicalFiles,
    Manifest,
    PassageFiles,
    VectorFiles,
    read_manifest,
    write_manifest,
)
from mempipe.retrieval.passages import read_batches
from mempipe.retrieval.vectors import (
    Shard,
    Shards,
)
from mempipe.settings import ConfigError
from mempipe.storage.checksums import NUM_THREADS, FileRecord, record_of
from mempipe.storage.files import check_new_folder, sync, whole_file, whole_folder
from mempipe.storage.json_files import read_object, write_object
from mempipe.text import replace_surrogates
from mempipe.types import Passage

PASSAGES, VECTORS, LEXICAL, UNFINISHED = "passages", "vectors", "lexical", "unfinished"
NUM_RECALL_QUERIES = 256
RECALL_AT = 10
EQUAL = 1e-5
"""Part of a score by which rounding may change it."""
TRAINED = f"{UNFINISHED}/trained.faiss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Passages of the corpus that follow one another; `partitions` are the names and lengths of their runs."""

    number: int
    count: int
    partitions: list[tuple[str, int]]
    position: CorpusPosition
    """Position at which reading continues after it."""
    file: FileRecord


class IndexBuild:
    """One unfinished index."""

    def __init__(
        self,
        config: IndexConfig,
        files: Sequence[CorpusFile],
        *,
        lock: bool = True,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Continues the unfinished build of the same settings and corpus, or begins one. The process in charge takes
        the `lock` and compares settings and corpus, which it reads through; others work for it. `texts` names what the
        passages of a file were made of, by the file's url. If such texts have changed, and the build has only read
        their passages, it begins again; `changed_texts` names them.

        Raises ConfigError when the output holds something, when an unfinished build has other settings or another
        corpus or is in flight, and when faiss does not know the factory.
        """
        self._config = config
        self._files = list(files)
        self._texts = texts or {}
        self.changed_texts = ""
        self._output = Path(config.output)
        self.folder = self._output.parent / f".{self._output.name}.building"
        self._finished = self._output.parent / f".{self._output.name}.finished"
        if not self.folder.exists() and self._finished.exists():  # left by a kill after the index got its name
            shutil.rmtree(self._finished)
        check_new_folder(self._output, setting="output")
        # In the last steps the rest of the build is already next to the index.
        self._unfinished = self._finished if self._finished.exists() else self.folder / UNFINISHED
        try:
            self._unfinished.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output is {config.output!r}: cannot make {self.folder}: {error.strerror}") from error
        if lock:
            self._lock = lock_output(self._unfinished, config.output)
            self._check_settings()
            self._check_corpus(begins=True)
        for name in (PASSAGES, VECTORS):
            (self.folder / name).mkdir(exist_ok=True)
        for name in ("segments", "encoded"):
            (self._unfinished / name).mkdir(exist_ok=True)

    def read(self) -> Iterator[Segment]:
        """Yields all segments: first those that were read before, then the rest of the corpus.

        Raises ConfigError as `read_segments` does, for an empty corpus, and when the passages of a partition do not
        follow one another.
        """
        of_tables = sum((Counter(dict(file.skipped)) for file in self._files), Counter[str]())
        seen, known, position = SeenIds(), _Partitions(), CorpusPosition(counts=dict(of_tables))
        number = 0
        for segment in self.segments():
            self._check(segment_name(segment.number), segment.file)
            for batch in read_batches(segment_file(self.folder, segment.number)):
                seen.add(batch.column("id"))
            known.extend(segment)
            self._check_searchable(known)
            number, position = segment.number + 1, segment.position
            yield segment
        config = self._config
        if (skipped := sum(position.counts.values())) > config.max_bad_rows:
            raise ConfigError(
                f"max_bad_rows is {config.max_bad_rows}, but {skipped} bad rows were passed over before; raise it, or "
                f"{self._advice}"
            )
        batches = read_segments(
            self._files,
            size=config.segment_passages,
            start=position,
            seen=seen,
            max_bad_rows=config.max_bad_rows,
            max_line_bytes=config.max_line_bytes,
        )
        for batch, position in batches:
            segment = self.write_segment(number, batch, position)
            known.extend(segment)
            self._check_searchable(known)
            number += 1
            yield segment
        if not number:
            raise ConfigError(f"corpus {', '.join(config.corpus)} holds no passage; an index needs at least one")

    def _check_searchable(self, partitions: _Partitions) -> None:
        """Raises ConfigError for partitions in an index whose rows cannot be searched separately."""
        factory = self._config.faiss.factory
        if partitions.rows and self._config.encoder is not None and not EXHAUSTIVE.fullmatch(factory):
            raise ConfigError(
                f"faiss.factory is {factory!r}, but a corpus with partitions needs an index whose "
                "rows can be searched separately: Flat, SQ or PQ"
            )

    def segments(self) -> Iterator[Segment]:
        """Yields the segments that were read so far."""
        for number in itertools.count():
            file = self._segment_record(number)
            if not file.exists():
                return
            values = read_object(file, advice=self._advice)
            try:
                runs = [(str(name), int(count)) for name, count in values["partitions"]]
                segment = Segment(
                    number=number,
                    count=int(values["count"]),
                    partitions=runs,
                    position=CorpusPosition(**values["position"]),
                    file=FileRecord.model_validate(values["file"]),
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{file} is damaged: it does not describe a segment; {self._advice}") from error
            yield segment

    def write_segment(self, number: int, batch: pa.RecordBatch, position: CorpusPosition) -> Segment:
        runs = [(name, sum(1 for _ in run)) for name, run in itertools.groupby(batch.column("partition").to_pylist())]
        with whole_file(segment_file(self.folder, number)) as partial:
            with pa.ipc.new_file(str(partial), PASSAGE_COLUMNS) as writer:
                writer.write_batch(batch)
            record = record_of(partial)
        reached("index.read", segment=number)
        segment = Segment(number=number, count=len(batch), partitions=runs, position=position, file=record)
        write_object(self._segment_record(number), asdict(segment) | {"file": record.model_dump()})
        return segment

    def needs_vectors(self, segment: Segment) -> bool:
        """Returns whether the segment is still to be encoded."""
        if self._config.encoder is None or (self.folder / MANIFEST).exists():
            return False
        shard = shard_name(segment.number // self._shard_segments)
        return not encoded_file(self.folder, segment.number).exists() and not self._has(shard)

    def finish(self, encoder: Encoder | None, note: Callable[[str], None] = lambda _: None) -> Manifest:
        """Assembles the read and encoded parts, writes the manifest and moves the index to its place; tells `note` each
        step.

        Raises ConfigError when faiss cannot make or train such an index of these vectors.
        """
        if not (self.folder / MANIFEST).exists():
            segments = list(self.segments())
            vectors = self._assemble(segments, encoder, note) if encoder else None
            lexical = self._build_lexical(segments, note) if self._config.lexical else None
            note("checksums")
            reached("index.assembled")
            manifest = self._manifest(segments, vectors, lexical)
            self._check_corpus()  # once more: it may have been edited while it was read
            write_manifest(self.folder, manifest)
        for partial in self.folder.rglob(".*.partial"):  # of processes that were killed
            partial.unlink()
        # Settings and corpus can be compared until the index has its name, whenever a kill comes.
        if self._unfinished != self._finished:
            self._unfinished.rename(self._finished)
            self._unfinished = self._finished
        reached("index.move")
        self.folder.replace(self._output)
        sync(self._output.parent)
        shutil.rmtree(self._finished)
        return read_manifest(self._output)[0]

    def discard(self) -> None:
        """Deletes the unfinished build."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self._finished, ignore_errors=True)

    @property
    def _advice(self) -> str:
        return f"remove {self.folder}, and build the index again"

    def _check_settings(self) -> None:
        """Keeps the settings in the folder. Raises ConfigError when it was begun with others, unless they are those by
        which a build can be mended without reading or encoding again what it has.
        """
        file = self._unfinished / "settings.json"
        if not file.exists():
            if any((self.folder / name).exists() for name in (MANIFEST, PASSAGES)):
                raise ConfigError(
                    f"{self.folder} is an unfinished build that lacks {file}, so nobody can tell what it is of; "
                    f"{self._advice}"
                )
            self._keep_settings(file)
        changed = changed_settings(read_object(file, advice=self._advice), self._config)
        if changed and all(self._may_change(*each) for each in changed):
            if any(name.startswith("faiss.") for name, *_ in changed):
                for made in (self.folder / TRAINED, self._record(TRAINED)):
                    made.unlink(missing_ok=True)
            self._keep_settings(file)
            return
        for name, before, now in changed:
            raise ConfigError(
                f"{self.folder} is an unfinished build with {name} {before!r}, now it is {now!r}; remove that folder, "
                "or continue with its settings"
            )

    def _may_change(self, name: str, before: Any, now: Any) -> bool:
        """Returns whether nothing that was made depends on the setting."""
        if name == "max_line_bytes":
            return now > before and not any("too_long" in segment.position.counts for segment in self.segments())
        return name.startswith("faiss.") and not any((self.folder / VECTORS).glob("*.faiss"))

    def _keep_settings(self, file: Path) -> None:
        write_object(file, self._config.model_dump(mode="json", exclude={*IndexConfig.FREE}))

    def _check_corpus(self, *, begins: bool = False) -> None:
        """Keeps the fingerprints of the corpus in the folder. Raises ConfigError when they were others before, unless
        the build `begins` and reads changed texts again."""
        file = self._unfinished / "corpus.json"
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            prints = list(threads.map(lambda file: file.fingerprint(), self._files))
        files = [[each.url, each.size, found] for each, found in zip(self._files, prints, strict=True)]
        if not file.exists():
            if any((self._unfinished / "segments").glob("*")):
                raise ConfigError(f"{file} is missing, so the corpus of the build is unknown; {self._advice}")
            write_object(file, {"files": files})
        known = read_object(file, advice=self._advice).get("files")
        if known != files:
            listed = known if isinstance(known, list) else []
            differ = [str(each[0]) for each in files if each not in listed]
            changed = differ[0] if differ else "a file that is not listed any more"
            if begins and differ and self._texts.keys() >= {*differ} and self._has_only_passages():
                self.changed_texts = ", ".join(self._texts[each] for each in differ)
                shutil.rmtree(self._unfinished / "segments", ignore_errors=True)
                shutil.rmtree(self.folder / PASSAGES, ignore_errors=True)
                write_object(file, {"files": files})
                return
            raise ConfigError(
                f"{self.folder} is an unfinished build of another corpus ({self._texts.get(changed, changed)} has "
                f"changed); {self._advice}, or bring the corpus back"
            )

    def _has_only_passages(self) -> bool:
        """Returns whether nothing was made of the passages yet: no vector, no word index, no manifest."""
        made = [self.folder / name for name in (VECTORS, LEXICAL, MANIFEST)]
        made += [self._unfinished / name for name in ("encoded", "checksums")]
        return not any(any(path.iterdir()) if path.is_dir() else path.exists() for path in made)

    @property
    def _shard_segments(self) -> int:
        """Returns the number of segments in one shard."""
        return max(self._config.faiss.shard_passages // self._config.segment_passages, 1)

    @contextmanager
    def _file(self, name: str) -> Iterator[Path]:
        """Yields the path to write a file of the build to, as `whole_file` does, and keeps its checksum."""
        with whole_file(self.folder / name) as partial:
            yield partial
            self._note(name, partial)

    def _note(self, name: str, file: Path) -> None:
        """Keeps the checksum of a file that will be called `name`."""
        write_object(self._record(name), record_of(file).model_dump())

    def _has(self, name: str) -> bool:
        """Returns whether the file was written whole."""
        return (self.folder / name).exists() and self._record(name).exists()

    def _kept(self, name: str) -> FileRecord:
        """Returns the checksum that was kept. Raises ConfigError when it is damaged."""
        try:
            return FileRecord.model_validate(read_object(self._record(name), advice=self._advice))
        except ValidationError as error:
            raise ConfigError(f"{self._record(name)} is damaged: it is not a checksum; {self._advice}") from error

    def _check(self, name: str, kept: FileRecord) -> FileRecord:
        """Returns the kept checksum of a file. Raises ConfigError unless the file is still that."""
        try:
            found = record_of(self.folder / name)
        except OSError as error:
            raise ConfigError(f"{self.folder / name} cannot be read: {error.strerror}; {self._advice}") from error
        if found != kept:
            raise ConfigError(f"{self.folder / name} was changed since the build wrote it; {self._advice}")
        return kept

    def _record(self, name: str) -> Path:
        return self._unfinished / "checksums" / f"{name.replace('/', '-')}.json"

    def _segment_record(self, number: int) -> Path:
        return self._unfinished / "segments" / f"{number:08d}.json"

    def _assemble(self, segments: Sequence[Segment], encoder: Encoder, note: Callable[[str], None]) -> VectorFiles:
        config = self._config.faiss
        for segment in segments:
            if encoded_file(self.folder, segment.number).exists():
                self._check_encoded(segment)
        template = self._template(segments, encoder.dimension, note)
        exhaustive = isinstance(template, faiss.IndexFlatCodes)
        shards = [segments[i : i + self._shard_segments] for i in range(0, len(segments), self._shard_segments)]
        for number, members in enumerate(shards):
            if not self._has(shard_name(number)):
                note(f"shard {number + 1} of {len(shards)}")
                with faiss_faults(config), adding_threads(config.factory, config.graph_threads):
                    index = faiss.clone_index(template)
                    for segment in members:
                        for block in blocks_of(self._encoded(segment)):
                            index.add(block)
                with self._file(shard_name(number)) as partial:
                    write_faiss(index, partial)
            if exhaustive:  # nothing needs them any more
                for segment in members:
                    encoded_file(self.folder, segment.number).unlink(missing_ok=True)
        recall: dict[str, Any] = {} if exhaustive else self._recall(segments, note)
        return VectorFiles(
            encoder=encoder.spec(),
            dimension=encoder.dimension,
            factory=config.factory,
            search=config.search,
            files=[shard_name(number) for number in range(len(shards))],
            **recall,
        )

    def _template(self, segments: Sequence[Segment], dimension: int, note: Callable[[str], None]) -> Any:
        """Returns an empty index, trained if its kind needs that. Every shard begins as a copy of it."""
        file = self.folder / TRAINED
        if self._has(TRAINED):
            self._check(TRAINED, self._kept(TRAINED))
            return faiss.read_index(str(file))
        index = make_index(self._config.faiss, dimension)
        if not index.is_trained:
            sample = self._sample(segments, self._config.faiss.train_passages)
            note(f"training {self._config.faiss.factory} on {len(sample)} passages")
            with (
                faiss_faults(self._config.faiss),
                adding_threads(self._config.faiss.factory, self._config.faiss.graph_threads),
            ):
                train_index(index, sample)
        with self._file(TRAINED) as partial:
            write_faiss(index, partial)
        return faiss.read_index(str(file))

    def _recall(self, segments: Sequence[Segment], note: Callable[[str], None]) -> dict[str, Any]:
        """Returns the share of the 10 nearest neighbours that the index finds for passages drawn at random; none is its
        own neighbour. A passage that is as near as the tenth counts too, since equal texts have equal vectors.
        """
        file = self._unfinished / "recall.json"
        if not file.exists():
            note(f"measuring recall@{RECALL_AT} against an exact search")
            rows = self._rows(segments, NUM_RECALL_QUERIES)
            queries = self._gather(segments, rows)
            near = exact_nearest(
                queries, (block for s in segments for block in blocks_of(self._encoded(s))), RECALL_AT + 1
            )
            shards = [
                Shard(path, search=self._config.faiss.search)
                for path in sorted((self.folder / VECTORS).glob("*.faiss"))
            ]
            found = [answered for answered, _ in Shards(shards).search(queries, RECALL_AT + 1)]
            answers = np.unique(np.concatenate(found))
            vectors = self._gather(segments, answers)
            hits = total = 0
            for row, query, (exact, scores), answered in zip(rows.tolist(), queries, near, found, strict=True):
                wanted = scores[exact != row][:RECALL_AT].tolist()
                others = vectors[np.searchsorted(answers, answered[answered != row])] @ query
                total += len(wanted)
                if wanted:
                    hits += min(int(np.sum(others >= wanted[-1] - EQUAL * max(abs(wanted[-1]), 1))), len(wanted))
            values = {"recall_at_10": round(hits / max(total, 1), 4), "num_recall_queries": len(rows)}
            write_object(file, values)
        return read_object(file, advice="remove it, and the same command measures again")

    def _rows(self, segments: Sequence[Segment], count: int) -> npt.NDArray[np.int64]:
        """Draws distinct rows with the seed and returns them in ascending order."""
        total = sum(segment.count for segment in segments)
        return np.sort(np.random.default_rng(self._config.seed).choice(total, size=min(count, total), replace=False))

    def _sample(self, segments: Sequence[Segment], count: int) -> Vectors:
        return self._gather(segments, self._rows(segments, count))

    def _gather(self, segments: Sequence[Segment], rows: npt.NDArray[np.int64]) -> Vectors:
        """Returns the vectors of ascending `rows`."""
        first, parts = 0, []
        for segment in segments:
            inside = rows[(rows >= first) & (rows < first + segment.count)] - first
            if len(inside):
                parts.append(self._encoded(segment)[inside])
            first += segment.count
        return np.concatenate(parts)

    def _encoded(self, segment: Segment) -> Vectors:
        return _read_vectors(encoded_file(self.folder, segment.number)).reshape(segment.count, -1)

    def _check_encoded(self, segment: Segment) -> None:
        """Raises ConfigError unless the vectors of the segment are those that were written."""
        file = encoded_file(self.folder, segment.number)
        if not file.stat().st_size or not _is_as_written(file):
            raise ConfigError(
                f"{file} was changed since the build wrote it; remove it, and the same command makes it again"
            )

    def _build_lexical(self, segments: Sequence[Segment], note: Callable[[str], None]) -> LexicalFiles:
        folder = self.folder / LEXICAL
        if not folder.exists():
            note("BM25 index")
            batches = (
                batch for segment in segments for batch in read_batches(segment_file(self.folder, segment.number))
            )
            with whole_folder(folder) as partial:
                build_lexical(batches, partial)
                for file in partial.iterdir():
                    self._note(f"{LEXICAL}/{file.name}", file)
        for file in folder.iterdir():
            self._check(f"{LEXICAL}/{file.name}", self._kept(f"{LEXICAL}/{file.name}"))
        return LexicalFiles(spec=LexicalIndex.open(folder).spec(), folder=LEXICAL)

    def _manifest(
        self, segments: Sequence[Segment], vectors: VectorFiles | None, lexical: LexicalFiles | None
    ) -> Manifest:
        partitions = _Partitions()
        for segment in segments:
            partitions.extend(segment)
        arrow = {segment_name(segment.number): segment.file for segment in segments}
        words = sorted(f"{LEXICAL}/{file.name}" for file in (self.folder / LEXICAL).iterdir()) if lexical else []
        kept = arrow | {name: self._kept(name) for name in [*(vectors.files if vectors else []), *words]}
        return Manifest(
            passages=PassageFiles(
                kind="arrow",
                files=list(arrow),
                count=sum(segment.count for segment in segments),
                partitions=partitions.rows,
                skipped=segments[-1].position.counts,
            ),
            vectors=vectors,
            lexical=lexical,
            files={name: self._check(name, record) for name, record in kept.items()},
        )


def build_index(
    passages: Iterable[Passage], folder: str | Path, *, encoder: Encoder | None = None, **settings: Any
) -> Manifest:
    """Builds the index of a few passages in this process, by default with a HashingEncoder; `settings` are those of
    IndexConfig.

    Passages of one partition must follow one another. The same passages and encoder give the same bytes. Raises
    ConfigError when a partition is torn apart, when there is no passage, and when `folder` holds anything; OSError when
    the disk is full. It leaves nothing then.
    """
    encoder = encoder or HashingEncoder()
    config = IndexConfig(corpus=[], output=str(folder), encoder=encoder.spec(), **settings)
    IndexBuild(config, []).discard()  # the rest of a killed build: its passages are unknown
    build = IndexBuild(config, [])
    try:
        known, remaining = _Partitions(), iter(passages)
        number = 0
        while batch := list(itertools.islice(remaining, config.segment_passages)):
            segment = build.write_segment(number, passages_to_batch(batch), CorpusPosition())
            known.extend(segment)
            encode_segment(build.folder, number, encoder)
            number += 1
        if not number:
            raise ConfigError("the corpus holds no passage; an index needs at least one")
        return build.finish(encoder)
    except BaseException:
        build.discard()
        raise


def encode_segment(folder: Path, number: int, encoder: Encoder) -> None:
    """Writes the vectors of one segment, float32 [count, dimension].

    Any number of processes may do so at the same time, each for its own segments.
    """
    passages = [Passage(**row) for batch in read_batches(segment_file(folder, number)) for row in batch.to_pylist()]
    reached("index.encode", segment=number)
    vectors = encoder.encode_passages(passages)
    assert vectors.shape == (len(passages), encoder.dimension), (
        f"{encoder.name} encoder made vectors of shape {vectors.shape}"
    )
    write_vectors(folder, number, vectors)


def write_vectors(folder: Path, number: int, vectors: Vectors) -> None:
    """Keeps the vectors of a segment until they are in a shard."""
    data = np.ascontiguousarray(vectors, dtype=np.float32)
    with whole_file(encoded_file(folder, number)) as partial, partial.open("wb") as opened:
        opened.write(data.data)
        opened.write(hashlib.sha256(data.data).digest())


def _read_vectors(file: Path) -> npt.NDArray[np.float32]:
    """Returns the numbers of a file of `write_vectors`, memory-mapped."""
    return np.memmap(file, dtype=np.uint8, mode="r")[: -hashlib.sha256().digest_size].view(np.float32)


def _is_as_written(file: Path) -> bool:
    content = np.memmap(file, dtype=np.uint8, mode="r")
    size = len(content) - hashlib.sha256().digest_size
    return size >= 0 and hashlib.sha256(content[:size].data).digest() == content[size:].tobytes()


def segment_name(number: int) -> str:
    """Returns a segment's file in the folder of the index."""
    return f"{PASSAGES}/{number:08d}.arrow"


def segment_file(folder: Path, number: int) -> Path:
    return folder / segment_name(number)


def shard_name(number: int) -> str:
    return f"{VECTORS}/{number:05d}.faiss"


def encoded_file(folder: Path, number: int) -> Path:
    return folder / UNFINISHED / "encoded" / f"{number:08d}.f32"


def passages_to_batch(passages: Sequence[Passage]) -> pa.RecordBatch:
    columns = [[replace_surrogates(getattr(passage, name)) for passage in passages] for name in PASSAGE_COLUMNS.names]
    return pa.record_batch(columns, schema=PASSAGE_COLUMNS)


class _Partitions:
    """Collects the row range of every partition, segment after segment."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[int, int]] = {}
        self._next_row = 0

    def extend(self, segment: Segment) -> None:
        for name, count in segment.partitions:
            if name:
                first, last = self.rows.get(name, (self._next_row, self._next_row))
                if last != self._next_row:
                    raise ConfigError(
                        f"passages of partition {name!r} do not follow one another; sort the corpus by partition"
                    )
                self.rows[name] = (first, last + count)
            self._next_row += count


def lock_output(folder: Path, output: str) -> IO[bytes]:
    """Locks a folder of the build of `output` for as long as the returned file is open; the system ends the lock when
    the process dies. Raises ConfigError while another process holds it."""
    file = (folder / "lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"output is {output!r}, which another process is building") from error
    except OSError:  # a file system without locks
        pass
    return file
