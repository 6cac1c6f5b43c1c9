"""Index to masked documents for MemTrain: `mempipe data memtrain`, `python -m jobs.build_memtrain`.

    count      entities of a sample of the corpus: which are common, which can be guessed     Ray Data, polars
    make       documents of pivots in random order, in parts, until there are enough          Ray Data
    finish     the first `num_held_out` in one file, the others in another, and a summary     pyarrow

The folder holds documents.parquet and held_out.parquet (`mempipe.masking.documents.MaskedDocument`), which `data.train`
and `data.validation` of a run take as they are, summary.json and, while it is built, parts/.
The same index, settings and finder give the same documents, whatever the number of workers and however often the build
was killed.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from mempipe.actors.cluster import connected
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.masking.documents import (
    REJECTIONS,
    CommonEntities,
    DocumentsConfig,
    common_entities,
)
from mempipe.masking.entities import make_finder
from mempipe.progress import Progress
from mempipe.provenance import changed_settings
from mempipe.retrieval.manifest import check_index, read_manifest
from mempipe.settings import ConfigError
from mempipe.storage.files import lock
from mempipe.storage.json_files import read_object, write_object
from mempipe.storage.parquet import check_parquet, parquet_writer, read_metadata, read_table
from mempipe.streams.documents import DOCUMENT_SCHEMA, REJECTED, stream_parts
from mempipe.text import check_mask

DOCUMENTS, HELD_OUT, SUMMARY, SETTINGS, PARTS, ENTITIES = (
    "documents.parquet",
    "held_out.parquet",
    "summary.json",
    "settings.json",
    "parts",
    "entities",
)
PASSAGES_AT_ONCE = 512
LEAST_ACCEPTED = 0.05
"""Share of the pivots that is expected to give a document, when fewer have so far."""
_NUMBERS = ("num_documents", "num_held_out")
_AGAIN = "make the documents again (mempipe data memtrain)"
_PART_ADVICE = "remove it, and the same command makes it again"


def main(config: DocumentsConfig) -> Path:
    """Builds the documents, or continues with a build that was interrupted; returns the folder.

    Raises ConfigError before anything starts for an index, a tokenizer, a mask or a finder that cannot work, a corpus
    with too few passages, and a folder of other settings; and when no pivot gives a document.
    """
    check_index(config.index)
    tokenizer = load_tokenizer(config.tokenizer)
    check_mask(config.mask, tokenizer.encode_text, tokenizer.decode)
    manifest, snapshot = read_manifest(Path(config.index))
    num_passages, least = manifest.passages.count, 1 + config.num_related + config.num_random
    if num_passages < least:
        raise ConfigError(
            f"index {config.index} holds {num_passages} passages; a document of num_related {config.num_related} and "
            f"num_random {config.num_random} needs {least}"
        )
    folder = Path(config.output) / config.name
    lock(folder)
    _check_same(folder / SETTINGS, config, snapshot=snapshot, finder=make_finder(config.entities).name)
    if (folder / SUMMARY).exists():
        _clear(folder)
        return folder
    order = np.random.default_rng(config.seed).permutation(num_passages)
    with connected(config.ray_address, name=config.name):
        common = _count(folder / ENTITIES, order, config)
        parts = _make(folder / PARTS, order, config, common)
    rejected = _finish(folder, parts, config)
    write_object(folder / SUMMARY, _summary(folder, rejected))
    _clear(folder)
    return folder


def _clear(folder: Path) -> None:
    """Removes the files that only an unfinished build needs, also after a kill."""
    for name in (PARTS, ENTITIES):
        shutil.rmtree(folder / name, ignore_errors=True)


def _num_rows(file: Path) -> int:
    """Returns the number of rows of a file of the build. Raises ConfigError when it is damaged."""
    check_parquet(file, advice=_PART_ADVICE)
    try:
        return pq.read_metadata(file).num_rows
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{file} is damaged: {' '.join(str(error).split())[:200]}; {_PART_ADVICE}") from error


def describe(folder: Path) -> list[str]:
    """Returns a description of the build for people."""
    summary = read_object(folder / SUMMARY, advice=f"remove it, and {_AGAIN}")
    lines = [f"{folder / DOCUMENTS}: {summary['num_documents']} documents"]
    if summary["num_held_out"]:
        lines.append(f"{folder / HELD_OUT}: {summary['num_held_out']} documents")
    for name, (least, middle, most) in summary["ranges"].items():
        lines.append(f"{name}: {least:g} to {most:g}, half of them at most {middle:g}")
    lines.append("kinds of entities: " + ", ".join(f"{count} {kind}" for kind, count in summary["kinds"].items()))
    for rule, count in summary["rejected"].items():
        lines.append(f"rejected as {rule} ({REJECTIONS[rule]}): {count}")
    return lines


def shown(folder: Path, count: int) -> list[str]:
    """Returns the first documents as text for a person to read."""
    lines: list[str] = []
    for row in pl.scan_parquet(folder / DOCUMENTS, glob=False).head(max(count, 0)).collect().iter_rows(named=True):
        lines.append(
            f"\n=== {row['id']}: {row['golden_answers'][0]!r} ({row['kind']}), {row['num_masks']} masks, "
            f"{len(row['chunk_tokens'])} chunks, from {row['pivot_title']!r}"
        )
        lines += [row["text"], "may be recalled: " + " | ".join(target[0] for target in row["recall_targets"])]
        lines += ["---", row["context"]]
    return lines


def _check_same(file: Path, config: DocumentsConfig, **facts: str) -> None:
    """Keeps the settings and the facts in the folder. Raises ConfigError when it was begun with others. No part depends
    on the numbers of documents, so an unfinished build may continue with other ones."""
    kept = read_object(file, advice=f"remove {file.parent}, and {_AGAIN}") if file.exists() else None
    changed = [] if kept is None else changed_settings(kept, config, **facts)
    is_finished = (file.parent / SUMMARY).exists()
    if kept is None or (changed and not is_finished and all(name in _NUMBERS for name, *_ in changed)):
        write_object(file, config.model_dump(mode="json", exclude={*config.FREE}) | facts)
        return
    for name, before, now in changed:
        raise ConfigError(
            f"{file.parent} was begun with {name} {before!r}, now it is {now!r}; choose another name, or remove the "
            "folder"
        )


def _count(folder: Path, order: np.ndarray, config: DocumentsConfig) -> CommonEntities:
    """Returns the entities that a sample of the corpus shows to be too common or too easy to guess."""
    sample = np.sort(order[: config.statistics_passages])
    _run(_parts(folder, sample, PASSAGES_AT_ONCE), config, None, label="passages counted")
    made = sorted(folder.glob("*.parquet"))
    for part in made:
        _num_rows(part)  # refuses a damaged file, which polars would read
    return common_entities(pl.scan_parquet(made, glob=False), len(sample), config)


def _make(folder: Path, order: np.ndarray, config: DocumentsConfig, common: CommonEntities) -> list[Path]:
    """Makes parts until they hold enough documents or the corpus ends; returns their files in order."""
    parts = _parts(folder, order, config.documents_per_part)
    made = missing = 0
    while made < len(parts):
        found = sum(_num_rows(Path(part["file"])) for part in parts[:made])
        missing = config.num_held_out + config.num_documents - found
        if missing <= 0:
            break
        accepted = max(found / (made * config.documents_per_part), LEAST_ACCEPTED) if made else 1.0
        wave = parts[made : made + math.ceil(missing / accepted / config.documents_per_part)]
        _run(wave, config, common, label="pivots")
        made += len(wave)
    return [Path(part["file"]) for part in parts[:made]]


def _parts(folder: Path, rows: np.ndarray, size: int) -> list[dict[str, Any]]:
    folder.mkdir(parents=True, exist_ok=True)
    return [
        {"file": str((folder / f"{i:08d}.parquet").absolute()), "first": first, "rows": rows[first : first + size]}
        for i, first in enumerate(range(0, len(rows), size))
    ]


def _run(
    parts: Sequence[dict[str, Any]], config: DocumentsConfig, common: CommonEntities | None, *, label: str
) -> None:
    missing = [part for part in parts if not Path(part["file"]).exists()]
    total, left = (sum(len(part["rows"]) for part in listed) for listed in (parts, missing))
    with Progress(label, total=total, done=total - left) as progress:
        for count in stream_parts(missing, config, common) if missing else ():
            progress.advance(count)


def _finish(folder: Path, parts: Sequence[Path], config: DocumentsConfig) -> Counter[str]:
    """Writes the documents of the parts into the two files; returns how often each rule rejected in these parts."""
    rejected: Counter[str] = Counter()
    for part in parts:
        rejected.update(json.loads(read_metadata(part, advice=_PART_ADVICE)[REJECTED]))
    num_made, num_held_out = sum(map(_num_rows, parts)), config.num_held_out
    if not num_made:
        listed = ", ".join(f"{count} {rule}" for rule, count in rejected.items())
        raise ConfigError(
            f"no document could be made of index {config.index}; rejected: {listed}; a text whose script has no "
            "capital letters needs entities to name a spaCy pipeline"
        )
    if num_made <= num_held_out:
        raise ConfigError(
            f"index {config.index} gave {num_made} documents; with num_held_out {num_held_out} none is left to train "
            "on: lower it, or index more passages"
        )
    _write(folder / HELD_OUT, parts, 0, num_held_out)
    _write(folder / DOCUMENTS, parts, num_held_out, num_held_out + config.num_documents)
    return rejected


def _write(file: Path, parts: Sequence[Path], first: int, last: int) -> None:
    """Writes the documents `first` to `last` of the parts into one file."""
    with parquet_writer(file, DOCUMENT_SCHEMA) as writer:
        for part in parts:
            table = read_table(part, advice=_PART_ADVICE)
            start = max(first, 0)
            writer.write_table(table.slice(start, max(last - start, 0)))
            first, last = first - len(table), last - len(table)


def _summary(folder: Path, rejected: Counter[str]) -> dict[str, Any]:
    """Returns counts, kinds, and (least, median, most) of the quantities that differ between documents."""
    values = (
        pl.scan_parquet(folder / DOCUMENTS, glob=False)
        .select(
            "kind",
            "num_masks",
            pl.col("chunk_tokens").list.sum().alias("tokens"),
            pl.col("chunk_tokens").list.len().alias("chunks"),
            pl.col("recall_targets").list.len().alias("entities for recall"),
            pl.col("passage_ids").list.len().alias("passages"),
            pl.col("related_scores").list.mean().alias("mean score of the related"),
        )
        .collect()
    )
    ranges = {
        name: np.quantile(column.to_numpy(), (0, 0.5, 1)).tolist()
        for name in values.columns[1:]
        if len(column := values[name].drop_nulls())
    }
    return {
        "num_documents": len(values),
        "num_held_out": _num_rows(folder / HELD_OUT),
        "ranges": ranges,
        "kinds": dict(values["kind"].value_counts().sort("kind").iter_rows()),
        "rejected": {rule: rejected[rule] for rule in REJECTIONS if rejected[rule]},
    }
