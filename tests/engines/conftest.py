"""One real vLLM engine for most tests of a file, in their own process, and the checkpoint that it starts from."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from tiny_qwen2 import CANARY, build_model, make_generator
from transformers import Qwen2ForCausalLM

from mempipe.engines.generator import Generator
from mempipe.engines.weights import publish


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The engine lives in one event loop, so every test that calls it runs in that one."""
    for item in items:
        if (
            Path(__file__).parent in item.path.parents
            and isinstance(item, pytest.Function)
            and inspect.iscoroutinefunction(item.obj)
        ):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@dataclass
class Served:
    generator: Generator
    scores_at_start: list[list[float]]  # of the canary, before any update


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-qwen2")
    build_model(seed=0).save_pretrained(path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(model_path: Path) -> AsyncIterator[Served]:
    generator = make_generator(model_path)
    await generator.start()
    scores = await asyncio.gather(*(generator.score(ids) for ids in CANARY))
    yield Served(generator, list(scores))
    await generator.shutdown()


@pytest.fixture
def generator(served: Served) -> Generator:
    return served.generator


@pytest.fixture
def serve(generator: Generator, tmp_path: Path) -> Callable[[Qwen2ForCausalLM], Awaitable[int]]:
    """Makes the engine serve a model; returns the new version."""

    async def load(model: Qwen2ForCausalLM) -> int:
        version = generator.policy_version + 1
        await generator.load_weights(publish(model.state_dict(), tmp_path, version), version)
        return version

    return load
