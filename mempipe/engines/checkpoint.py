"""Checkpoints that exist whole or not at all, and Hugging Face folders made from trained weights.

A checkpoint is a folder `step-00000012`: the tensors (torch.distributed.checkpoint, every rank its shards, readable by
any number of ranks), `state.json` and `manifest.json` with the sha256 of every other file. It is written to a hidden
folder beside it, every file hashed by the rank that wrote it, synced to disk and renamed. With several ranks all of
them call together, on a file system that all of them see.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from transformers import AutoConfig
from transformers.utils.hub import cached_file

from mempipe.files import finish_folder, partial_folder, sha256, start_folder, whole_folder

T = TypeVar("T")
MANIFEST = "manifest.json"
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Holds what a checkpoint keeps beside tensors (`state.json`)."""

    num_updates_done: int
    """Optimiser updates, which the schedule of the learning rate counts."""
    ranks: str
    """Number and kind of the ranks that wrote it; others cannot take over its random states."""
    position: Position


class CheckpointWriter:
    """Writes checkpoints in the background, one at a time, while the tensors go on changing.

    With several ranks each has one, made by all together: the ranks talk in a process group of their own, so that
    writing and training do not take each other's messages.
    """

    def __init__(self) -> None:
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo")) if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def start(
        self, folder: str | Path, step: int, *, tensors: Mapping[str, Tensor], state: TrainingState, keep: int
    ) -> None:
        """Copies the tensors to the CPU, and starts to write them as `save_checkpoint` does.

        Waits for the checkpoint before, and raises what `finish` raises.
        """
        self.finish()
        stager = DefaultStager(StagingOptions(False, False, False, False))
        copied = stager.stage(dict(tensors))
        assert isinstance(copied, dict), "staging was asked to be done at once"
        self._pending = self._thread.submit(
            save_checkpoint, folder, step, tensors=copied, state=state, keep=keep, group=self._group
        )

    def finish(self) -> Path | None:
        """Waits for the checkpoint that is being written; returns its path, or None when there is none.

        Raises CheckpointError, on all ranks, when it could not be written; then nothing half-written is left.
        """
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()


def save_checkpoint(
    folder: str | Path,
    step: int,
    *,
    tensors: Mapping[str, Tensor],
    state: TrainingState,
    keep: int,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Writes `folder/step-…` and removes all but the newest `keep` checkpoints; returns its path.

    `tensors` may be sharded (DTensor); the ranks of `group` (all, by default) call it together. A checkpoint of the
    same step is replaced. Raises CheckpointError, on all ranks, and leaves nothing half-written.
    """
    text = json.dumps(asdict(state))
    target = Path(folder) / f"step-{step:08d}"
    partial = partial_folder(target)
    try:
        _on_rank_zero(lambda: start_folder(target), group)
        with _quiet():
            dcp.save(
                dict(tensors),
                storage_writer=dcp.FileSystemWriter(partial),
                no_dist=not dist.is_initialized(),
                process_group=group,
            )
        hashes = _gather(_on_every_rank(lambda: _hashes_of_rank(partial), group), group)
        _on_rank_zero(lambda: _finish(partial, target, text, hashes, keep), group)
    except (OSError, CheckpointException) as error:
        if _rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"cannot write checkpoint {target}: {_reason(error)}") from error
    return target


def read_state(path: str | Path) -> TrainingState:
    """The `state` of a checkpoint, after every file was compared with the manifest; with several ranks, each compares
    its share. Raises CheckpointError, on all ranks.
    """
    path = Path(path)
    try:
        _on_every_rank(lambda: _verify(path), None)
        return _training_state(json.loads((path / STATE).read_text()), path)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read checkpoint {path}: {_reason(error)}") from error


def load_tensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills `tensors` in place with those of the same names, however they were sharded. Raises CheckpointError when
    one is missing or has another shape. The files are not checked: call `read_state` first."""
    try:
        with _quiet():
            dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(path), no_dist=not dist.is_initialized())
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {path} does not fit this model and optimiser: {_reason(error)}") from error


