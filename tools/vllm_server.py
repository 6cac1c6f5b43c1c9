"""A real vLLM server, as tests and benchmarks start it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from mempipe import environment
from mempipe.engines.config import GenerationConfig, ModelConfig
from tools.processes import Marked, Running, free_ports

SERVED_NAME = "m"


@contextmanager
def vllm_server(model: ModelConfig, generation: GenerationConfig, *, context_tokens: int) -> Iterator[str]:
    """Yields the address (`http://…/v1`) of an OpenAI-compatible server on the CPU that serves `model.path` as "m".

    Its engine has the settings of a run's own. Raises AssertionError with the end of its log when it does not start.
    """
    (port,) = free_ports(1)
    variables = environment.engine(frontend_pid=os.getpid(), log_level="INFO")  # the log shows that it gets on
    variables |= environment.cpu_engine(num_threads=generation.num_threads, kv_cache_gib=generation.cpu_kv_cache_gib)
    variables |= {"HF_HUB_OFFLINE": "1"}
    # The module of `vllm serve`, whose own command asks for a package that is named otherwise in the CPU build.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1", f"--port={port}"]
    command += [f"--model={model.path}", f"--served-model-name={SERVED_NAME}", f"--dtype={model.dtype}"]
    command += [f"--max-model-len={context_tokens}", f"--max-num-seqs={generation.max_num_seqs}", "--block-size=32"]
    command += ["--enable-prefix-caching", "--disable-log-stats", "--uvicorn-log-level=error"]
    command += ["--enforce-eager"] * generation.enforce_eager
    url, marked = f"http://127.0.0.1:{port}/v1", Marked(variables)
    with tempfile.TemporaryDirectory() as folder:
        server = Running(command, marked=marked, cwd=Path(folder))
        try:
            server.wait_until(lambda: _answers(f"{url}/models"), every_s=0.5)
            yield url
        finally:
            server.end()
            marked.end()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False
