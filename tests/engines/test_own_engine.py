"""An engine in a process of its own: it serves as a shared one does, and ends with the process that started it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from tiny_qwen2 import (
    CANARY,
    build_model,
    engine_processes,
    left_in,
    make_generator,
    model_scores,
    named_semaphores,
    prompts,
)

from mempipe import environment
from mempipe.engines import generator as module
from mempipe.engines.config import SamplingConfig
from mempipe.engines.generator import EngineDead, Generator
from mempipe.engines.proof import canary_gap
from mempipe.engines.vllm_settings import engine_variables
from mempipe.engines.weights import WeightHandle, pack_weights
from mempipe.types import Completion
from tools.processes import GONE_WITHIN_S

TOLERANCE = 1e-4


async def complete(generator: Generator, prompt: list[int], max_tokens: int = 6) -> Completion:
    return await generator.generate(prompt, max_tokens=max_tokens, sampling=SamplingConfig(), stop_token_ids=[])


@pytest.fixture
def temporary() -> Iterator[Path]:
    """An empty folder for temporary files; its path is short, since those of sockets have a limit."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@dataclass
class Started:
    generator: Generator
    processes: list[psutil.Process]
    pending: list[asyncio.Task[Completion]]  # 30 completions


@pytest_asyncio.fixture(loop_scope="session")
async def started(model_path, temporary, monkeypatch) -> AsyncIterator[Started]:
    """Its process writes messages as for `ipc`, with the types of results: the caller's must read them so."""
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    chosen, handles = engine_variables, environment.PICKLED_HANDLES
    for name in handles:  # set by the engine, and gone again after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(module, "engine_variables", lambda *args, **kwargs: chosen(*args, **kwargs) | handles)
    others = engine_processes(psutil.Process())
    generator = make_generator(model_path, engine_process="own", updates_in_flight=True)
    await generator.start()
    own = [process for process in engine_processes(psutil.Process()) if process not in others]
    assert own and left_in(temporary)
    assert (await generator.held_weights()).checksums
    yield Started(generator, own, [])
    await generator.shutdown()


async def sample_much(started: Started) -> None:
    """Starts completions, and stops the engine's processes as soon as it samples them."""
    started.generator.take_load()
    started.pending = [asyncio.create_task(complete(started.generator, prompt, 200)) for prompt in prompts(30)]
    while not started.generator._load.steps:
        await asyncio.sleep(0.001)
    for process in started.processes:
        process.suspend()  # from here on it takes calls and answers none
    assert not any(task.done() for task in started.pending)


def go_on(started: Started) -> None:
    for process in started.processes:
        process.resume()


async def test_it_serves_new_weights_in_flight_and_leaves_nothing_when_it_is_shut_down(started, temporary, monkeypatch):
    generator, (before, after) = started.generator, (build_model(seed=0), build_model(seed=1))
    await sample_much(started)
    update = asyncio.create_task(generator.load_weights(pack_weights(after.state_dict()), 1))
    await asyncio.sleep(0.1)  # the request to pause is on its way
    go_on(started)
    await update
    completions = await asyncio.gather(*started.pending)
    crossed = [i for i, completion in enumerate(completions) if set(completion.policy_versions) == {0, 1}]
    assert crossed
    for i in crossed[:4]:
        whole = prompts(30)[i] + completions[i].token_ids
        scores = {version: model_scores(model, whole)[-200:] for version, model in enumerate((before, after))}
        expected = [scores[version][j] for j, version in enumerate(completions[i].policy_versions)]
        assert completions[i].logprobs == pytest.approx(expected, abs=TOLERANCE)
    scores = list(await asyncio.gather(*(generator.score(ids) for ids in CANARY)))
    assert canary_gap(scores, [model_scores(after, ids) for ids in CANARY]).maximum < TOLERANCE
    assert generator.take_load().steps > 200

    await sample_much(started)
    started.pending[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await started.pending[0]
    assert await generator._engine.num_under_way() == 29
    go_on(started)
    vllm = generator._engine._vllm
    await generator.shutdown()
    monkeypatch.setattr("vllm.v1.engine.async_llm.shutdown_prometheus", None)  # as when the interpreter ends
    vllm.__del__()
    results = await asyncio.wait_for(asyncio.gather(*started.pending[1:], return_exceptions=True), GONE_WITHIN_S)
    assert [type(result) for result in results] == [EngineDead] * 29
    assert psutil.wait_procs(started.processes, timeout=GONE_WITHIN_S)[1] == []
    assert left_in(temporary) == []


@pytest.mark.jobs
async def test_its_death_reaches_every_call_at_once(started):
    generator = started.generator
    await sample_much(started)
    control = asyncio.create_task(generator.connect({}))
    transfer = asyncio.create_task(generator.load_weights(WeightHandle(version=1), 1))
    await asyncio.sleep(0.1)
    held_back = asyncio.create_task(complete(generator, prompts(1)[0]))
    await asyncio.sleep(0.1)
    calls = [*started.pending, control, transfer, held_back]
    assert not any(call.done() for call in calls)
    for process in started.processes:
        process.kill()
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), timeout=GONE_WITHIN_S)
    assert [type(result) for result in results] == [EngineDead] * len(calls)
    for call in (
        complete(generator, prompts(1)[0]),
        generator.score([1, 2]),
        generator.load_weights(WeightHandle(version=1), 1),
    ):
        with pytest.raises(EngineDead, match="its process ended"):
            await call


@pytest.mark.jobs
def test_it_does_not_outlive_a_killed_owner_and_leaves_nothing(model_path, temporary, tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    command = [sys.executable, str(script), str(model_path)]
    variables = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables
    ) as owner:
        assert owner.stdout is not None
        assert any(line.strip() == "started" for line in owner.stdout)
        processes = engine_processes(psutil.Process(owner.pid))
        assert processes and left_in(temporary)
        semaphores = [name for process in processes for name in named_semaphores(process)]
        owner.kill()
    assert psutil.wait_procs(processes, timeout=GONE_WITHIN_S)[1] == []
    assert left_in(temporary) == semaphores == []


OWNER = """
import asyncio, sys
from mempipe.engines.config import GenerationConfig, ModelConfig
from mempipe.engines.generator import Generator

async def main():
    config = GenerationConfig(engine_process="own")
    generator = Generator(ModelConfig(path=sys.argv[1], dtype="float32"), config, max_model_len=64)
    await generator.start()
    print("started", flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""
