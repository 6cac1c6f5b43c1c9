"""Start of a vLLM engine: its arguments, the environment of its process, and its step listeners."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from logging.handlers import MemoryHandler
from typing import TYPE_CHECKING, Any, get_args

from mempipe import environment
from mempipe.engines.config import GenerationConfig, ModelConfig
from mempipe.engines.weights import GROUP_BACKEND
from mempipe.garbage import no_collections

if TYPE_CHECKING:
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase
    from vllm.v1.metrics.stats import SchedulerStats

NGRAM_IDS = (2, 4)
"""The fewest and the most ids that must have occurred before for a guess. Not tuned."""

_ENVIRONMENT = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Holds the settings with which both kinds of engine start."""

    arguments: dict[str, Any]
    """Keyword arguments of vLLM's EngineArgs."""
    variables: dict[str, str]
    """Environment variables of the engine's process."""
    num_threads: int | None
    """CPU threads that compute; None on a GPU."""
    listen: Callable[[SchedulerStats], None]
    """Called after every step of the engine, perhaps in a thread of the engine's."""


def engine_arguments(
    model: ModelConfig, config: GenerationConfig, *, max_model_len: int, seed: int, device: str, transfer: str
) -> dict[str, Any]:
    """Returns keyword arguments of vLLM's EngineArgs."""
    arguments: dict[str, Any] = {
        "model": model.path,
        "dtype": model.dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "seed": seed,
        "generation_config": "vllm",  # ignore the checkpoint's own sampling defaults
        "logprobs_mode": "processed_logprobs",
        "trust_remote_code": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "tensor_parallel_size": config.tensor_parallel,
        # Inside a placement group vLLM would look for a separate bundle for every worker.
        "distributed_executor_backend": "mp" if config.tensor_parallel > 1 else None,
        "enforce_eager": config.enforce_eager or device == "cpu",
        "weight_transfer_config": {"backend": GROUP_BACKEND if transfer == "nccl" else transfer},
        "worker_extension_cls": "mempipe.engines.vllm_worker.WorkerExtension",
    }
    if model.serves_adapter:
        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": _rank_of_engine(model.lora_rank),
            # Without it the head computes an adapter that is always zero. vLLM knows layers by the last part of a name.
            "lora_target_modules": sorted({target.rpartition(".")[2] for target in model.lora_targets}),
        }
    if device == "cuda":
        arguments["hf_overrides"] = {"head_dtype": "float32"}  # as the learner computes logits; CPUs: vllm_worker
        if config.ngram_tokens:  # vLLM 0.32 samples guessed tokens wrongly on CPUs, unless they are the likeliest
            arguments["speculative_config"] = guesses(config.ngram_tokens)
        return {**arguments, "gpu_memory_utilization": config.gpu_memory_utilization}
    return {
        **arguments,
        # the smallest that the CPU kernels take: the prefixes that short prompts share are cached from there on
        "block_size": 32,
        # a seeded request in chunks needs a generator that rewinds, which CPU ones cannot
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_model_len, 8192),
    }


def guesses(num_tokens: int) -> dict[str, Any]:
    """Returns vLLM's settings for guesses of `num_tokens` from the context."""
    fewest, most = NGRAM_IDS
    return {
        "method": "ngram",
        "num_speculative_tokens": num_tokens,
        "prompt_lookup_min": fewest,
        "prompt_lookup_max": most,
    }


def engine_variables(config: GenerationConfig, *, device: str, transfer: str) -> dict[str, str]:
    """Returns the environment variables of an engine's process that are the same wherever the engine lives."""
    variables = environment.engine(
        frontend_pid=os.getpid(), log_level=os.environ.get(environment.VLLM_LOG_LEVEL, "ERROR")
    )
    if transfer == "ipc":
        variables |= environment.PICKLED_HANDLES
    if device == "cuda":
        variables |= environment.NO_FUSED_SAMPLER
    if device == "cpu":
        variables |= environment.cpu_engine(num_threads=config.num_threads, kv_cache_gib=config.cpu_kv_cache_gib)
        if config.tensor_parallel == 1:
            variables |= environment.IN_PROCESS_ENGINE
    return variables


@contextlib.contextmanager
def engine_environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets `variables` in the environment of this process while an engine starts in it, or in a child that inherits
    them. Afterwards the environment is as it was before, also where vLLM changed it; an engine of this process has
    cached its variables by then. Engines start one after the other, also from several threads. vLLM is only imported
    inside this block, where Python collects no garbage; vLLM does so when its engine is made.
    """
    with _ENVIRONMENT, no_collections():
        from mempipe.engines.lean_libraries import import_vllm_without_scipy  # isort: skip  # before vLLM
        from vllm import envs

        before = dict(os.environ)
        os.environ.update(variables)
        envs.disable_envs_cache()  # an earlier engine of this process has cached its own variables
        try:
            with kept_log_targets():
                import_vllm_without_scipy()
                yield
        finally:
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)


@contextlib.contextmanager
def kept_log_targets() -> Iterator[None]:
    """Gives every buffering log handler of this process its target back at the end of the block.

    vLLM configures logging when it is imported, for which Python closes the handlers of all others. Ray Serve's
    handler would keep all further records in memory, and a restarted controller would end the replica.
    """
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    handlers = {handler for logger in loggers for handler in logger.handlers if isinstance(handler, MemoryHandler)}
    targets = {handler: handler.target for handler in handlers}
    try:
        yield
    finally:
        for handler, target in targets.items():
            handler.setTarget(target)


def step_listener(listen: Callable[[SchedulerStats], None]) -> type[AggregateStatLoggerBase]:
    """Returns a logger class for vLLM that calls `listen` after every engine step.

    It is a subclass of vLLM's Prometheus logger, because vLLM adds its own, costlier one to any other kind.
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
    """Returns the smallest adapter rank that vLLM makes room for and that holds one of `rank`; the rest stays zero."""
    from vllm.config.lora import MaxLoRARanks

    return min(size for size in get_args(MaxLoRARanks) if size >= rank)
