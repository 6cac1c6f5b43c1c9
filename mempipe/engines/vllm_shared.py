"""A vLLM engine in the caller's own process, stepped by one thread.

The event loop puts requests and calls into a queue, and the thread does them between two steps; results come back by
`call_soon_threadsafe`, all of a step together. Compared with an engine in a separate process this saves the process,
its start and its memory, and the transfer of every request and result over a socket.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mempipe import environment
from mempipe.engines.engine_faults import EngineDead, EngineFault
from mempipe.engines.vllm_settings import VllmSettings, engine_environment, step_listener
from mempipe.garbage import collect_garbage

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.engine.llm_engine import LLMEngine

T = TypeVar("T")

END_WITHIN_S = 10.0
"""A thread that must end first finishes its step. One that hangs is left alone after this time; it ends with the
process."""

_OCCUPIED = threading.Lock()
"""Held while this process has an engine: vLLM's CPU kernels share one scratch memory, and its groups of processes are
global."""


def is_occupied() -> bool:
    """Returns whether this process has an engine already."""
    return _OCCUPIED.locked()


class SharedEngine:
    """vLLM's LLMEngine, which only its thread touches. `start` it; call it from the event loop that started it."""

    def __init__(self, settings: VllmSettings) -> None:
        self.death = ""
        """Says why the engine has ended; "" while it runs."""
        self.vocab_size = 0
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.died: asyncio.Future[None] = self._loop.create_future()
        """Waits until the engine has ended."""
        self._answers: set[asyncio.Future[Any]] = set()  # futures that callers wait for
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="mempipe-engine", daemon=True)
        # Used by the thread only:
        self._vllm: LLMEngine
        self._requests: dict[str, asyncio.Future[RequestOutput]] = {}

    async def start(self) -> None:
        """Loads the model. Raises what vLLM raises when it cannot, and EngineFault when the process has an engine."""
        if not _OCCUPIED.acquire(blocking=False):
            raise EngineFault(
                "this process has an engine already; a second one needs generation.engine_process own, that "
                "is, a separate process"
            )
        atexit.register(self._end_thread)  # a thread that computes while the interpreter is taken down would crash it
        started: asyncio.Future[int] = self._expected()
        self._inbox.put(lambda: self._tell(_succeed, started, self._vllm.model_config.get_vocab_size()))
        self._thread.start()
        try:
            self.vocab_size = await started
        except asyncio.CancelledError:
            self._end_thread(wait_s=0.0)
            raise
        except EngineDead as error:
            raise error.__cause__ or error from None

    async def complete(
        self, request_id: str, token_ids: Sequence[int], params: SamplingParams, adapter: LoRARequest | None
    ) -> RequestOutput:
        """Returns the final output of one request. Aborts the request when it is cancelled."""
        answer: asyncio.Future[RequestOutput] = self._expected()
        self._inbox.put(partial(self._add, request_id, list(token_ids), params, adapter, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            self._inbox.put(partial(self._abort, request_id))
            raise

    async def collective_rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Calls a method of the worker; returns its answer in a list."""
        return await self._between_steps(lambda vllm: vllm.collective_rpc(method, kwargs=arguments))

    async def set_weight_version(self, version: str) -> None:
        """Names the weights of all tokens that are sampled from now on."""
        await self._between_steps(lambda vllm: vllm.set_weight_version(version))

    async def add_lora(self, adapter: LoRARequest) -> None:
        await self._between_steps(lambda vllm: vllm.add_lora(adapter))

    async def reset_prefix_cache(self, *, running: bool) -> bool:
        """Empties the prefix cache, with `running` that of completions in flight too; False when it is kept."""
        return await self._between_steps(lambda vllm: vllm.reset_prefix_cache(running))

    async def pause(self) -> None:
        """Pauses completions in flight until `resume`."""
        await self._between_steps(self._pause)

    async def resume(self) -> None:
        await self._between_steps(lambda vllm: _core(vllm).resume_scheduler())

    async def sleep(self, *, level: int) -> None:
        await self._between_steps(partial(self._sleep, level))

    async def wake_up(self, *, tags: list[str]) -> None:
        await self._between_steps(lambda vllm: vllm.wake_up(tags))

    async def num_under_way(self) -> int:
        """Counts the requests that the engine has not finished."""
        return await self._between_steps(lambda vllm: vllm.get_num_unfinished_requests())

    async def shutdown(self) -> None:
        """Ends the thread and frees the engine's memory; completions in flight raise EngineDead."""
        self._end("shut down")
        await asyncio.to_thread(self._end_thread)

    # What follows up to `_end_thread` runs in the event loop.

    def _expected(self) -> asyncio.Future[Any]:
        """Returns an answer that the thread will give. Raises EngineDead when it has ended."""
        if self.death:
            raise EngineDead(f"the engine is not running: {self.death}")
        answer = self._loop.create_future()
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        return answer

    async def _between_steps(self, call: Callable[[LLMEngine], T]) -> T:
        answer: asyncio.Future[T] = self._expected()

        def work() -> None:
            if answer.cancelled():
                return
            try:
                result = call(self._vllm)
            except Exception as error:  # of any kind: the caller, who waits for the answer, raises it
                self._tell(_fail, answer, error)
            else:
                self._tell(_succeed, answer, result)

        self._inbox.put(work)
        return await answer

    def _deliver(self, outputs: Sequence[tuple[asyncio.Future[RequestOutput], RequestOutput]]) -> None:
        for answer, output in outputs:
            _succeed(answer, output)

    def _end(self, death: str, fault: BaseException | None = None) -> None:
        """Records that the engine has ended, and fails every pending answer."""
        if self.death:
            return
        self.death = death
        for answer in tuple(self._answers):
            error = EngineDead(f"the engine ended while it was asked: {death}")
            error.__cause__ = fault
            _fail(answer, error)
        self.died.set_result(None)

    def _end_thread(self, wait_s: float = END_WITHIN_S) -> None:
        self._is_ending = True
        self._inbox.put(None)
        self._thread.join(wait_s)
        atexit.unregister(self._end_thread)

    # What follows runs in the thread.

    def _run(self) -> None:
        death, fault = "shut down", None
        try:
            self._vllm = _build(self._settings)
            while self._does_what_is_asked():
                self._step()
        except BaseException as error:  # the outermost handler of the thread: it fails all pending answers
            death, fault = f"it failed with {type(error).__name__}: {error}", error
            traceback.clear_frames(error.__traceback__)  # which would keep the model in memory
        finally:
            self._free()
            _OCCUPIED.release()
            self._tell(self._end, death, fault)

    def _does_what_is_asked(self) -> bool:
        """Empties the inbox, and waits for it while the engine has nothing to do. Returns False when the engine must
        end."""
        core = _core(self._vllm)
        while not self._is_ending:
            has_work = core.scheduler.has_requests() or bool(core.batch_queue)
            try:
                work = self._inbox.get(block=not has_work)
            except queue.Empty:
                return True
            if work is not None:
                work()
        return False

    def _step(self) -> None:
        outputs = [(self._requests.pop(output.request_id), output) for output in self._vllm.step()]
        if outputs:
            self._tell(self._deliver, outputs)

    def _add(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        adapter: LoRARequest | None,
        answer: asyncio.Future[RequestOutput],
    ) -> None:
        from vllm.inputs.engine import tokens_input

        if answer.cancelled():
            return
        self._requests[request_id] = answer
        try:
            self._vllm.add_request(request_id, tokens_input(token_ids), params, lora_request=adapter)
        except Exception as error:  # of any kind: the caller, who waits for the answer, raises it
            self._abort(request_id)
            self._tell(_fail, answer, error)

    def _abort(self, request_id: str) -> None:
        if self._requests.pop(request_id, None) is not None:
            self._vllm.abort_request([request_id])

    def _pause(self, vllm: LLMEngine) -> None:
        _core(vllm).pause_scheduler("keep", clear_cache=False)
        self._finish_steps_ahead()

    def _sleep(self, level: int, vllm: LLMEngine) -> None:
        self._finish_steps_ahead()
        vllm.sleep(level)

    def _finish_steps_ahead(self) -> None:
        """Finishes the steps that are scheduled ahead on a GPU; their tokens are sampled from the weights until now."""
        while _core(self._vllm).batch_queue:
            self._step()

    def _free(self) -> None:
        vllm = self.__dict__.pop("_vllm", None)
        self._requests.clear()
        if vllm is not None:
            try:
                vllm.engine_core.shutdown()
            except Exception as error:  # of any kind, and likely after a failure: the memory is freed all the same
                logging.getLogger(__name__).warning("the engine's shutdown failed: %s", error)
        del vllm
        collect_garbage()  # the model is part of a reference cycle

    def _tell(self, call: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(call, *arguments)


def _build(settings: VllmSettings) -> LLMEngine:
    with engine_environment(settings.variables | environment.IN_PROCESS_ENGINE):
        import torch
        import torch.distributed as dist
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        set_num_threads = torch.set_num_threads
        if settings.num_threads is not None:
            set_num_threads(settings.num_threads)
            if not dist.is_initialized():  # vLLM's default store is a file that engines share
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        _import_model(Path(settings.arguments["model"]))
        try:
            # Without its own statistics this class calls no step listener; AsyncLLM does.
            arguments: dict[str, Any] = settings.arguments | {"disable_log_stats": False}
            return LLMEngine.from_engine_args(EngineArgs(**arguments), stat_loggers=[step_listener(settings.listen)])
        finally:
            torch.set_num_threads = set_num_threads  # vLLM disables it for the whole process


def _import_model(folder: Path) -> None:
    """Gives vLLM the class of the model. Otherwise it imports the class in another process first, which takes a core
    for 13 seconds whenever a machine starts an engine of that architecture for the first time. A name on the hub has no
    folder here, and vLLM finds its class."""
    from vllm import ModelRegistry

    file = folder / "config.json"
    values = json.loads(file.read_text()) if file.is_file() else {}
    for name in values.get("architectures") or []:
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def _core(vllm: LLMEngine) -> EngineCore:
    return cast("InprocClient", vllm.engine_core).engine_core


def _succeed(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: asyncio.Future[Any], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
