"""A vLLM engine that samples token ids after token ids, under weights of a known version that can be replaced while it
runs.

Ids in, ids out: the engine has no tokenizer, unless it is to stop at texts, and stops only at what the caller names.
Every completion is sampled by one version of the weights: `load_weights` lets the completions in flight finish, holds
back new ones, and empties the prefix cache. With `generation.updates_in_flight` running completions pause instead and
continue under the new weights, from a recomputed cache; every token knows its version. Faults raise (`EngineFault`);
they are never a completion (promise 8).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np

from mempipe.engines.config import GenerationConfig, ModelConfig, SamplingConfig
from mempipe.engines.engine_faults import EngineDead, EngineFault, GenerationTimeout, WeightTransferFailed
from mempipe.engines.engine_load import EngineLoad
from mempipe.engines.proof import CANARY_END, HeldWeights, added
from mempipe.engines.vllm_own import OwnEngine
from mempipe.engines.vllm_settings import VllmSettings, engine_arguments, engine_variables
from mempipe.engines.vllm_shared import SharedEngine, is_occupied
from mempipe.engines.weights import SHARED_MEMORY_BACKEND, WeightHandle, publish
from mempipe.storage.scratch import memory_folder
from mempipe.types import Completion, FinishReason

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.metrics.stats import SchedulerStats

T = TypeVar("T")
Engine: TypeAlias = OwnEngine | SharedEngine
ADAPTER_NAME = "policy"


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

        A completion also ends with the token in which one of `stop_texts` ends. Only then does the engine have a
        tokenizer (the model's), since it must decode each token. With `reproducible` on CPUs no completion depends on
        the others of its batch: the same request with the same seed gives the same tokens and log-probs to the last
        bit. It samples more slowly.
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
        self._without_cache = False  # between `load_weights` of an engine that sleeps and `wake`
        self._engine: Engine | None = None
        self._ids = itertools.count()
        self.is_connected = False
        """Whether it has joined a rendezvous."""
        self._update = asyncio.Lock()
        self._open = asyncio.Event()  # cleared while weights are replaced
        self._idle = asyncio.Event()  # set while no completion is in flight
        self._idle.set()
        self._open.set()
        self._under_way = 0
        self._load = EngineLoad()
        self._load_lock = threading.Lock()  # a shared engine counts its steps in its own thread
        self._transfer_failure: str | None = None
        self._adapter: LoRARequest | None = None  # what completions are sampled with, once there is one

    async def start(self) -> None:
        """Loads the model (seconds to minutes), unless it is loaded.

        With a separate engine process the event loop is blocked during this time. Raises what vLLM raises.
        """
        if self._engine is not None:
            return
        arguments = engine_arguments(
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
        settings = VllmSettings(
            arguments=arguments,
            variables=engine_variables(self._config, device=self._device, transfer=self._transfer),
            num_threads=self._config.num_threads if self._device == "cpu" else None,
            listen=self._count_step,
        )
        if self._shares_process():
            engine = SharedEngine(settings)
            await engine.start()
        else:
            engine = OwnEngine(settings)
        self._engine = engine
        await self._call("weight version", lambda engine: engine.set_weight_version(str(self.policy_version)))
        if self._alone:
            await self._call("rows alone", lambda engine: engine.collective_rpc("compute_rows_alone"))

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingConfig,
        stop_token_ids: Sequence[int],
        seed: int | None = None,
    ) -> Completion:
        """Samples one completion after `token_ids`. Any number of calls may be in flight.

        Log-probs are of the distribution that was sampled from: temperature applied, and renormalised over what top_k
        and top_p leave. Temperature 0 takes the likeliest id, with its log-prob at temperature 1. With `seed` the
        completion depends on nothing else that the engine is doing.

        Raises ValueError for ids that the model does not have, and when prompt and completion exceed the model length;
        GenerationTimeout; EngineDead; WeightTransferFailed when the engine has no complete set of weights.
        """
        self._check(token_ids, max_tokens)
        params = _sampling_params(
            sampling, max_tokens=max_tokens, stop_token_ids=stop_token_ids, stop_texts=self._stop_texts, seed=seed
        )
        output = await self._run(token_ids, params)
        self._load.count_prompt(len(token_ids), output.num_cached_tokens or 0)
        return _completion(output)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Returns the log-probs of `token_ids[1:]`, each given all ids before it, at temperature 1; the prefix cache is
        not used.

        Raises as `generate` does, and ValueError for fewer than two ids.
        """
        return await self._scores(token_ids, from_cache=False)

    async def score_from_cache(self, token_ids: Sequence[int]) -> list[float]:
        """Returns the log-probs of the last ids, computed after the others were found in the prefix cache; temperature
        1.

        The others are computed first, for the cache, which holds whole blocks: the result has about CANARY_END
        log-probs and up to a block more. It has fewer when the cache held more than that, and none when the engine has
        no prefix cache or the sequence is too short for one. Raises as `score` does.
        """
        if len(token_ids) < CANARY_END + 2:
            return []
        await self._scores(token_ids[:-CANARY_END], from_cache=False)
        return await self._scores(token_ids, from_cache=True)

    async def _scores(self, token_ids: Sequence[int], *, from_cache: bool) -> list[float]:
        if len(token_ids) < 2:
            raise ValueError(f"a sequence of {len(token_ids)} ids has nothing to score; give at least 2")
        self._check(token_ids, 1)
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=not from_cache,
        )
        output = await self._run(token_ids, params)
        rows, num_cached = output.prompt_logprobs, output.num_cached_tokens or 0
        assert rows is not None, "prompt_logprobs were asked for"
        if from_cache and not num_cached:
            return []
        first = num_cached + 1  # vLLM fills only the rows that it computed; on a GPU it leaves the others out
        num_computed = len(token_ids) - first
        scored = zip(token_ids[first:], rows[len(rows) - num_computed :], strict=True)
        return [row[token].logprob for token, row in scored if row is not None]

    async def held_weights(self) -> HeldWeights:
        """Returns the version and the checksums of the weights that the engine holds, as its workers find them in
        memory.

        Raises WeightTransferFailed when the engine cannot say, EngineDead.
        """
        parts = await self._call("checksums", lambda engine: engine.collective_rpc("weight_checksums"))
        packed, *_ = await self._call("packed modules", lambda engine: engine.collective_rpc("packed_modules"))
        return HeldWeights(version=self.policy_version, checksums=added(parts), packed_modules=packed)

    async def connect(self, init_info: dict[str, Any]) -> None:
        """Joins the backend's rendezvous before the first `load_weights`, and again after a member of an nccl group was
        lost; `mempipe_shm` needs none."""
        await self._call(
            "connect", lambda engine: engine.collective_rpc("init_weight_transfer_engine", init_info=init_info)
        )
        self.is_connected = True

    async def load_weights(self, weights: WeightHandle | np.ndarray, policy_version: int) -> None:
        """Samples completions from `weights`, of version `policy_version`, from now on.

        Running completions finish first with the old weights, or continue with the new ones (`updates_in_flight`). A
        sleeping engine allocates the memory of its weights again; completions wait for `wake`. `weights` is a handle of
        the backend's, or packed weights (a row of bytes from `pack_weights`) that came through an object store; those
        of a model that `serves_adapter` are its adapter. Raises WeightTransferFailed, which names the phase; paused
        completions then raise it too.
        """
        async with self._update:
            self._open.clear()
            started = time.perf_counter()
            in_flight = self._config.updates_in_flight and not self._asleep
            if self._model.serves_adapter and self._adapter is None:
                in_flight = False  # completions that began without an adapter cannot switch to one
            try:
                if in_flight:
                    await self._call("pause", lambda engine: engine.pause())
                else:
                    await self._idle.wait()
                self._load.drain_seconds = time.perf_counter() - started
                self._live()
                self._transfer_failure = (
                    f"the engine holds no whole set of weights: loading version {policy_version} failed"
                )
                if self._asleep and not self._without_cache:
                    await self._call("wake for weights", lambda engine: engine.wake_up(tags=["weights"]))
                    self._without_cache = True
                if self._model.serves_adapter:
                    await self._replace_adapter(weights, policy_version)
                else:
                    with self._as_handle(weights, policy_version) as handle:
                        await self._replace(handle, policy_version)
                if not await self._call("prefix cache", lambda engine: engine.reset_prefix_cache(running=in_flight)):
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
                    await self._call("resume", lambda engine: engine.resume())

    async def begin(self, seed: int) -> None:
        """Forgets all that was sampled so far: completions are from now on those of an engine that was just started
        with `seed`. Waits for the completions in flight. Raises as `load_weights` does."""
        async with self._update:
            self._open.clear()
            try:
                await self._idle.wait()
                if not await self._call("prefix cache", lambda engine: engine.reset_prefix_cache(running=False)):
                    raise WeightTransferFailed("the engine kept its prefix cache, which others filled")
                await self._call("seed", lambda engine: engine.collective_rpc("reseed", seed=seed))
                self.take_load()
            finally:
                self._open.set()

    async def sleep(self) -> None:
        """Frees the GPU memory of weights and cache, once the completions in flight have finished; does nothing for a
        sleeping engine.

        New ones wait until `load_weights` and then `wake`. Only for an engine that was made with `can_sleep`.
        """
        async with self._update:
            if self._asleep:
                return
            self._open.clear()
            await self._idle.wait()
            try:
                # An adapter brings no base weights with it, so those stay, in the machine's memory.
                level = 1 if self._model.serves_adapter else 2
                await self._call("sleep", lambda engine: engine.sleep(level=level))
                self._asleep = True
            finally:
                if not self._asleep:
                    self._open.set()

    async def wake(self) -> None:
        """Allocates the memory of the cache again, after `load_weights`, and lets completions begin; does nothing for
        an engine that is awake.

        It is a separate call, because on the GPU of a learner there is room for the cache only when the learner's copy
        of the weights is gone. Raises WeightTransferFailed before `load_weights`.
        """
        async with self._update:
            if not self._asleep:
                return
            if not self._without_cache:
                raise WeightTransferFailed("the engine sleeps without weights; load_weights comes before wake")
            await self._call("wake", lambda engine: engine.wake_up(tags=["kv_cache"]))
            self._asleep = self._without_cache = False
            self._open.set()

    def take_load(self) -> EngineLoad:
        """Returns the engine's counters since the last call, and resets them."""
        with self._load_lock:
            load, self._load = self._load, EngineLoad()
        return load

    def check_alive(self) -> None:
        """Raises EngineDead when the engine is not running."""
        self._live()

    async def shutdown(self) -> None:
        """Ends the engine and frees its memory; completions in flight raise EngineDead."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        await engine.shutdown()

    def _shares_process(self) -> bool:
        choice = self._config.engine_process
        if choice == "auto":
            return self._device == "cpu" and self._config.tensor_parallel == 1 and not is_occupied()
        return choice == "shared"

    async def _replace(self, handle: WeightHandle, policy_version: int) -> None:
        if not self.is_connected:
            await self.connect({})
        await self._call("start", lambda engine: engine.collective_rpc("start_weight_update"))
        await self._call(
            "update", lambda engine: engine.collective_rpc("update_weights", update_info=handle.update_info)
        )
        await self._call("finish", lambda engine: engine.collective_rpc("finish_weight_update"))
        await self._call("weight version", lambda engine: engine.set_weight_version(str(policy_version)))

    async def _replace_adapter(self, weights: WeightHandle | np.ndarray, policy_version: int) -> None:
        from vllm.lora.request import LoRARequest

        from mempipe.engines.adapter import write_adapter  # PEFT, for engines that serve an adapter

        assert isinstance(weights, np.ndarray), "an adapter comes as bytes, whatever moves whole models"
        with memory_folder(weights.nbytes) as folder:
            write_adapter(folder, weights, self._model)
            request = LoRARequest(ADAPTER_NAME, 1, str(folder), load_inplace=True)
            await self._call("update", lambda engine: engine.add_lora(request))
        self._adapter = LoRARequest(ADAPTER_NAME, 1, str(folder))  # it is loaded, so the folder is not looked for
        await self._call("weight version", lambda engine: engine.set_weight_version(str(policy_version)))

    @contextlib.contextmanager
    def _as_handle(self, weights: WeightHandle | np.ndarray, version: int) -> Iterator[WeightHandle]:
        if isinstance(weights, WeightHandle):
            yield weights
            return
        with memory_folder(weights.nbytes) as folder:
            yield publish(weights, folder, version)

    async def _run(self, token_ids: Sequence[int], params: SamplingParams) -> RequestOutput:
        """Returns the final output of one request, sampled while the gate is open. Raises what `generate` raises."""
        try:
            async with asyncio.timeout(self._config.timeout_s), self._entered() as engine:
                output = await engine.complete(f"{next(self._ids)}", token_ids, params, self._adapter)
        except TimeoutError as error:
            raise GenerationTimeout(
                f"no completion within generation.timeout_s {self._config.timeout_s:g} s"
            ) from error
        if self._transfer_failure is not None and self._open.is_set():  # it was paused when a transfer failed
            raise WeightTransferFailed(self._transfer_failure)
        return output

    @contextlib.asynccontextmanager
    async def _entered(self) -> AsyncIterator[Engine]:
        """Counts one completion as running, once no weights are being replaced."""
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
        with self._load_lock:
            self._load.count_step(running=stats.num_running_reqs, waiting=waiting, cache_use=stats.kv_cache_usage)
            if (guesses := stats.spec_decoding_stats) is not None:
                self._load.count_guesses(guessed=guesses.num_draft_tokens, right=guesses.num_accepted_tokens)

    def _live(self) -> Engine:
        if self._engine is None or self._engine.death:
            reason = "not started, or shut down" if self._engine is None else self._engine.death
            raise EngineDead(f"the engine is not running: {reason}")
        return self._engine

    def _check(self, token_ids: Sequence[int], max_tokens: int) -> None:
        vocab_size = self._live().vocab_size
        if not len(token_ids) or max_tokens < 1:
            raise ValueError(f"{len(token_ids)} prompt ids and max_tokens {max_tokens}; both must be at least 1")
        if len(token_ids) + max_tokens > self.max_model_len:
            raise ValueError(
                f"prompt of {len(token_ids)} ids and max_tokens {max_tokens} exceed the model length "
                f"{self.max_model_len}"
            )
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            raise ValueError(
                f"prompt holds id {min(token_ids)} or {max(token_ids)}, outside of the model's 0..{vocab_size - 1}"
            )

    async def _call(self, phase: str, call: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
        """Returns the result of one control call.

        Such calls never return when vLLM's engine dies, so the call also waits for the engine's end.
        """
        engine = self._live()
        task = asyncio.ensure_future(call(engine))
        await asyncio.wait({task, engine.died}, timeout=self._config.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            if engine.died.done():
                raise EngineDead(f"the engine ended during {phase!r}: {engine.death}")
            raise WeightTransferFailed(
                f"{phase!r} did not finish within generation.timeout_s {self._config.timeout_s:g} s"
            )
        error = task.exception()
        if isinstance(error, EngineDead):
            raise EngineDead(f"the engine ended before {phase!r} was done: {engine.death}") from error
        if error is not None:
            raise WeightTransferFailed(f"{phase!r} failed: {error}") from error
        return task.result()


def _own_device() -> Literal["cpu", "cuda"]:
    import torch  # here, since every process with a handle of an engine's actor imports this module

    return "cuda" if torch.cuda.is_available() else "cpu"


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
        num_cached_tokens=output.num_cached_tokens or 0,
    )
