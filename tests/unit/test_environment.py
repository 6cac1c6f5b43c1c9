"""What processes that run with mempipe's environment do differently."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import httpx
import pytest
import requests
import torch
from latin1 import latin1_variables
from ray._private.runtime_env.context import RuntimeEnvContext
from ray.runtime_env import RuntimeEnv
from served_replies import served

from mempipe.engines.config import GenerationConfig
from mempipe.engines.vllm_settings import engine_variables
from mempipe.environment import EVERY_PROCESS, prepare_process, worker_environment

ROWS_OF_MANY_LENGTHS = """
import psutil, torch
torch.set_num_threads(1)
weight = torch.randn(512, 512, dtype=torch.bfloat16, requires_grad=True)
def learn(lengths):
    for length in lengths:
        row = torch.randn(length, 512, dtype=torch.bfloat16, requires_grad=True)
        torch.nn.functional.linear(row, weight).sum().backward()
    return psutil.Process().memory_full_info().uss
before = learn(range(1, 9))
print((learn(range(100, 700, 2)) - before) // 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="only products with AVX-512 keep what they made"
)
def test_memory_does_not_grow_with_the_lengths_that_rows_have_had():
    command = [sys.executable, "-c", ROWS_OF_MANY_LENGTHS]
    ended = subprocess.run(command, env={**os.environ, **EVERY_PROCESS}, capture_output=True, text=True, check=True)
    assert int(ended.stdout) < 300, "MiB after 300 lengths"


MESSAGES_OF_THE_RAYLET = """
from ray._private.ray_logging import stdout_deduplicator
lines = [
    "WARNING: 8 PYTHON worker processes have been started on node: 5ac1 with address: 192.0.2.2, which is 4x the "
    "maximum expected startup concurrency (2). This could be a result of using a large number of actors.",
    "The node with node id 5ac1 has been marked dead",
]
for batch in stdout_deduplicator.deduplicate({"lines": lines, "pid": "raylet", "ip": None, "is_err": False}):
    print(*batch["lines"], sep="\\n")
"""


def test_ray_does_not_warn_of_the_number_of_workers_and_still_reports_a_lost_node():
    command = [sys.executable, "-c", MESSAGES_OF_THE_RAYLET]
    ended = subprocess.run(command, env={**os.environ, **EVERY_PROCESS}, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["The node with node id 5ac1 has been marked dead"]


def test_an_engine_on_a_gpu_samples_by_kernels_that_give_log_probs_and_unpickles_handles_only_for_ipc():
    by_nccl, by_ipc = (engine_variables(GenerationConfig(), device="cuda", transfer=way) for way in ("nccl", "ipc"))
    assert by_nccl["VLLM_USE_FLASHINFER_SAMPLER"] == by_ipc["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert by_ipc["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in by_nccl
    on_cpus = engine_variables(GenerationConfig(), device="cpu", transfer="mempipe_shm")
    assert not {"VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ALLOW_INSECURE_SERIALIZATION"} & on_cpus.keys()


DEAD = "http://127.0.0.1:9"
"""A proxy that answers nobody."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Variables of this process are as before after the test."""
    for name in (*PROXIES, "no_proxy"):
        for variable in (name, name.upper()):
            monkeypatch.setenv(variable, "")
            monkeypatch.delenv(variable)
    return monkeypatch


def no_proxy() -> tuple[str | None, str | None]:
    prepare_process()
    return os.environ.get("no_proxy"), os.environ.get("NO_PROXY")


def test_without_a_proxy_nothing_says_where_there_is_none(no_proxies):
    assert no_proxy() == (None, None)


@pytest.mark.parametrize("proxy", [*PROXIES, "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"])
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, "127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "head, .inside"}, "head,.inside,127.0.0.1,localhost,::1"),
        ({"no_proxy": "localhost,head"}, "localhost,head,127.0.0.1,::1"),
        ({"no_proxy": "lower", "NO_PROXY": "upper"}, "lower,127.0.0.1,localhost,::1"),
    ],
)
def test_a_proxy_is_not_asked_for_this_machine(no_proxies, proxy, given, wanted):
    for name, value in {proxy: DEAD, **given}.items():
        no_proxies.setenv(name, value)
    assert no_proxy() == (wanted, wanted) == no_proxy(), "and a second call adds nothing"


def test_no_proxy_for_any_host_stays_so(no_proxies):
    no_proxies.setenv("http_proxy", DEAD)
    no_proxies.setenv("no_proxy", "*")
    assert no_proxy() == ("*", None)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_clients_reach_this_machine_where_a_proxy_is_set(no_proxies, host):
    for name in PROXIES:
        no_proxies.setenv(name, DEAD)
    with served({"/": (200, "here")}) as url:
        url = f"{url.replace('127.0.0.1', host)}/"
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
        prepare_process()
        assert httpx.get(url).text == "here"
        assert requests.get(url, timeout=60).text == "here"  # Ray's client of jobs


def test_a_locale_of_another_encoding_changes_neither_arguments_nor_files_nor_messages(tmp_path):
    variables = latin1_variables(tmp_path)
    (tmp_path / "旗.jsonl").write_text(json.dumps({"question": "鲁迅？", "answer": "周树人"}, ensure_ascii=False))
    command = [sys.executable, "-m", "mempipe", "data", "qa", "旗.jsonl"]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert "周树人" in done.stdout.decode()


STARTED_BY_RAY = """
import sys
from ray._private.runtime_env.context import Language, RuntimeEnvContext
RuntimeEnvContext.deserialize(sys.argv[1]).exec_worker(sys.argv[2:], Language.PYTHON)
"""


def test_ray_workers_with_variables_start_where_the_path_of_python_holds_a_blank(tmp_path, monkeypatch):
    """Ray starts such a worker by a shell, which takes the first word of the path for a command."""
    plain = sys.executable
    assert worker_environment({"WORD": "here"}) == {"env_vars": {"WORD": "here"}}
    python = tmp_path / "a b" / "python"
    python.parent.mkdir()
    python.symlink_to(plain)
    monkeypatch.setattr(sys, "executable", str(python))
    worker = RuntimeEnv(**worker_environment({"WORD": "here"}))
    context = RuntimeEnvContext(env_vars=worker.env_vars(), py_executable=worker.py_executable())
    command = [plain, "-c", STARTED_BY_RAY, context.serialize(), "-c", "import os; print(os.environ['WORD'])"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("here\n", "")
