"""A vLLM engine that samples token ids after token ids, under weights of a known version that can be replaced while it
runs.

Ids in, ids out: the engine has no tokenizer, unless it is to stop at texts, and stops only at what the caller names.
Every completion is sampled by one version of the weights: `load_weights` lets the completions under way finish, holds
back new ones, and empties the prefix cache. With `generation.updates_in_flight` those under way stand still instead and
go on under the new weights, from a cache that is computed anew; every token knows its version. Faults raise
(`EngineFault`); they are never a completion (promise 8).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np

from mempipe import environment
from mempipe.engines.config import GenerationConfig, ModelConfig, SamplingConfig
from mempipe.engines.engine_load import EngineLoad
from mempipe.engines.proof import HeldWeights, added
from mempipe.engines.weights import SHARED_MEMORY_BACKEND, WeightHandle, publish, write_adapter
from mempipe.faults import InfrastructureFault
from mempipe.types import Completion, FinishReason

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase
    from vllm.v1.metrics.stats import SchedulerStats

T = TypeVar("T")
ADAPTER_NAME = "policy"


class EngineFault(InfrastructureFault):
    """The engine could not do what it was asked; the request itself was fine."""


class EngineDead(EngineFault):
    """The engine's process is gone, or was never started. A new `Generator` is needed."""


class GenerationTimeout(EngineFault):
    """A completion did not finish within `generation.timeout_s`, waiting included."""


class WeightTransferFailed(EngineFault):
    """New weights did not arrive. The engine samples nothing until a later `load_weights` succeeds."""


