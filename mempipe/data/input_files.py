"""Finds the input files that settings name: local files and folders, fsspec URLs, and data sets of the Hugging Face
hub.

A fault of a whole source (missing, of another kind) is a ConfigError; one of the disk or the network is an OSError.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import fsspec

from mempipe.settings import ConfigError
from mempipe.storage.files import sha256

JSONL = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
PARQUET, JSON, CSV = (".parquet",), (".json",), (".csv", ".tsv")
ROWS = (*JSONL, *PARQUET, *JSON, *CSV)
"""The suffixes of all files that have rows."""
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".7z")
_HUB_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+):(?P<path>[^/].*)")
_HUB_URL = re.compile(r"hf://(?!datasets/|spaces/|buckets/)(?P<rest>[\w.-]+/[\w.-]+(/.*)?)")
_RECORDS = {"ruler.json", "cloze.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""Files that describe the others of a folder and have no rows."""

Source = str | Path


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file to read: a local path or an fsspec URL, and its size in bytes. `made_of` is what its passages were made
    of, which messages name instead of it; `skipped` are the bad rows of that by kind, which its passages lack."""

    url: str
    size: int
    made_of: str = ""
    skipped: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """Returns the part after the last slash."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def folder(self) -> str:
        """Returns the name of the folder that holds it."""
        return self.url.rpartition("/")[0].rpartition("/")[2]

    @property
    def is_parquet(self) -> bool:
        return self.ends_in(*PARQUET)

    def ends_in(self, *suffixes: str) -> bool:
        """Returns whether the name ends in one of the suffixes, in any case."""
        return self.name.lower().endswith(suffixes)

    def fingerprint(self) -> str:
        """Returns a text that changes with the content: the sha256 of a local file, which is read completely; for a
        remote file the ETag or the time of change that its file system reports. Raises OSError.
        """
        if not is_url(self.url):
            return sha256(Path(self.url))
        filesystem, path = fsspec.url_to_fs(self.url)
        return str(filesystem.ukey(path))

    def open(self) -> BinaryIO:
        """Opens the file's bytes as they are stored. Raises OSError."""
        if not is_url(self.url):
            return Path(self.url).open("rb")
        filesystem, path = fsspec.url_to_fs(self.url)
        return filesystem.open(path, "rb")


def input_files(sources: Source | Sequence[Source], *, suffixes: tuple[str, ...]) -> list[InputFile]:
    """Returns the files that `sources` name, in order: a file, a folder (its own files of these suffixes, by name) or a
    list of any.

    A source is a local path, an fsspec URL or `OWNER/NAME:FILE` of a data set on the Hugging Face hub. Raises
    ConfigError for what does not exist or cannot be reached, has another suffix, or is a folder without such files.
    """
    listed = [sources] if isinstance(sources, str | Path) else list(sources)
    if not listed:
        raise ConfigError("no file is named; expected a file, a folder or a list of them")
    return [file for source in listed for file in _find(_url(source), suffixes)]


def is_remote(source: Source) -> bool:
    """Returns whether a source is read over the network."""
    return is_url(_url(source))


def is_hidden(name: str) -> bool:
    """Returns whether a file or a folder is none that a person made: hidden, or the lock of an open Office document."""
    return name.startswith((".", "~$"))


def is_url(source: str) -> bool:
    return "://" in source


def _url(source: Source) -> str:
    text = _HUB_URL.sub(r"hf://datasets/\g<rest>", str(source))
    hub = _HUB_NAME.fullmatch(text)
    if hub and not Path(text).exists():
        return f"hf://datasets/{hub['repository']}/{hub['path']}"
    return text.removeprefix("file://") if text.startswith("file:///") else text


def _find(source: str, suffixes: tuple[str, ...]) -> list[InputFile]:
    found, is_folder = _find_remote(source) if is_url(source) else _find_local(Path(source))
    expected = f"{', '.join(suffixes[:-1])} nor {suffixes[-1]}"
    if not is_folder and not source.lower().endswith(suffixes):
        advice = "; unpack it first" if source.lower().endswith(_PACKED) else ""
        raise ConfigError(f"{source} ends in neither {expected}{advice}")
    files = sorted((file for file in found if file.ends_in(*suffixes)), key=lambda file: file.name)
    if is_folder:
        files = [file for file in files if file.name not in _RECORDS and not is_hidden(file.name)]
    if not files and any(file.ends_in(".arrow") for file in found):
        raise ConfigError(
            f"{source} holds .arrow files, as Dataset.save_to_disk writes them; write a .parquet file and name that: "
            f"datasets.load_from_disk({source!r}).to_parquet('questions.parquet')"
        )
    if not files:
        raise ConfigError(f"{source} is a folder without a file that ends in {expected.replace(' nor ', ' or ')}")
    return files


def _find_local(path: Path) -> tuple[list[InputFile], bool]:
    if not path.exists():
        raise ConfigError(f"{path} does not exist", absent=str(path))
    is_folder = path.is_dir()
    return [
        InputFile(str(file), file.stat().st_size)
        for file in (path.iterdir() if is_folder else [path])
        if file.is_file()
    ], is_folder


def _find_remote(url: str) -> tuple[list[InputFile], bool]:
    try:
        filesystem, path = fsspec.url_to_fs(url)
        entry = filesystem.info(path)
        is_folder = entry["type"] == "directory"
        entries = filesystem.ls(path, detail=True) if is_folder else [entry]
    except FileNotFoundError as error:
        raise ConfigError(f"{url} does not exist or cannot be reached") from error
    except Exception as error:  # file systems define their own errors; each means that the place cannot be read
        said = " ".join(str(error).split())[:300]
        advice = "; without a network, copy the file to this machine and name the copy" * url.startswith("hf://")
        raise ConfigError(f"{url} cannot be read: {type(error).__name__}: {said}{advice}") from error
    files = [file for file in entries if file["type"] == "file"]
    return [
        InputFile(filesystem.unstrip_protocol(file["name"]) if is_folder else url, int(file["size"] or 0))
        for file in files
    ], is_folder
