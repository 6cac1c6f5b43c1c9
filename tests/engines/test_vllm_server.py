"""Completions over HTTP from a real vLLM server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from transformers import Qwen2ForCausalLM

from mempipe.data.ruler import SourceQuestion
from mempipe.engines.config import EndpointConfig, GenerationConfig, ModelConfig, SamplingConfig
from mempipe.engines.endpoint import Endpoint
from mempipe.engines.tiny import build_model, build_tokenizer
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.evaluation.closed_book import closed_book_filter
from mempipe.faults import ServiceFault
from mempipe.settings import ConfigError
from mempipe.types import FinishReason
from tools.vllm_server import vllm_server

pytestmark = pytest.mark.jobs  # `make test` has the same client and a server of its own (test_openai_endpoint.py)
GREEDY = SamplingConfig(temperature=0.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address of a real server of a tiny chat model, and the model's folder."""
    folder = tmp_path_factory.mktemp("served")
    build_tokenizer(folder)
    build_model(folder, seed=1)
    model = ModelConfig(path=str(folder), dtype="float32")
    with vllm_server(model, GenerationConfig(enforce_eager=True), context_tokens=768) as url:
        yield url, str(folder)


async def test_a_real_server_samples_what_transformers_finds_likeliest(server):
    url, folder = server
    model, tokenizer = Qwen2ForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    client = Endpoint(EndpointConfig(url=url, model="m"), sampling=GREEDY, tokenizer=tokenizer)
    await client.check(context_tokens=768)
    with pytest.raises(ConfigError, match=r"budget.context_tokens is 769, but m is served with contexts of 768"):
        await client.check(context_tokens=769)
    prompts = [[20 + i, 30, 40] for i in range(8)]
    completions = await asyncio.gather(*(client.generate(prompt, max_tokens=6) for prompt in prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert 1 <= len(completion.token_ids) <= 6
        with torch.no_grad():
            logprobs = (
                model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            )
        found = logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert completion.logprobs == pytest.approx(found.tolist(), abs=1e-3)
        assert found.tolist() == pytest.approx(logprobs.max(-1).values.tolist(), abs=1e-4)
        ended = completion.token_ids[-1] in tokenizer.stop_token_ids
        assert completion.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
    with pytest.raises(ServiceFault, match="its context is shorter than the budget's"):
        await client.generate([20] * 760, max_tokens=20)
    with pytest.raises(ServiceFault, match="status 400"):
        await client.generate([20] * 800, max_tokens=20)
    await client.close()


async def test_a_stop_token_ends_a_completion_and_is_its_last_id(server):
    url, folder = server
    tokenizer = load_tokenizer(folder)
    client = Endpoint(EndpointConfig(url=url, model="m"), sampling=GREEDY, tokenizer=tokenizer)
    sampled = (await client.generate([20, 30, 40], max_tokens=3)).token_ids
    await client.close()
    stops = load_tokenizer(folder)
    stops.stop_token_ids = frozenset({sampled[0]})
    client = Endpoint(EndpointConfig(url=url, model="m"), sampling=GREEDY, tokenizer=stops)
    completion = await client.generate([20, 30, 40], max_tokens=3)
    assert (completion.token_ids, completion.finish_reason) == (sampled[:1], FinishReason.STOP)
    await client.close()


async def test_a_real_server_ends_a_completion_with_the_token_in_which_a_stop_text_ends(server):
    url, folder = server
    tokenizer = load_tokenizer(folder)
    config = EndpointConfig(url=url, model="m")
    client = Endpoint(config, sampling=GREEDY, tokenizer=tokenizer)
    sampled = (await client.generate([20, 30, 40], max_tokens=6)).token_ids
    await client.close()
    client = Endpoint(config, sampling=GREEDY, tokenizer=tokenizer, stop_texts=[tokenizer.decode(sampled[:3])])
    completion = await client.generate([20, 30, 40], max_tokens=6)
    assert (completion.token_ids, completion.finish_reason) == (sampled[:3], FinishReason.STOP)
    await client.close()


def test_known_questions_are_asked_of_the_real_server(server):
    url, _ = server
    questions = [
        SourceQuestion(id=str(i), text=f"who {i} ?", answers=["no such answer"], documents=[("T", "x")], needed=[0])
        for i in range(3)
    ]
    assert closed_book_filter(url, ["m"])(questions) == [False] * 3
    with pytest.raises(ConfigError, match=r"endpoint.model is 'other'"):
        closed_book_filter(url, ["other"])(questions)
