"""From a corpus to an index folder: `mempipe index build`."""

from __future__ import annotations

import fcntl
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from mempipe.actors.cluster import connected
from mempipe.data.corpus import CorpusFile, corpus_files, read_segments
from mempipe.data.plain_text import describe_source, is_plain_text, skipped_files, write_corpus
from mempipe.data.rows import BadRows
from mempipe.data.text_files import SUFFIXES
from mempipe.progress import Progress, say
from mempipe.retrieval.build import IndexBuild, lock_output
from mempipe.retrieval.config import IndexConfig
from mempipe.retrieval.encoders import make_encoder
from mempipe.retrieval.faiss_build import make_index
from mempipe.retrieval.manifest import Manifest
from mempipe.streams.segments import stream_segments

_OURS = re.compile(r"lock|\.?\d+\.parquet.*")


def main(config: IndexConfig) -> Manifest:
    """Builds the index, or continues with a build that was interrupted.
    Raises ConfigError, before anything starts where it can.
    """
    with corpus_of(config) as files:
        encoder = make_encoder(config.encoder) if config.encoder else None
        if encoder:
            make_index(config.faiss, encoder.dimension)  # refuses a wrong factory now, not after hours of encoding
        build = IndexBuild(config, files, texts=texts_of(config))
        if build.changed_texts:
            say(f"{build.changed_texts} has changed since the build that was interrupted: its passages are read again")
        say("connecting to Ray, starting encoders")
        with connected(config.ray_address, name="index"), Progress("passages", total=None) as progress:
            if known := sum(segment.count for segment in build.segments()):
                progress.note(f"continuing with {build.folder}, where {known} passages were read")
            for count in stream_segments(config, files, folder=build.folder):
                progress.advance(count)
        return build.finish(encoder, note=say)


@contextmanager
def corpus_of(config: IndexConfig) -> Iterator[list[CorpusFile]]:
    """Yields the files to read. Passages of texts are written to a folder next to the index, which is removed after the
    block, however it ends: the next build makes the same passages again.

    Raises ConfigError for texts that cannot be read, and while another process builds this output of texts.
    """
    made = _made_of_texts(config)
    with ExitStack() as stack:
        if any(map(is_plain_text, config.corpus)):
            _remove_abandoned(made.parent)
            made.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_output(made, config.output))
            stack.callback(shutil.rmtree, made, ignore_errors=True)
        yield _files(config, made)


def texts_of(config: IndexConfig) -> dict[str, str]:
    """Returns the sources of the corpus that are texts, by the file that `corpus_of` writes their passages to."""
    made = _made_of_texts(config)
    return {str(made / _file_name(i)): str(text) for i, text in enumerate(config.corpus) if is_plain_text(text)}


def _made_of_texts(config: IndexConfig) -> Path:
    """Returns the folder for the passages of texts."""
    output = Path(config.output)
    return output.parent / f".{output.name}.corpus"


def _file_name(number: int) -> str:
    return f"{number}.parquet"


def _remove_abandoned(folder: Path) -> None:
    """Removes the passages of texts that builds in `folder` left behind when they were killed."""
    for file in folder.glob(".*.corpus/lock"):
        with suppress(OSError), file.open() as lock:  # a living build holds it, or the file system has no locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if all(_OURS.fullmatch(each.name) for each in file.parent.iterdir()):
                shutil.rmtree(file.parent, ignore_errors=True)


def _files(config: IndexConfig, made: Path) -> list[CorpusFile]:
    """Returns the files to read, after those of texts were written to `made`; prints the first passage."""
    files: list[CorpusFile] = []
    bad = BadRows(config.max_bad_rows)  # of tables; those of other files are counted after them, when they are read
    for number, source in enumerate(config.corpus):
        if is_plain_text(source):
            say(f"making passages of at most {config.passage_words} words: {describe_source(source)}")
            if others := skipped_files(source):
                ends = ", ".join(f"{number} {end}" for end, number in others.items())
                say(f"skipped files, since texts end in {', '.join(SUFFIXES)}: {ends}")
            before = Counter(bad.counts)
            file = write_corpus(source, made / _file_name(number), words=config.passage_words, bad=bad)
            skipped = tuple((Counter(bad.counts) - before).items())
            files += [replace(each, made_of=str(source), skipped=skipped) for each in corpus_files(file)]
        else:
            files += corpus_files(source)
    if bad.total:
        say(f"bad rows of tables that are passed over: {bad.total}; the first is {bad.examples[0]}")
    limits = {"max_bad_rows": config.max_bad_rows, "max_line_bytes": config.max_line_bytes}
    for batch, _ in islice(read_segments(files, size=1, **limits), 1):
        first = batch.to_pylist()[0]
        say(f"the first passage is {first['id']!r}, titled {first['title']!r}: {first['text'][:80]!r}")
    return files
