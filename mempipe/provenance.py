"""The record of a result's settings and inputs, stored with it, and its comparison with the present ones. Runs,
validations, evaluations, chains, sweeps and builds decide by it whether existing results may be used again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mempipe.data.input_files import ROWS, input_files
from mempipe.settings import ConfigError, Section, renamed
from mempipe.storage.checksums import record_of
from mempipe.storage.files import sha256
from mempipe.storage.json_files import read_object, write_object
from mempipe.types import Question, to_row

MADE_OF = "made_of.json"
"""The record inside a folder that was made."""
_HASH_BYTES = 2**20
_SHORT = 16  # hex digits of a hash that people may have to compare


def differences(before: Any, now: Any, *, free: Iterable[str] = (), prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (dotted name, value before, value now) where two nested records differ, in order of their names. A name
    that is absent counts as None, and so does an empty text, list or section. Settings and sections in `free` may
    differ."""
    if any(f"{prefix}.".startswith(f"{name}.") for name in free):
        return
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted({*before, *now}, key=str):
            yield from differences(before.get(key), now.get(key), free=free, prefix=f"{prefix}.{key}".lstrip("."))
    elif before != now and not (_is_nothing(before) and _is_nothing(now)):
        yield prefix, before, now


def _is_nothing(value: Any) -> bool:
    """Returns whether a setting has no value, as one that an older version did not have."""
    if isinstance(value, Mapping):
        return all(map(_is_nothing, value.values()))
    return value is None or value in ("", [])


def completed(saved: Mapping[str, Any], kind: type[Section]) -> dict[str, Any]:
    """Returns saved settings of this kind under their names of today, with the defaults of those that this version of
    mempipe knows and an earlier one did not."""
    try:
        return kind.model_validate(renamed(saved, kind)[0]).model_dump(mode="json")
    except (ConfigError, ValidationError):  # a setting that is gone, or damage: the comparison names it
        return dict(saved)


def changed_settings(saved: Mapping[str, Any], now: Section, **facts: Any) -> list[tuple[str, Any, Any]]:
    """Returns (dotted name, value before, value now) for each setting that differs from a saved one and is not free
    (`Section.FREE`). The record may be of an earlier version, and may lack free settings. `facts` are further values of
    it, such as the hash of an index."""
    kind, settings = type(now), now.model_dump(mode="json")
    before = {name: settings[name] for name in kind.FREE if name in settings} | {**saved}
    found = {name: before.pop(name, None) for name in facts}
    return list(differences(completed(before, kind) | found, settings | facts, free=kind.FREE))


def read_record(file: Path, *, mends: str, **fields: type) -> dict[str, Any]:
    """Returns the mapping in a JSON file; `fields` are names that it has, with the type of each.

    Raises ConfigError, one sentence that ends in `mends` (what the user does), for a file that is missing or damaged.
    """
    values = read_object(file, advice=mends)
    for name, kind in fields.items():
        if not isinstance(values.get(name), kind):
            found = f"is {values[name]!r}" if name in values else "is missing"
            raise ConfigError(f"{file} is damaged ({name} {found}); {mends}")
    return values


def write_record(file: Path, values: Mapping[str, Any]) -> None:
    """Writes a record as `read_record` reads it, atomically, with a checksum."""
    write_object(file, values)


def changed_inputs(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the names of the inputs whose hash has changed. A hash of "" or without a name is not known, and is not
    compared."""
    known = {name for name in before.keys() & now.keys() if before[name] and now[name]}
    return [name for name in sorted(known) if before[name] != now[name]]


def questions_sha256(questions: Iterable[Question]) -> str:
    """Returns the hash of questions in any order, with golden answers and all else that an agent or a score reads."""
    lines = (json.dumps(_hashed(question), sort_keys=True) for question in questions)
    each = sorted(hashlib.sha256(line.encode()).hexdigest() for line in lines)
    return hashlib.sha256(json.dumps(each).encode()).hexdigest()[:_SHORT]


def _hashed(question: Question) -> dict[str, Any]:
    """Returns the row of a question as versions before `Evidence.objective` and `Question.user` hashed it, where it
    needs neither."""
    row = to_row(question)
    if not question.user:
        del row["user"]
    for fact in row["evidence"]:
        if not fact["objective"]:
            del fact["objective"]
    return row


def files_sha256(path: str) -> str:
    """Returns the SHA-256 of the bytes of a question set's file, or files. Raises ConfigError as reading it does."""
    digest = hashlib.sha256()
    for file in input_files(path, suffixes=ROWS):
        with file.open() as stored:
            while block := stored.read(_HASH_BYTES):
                digest.update(block)
    return digest.hexdigest()


def model_sha256(path: str) -> str:
    """Returns the hash of a local model's weights, by 256 blocks of each file, and of its configuration and tokenizer;
    "" for anything but a folder with weights, such as the name of a model on the hub."""
    folder = Path(path)
    weights = sorted(folder.glob("*.safetensors")) if path else []
    if not weights:
        return ""
    kept = {file.name: record_of(file, sampled=True).sha256 for file in weights}
    kept |= {name: sha256(folder / name) for name in ("config.json", "tokenizer.json") if (folder / name).is_file()}
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:_SHORT]


def checksums_sha256(checksums: Mapping[str, int]) -> str:
    """Returns the hash of a policy, from the checksum of each of its weights (`mempipe.engines.checksums`). It is the
    same however many ranks hold them."""
    return hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest()[:_SHORT]
