"""JSON objects in files whose damage is detected: each holds a checksum of its other values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mempipe.settings import ConfigError
from mempipe.storage.files import write_text

CHECKSUM = "checksum"


def write_object(path: Path, values: Mapping[str, Any]) -> None:
    """Writes the object as `mempipe.storage.files.whole_file` does, with its checksum."""
    write_text(path, json.dumps({**values, CHECKSUM: _checksum(values)}, indent=1))


def read_object(path: Path, *, advice: str) -> dict[str, Any]:
    """Returns the object of a file without its checksum. A file of an older version, which has none, is read as it is.

    Raises ConfigError when the file is missing or differs from the written content; `advice` says what to do then.
    """
    try:
        return without_checksum(parse_object(path.read_bytes()))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {advice}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}; {advice}") from error


def parse_object(text: bytes) -> dict[str, Any]:
    """Returns the object, with its checksum. Raises ValueError for text that is not a JSON object in UTF-8."""
    try:
        values = json.loads(text.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is empty or not JSON ({error})" if not text.strip() else f"not JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"it holds a {type(values).__name__}, expected an object")
    return values


def without_checksum(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the object without its checksum, if it has one. Raises ValueError when another value was changed."""
    rest = {name: value for name, value in values.items() if name != CHECKSUM}
    if CHECKSUM in values and values[CHECKSUM] != _checksum(rest):
        raise ValueError(f"its values do not fit its {CHECKSUM}, so it was changed since it was written")
    return rest


def _checksum(values: Mapping[str, Any]) -> str:
    # By way of JSON, where a tuple is a list and every key a text.
    plain = json.dumps(json.loads(json.dumps(values)), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()