class Generator:
    """One engine. `start` it, call it from one event loop, `shutdown` it."""

    def __init__(
        self,
        model: ModelConfig,
        config: GenerationConfig,
        *,
        max_model_len: int,
        seed: int = 0,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        transfer: Literal["mempipe_shm", "nccl", "ipc"] = SHARED_MEMORY_BACKEND,
        stop_texts: Sequence[str] = (),
        can_sleep: bool = False,
        reproducible: bool = False,
    ) -> None:
        """`max_model_len` is in tokens, prompt and completion together; `seed` is the engine's.

        A completion also ends with the token in which one of `stop_texts` ends. Only then has the engine a tokenizer
        (the model's), since it must read along.
        With `reproducible` on CPUs no completion depends on those beside it: the same request with the same seed gives
        the same tokens and log-probs to the last bit. It samples more slowly.
        """
        self.max_model_len = max_model_len
        self.policy_version = 0
        self._model = model
        self._config = config
        self._seed = seed
        self._device = _own_device() if device == "auto" else device
        self._transfer = transfer
        self._stop_texts = list(stop_texts)
        self._can_sleep = can_sleep
        self._alone = reproducible and self._device == "cpu"
        self._asleep = False
        self._engine: AsyncLLM | None = None
        self._death: asyncio.Task[None] | None = None  # done when the engine has died or was shut down
        self._vocab_size = 0
        self._ids = itertools.count()
        self._connected = False
        self._update = asyncio.Lock()
        self._open = asyncio.Event()  # cleared while weights are replaced
        self._idle = asyncio.Event()  # set while no completion is under way
        self._idle.set()
        self._open.set()
        self._under_way = 0
        self._load = EngineLoad()
        self._transfer_failure: str | None = None
        self._adapter: LoRARequest | None = None  # what completions are sampled with, once there is one

    async def start(self) -> None:
        """Loads the model (seconds to minutes, during which the event loop stands still)."""
        assert self._engine is None, "the engine is already started"
        with _environment(_engine_environment(self._config, device=self._device, transfer=self._transfer)):
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            arguments = _engine_arguments(
                self._model,
                self._config,
                max_model_len=self.max_model_len,
                seed=self._seed,
                device=self._device,
                transfer=self._transfer,
            )
            arguments["skip_tokenizer_init"] = not self._stop_texts
            arguments["enable_sleep_mode"] = self._can_sleep
            # A prompt that is found in the cache is attended to in other pieces than one that is computed whole.
            arguments["enable_prefix_caching"] = not self._alone
            self._engine = AsyncLLM.from_engine_args(
                AsyncEngineArgs(**arguments), stat_loggers=[_step_listener(self._count_step)]
            )
        self._death = self._engine.output_handler
        self._vocab_size = self._engine.model_config.get_vocab_size()
        await self._call("weight version", self._engine.update_weight_version(str(self.policy_version)))
        if self._alone:
            await self._call("rows alone", self._engine.collective_rpc("compute_rows_alone"))

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingConfig,
        stop_token_ids: Sequence[int],
        seed: int | None = None,
    ) -> Completion:
        """One completion after `token_ids`. Any number of calls may be under way.

        Log-probs are of the distribution that was sampled from: temperature applied, and renormalised over what top_k
        and top_p leave. Temperature 0 takes the likeliest id, with its log-prob at temperature 1. With `seed` the
        completion depends on nothing else that the engine is doing.

        Raises ValueError for ids that the model does not have, and when prompt and completion exceed the model length;
        GenerationTimeout; EngineDead; WeightTransferFailed when the engine has no whole set of weights.
        """
        self._check(token_ids, max_tokens)
        params = _sampling_params(
            sampling, max_tokens=max_tokens, stop_token_ids=stop_token_ids, stop_texts=self._stop_texts, seed=seed
        )
        output = await self._run(token_ids, params)
        self._load.count_prompt(len(token_ids), output.num_cached_tokens or 0)
        return _completion(output)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of `token_ids[1:]`, each given all ids before it, at temperature 1; the prefix cache is not used.

        Raises as `generate` does, and ValueError for fewer than two ids.
        """
        if len(token_ids) < 2:
            raise ValueError(f"a sequence of {len(token_ids)} ids has nothing to score; give at least 2")
        self._check(token_ids, 1)
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        output = await self._run(token_ids, params)
        rows = output.prompt_logprobs
        assert rows is not None, "prompt_logprobs were asked for"
        return [row[token].logprob for token, row in zip(token_ids[1:], rows[1:], strict=True) if row is not None]

    async def held_weights(self) -> HeldWeights:
        """The version and the checksums of the weights that the engine holds, as its workers find them in memory.

        Raises WeightTransferFailed when the engine cannot say, EngineDead.
        """
        parts = await self._call("checksums", self._live().collective_rpc("weight_checksums"))
        packed, *_ = await self._call("packed modules", self._live().collective_rpc("packed_modules"))
        return HeldWeights(version=self.policy_version, checksums=added(parts), packed_modules=packed)

    async def connect(self, init_info: dict[str, Any]) -> None:
        """The backend's rendezvous, once, before the first `load_weights`; `mempipe_shm` needs none."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._call(
            "connect", self._live().init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))
        )
        self._connected = True

    async def load_weights(self, weights: WeightHandle | np.ndarray, policy_version: int) -> None:
        """From now on completions are sampled by `weights`, which are called `policy_version`.

        Completions under way finish first, under the old ones, or go on afterwards (`updates_in_flight`). `weights` is
        a handle of the backend's, or packed weights (a row of bytes from `pack_weights`) that came through an object
        store; those of a model that `serves_adapter` are its adapter. Raises WeightTransferFailed, which names the
        phase; then completions that stood still raise it too.
        """
        async with self._update:
            self._open.clear()
            started = time.perf_counter()
            in_flight = self._config.updates_in_flight and not self._asleep
            if self._model.serves_adapter and self._adapter is None:
                in_flight = False  # completions that began without an adapter cannot take one over
            try:
                if in_flight:
                    await self._call("pause", self._live().pause_generation(mode="keep", clear_cache=False))
                else:
                    await self._idle.wait()
                self._load.drain_seconds = time.perf_counter() - started
                self._live()
                self._transfer_failure = (
                    f"the engine holds no whole set of weights: loading version {policy_version} failed"
                )
                if self._asleep:
                    await self._call("wake for weights", self._live().wake_up(tags=["weights"]))
                if self._model.serves_adapter:
                    await self._replace_adapter(weights, policy_version)
                else:
                    with self._as_handle(weights, policy_version) as handle:
                        await self._replace(handle, policy_version)
                if self._asleep:
                    await self._call("wake", self._live().wake_up(tags=["kv_cache"]))
                    self._asleep = False
                if not await self._call("prefix cache", self._live().reset_prefix_cache(in_flight)):
                    raise WeightTransferFailed(
                        f"weights {policy_version}: the engine kept its prefix cache, which belongs to the old weights"
                    )
                self.policy_version = policy_version
                self._transfer_failure = None
                self._load.load_seconds = time.perf_counter() - started - self._load.drain_seconds
            finally:
                if not self._asleep:
                    self._open.set()
                if in_flight:
                    await self._call("resume", self._live().resume_generation())

    async def sleep(self) -> None:
        """Frees the GPU memory of weights and cache, once the completions under way have finished.

        New ones wait until `load_weights`, which wakes the engine. Only for an engine that was made with `can_sleep`.
        """
        async with self._update:
            self._open.clear()
            await self._idle.wait()
            try:
                # An adapter brings no base weights with it, so those stay, in the machine's memory.
                level = 1 if self._model.serves_adapter else 2
                await self._call("sleep", self._live().sleep(level=level))
                self._asleep = True
            finally:
                if not self._asleep:
                    self._open.set()

    def take_load(self) -> EngineLoad:
        """Returns what the engine counted since the last call, and begins anew."""
        load, self._load = self._load, EngineLoad()
        return load

    def check_alive(self) -> None:
        """Raises EngineDead when the engine is not running."""
        self._live()

    async def shutdown(self) -> None:
        """Ends the engine's processes; completions under way raise EngineDead."""
        if self._engine is None:
            return
        from vllm.v1.engine.exceptions import EngineDeadError

        engine, self._engine = self._engine, None
        if self._death is not None:
            self._death.cancel()
        engine.output_processor.propagate_error(EngineDeadError())
        await asyncio.to_thread(engine.shutdown)

    async def _replace(self, handle: WeightHandle, policy_version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine = self._live()
        if not self._connected:
            await self.connect({})
        await self._call("start", engine.start_weight_update())
        await self._call("update", engine.update_weights(WeightTransferUpdateRequest(update_info=handle.update_info)))
        await self._call("finish", engine.finish_weight_update(weight_version=str(policy_version)))

    async def _replace_adapter(self, weights: WeightHandle | np.ndarray, policy_version: int) -> None:
        from vllm.lora.request import LoRARequest

        assert isinstance(weights, np.ndarray), "an adapter comes as bytes, whatever moves whole models"
        with _memory_folder() as folder:
            write_adapter(folder, weights, self._model)
            request = LoRARequest(ADAPTER_NAME, 1, str(folder), load_inplace=True)
            await self._call("update", self._live().add_lora(request))
        self._adapter = LoRARequest(ADAPTER_NAME, 1, str(folder))  # it is loaded, so the folder is not looked for
        await self._call("finish", self._live().update_weight_version(str(policy_version)))

    @contextlib.contextmanager
    def _as_handle(self, weights: WeightHandle | np.ndarray, version: int) -> Iterator[WeightHandle]:
        if isinstance(weights, WeightHandle):
            yield weights
            return
        with _memory_folder() as folder:
            yield publish(weights, folder, version)

    async def _run(self, token_ids: Sequence[int], params: SamplingParams) -> RequestOutput:
        """The final output of one request, sampled while the gate is open. Raises what `generate` raises."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            async with asyncio.timeout(self._config.timeout_s), self._entered() as engine:
                output = await _final_output(engine, f"{next(self._ids)}", token_ids, params, self._adapter)
        except TimeoutError as error:
            raise GenerationTimeout(
                f"no completion within generation.timeout_s {self._config.timeout_s:g} s"
            ) from error
        except EngineDeadError as error:
            raise EngineDead("the engine's process ended while it sampled") from error
        except EngineGenerateError as error:
            raise EngineFault(f"the engine failed to sample: {error.__cause__}") from error
        if self._transfer_failure is not None and self._open.is_set():  # it stood still when a transfer failed
            raise WeightTransferFailed(self._transfer_failure)
        return output

    @contextlib.asynccontextmanager
    async def _entered(self) -> AsyncIterator[AsyncLLM]:
        """Counts one completion as under way, once no weights are being replaced."""
        await self._open.wait()
        engine = self._live()
        if self._transfer_failure is not None:
            raise WeightTransferFailed(self._transfer_failure)
        self._under_way += 1
        self._idle.clear()
        try:
            yield engine
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    def _count_step(self, stats: SchedulerStats) -> None:
        waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self._load.count_step(running=stats.num_running_reqs, waiting=waiting, cache_use=stats.kv_cache_usage)

    def _live(self) -> AsyncLLM:
        if self._engine is None or self._engine.errored:
            raise EngineDead(
                "the engine is not running: "
                + ("not started, or shut down" if self._engine is None else "its process ended")
            )
        return self._engine

    def _check(self, token_ids: Sequence[int], max_tokens: int) -> None:
        self._live()
        if not len(token_ids) or max_tokens < 1:
            raise ValueError(f"{len(token_ids)} prompt ids and max_tokens {max_tokens}; both must be at least 1")
        if len(token_ids) + max_tokens > self.max_model_len:
            raise ValueError(
                f"prompt of {len(token_ids)} ids and max_tokens {max_tokens} exceed the model length "
                f"{self.max_model_len}"
            )
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise ValueError(
                f"prompt holds id {min(token_ids)} or {max(token_ids)}, outside of the model's "
                f"0..{self._vocab_size - 1}"
            )

    async def _call(self, phase: str, call: Awaitable[T]) -> T:
        """Returns the result of one control call.

        vLLM leaves such calls waiting for ever when the engine dies, so its death is waited for beside them.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        assert self._death is not None, "vLLM reads outputs from the moment it is built inside an event loop"
        task = asyncio.ensure_future(call)
        await asyncio.wait({task, self._death}, timeout=self._config.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            if self._death.done():
                raise EngineDead(f"the engine's process ended during {phase!r}")
            raise WeightTransferFailed(
                f"{phase!r} did not finish within generation.timeout_s {self._config.timeout_s:g} s"
            )
        error = task.exception()
        if isinstance(error, EngineDeadError):
            raise EngineDead(f"the engine's process ended before {phase!r}") from error
        if error is not None:
            raise WeightTransferFailed(f"{phase!r} failed: {error}") from error
        return task.result()


def _own_device() -> Literal["cpu", "cuda"]:
    import torch  # here: whoever gets a handle to an engine's actor imports this module

    return "cuda" if torch.cuda.is_available() else "cpu"


async def _final_output(
    engine: AsyncLLM, request_id: str, token_ids: Sequence[int], params: SamplingParams, adapter: LoRARequest | None
) -> RequestOutput:
    """Does what `AsyncLLM.generate` does, for a request with one output: without an async generator it takes half the
    turns of the event loop. Aborts the request when it is cancelled.
    """
    from vllm.inputs.engine import tokens_input
    from vllm.outputs import PoolingRequestOutput

    try:
        queue = await engine.add_request(request_id, tokens_input(list(token_ids)), params, lora_request=adapter)
        output = queue.get_nowait() or await queue.get()
    except asyncio.CancelledError:
        await engine.abort(request_id)
        raise
    assert not isinstance(output, PoolingRequestOutput), "a text model answers with text"
    return output


def _sampling_params(
    sampling: SamplingConfig,
    *,
    max_tokens: int,
    stop_token_ids: Sequence[int],
    stop_texts: Sequence[str],
    seed: int | None,
) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,  # only the caller's stop ids stop
        seed=seed,
        logprobs=0,  # of the sampled id alone
        flat_logprobs=True,
        stop=list(stop_texts),
        include_stop_str_in_output=True,
        skip_special_tokens=False,  # a tag may be one
        detokenize=bool(stop_texts),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _completion(output: RequestOutput) -> Completion:
    from vllm.logprobs import FlatLogprobs

    (sampled,) = output.outputs
    if sampled.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise EngineFault(f"the engine ended a request with {sampled.finish_reason!r}")
    assert isinstance(sampled.logprobs, FlatLogprobs) and sampled.weight_versions is not None, "both were asked for"
    spans = sampled.weight_versions
    mixed = [int(span.version) for span in spans for _ in range(span.start, span.end)] if len(spans) > 1 else []
    return Completion(
        token_ids=list(sampled.token_ids),
        logprobs=list(sampled.logprobs.logprobs),
        finish_reason=FinishReason(sampled.finish_reason),
        policy_version=int(spans[-1].version),
        policy_versions=mixed,
    )


def _engine_arguments(
    model: ModelConfig, config: GenerationConfig, *, max_model_len: int, seed: int, device: str, transfer: str
) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs."""
    arguments: dict[str, Any] = {
        "model": model.path,
        "dtype": model.dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "seed": seed,
        "generation_config": "vllm",  # nothing of the checkpoint's own sampling defaults
        "logprobs_mode": "processed_logprobs",
        "trust_remote_code": False,
        "disable_log_stats": True,
        "enable_log_requests": False,
        "use_tqdm_on_load": False,
        "tensor_parallel_size": config.tensor_parallel,
        # Inside a placement group vLLM would look for a bundle of its own for every worker.
        "distributed_executor_backend": "mp" if config.tensor_parallel > 1 else None,
        "enforce_eager": config.enforce_eager or device == "cpu",
        "weight_transfer_config": {"backend": transfer},
        "worker_extension_cls": "mempipe.engines.vllm_worker.WorkerExtension",
    }
    if model.serves_adapter:
        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": _rank_of_engine(model.lora_rank),
            "lora_target_modules": list(model.lora_targets),  # else the head computes an adapter that is always zero
        }
    if device == "cuda":
        arguments["hf_overrides"] = {"head_dtype": "float32"}  # as the learner computes logits; CPUs: vllm_worker
        return {**arguments, "gpu_memory_utilization": config.gpu_memory_utilization}
    return {
        **arguments,
        # the smallest that the CPU kernels take: the prefixes that short prompts share are cached from there on
        "block_size": 32,
        # a seeded request in chunks needs a generator that rewinds, which CPU ones cannot
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_model_len, 8192),
    }


def _step_listener(listen: Callable[[SchedulerStats], None]) -> type[AggregateStatLoggerBase]:
    """Returns a logger class for vLLM that calls `listen` after every engine step.

    It passes for vLLM's Prometheus logger, since beside any other kind vLLM starts its own, which counts far more.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class StepListener(PrometheusStatLogger):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def record(self, scheduler_stats: SchedulerStats | None, *args: Any, **kwargs: Any) -> None:
            if scheduler_stats is not None:
                listen(scheduler_stats)

        def log_engine_initialized(self) -> None:
            pass

        def record_sleep_state(self, *args: Any, **kwargs: Any) -> None:
            pass

        def record_admission_rejection(self, reason: str) -> None:
            pass

    return StepListener


def _rank_of_engine(rank: int) -> int:
    """The smallest adapter rank that vLLM makes room for and that holds one of `rank`; the rest stays zero."""
    from vllm.config.lora import MaxLoRARanks

    return min(size for size in get_args(MaxLoRARanks) if size >= rank)


@contextlib.contextmanager
def _memory_folder() -> Iterator[Path]:
    """A folder in shared memory, if the machine has it, until the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix="mempipe-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _engine_environment(config: GenerationConfig, *, device: str, transfer: str) -> dict[str, str]:
    """Environment variables of the engine's processes."""
    variables = environment.engine(
        frontend_pid=os.getpid(), log_level=os.environ.get(environment.VLLM_LOG_LEVEL, "ERROR")
    )
    if transfer == "ipc":
        variables |= environment.PICKLED_HANDLES
    if device == "cpu":
        variables |= environment.cpu_engine(num_threads=config.num_threads, kv_cache_gib=config.cpu_kv_cache_gib)
        if config.tensor_parallel == 1:
            variables |= environment.IN_PROCESS_ENGINE
    return variables


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets `variables` in the environment of this process, for children that inherit it. Afterwards the environment is
    as it was before, also where vLLM changed it.
    """
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
