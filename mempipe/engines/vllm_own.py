"""A vLLM engine in a separate process, which ends with the process that started it."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mempipe import environment
from mempipe.engines.engine_faults import EngineDead, EngineFault
from mempipe.engines.vllm_settings import VllmSettings, engine_environment, step_listener

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")


class OwnEngine:
    """vLLM's AsyncLLM: requests and results go to the engine's process and back over sockets."""

    def __init__(self, settings: VllmSettings) -> None:
        """Loads the model, and blocks the event loop while it does."""
        self._folder = Path(tempfile.mkdtemp(prefix="mempipe-"))
        try:
            folder = environment.engine_folder(str(self._folder), temporary=settings.num_threads is not None)
            with engine_environment(settings.variables | folder):
                from vllm import AsyncEngineArgs
                from vllm.v1.engine.async_llm import AsyncLLM

                self._vllm: AsyncLLM = AsyncLLM.from_engine_args(
                    AsyncEngineArgs(**settings.arguments, enable_log_requests=False),
                    stat_loggers=[step_listener(settings.listen)],
                )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        # vLLM looks for this variable again whenever it reads a message, and both processes must find the same.
        os.environ.update(
            {name: settings.variables[name] for name in environment.PICKLED_HANDLES if name in settings.variables}
        )
        reader = self._vllm.output_handler
        assert reader is not None, "vLLM reads outputs from the moment it is built inside an event loop"
        self.died: asyncio.Future[None] = reader
        """Waits until the engine has ended."""
        self.vocab_size = self._vllm.model_config.get_vocab_size()

    @property
    def death(self) -> str:
        """Says why the engine has ended; "" while it runs."""
        return "its process ended" if self._vllm.errored else ""

    async def complete(
        self, request_id: str, token_ids: Sequence[int], params: SamplingParams, adapter: LoRARequest | None
    ) -> RequestOutput:
        """Does what `AsyncLLM.generate` does, for a request with one output: without an async generator it takes half
        the turns of the event loop. Aborts the request when it is cancelled.
        """
        from vllm.inputs.engine import tokens_input
        from vllm.outputs import PoolingRequestOutput
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            queue = await self._vllm.add_request(
                request_id, tokens_input(list(token_ids)), params, lora_request=adapter
            )
            output = queue.get_nowait() or await queue.get()
        except asyncio.CancelledError:
            await self._vllm.abort(request_id)
            raise
        except EngineDeadError as error:
            raise EngineDead("the engine's process ended while it sampled") from error
        except EngineGenerateError as error:
            raise EngineFault(f"the engine failed to sample: {error.__cause__}") from error
        assert not isinstance(output, PoolingRequestOutput), "a text model answers with text"
        return output

    async def collective_rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Calls a method of the workers; returns what each answers."""
        return await _of_living(self._vllm.collective_rpc(method, kwargs=arguments))

    async def set_weight_version(self, version: str) -> None:
        """Names the weights of all tokens that are sampled from now on."""
        await _of_living(self._vllm.update_weight_version(version))

    async def add_lora(self, adapter: LoRARequest) -> None:
        await _of_living(self._vllm.add_lora(adapter))

    async def reset_prefix_cache(self, *, running: bool) -> bool:
        """Empties the prefix cache, with `running` that of completions in flight too; False when it is kept."""
        return await _of_living(self._vllm.reset_prefix_cache(running))

    async def pause(self) -> None:
        """Pauses completions in flight until `resume`."""
        await _of_living(self._vllm.pause_generation(mode="keep", clear_cache=False))

    async def resume(self) -> None:
        await _of_living(self._vllm.resume_generation())

    async def sleep(self, *, level: int) -> None:
        await _of_living(self._vllm.sleep(level=level))

    async def wake_up(self, *, tags: list[str]) -> None:
        await _of_living(self._vllm.wake_up(tags=tags))

    async def num_under_way(self) -> int:
        """Counts the requests that the engine has not finished."""
        return self._vllm.output_processor.get_num_unfinished_requests()

    async def shutdown(self) -> None:
        """Ends the engine's processes; completions in flight raise EngineDead."""
        from vllm.v1.engine.exceptions import EngineDeadError

        self.died.cancel()
        self._vllm.output_processor.propagate_error(EngineDeadError())
        await asyncio.to_thread(self._vllm.shutdown)
        # Its destructor would do so again, perhaps at the end of the process, when its module is empty already.
        self._vllm.shutdown = lambda timeout=None: None  # pyrefly: ignore
        shutil.rmtree(self._folder, ignore_errors=True)


async def _of_living(call: Awaitable[T]) -> T:
    """Returns the result of a call. Raises EngineDead when the engine was dead already."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        return await call
    except EngineDeadError as error:
        raise EngineDead("the engine's process ended") from error
