"""The tensors of checkpoints, written and read by all ranks together.

They are written with torch.distributed.checkpoint, every rank its shards, to a hidden folder next to the checkpoint's;
every file is hashed by the rank that wrote it and synced to disk, and the folder is renamed. Any number of ranks reads
them. With several ranks all of them call together, on a file system that all of them see.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from mempipe.beacons import reached
from mempipe.engines.checkpoint import MANIFEST, STATE, CheckpointError, TrainingState, checkpoints, read_state, reason
from mempipe.storage.files import discard_folder, finish_folder, partial_folder, remove_folder, sha256, start_folder

T = TypeVar("T")


class CheckpointWriter:
    """Writes checkpoints in the background, one at a time, while the tensors continue changing.

    With several ranks each has one, made by all together: the ranks use a separate process group, so that
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

    @property
    def failed(self) -> bool:
        """Returns at once whether the checkpoint could not be written; `finish` raises why."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

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
        reached("checkpoint.partial", rank=_rank(), step=step)
        hashes = _gather(_on_every_rank(lambda: _hashes_of_rank(partial), group), group)
        _on_rank_zero(lambda: _finish(partial, target, text, hashes, keep), group)
    except (OSError, CheckpointException) as error:
        if _rank() == 0:
            discard_folder(target)
        raise CheckpointError(f"cannot write checkpoint {target}: {_reason(error)}") from error
    return target


def load_state(path: str | Path, *, verified: bool = False) -> TrainingState:
    """Does what `read_state` does, where each rank compares its share of the files. Raises CheckpointError, on all
    ranks.
    """
    return _on_every_rank(lambda: read_state(path, rank=_rank(), num_ranks=_world_size(), verified=verified), None)


def load_tensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills `tensors` in place with those of the same names, however they were sharded. Raises CheckpointError when
    one is missing or has another shape. The files are not checked: call `read_state` first."""
    try:
        with _quiet():
            dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(path), no_dist=not dist.is_initialized())
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {path} does not fit this model and optimiser: {_reason(error)}") from error


def _hashes_of_rank(partial: Path) -> dict[str, dict[str, Any]]:
    """Returns the manifest's entries for the files that this rank wrote, which are named `__RANK_…`."""
    return {file.name: _entry(file) for file in partial.glob(f"__{_rank()}_*")}


def _entry(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}


def _finish(partial: Path, target: Path, state: str, hashes: Sequence[Mapping[str, dict[str, Any]]], keep: int) -> None:
    (partial / STATE).write_text(state)
    files = {name: entry for part in hashes for name, entry in part.items()}
    if unseen := sorted(name for name in files if not (partial / name).is_file()):
        raise CheckpointError(
            f"{unseen[0]}, which another rank wrote, is not there; the ranks are on nodes that see different folders "
            "under this path: set `output` to a folder that all nodes share"
        )
    files |= {file.name: _entry(file) for file in partial.iterdir() if file.name not in files}
    (partial / MANIFEST).write_text(json.dumps({"files": dict(sorted(files.items()))}, indent=1))
    reached("checkpoint.whole", folder=target.name)
    finish_folder(partial, target)
    reached("checkpoint.finished", folder=target.name)
    for old in checkpoints(target.parent)[:-keep]:
        remove_folder(old)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the warning that a single process is one, which `no_dist` has said already."""
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
    """Returns the value of every rank."""
    if _world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * _world_size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _reason(error: BaseException) -> str:
    """Returns what went wrong, in one line; of the failures of several ranks, the first."""
    return reason(next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error)
