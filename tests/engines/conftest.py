"""One real vLLM engine for all tests of this folder, and the checkpoint that it starts from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tiny_qwen2 import build_model, make_generator

from mempipe.engines.generation import Generator


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-qwen2")
    build_model(seed=0).save_pretrained(path)
    return path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_generator(model_path: Path) -> AsyncIterator[Generator]:
    generator = make_generator(model_path)
    await generator.start()
    yield generator
    await generator.shutdown()
