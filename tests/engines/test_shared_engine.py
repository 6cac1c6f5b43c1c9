"""An engine in the process of its caller: how it ends, by itself and when it is told to, and what it leaves."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch.distributed as dist
from tiny_qwen2 import engine_processes, held, left_in, make_generator, prompts

from mempipe.engines.config import SamplingConfig
from mempipe.engines.generator import EngineDead, EngineFault, Generator
from mempipe.engines.vllm_shared import SharedEngine, _import_model, is_occupied
from mempipe.engines.weights import WeightHandle
from mempipe.types import Completion

SOON_S = 30.0


async def complete(generator: Generator, prompt: list[int], max_tokens: int = 6) -> Completion:
    return await generator.generate(prompt, max_tokens=max_tokens, sampling=SamplingConfig(), stop_token_ids=[])


@asynccontextmanager
async def many_under_way(generator: Generator) -> AsyncIterator[list[asyncio.Task[Completion]]]:
    """Starts 30 completions of 200 ids; the engine has sampled some, and samples no more until the block ends."""
    with held(generator, after=20) as steps_are_taken:
        tasks = [asyncio.create_task(complete(generator, prompt, 200)) for prompt in prompts(30)]
        await steps_are_taken()
        yield tasks


async def test_a_step_that_fails_is_the_death_of_the_engine_for_every_call(model_path, monkeypatch):
    generator = make_generator(model_path)
    await generator.start()

    def fail() -> None:
        raise RuntimeError("the device is lost")

    async with many_under_way(generator) as tasks:
        monkeypatch.setattr(generator._engine._vllm, "step", fail)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=SOON_S)
    assert [type(result) for result in results] == [EngineDead] * 30
    assert "RuntimeError: the device is lost" in str(results[0])
    for call in (
        complete(generator, prompts(1)[0]),
        generator.score([1, 2]),
        generator.load_weights(WeightHandle(version=1), 1),
        generator.held_weights(),
    ):
        with pytest.raises(EngineDead, match="RuntimeError: the device is lost"):
            await call
    with pytest.raises(EngineDead):
        generator.check_alive()
    await generator.shutdown()
    assert not is_occupied()


async def test_a_shutdown_ends_completions_and_frees_thread_and_memory(model_path, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    children = engine_processes(psutil.Process())
    generator = make_generator(model_path)
    await generator.start()
    assert isinstance(generator._engine, SharedEngine) and engine_processes(psutil.Process()) == children
    model = weakref.ref(generator._engine._vllm.model_executor.driver_worker.worker.get_model())
    async with many_under_way(generator) as tasks:
        await generator.shutdown()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=SOON_S)
    assert [type(result) for result in results] == [EngineDead] * 30
    assert model() is None and not dist.is_initialized()
    assert not any(thread.name == "mempipe-engine" for thread in threading.enumerate())
    assert left_in(tmp_path) == []


async def test_a_model_that_cannot_be_loaded_raises_what_is_wrong_and_leaves_the_process_free(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Exception, match=r"model_type|architectures") as raised:
        await make_generator(tmp_path).start()
    assert not isinstance(raised.value, EngineFault) and not is_occupied()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def generator(model_path: Path) -> AsyncIterator[Generator]:
    made = make_generator(model_path, engine_process="shared")
    await made.start()
    yield made
    await made.shutdown()


async def test_a_cancelled_completion_is_dropped_by_the_engine(generator):
    async with many_under_way(generator) as tasks:
        for task in tasks[:20]:
            task.cancel()
        await asyncio.wait(tasks[:20])
        assert await generator._engine.num_under_way() == 10
    assert all(len(completion.token_ids) == 200 for completion in await asyncio.gather(*tasks[20:]))


async def test_a_process_shares_one_engine_and_auto_gives_the_next_one_its_own(generator, model_path):
    with pytest.raises(EngineFault, match=r"already; .* needs generation\.engine_process own"):
        await make_generator(model_path, engine_process="shared").start()
    assert len((await complete(generator, prompts(1)[0])).token_ids) == 6
    assert not make_generator(model_path)._shares_process()


async def test_a_request_that_vllm_refuses_fails_alone(generator, monkeypatch):
    add = generator._engine._vllm.add_request

    def refuse_the_first(request_id: str, *arguments: object, **more: object) -> object:
        monkeypatch.undo()
        raise ValueError("a number that it does not like")

    monkeypatch.setattr(generator._engine._vllm, "add_request", refuse_the_first)
    results = await asyncio.gather(*(complete(generator, ids) for ids in prompts(3)), return_exceptions=True)
    assert sorted(type(result) for result in results if isinstance(result, Exception)) == [ValueError]
    assert generator._engine._vllm.add_request == add and await generator._engine.num_under_way() == 0


async def test_the_first_engine_of_an_architecture_imports_vllm_in_no_other_process(model_path, tmp_path, monkeypatch):
    def fail(_: object) -> None:
        raise AssertionError("vLLM looks at the model's class in another process")

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # with the caches of a machine that has started no engine
    monkeypatch.setattr("vllm.model_executor.models.registry._run_in_subprocess", fail)
    generator = make_generator(model_path)
    await generator.start()
    await complete(generator, prompts(1)[0])
    await generator.shutdown()


def test_a_model_that_is_a_name_on_the_hub_is_left_to_vllm(monkeypatch):
    monkeypatch.setattr("vllm.ModelRegistry.register_model", lambda *_: pytest.fail("no file names a class"))
    _import_model(Path("Qwen/Qwen2.5-0.5B-Instruct"))
