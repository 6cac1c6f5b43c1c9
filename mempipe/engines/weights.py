"""Sends trained weights to the engines (`mempipe.engines.proof` checks that they arrived).

Every transport is one of vLLM's weight-transfer backends, and every engine takes weights through
`Generator.load_weights`: `mempipe_shm` (ours, `mempipe.engines.vllm_worker`) reads a file that `publish` wrote to
shared memory or any folder; `nccl` and `ipc` (vLLM's; of `nccl` our engines' end, `mempipe.engines.vllm_group`) move
GPU memory and are driven from the learner by `GpuWeightSender`. This module imports vLLM and torch only in functions
that move weights, so `WeightHandle` can be imported without them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from mempipe.provenance import model_sha256
from mempipe.storage.files import sha256, whole_file

if TYPE_CHECKING:
    import torch
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

SHARED_MEMORY_BACKEND = "mempipe_shm"
GROUP_BACKEND = "mempipe_nccl"
"""The engine's end of `nccl`."""
MEMBER_LOST = "mempipe/member_lost"
"""The key in an nccl group's store that ends a transfer on all members."""
NEWEST = "newest.json"
_TOLD_S = 30.0
"""How long a sender whose broadcast failed waits for the engines' answers: Ray tells a death within seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightHandle:
    """Holds what an engine needs to fetch weights of `version`: small, and made of numbers, strings, lists and dicts.

    `update_info` is the backend's own (for `mempipe_shm`: path, checksum, version)."""

    version: int
    update_info: dict[str, Any] = field(default_factory=dict)


def pack_weights(state_dict: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None = None) -> np.ndarray:
    """Packs the tensors as one safetensors file in memory, [num_bytes] uint8; floating-point tensors are cast to
    `dtype`.

    A tensor that is another one's alias (tied embeddings) is written once, under the name that comes first.
    """
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    for name, tensor in state_dict.items():
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and identity in seen:
            continue
        seen.add(identity)
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        tensors[name] = tensor.detach().to("cpu", wanted).contiguous()
    return np.frombuffer(save(tensors), dtype=np.uint8)


def publish(weights: Mapping[str, torch.Tensor] | np.ndarray, folder: str | Path, version: int) -> WeightHandle:
    """Writes `weights` (named as in the Hugging Face checkpoint, or packed by `pack_weights`) for engines on this
    machine.

    `folder` is best on /dev/shm. A reader sees a whole file or none, and `newest_weights` finds the last one that was
    written. The one before stays for an engine that may be reading it; older ones are removed. A resumed run may
    publish a version again.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    previous = newest_weights(folder)
    packed = weights if isinstance(weights, np.ndarray) else pack_weights(weights)
    path = folder / f"weights-{version:08d}.safetensors"
    _write(path, packed.data)
    handle = WeightHandle(
        version=version,
        update_info={"path": str(path), "checksum": hashlib.sha256(packed.data).hexdigest(), "version": version},
    )
    _write(folder / NEWEST, json.dumps(handle.update_info).encode())
    kept = {path} if previous is None else {path, Path(previous.update_info["path"])}
    for old in set(folder.glob("weights-*.safetensors")) - kept:
        old.unlink(missing_ok=True)
    return handle


def newest_weights(folder: str | Path) -> WeightHandle | None:
    """Returns the handle that `publish` wrote last to `folder`, for engines that start late or again; None when there
    is none."""
    try:
        info = json.loads((Path(folder) / NEWEST).read_bytes())
    except FileNotFoundError:
        return None
    return WeightHandle(version=info["version"], update_info=info)


def model_handle(folder: str) -> WeightHandle | None:
    """Returns the handle of a model's own files, which are loaded as version 0; None for anything but a folder with
    weights in safetensors files."""
    checksum = model_sha256(folder)
    if not checksum:
        return None
    info = {"path": str(Path(folder).absolute()), "checksum": checksum, "version": 0}
    return WeightHandle(version=0, update_info=info)


def read_weights(path: str, *, checksum: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a published file, or of a model's folder (`model_handle`). They stay in the files' memory:
    these are mapped, and not copied.

    Raises ValueError when the bytes are not those that were published.
    """
    from safetensors.torch import load_file

    is_folder = Path(path).is_dir()
    found = model_sha256(path) if is_folder else sha256(Path(path))
    if found != checksum:
        raise ValueError(f"{path} has sha256 {found}, but {checksum} was published; it was changed or damaged since")
    files = _weight_files(Path(path)) if is_folder else [path]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _weight_files(folder: Path) -> list[Path]:
    """Returns the files of a model that transformers and vLLM read: those that its index names, or the only one. Others
    may be next to them, such as the same weights under other names (`consolidated.safetensors` of Mistral)."""
    index, only = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    return [only] if only.is_file() else sorted(folder.glob("*.safetensors"))


def read_checksums(handle: WeightHandle, *, dtype: str) -> dict[str, int]:
    """Returns the checksum of every weight of a handle as an engine of `dtype` holds it, by its name in the file.
    Raises ValueError as `read_weights` does."""
    import torch

    from mempipe.engines.checksums import checksum

    weights = read_weights(handle.update_info["path"], checksum=handle.update_info["checksum"])
    return {name: int(checksum(weight.to(getattr(torch, dtype)))) % 2**64 for name, weight in weights.items()}


class EngineControl(Protocol):
    """Describes the interface of the engines to a GPU sender: blocking calls that reach every engine and return when
    all have finished."""

    def connect(self, init_info: dict[str, Any]) -> None:
        """Calls `Generator.connect` on every engine, with the `rank_offset` of `replica_init_info`."""
        ...

    def load(self, handle: WeightHandle) -> None:
        """Calls `Generator.load_weights` on every engine."""
        ...


