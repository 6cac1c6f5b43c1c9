"""The learner: actors of FSDP ranks, and one typed class that sends every rank its micro-batches and waits for all."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from mempipe import environment
from mempipe.actors.handles import Handle
from mempipe.actors.lost import EngineLost, LearnerFailed, LearnerLost, is_lost, one_line
from mempipe.beacons import reached
from mempipe.engines.checkpoint import Position, latest
from mempipe.engines.learner_settings import LearnerSettings
from mempipe.engines.proof import SamplingMismatch
from mempipe.engines.weights import GpuWeightSender, WeightHandle, pack_weights, replica_init_info
from mempipe.garbage import collect_garbage, no_collections
from mempipe.rl.packing import MicroBatch
from mempipe.settings import ConfigError
from mempipe.stop import StopRequest

WATCH_S = 5.0
COUNTING_S = 30.0
DEATH_S = 10.0
"""Seconds in which every rank answers or Ray reports its death; not tuned."""


class LearnerActor:
    """One rank. `start` makes its Learner when all ranks know the master's address. The next `start` replaces that
    Learner in the same process."""

    def __init__(self) -> None:
        with no_collections():
            import mempipe.engines.learner  # noqa: F401  # takes seconds, while the other roles start

    def address(self) -> tuple[str, int]:
        """Returns this node's address, and a port that is free on it."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    def listen(self) -> tuple[str, int]:
        """Returns this node's address, and a port on which this rank listens until all ranks have met there."""
        self._listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        return self._listener.getsockname()

    def node_without(self, folder: Path) -> str:
        """Returns the address of this node when it does not see the folder; else ""."""
        return "" if folder.is_dir() else ray.util.get_node_ip_address()

    def start(self, settings: LearnerSettings, rank: int, world_size: int, address: tuple[str, int]) -> None:
        if interface := _interface(ray.util.get_node_ip_address()):
            os.environ.setdefault(environment.GLOO_INTERFACE, interface)
        from mempipe.engines.learner import Learner

        if vars(self).pop("_learner", None) is not None:  # its memory must be free before the next one is made
            collect_garbage()
            self.release_memory()
        host, port = address
        self._learner = Learner(
            settings,
            rank=rank,
            world_size=world_size,
            master_address=host,
            master_port=port,
            listener=vars(self).pop("_listener", None),
        )

    def begin_step(self, updates: Sequence[Sequence[MicroBatch]], first: int) -> None:
        self._learner.begin_step(updates, first=first)

    def update(self, index: int) -> dict[str, float]:
        reached("rank.update", rank=self._learner.rank, update=index)
        return self._learner.update(index)

    def release_memory(self) -> None:
        """Frees GPU memory that no tensor uses for the other processes of the GPU, including memory that an engine had
        opened."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def score(self, sequences: Sequence[Sequence[int]], *, temperature: float) -> list[list[float]]:
        return self._learner.score(sequences, temperature=temperature)

    def checksums(self) -> dict[str, int]:
        return self._learner.checksums()

    def weights(self) -> np.ndarray | None:
        """Returns the served weights as bytes on rank 0; None elsewhere."""
        state_dict = self._learner.served_state_dict()
        return pack_weights(state_dict) if state_dict else None

    def open_transfer(
        self,
        engines: Sequence[Handle],
        tensor_parallel: int,
        address: tuple[str, int],
        backend: Literal["nccl", "ipc"],
    ) -> None:
        """Connects this rank with all engines: by nccl in one group, which takes the place of the one before, by ipc
        with the engine on its own GPU."""
        if (before := vars(self).pop("_sender", None)) is not None:
            before.close()
        self._sender = GpuWeightSender(
            self._learner.policy.lm,
            dtype=self._learner.dtype,
            control=_Engines(engines, tensor_parallel),
            backend=backend,
            rank=self._learner.rank,
            address=address,
            num_engine_ranks=len(engines) * tensor_parallel,
        )

    def send_weights(self, policy_version: int) -> None:
        reached("rank.send", rank=self._learner.rank, version=policy_version)
        self._sender.send(policy_version)

    def num_served_bytes(self) -> int:
        return self._learner.num_served_bytes

    def updates_done(self) -> int:
        return self._learner.num_updates_done

    def save(self, folder: Path, position: Position, keep: int) -> None:
        self._learner.save(folder, position, keep=keep)

    def start_save(self, folder: Path, position: Position, keep: int) -> None:
        self._learner.start_save(folder, position, keep=keep)

    def save_failed(self) -> bool:
        return self._learner.save_failed

    def finish_save(self) -> None:
        self._learner.finish_save()

    def load(self, path: Path, verified: bool) -> Position:
        return self._learner.load(path, verified=verified)

    def export(self, folder: Path, source: str) -> None:
        reached("rank.export", rank=self._learner.rank)
        state_dict = self._learner.full_state_dict()
        if state_dict:
            from mempipe.engines.export import export_hf

            export_hf(folder, state_dict, source=source)


class _Engines:
    """The interface of all engines to the sender of weights (`mempipe.engines.weights.EngineControl`)."""

    def __init__(self, engines: Sequence[Handle], tensor_parallel: int) -> None:
        self._engines, self._tensor_parallel = list(engines), tensor_parallel

    def connect(self, init_info: dict[str, Any]) -> None:
        infos = [
            replica_init_info(init_info, replica=i, tensor_parallel=self._tensor_parallel)
            for i in range(len(self._engines))
        ]
        ray.get([engine.connect.remote(info) for engine, info in zip(self._engines, infos, strict=True)])

    def load(self, handle: WeightHandle) -> None:
        """Raises the loss of an engine, if there is one: an engine that lost its partner may be the first to fail."""
        calls = [engine.load_weights.remote(handle, handle.version) for engine in self._engines]
        try:
            ray.get(calls)
        except RayError as error:
            raise _first_loss(calls, within_s=0.0 if is_lost(error) else DEATH_S) or error from None


class LearnerGroup:
    """All ranks as one learner. Every method is one phase with the deadline `learner.timeout_s`."""

    def __init__(self, ranks: Sequence[Handle], *, timeout_s: float) -> None:
        self.ranks = list(ranks)
        self._timeout_s = timeout_s
        self._turn = threading.Lock()

    def start(self, settings: LearnerSettings) -> None:
        """Makes a `Learner` on every rank, in place of the earlier one. Rank 0's node is the master address."""
        address = self._all("meeting point", lambda rank, _: rank.listen.remote())[0]
        self._all("start", lambda rank, i: rank.start.remote(settings, i, len(self.ranks), address))

    def check_folder(self, folder: Path) -> None:
        """Raises ConfigError when the node of a rank does not see the run's folder, where ranks write checkpoints and
        models: they would write to a disk on which nobody looks for them."""
        blind = self._all("looking for the run's folder", lambda rank, _: rank.node_without.remote(folder))
        if nodes := sorted({address for address in blind if address}):
            raise ConfigError(
                f"the run's folder {folder} is not there on {', '.join(nodes)}, where learner ranks are; set `output` "
                "to a folder that all nodes share"
            )

    def step(
        self, updates: Sequence[Sequence[Sequence[MicroBatch]]], *, first: int = 0, stop: StopRequest | None = None
    ) -> list[dict[str, float]]:
        """Makes one optimiser update after another; `updates[u][rank]` are that rank's micro-batches. Returns the
        metrics of each update.

        A resumed step begins with update `first`. The step ends early, between two updates, when `stop` leaves no time
        for the rest.
        """
        begun = self._submit(lambda rank, i: rank.begin_step.remote([update[i] for update in updates], first))
        # With old_logprobs: recompute, and with a reference on the ranks, it also scores every micro-batch.
        self._get("starting a step", begun, timeout_s=self._timeout_s * len(updates))
        reports: list[dict[str, float]] = []
        started = time.monotonic()
        for index in range(first, len(updates)):
            reports.append(self._update(index, len(updates)))
            rest = (time.monotonic() - started) / len(reports) * (len(updates) - index - 1)
            if stop is not None and rest and not stop.leaves_time_for(rest):
                break
        return reports

    def release_memory(self) -> None:
        """Frees GPU memory that no tensor uses for the other processes of the GPU."""
        self._all("releasing memory", lambda rank, _: rank.release_memory.remote())

    def score(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        """Returns the log-probs of every sequence's tokens but the first, under the current weights."""
        return self._all("score", lambda rank, _: rank.score.remote(sequences, temperature=temperature))[0]

    def checksums(self) -> dict[str, int]:
        """Returns the checksum of every weight as an engine holds it (`mempipe.engines.checksums`)."""
        return self._all("checksums", lambda rank, _: rank.checksums.remote())[0]

    def weights(self) -> Any:
        """Returns a reference to the served weights (all, or with LoRA the adapter), as bytes (`pack_weights`)."""
        references = self._submit(lambda rank, _: rank.weights.remote())
        self._get("gathering weights", references[1:])
        return references[0]

    def open_transfer(
        self,
        engines: Sequence[Handle],
        *,
        tensor_parallel: int,
        backend: Literal["nccl", "ipc"],
        timeout_s: float | None = None,
    ) -> None:
        """Connects the ranks with the engines, so that `send_weights` goes from GPU memory to GPU memory. Called again
        after an engine was lost, it connects them in a new group. `timeout_s` None: `learner.timeout_s`."""
        address = self._all("meeting point", lambda rank, _: rank.address.remote(), timeout_s=timeout_s)[0]
        opened = self._submit(lambda rank, _: rank.open_transfer.remote(engines, tensor_parallel, address, backend))
        self._get("opening the weight transfer", opened, timeout_s=timeout_s, beside=engines)

    def send_weights(self, policy_version: int, engines: Sequence[Handle]) -> None:
        """Sends the current weights to the engines of `open_transfer` as `policy_version`; returns when all serve
        them."""
        sent = self._submit(lambda rank, _: rank.send_weights.remote(policy_version))
        self._get("sending weights", sent, beside=engines)

    def num_served_bytes(self) -> int:
        """Returns the bytes that a sync sends to an engine."""
        return self._get("counting bytes", [self.ranks[0].num_served_bytes.remote()])[0]

    def updates_done(self, *, finish: bool = False) -> int:
        """Returns the number of optimiser updates applied; with `finish` it waits for the running update first.

        Raises LearnerLost when a rank does not answer in time (without `finish`: at once), or the ranks disagree.
        """
        answers = self._submit(lambda rank, _: rank.updates_done.remote())
        counts = set(self._get("counting updates", answers, timeout_s=None if finish else COUNTING_S))
        if len(counts) != 1:
            raise LearnerLost(f"the ranks have done {sorted(counts)} updates")
        return counts.pop()

    def save(self, folder: Path, position: Position, *, keep: int) -> None:
        """Writes a checkpoint of the run at `position` under `folder`."""
        self._all("checkpoint", lambda rank, _: rank.save.remote(folder.absolute(), position, keep))

    def start_save(self, folder: Path, position: Position, *, keep: int) -> None:
        """Does what `save` does in the background, after the checkpoint before is finished."""
        self._all("checkpoint", lambda rank, _: rank.start_save.remote(folder.absolute(), position, keep))

    def save_failed(self) -> bool:
        """Returns at once whether a checkpoint could not be written; `finish_save` says why."""
        return any(self._all("checkpoint", lambda rank, _: rank.save_failed.remote()))

    def finish_save(self) -> None:
        """Waits for the checkpoint that is being written, if there is one."""
        self._all("checkpoint", lambda rank, _: rank.finish_save.remote())

    def restore(self, folder: Path) -> Position | None:
        """Continues from the newest checkpoint under `folder`; returns its position, None when there is none."""
        path = latest(folder.absolute())
        return None if path is None else self.load(path)

    def load(self, path: Path, *, verified: bool = False) -> Position:
        """Continues from the checkpoint at `path`; returns its position. The ranks compare its files with the manifest,
        unless that was done (`verified`)."""
        return self._all("restore", lambda rank, _: rank.load.remote(path.absolute(), verified))[0]

    def export(self, folder: Path, *, source: str) -> None:
        """Writes a Hugging Face folder; tokenizer and config come from `source`."""
        self._all("export", lambda rank, _: rank.export.remote(folder.absolute(), source))

    def _update(self, index: int, num_updates: int) -> dict[str, float]:
        reached("learn.update", update=index)
        return self._all(f"optimiser update {index + 1} of {num_updates}", lambda rank, _: rank.update.remote(index))[0]

    def _all(self, phase: str, submit: Callable[[Handle, int], Any], *, timeout_s: float | None = None) -> list[Any]:
        return self._get(phase, self._submit(submit), timeout_s=timeout_s)

    def _submit(self, submit: Callable[[Handle, int], Any]) -> list[Any]:
        """Calls all ranks, which work together: each must be given the calls of two threads in the same order."""
        with self._turn:
            return [submit(rank, i) for i, rank in enumerate(self.ranks)]

    def _get(
        self, phase: str, references: Sequence[Any], *, timeout_s: float | None = None, beside: Sequence[Handle] = ()
    ) -> list[Any]:
        """Gets the object refs of one phase. Checks every WATCH_S seconds that the actors in `beside` are alive, since
        ranks that wait for a dead engine would hang until the timeout. Raises EngineLost, LearnerLost, LearnerFailed or
        SamplingMismatch."""
        timeout_s = timeout_s or self._timeout_s
        deadline, pending = time.monotonic() + timeout_s, list(references)
        try:
            while beside and pending and time.monotonic() < deadline:
                done, pending = ray.wait(pending, timeout=WATCH_S)
                ray.get(done)
                _check_alive(beside, phase)
            return ray.get(list(references), timeout=max(deadline - time.monotonic(), 0.001))
        except RayTaskError as error:  # first: Ray makes it an instance of the class of its cause as well
            if death := self._death():
                raise LearnerLost(f"{phase}: a learner rank died: {one_line(death)}") from error
            if isinstance(error.cause, SamplingMismatch):
                raise error.cause from error
            kind = EngineLost if is_lost(error) else LearnerFailed  # a rank may itself wait for an engine
            raise kind(f"{phase}: {one_line(error)}") from error
        except GetTimeoutError as error:
            setting = " (learner.timeout_s)" if timeout_s >= self._timeout_s else ""
            raise LearnerLost(f"{phase}: not all ranks finished within {timeout_s:g} s{setting}") from error
        except RayActorError as error:
            raise LearnerLost(f"{phase}: a learner rank died: {one_line(error)}") from error

    def _death(self) -> RayError | None:
        """Returns the error of a rank that has died, if there is one. Its death breaks the connections of the others,
        whose errors may come first."""
        return _first_loss([rank.address.remote() for rank in self.ranks], within_s=DEATH_S)


def _interface(address: str) -> str | None:
    """Returns the network interface of this machine that has the address; None when none has."""
    found = psutil.net_if_addrs().items()
    return next((name for name, own in found if address in (entry.address for entry in own)), None)


def _check_alive(engines: Sequence[Handle], phase: str) -> None:
    """Raises EngineLost when an engine has died; a busy one is not an error."""
    if death := _first_loss([engine.ready.remote() for engine in engines], within_s=WATCH_S):
        raise EngineLost(f"{phase}: an engine died: {one_line(death)}") from death


def _first_loss(calls: Sequence[Any], *, within_s: float) -> RayError | None:
    """Returns the error of the first call that says that an actor or its engine is lost; None when none says so before
    all have answered or the time is up."""
    deadline, left = time.monotonic() + within_s, list(calls)
    while left and (done := ray.wait(left, timeout=max(deadline - time.monotonic(), 0.001))[0]):
        first = done[0]
        left.remove(first)
        try:
            ray.get(first)
        except RayError as error:
            if is_lost(error):
                return error
    return None
