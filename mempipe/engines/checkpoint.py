"""Checkpoints that exist atomically: their content, the list of them, and the check that they are unchanged.

A checkpoint is a folder `step-00000012`: the tensors (`mempipe.engines.sharded_checkpoint`), `state.json` and
`manifest.json` with the sha256 of every other file. Nothing here imports torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from mempipe.storage.files import recover_folders, sha256

MANIFEST = "manifest.json"
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_NEWER = {"position.num_updates", "position.under_way"}  # older checkpoints lack them and are whole steps


class CheckpointError(OSError):
    """A checkpoint cannot be written or read; the message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Says how far a run has come in its stream of groups."""

    step: int = 0
    """Learner steps done."""
    trained: list[list[str]] = field(default_factory=list)
    """Ids of the groups that each step took."""
    dropped: list[str] = field(default_factory=list)
    """Ids of the groups without a learning signal, which no step took."""
    num_updates: int = 0
    """Optimiser updates of the next step that are done: a run that has to end saves between two updates as well."""
    under_way: list[str] = field(default_factory=list)
    """Ids of the groups of that step; empty when none of its updates is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The part of a checkpoint besides tensors (`state.json`)."""

    num_updates_done: int
    """Optimiser updates, which the schedule of the learning rate counts."""
    ranks: str
    """Number and kind of the ranks that wrote it; others cannot take over its random states."""
    position: Position


def read_state(path: str | Path, *, rank: int = 0, num_ranks: int = 1, verified: bool = False) -> TrainingState:
    """Returns the state of a checkpoint after comparing every file with the manifest, which takes minutes for a large
    model; one of several ranks compares its share. `verified`: they were compared before. Raises CheckpointError.
    """
    path = Path(path)
    try:
        if not verified:
            _verify(path, rank, num_ranks)
        return _training_state(json.loads((path / STATE).read_text()), path)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read checkpoint {path}: {reason(error)}") from error


def latest(folder: str | Path) -> Path | None:
    """Returns the newest checkpoint under `folder`, or None."""
    found = checkpoints(folder)
    return found[-1] if found else None


def checkpoints(folder: str | Path) -> list[Path]:
    """Returns the checkpoints under `folder`, oldest first."""
    recover_folders(Path(folder))
    found = [(int(match[1]), path) for path in Path(folder).glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def step_of(path: str | Path) -> int:
    """Returns the learner step of a checkpoint; reads only its state.json. Raises CheckpointError."""
    return position_of(path).step


def position_of(path: str | Path) -> Position:
    """Returns the position of a checkpoint; reads only its state.json. Raises CheckpointError."""
    try:
        return _training_state(json.loads((Path(path) / STATE).read_text()), Path(path)).position
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read checkpoint {path}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Returns what went wrong, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _verify(path: Path, rank: int, num_ranks: int) -> None:
    try:
        files = {
            name: (entry["bytes"], entry["sha256"])
            for name, entry in json.loads((path / MANIFEST).read_text())["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"{MANIFEST} differs from the written content") from error
    written = {file.name for file in path.iterdir() if file.suffix == ".distcp" or file.name in (STATE, ".metadata")}
    if unknown := sorted(written - files.keys()):
        raise _damaged(path, f"{MANIFEST} lacks {', '.join(unknown)}")
    for i, (name, (num_bytes, digest)) in enumerate(files.items()):
        if i % num_ranks != rank:
            continue
        file = path / name
        if not file.is_file():
            raise _damaged(path, f"{name} is missing")
        size = file.stat().st_size
        if size != num_bytes:
            raise _damaged(path, f"{name} has {size} bytes, {num_bytes} were written")
        if sha256(file) != digest:
            raise _damaged(path, f"{name} has changed since it was written")


def _damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} is damaged: {how}; move it out of {path.parent}, and the checkpoint before it is taken"
    )


def _training_state(values: object, path: Path) -> TrainingState:
    """Raises CheckpointError, naming the fields, when `values` are not those that this version writes."""
    if not isinstance(values, dict):
        raise _damaged(path, f"{STATE} holds {type(values).__name__}, not a mapping")
    position = values.get("position")
    found = {*values, *(f"position.{name}" for name in (position if isinstance(position, dict) else ()))}
    expected = {own.name for own in fields(TrainingState)} | {f"position.{own.name}" for own in fields(Position)}
    if not expected - _NEWER <= found <= expected:
        raise CheckpointError(
            f"checkpoint {path} was written by another version of mempipe: {STATE} holds {', '.join(sorted(found))}; "
            f"this version reads {', '.join(sorted(expected))}"
        )
    return TrainingState(**values | {"position": Position(**values["position"])})
