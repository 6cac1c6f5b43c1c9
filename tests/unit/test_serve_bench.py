"""`vllm bench serve` against the agent service: what its backends send is taken, and listed or refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from service_builders import QUESTIONS, Service, build_service, running

from mempipe.engines.config import SamplingConfig
from mempipe.engines.tiny import build_tokenizer
from mempipe.engines.tokenizer import load_tokenizer

TWO_HOPS = next(question for question in QUESTIONS if question.num_hops == 2)
GOLD = TWO_HOPS.golden_answers[0]
PATHS = {"openai": "completions", "openai-chat": "chat/completions", "openai-responses": "responses"}
"""The backends, and the route that each of them asks."""
ASKED: dict[str, dict[str, Any]] = {
    "completions": {"prompt": TWO_HOPS.text},
    "chat/completions": {"messages": [{"role": "user", "content": TWO_HOPS.text}]},
    "responses": {"input": TWO_HOPS.text},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("service")
    build_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def shared(folder) -> Iterator[Service]:
    with running(service := build_service(load_tokenizer(str(folder)), folder)):
        yield service


@pytest.fixture
def service(shared) -> Service:
    for kept in (shared.engine.samplings, shared.engine.limits, shared.engine.seeds):
        kept.clear()
    return shared


def send(service: Service, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{service.url}/v1/{path}", json={"model": "tiny", **ASKED[path], **fields}, timeout=20)


@pytest.mark.parametrize("backend", PATHS)
async def test_a_request_as_the_benchmark_builds_it_is_answered_and_counted(service, backend):
    bench = pytest.importorskip("vllm.benchmarks.lib.endpoint_request_func", reason="vLLM is not installed")
    asked = bench.RequestFuncInput(
        prompt=TWO_HOPS.text,
        api_url=f"{service.url}/v1/{PATHS[backend]}",
        prompt_len=10,
        output_len=60,
        model="tiny",
        # As its options --temperature, --top-k, --min-p and so on are sent.
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.0}
        | {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
    )
    async with aiohttp.ClientSession() as session:
        output = await bench.ASYNC_REQUEST_FUNCS[backend](asked, session)
    assert output.success, output.error
    usage = send(service, PATHS[backend], temperature=0.0).json()["usage"]
    read, sampled = (usage.get(name) or usage[other] for name, other in COUNTS)
    assert (output.generated_text, output.output_tokens, output.prompt_len) == (GOLD, sampled, read)
    assert service.engine.samplings[0] == SamplingConfig(temperature=0.5, top_p=0.9, top_k=5)
    assert 60 in service.engine.limits  # of a memory, which otherwise may have 68


COUNTS = (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))
NOTHING: dict[str, Any] = {
    "add_special_tokens": True,
    "bad_words": [],
    "ignore_eos": False,
    "length_penalty": 1.0,
    "min_p": 0.0,
    "min_tokens": 0,
    "priority": 0,
    "repetition_penalty": 1.0,
    "request_id": "a",
    "skip_special_tokens": True,
    "stop_token_ids": [],
    "structured_outputs": None,
    "use_beam_search": False,
    "user": "ann",
}


@pytest.mark.parametrize("path", ASKED)
def test_sampling_fields_of_vllm_that_request_nothing_are_taken_and_listed(service, path):
    answer = send(service, path, **NOTHING)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-mempipe-ignored"] == ", ".join(NOTHING)


def test_a_completion_lists_its_own_fields_and_those_of_its_stream(service):
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = send(service, "completions", logprobs=None, best_of=1, stream=True, stream_options=options)
    assert answer.headers["x-mempipe-ignored"] == "best_of, logprobs, stream_options.continuous_usage_stats"
    assert GOLD in answer.text


REFUSED: dict[str, Any] = {
    "ignore_eos": True,
    "min_p": 0.1,
    "min_tokens": 5,
    "repetition_penalty": 1.1,
    "stop_token_ids": [5],
    "structured_outputs": {"regex": "a"},
    "use_beam_search": True,
}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("name", REFUSED)
def test_sampling_fields_of_vllm_that_would_change_the_answer_are_refused_by_name(service, path, name):
    refused = send(service, path, **{name: REFUSED[name]})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, name)
    assert error["type"] == "invalid_request_error" and f"{name} is {REFUSED[name]!r}, which" in error["message"]


def test_a_response_takes_a_seed_as_a_chat_does(service):
    for path in ("chat/completions", "responses"):
        assert send(service, path, seed=7).status_code == 200
    seeds = service.engine.seeds
    assert None not in seeds and seeds[: len(seeds) // 2] == seeds[len(seeds) // 2 :]


@pytest.mark.jobs
def test_the_command_measures_the_service_with_each_of_its_backends(service, folder, tmp_path):
    """It imports vLLM, which takes ten seconds of a core for each backend."""
    command = Path(sys.executable).with_name("vllm")
    if not command.exists():
        pytest.skip("vLLM is not installed")
    # The build for CPUs is a distribution of another name, and the command wants its version under its own name.
    named = tmp_path / "named" / "vllm-0.32.0.dist-info"
    named.mkdir(parents=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": question.text}) + "\n" for question in QUESTIONS[:3]))
    shared = f"--base-url {service.url} --model tiny --tokenizer {folder} --dataset-name custom --skip-chat-template"
    shared += f" --dataset-path {questions} --custom-output-len 60 --num-prompts 3 --temperature 0 --save-result"
    started = {
        backend: subprocess.Popen(
            [
                *(command, "bench", "serve", *shared.split(), "--save-detailed"),
                *("--backend", backend, "--endpoint", f"/v1/{path}"),
                *("--result-dir", tmp_path, "--result-filename", f"{backend}.json"),
            ],
            env={**os.environ, "PYTHONPATH": str(named.parent), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for backend, path in PATHS.items()
    }
    for backend, process in started.items():
        said, _ = process.communicate(timeout=300)
        assert not process.returncode, said
        result = json.loads((tmp_path / f"{backend}.json").read_text())
        assert (result["completed"], result["failed"]) == (3, 0), said
        golden = {question.golden_answers[0] for question in QUESTIONS[:3]}
        assert set(result["generated_texts"]) == golden and min(result["output_lens"]) > 0