def replica_init_info(init_info: Mapping[str, Any], *, replica: int, tensor_parallel: int) -> dict[str, Any]:
    """Returns the `init_info` of a sender for engine number `replica`: with nccl the ranks of its workers follow those
    of the engine before."""
    info = dict(init_info)
    if "rank_offset" in info:
        info["rank_offset"] += replica * tensor_parallel
    return info


class GpuWeightSender:
    """The learner's end of vLLM's `nccl` and `ipc` backends. Make one per learner rank, and call `send` on all ranks
    together.

    `model` has the names of the Hugging Face checkpoint and may be sharded by FSDP2; its weights travel in `dtype`, the
    engines' own. Rank 0 transmits and drives the engines. `address` (host, port) and `num_engine_ranks` (replicas x
    tensor_parallel) are the nccl group's.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        dtype: torch.dtype,
        control: EngineControl,
        backend: Literal["nccl", "ipc"],
        rank: int,
        address: tuple[str, int] = ("127.0.0.1", 0),
        num_engine_ranks: int = 1,
    ) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self._client = TrainerClient(control)
        self._source = _cast_source(model, dtype)
        info = _trainer_init_info(backend, rank=rank, address=address, num_engine_ranks=num_engine_ranks)
        self._engine: TrainerWeightTransferEngine = WeightTransferTrainerFactory.trainer_init(
            info, client=self._client, source=self._source
        )
        self._client.failed = self._abort

    def send(self, version: int) -> None:
        """Sends the model's present weights to the engines as `version`; returns when every engine serves them. When an
        engine fails or dies it raises what `EngineControl.load` does, and an nccl group is of no further use."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()  # vLLM reads on its own streams, which do not wait for the optimiser's
        self._client.begin(version)
        self._source.left = None
        try:
            self._engine.send_weights()
        except Exception:
            if self._client.failure(within_s=0) is None:  # else the group is aborted already
                self._abort()
            self._source.finish()  # the other ranks gather all weights together with this one
            # A broadcast may fail because of an engine whose death Ray tells a moment later.
            if failure := self._client.failure(within_s=_TOLD_S):
                raise failure from None
            raise

    def _abort(self) -> None:
        """Ends an nccl transfer on all members: they would wait in a broadcast for a member that is gone."""
        group = getattr(self._engine, "model_update_group", None)
        if group is not None and group.group is not None:
            group.group.store.set(MEMBER_LOST, b"1")
            group.destroy()

    def close(self) -> None:
        self._engine.shutdown()


class TrainerClient:
    """The control plane that vLLM's trainer engines drive, ending in `EngineControl`.

    Start and finish of an update are part of `Generator.load_weights`, one call per update, so an update must come in
    one piece: nccl's is one however it is packed, ipc's is one unpacked.
    """

    def __init__(self, control: EngineControl) -> None:
        self.failed: Callable[[], None] = lambda: None
        """Is called at once when the engines do not load an update, while the sender may still be sending."""
        self._control = control
        self._version = -1
        self._failure: Exception | None = None
        self._has_ended = threading.Event()
        self._has_ended.set()  # no update is running

    def begin(self, version: int) -> None:
        """Says that the next update is of this version."""
        self._version, self._failure = version, None

    def failure(self, *, within_s: float) -> Exception | None:
        """Returns why the engines did not load the running update, if that is known in time."""
        self._has_ended.wait(within_s)
        return self._failure

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._control.connect(init_info)

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        assert isinstance(update_info, dict), "nccl and ipc describe an update in one dict"
        self._has_ended.clear()
        try:
            self._control.load(WeightHandle(version=self._version, update_info=_plain(update_info)))
        except Exception as error:
            self._failure = error
            self.failed()
            raise
        finally:
            self._has_ended.set()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


def _cast_source(model: torch.nn.Module, dtype: torch.dtype) -> Any:
    """Returns the model's weights as an engine holds them, in vLLM's WeightSource with a method `finish`. Shards are
    cast before they are gathered, which halves the traffic."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, materialize_full_tensor

    class CastSource(WeightSource):
        left: Iterator[tuple[str, torch.Tensor]] | None = None

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, dtype, tuple(parameter.shape)) for name, parameter in model.named_parameters()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            self.left = self._gather()
            return self.left

        def finish(self) -> None:
            """Gathers what the iteration did not come to."""
            for _ in self.left or self._gather():
                pass

        def _gather(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, parameter in model.named_parameters():
                yield name, materialize_full_tensor(parameter.detach().to(dtype))

    return CastSource()


def _trainer_init_info(backend: str, *, rank: int, address: tuple[str, int], num_engine_ranks: int) -> TrainerInitInfo:
    if backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        host, port = address
        return NCCLTrainerInitInfo(rank=rank, master_address=host, master_port=port, world_size=1 + num_engine_ranks)
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=rank)
    raise ValueError(
        f"backend is {backend!r}; a GPU sender has 'nccl' (learner and engines on different GPUs) and 'ipc' (on "
        "the same)"
    )


def _plain(update_info: dict[str, Any]) -> dict[str, Any]:
    """Returns the update's description in plain data. CUDA IPC handles hold Python types that the engine's message
    format lacks, so they travel pickled, as vLLM's HTTP client sends them.
    """
    plain = {key: value for key, value in update_info.items() if value is not None}
    if "ipc_handles" in plain:
        plain["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(plain.pop("ipc_handles"))).decode()
    return plain


def _write(path: Path, content: bytes | memoryview) -> None:
    with whole_file(path, durable=False) as partial:  # an engine that finds it damaged refuses it by its checksum
        partial.write_bytes(content)