def latest(folder: str | Path) -> Path | None:
    """The newest checkpoint under `folder`, or None."""
    found = checkpoints(folder)
    return found[-1] if found else None


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints under `folder`, oldest first."""
    found = [(int(match[1]), path) for path in Path(folder).glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def step_of(path: str | Path) -> int:
    """The learner step that a checkpoint is of, without a look at its other files. Raises CheckpointError."""
    try:
        return _training_state(json.loads((Path(path) / STATE).read_text()), Path(path)).position.step
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read checkpoint {path}: {_reason(error)}") from error


def export_hf(folder: str | Path, state_dict: Mapping[str, Tensor], *, source: str | Path) -> Path:
    """A Hugging Face model folder that transformers and vLLM load: `state_dict` (Hugging Face names, whole tensors,
    LoRA merged) as safetensors, with configuration and tokenizer of the model at `source`. An existing folder is
    replaced.

    Raises CheckpointError and leaves nothing half-written.
    """
    target = Path(folder)
    try:
        config = AutoConfig.from_pretrained(source)
        config.dtype = next(iter(state_dict.values())).dtype
        with whole_folder(target) as partial:
            config.save_pretrained(partial)
            save_torch_state_dict(dict(state_dict), partial)
            for name in _COPIED_FILES:
                file = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
                if file is not None:
                    shutil.copyfile(file, partial / name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot export a model to {target}: {_reason(error)}") from error
    return target


def _hashes_of_rank(partial: Path) -> dict[str, dict[str, Any]]:
    """The manifest's entries for the files that this rank wrote, which are named `__RANK_…`."""
    return {file.name: _entry(file) for file in partial.glob(f"__{_rank()}_*")}


def _entry(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}


def _finish(partial: Path, target: Path, state: str, hashes: Sequence[Mapping[str, dict[str, Any]]], keep: int) -> None:
    (partial / STATE).write_text(state)
    files = {name: entry for part in hashes for name, entry in part.items()}
    files |= {file.name: _entry(file) for file in partial.iterdir() if file.name not in files}
    (partial / MANIFEST).write_text(json.dumps({"files": dict(sorted(files.items()))}, indent=1))
    finish_folder(partial, target)
    for old in checkpoints(target.parent)[:-keep]:
        shutil.rmtree(old)


def _verify(path: Path) -> None:
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST} is not what was written") from error
    for i, (name, written) in enumerate(files.items()):
        if i % _world_size() != _rank():
            continue
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing")
        size = file.stat().st_size
        if size != written["bytes"]:
            raise CheckpointError(
                f"checkpoint {path} is damaged: {name} has {size} bytes, {written['bytes']} were written"
            )
        if sha256(file) != written["sha256"]:
            raise CheckpointError(f"checkpoint {path} is damaged: {name} has changed since it was written")


def _training_state(values: dict[str, Any], path: Path) -> TrainingState:
    """Raises CheckpointError, naming the fields, when `values` are not those that this version writes."""
    position = values.get("position")
    found = {*values, *(f"position.{name}" for name in (position if isinstance(position, dict) else ()))}
    expected = {own.name for own in fields(TrainingState)} | {f"position.{own.name}" for own in fields(Position)}
    if found != expected:
        raise CheckpointError(
            f"checkpoint {path} was written by another version of mempipe: {STATE} holds {', '.join(sorted(found))}; "
            f"this version reads {', '.join(sorted(expected))}"
        )
    return TrainingState(**values | {"position": Position(**values["position"])})


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that a single process is one, which `no_dist` has said already."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _on_rank_zero(action: Callable[[], object], group: dist.ProcessGroup | None) -> None:
    """Runs `action` on rank 0; an OSError of it is raised on all ranks."""
    _on_every_rank(lambda: action() if _rank() == 0 else None, group)


def _on_every_rank(action: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Returns what `action` returns here; an OSError of it on any rank is raised on all of them."""
    outcome, failure = None, None
    try:
        outcome = action()
    except OSError as error:
        failure = error
    failures = [other for other in _gather(failure, group) if other is not None]
    if failures:
        raise failures[0]
    return cast(T, outcome)


def _gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """The value of every rank."""
    if _world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * _world_size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _reason(error: BaseException) -> str:
    """Returns what went wrong, in one line."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
