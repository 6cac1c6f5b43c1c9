"""Every file that a shipped config names is made by a command of docs/data.md or of a config's header."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from mempipe.loader import load_job

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "jobs" / "configs").glob("*.yaml"))
RUNS = {str(values.get("name")) for values in (yaml.safe_load(file.read_text()) for file in CONFIGS)} - {
    "memtrain_wiki18",
    "memtrain_reference",
}
"""The names of shipped configs whose folders `mempipe train` makes."""


def named(values: Any) -> Iterator[str]:
    """Yields the paths of a config's inputs."""
    if isinstance(values, dict):
        folder = values.get("data_dir", "")
        for each in values.get("benchmarks", ()) if folder else ():
            length = f"/test_{each['num_docs']}.parquet" if "num_docs" in each else ""
            yield from () if "file" in each else [f"{folder}/{each['name']}{length}"]
        for name, value in values.items():
            yield from () if name in ("data_dir", "output") else named(value)
    elif isinstance(values, list):
        for value in values:
            yield from named(value)
    elif isinstance(values, str) and re.match(r"(data|models|runs)/", values):
        first, second, *_ = values.split("/")
        yield from () if first == "runs" and second in RUNS else [values]


def commands() -> Iterator[str]:
    """Yields the commands of docs/data.md, and those of the headers of all configs."""
    page = (ROOT / "docs" / "data.md").read_text()
    yield from (
        line for text in re.findall(r"^```\w*\n(.*?)^```", page, flags=re.M | re.S) for line in text.splitlines()
    )
    yield from (span.replace("\\|", "|") for span in re.findall(r"`([a-z]+ [^`\n]+)`", page))
    for file in CONFIGS:
        yield from re.findall(r"^#   (.+)$", file.read_text(), flags=re.M)


def made_by(command: str) -> list[str]:
    """Returns the files that a command writes, as patterns."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:
        return []  # a sentence
    options = {before: word for before, word in pairwise(words) if before.startswith("-")}
    match words:
        case [*_, ">", output] | ["cp", _, output]:
            return [output]
        case ["hf", "download", _, *rest]:
            patterns = [word for before, word in pairwise(rest) if before == "--include"]
            return [f"{options['--local-dir']}/{pattern}" for pattern in patterns or rest[:1]]
        case ["mempipe", "data", "ruler", _, folder, *_]:
            splits = [part.split("=")[0] for part in options.get("--split", "test").split(",")]
            return [f"{folder}/{split}_{n}.parquet" for split in splits for n in options["--num-docs"].split(",")]
        case ["mempipe", "data", "cloze", _, folder, *_]:
            return [f"{folder}/corpus.parquet"]
        case ["mempipe", "data", "memtrain", config, *_]:
            folder = f"runs/{load_job(config)[1].name}"
            return [f"{folder}/documents.parquet", f"{folder}/held_out.parquet"]
        case ["mempipe", "data", "objectives", _, output, *_] | ["mempipe", "model", "import", _, output]:
            return [output]
        case ["mempipe", "index", "build", config, *settings] if config.endswith(".yaml") and not settings:
            return [yaml.safe_load((ROOT / config).read_text())["output"]]
    return []


def is_made(path: str, outputs: list[str]) -> bool:
    """Returns whether a command makes the path, or a file in the folder of this name."""
    return any(fnmatch(path, output) or output.startswith(f"{path}/") for output in outputs)


@pytest.fixture(scope="module")
def outputs() -> list[str]:
    return [output for command in commands() for output in made_by(command)]


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_file_that_a_shipped_config_names_is_made_by_a_documented_command(file, outputs, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert not [path for path in named(yaml.safe_load(file.read_text())) if not is_made(path, outputs)]


def test_a_path_that_no_command_makes_is_found(outputs):
    assert [path for path in named({"data": {"train": "data/nq_hotpotqa", "validation": "data/validation.jsonl"}})] == [
        "data/nq_hotpotqa",
        "data/validation.jsonl",
    ]
    assert is_made("data/nq_hotpotqa", outputs) and not is_made("data/validation.jsonl", outputs)
