"""Ids in, ids out: what was sampled, from which distribution, by which weights; and what happens when the engine is
gone.
"""

from __future__ import annotations

import asyncio
from asyncio import Task
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
from tiny_qwen2 import MAX_MODEL_LEN, VOCAB_SIZE, build_model, held, model_scores, prompts
from transformers import Qwen2ForCausalLM

from mempipe.agents.rendering import AnswerProbe
from mempipe.checks.roles import CPU_HEAD_SIZES
from mempipe.config import RunConfig
from mempipe.engines.config import GenerationConfig, ModelConfig, SamplingConfig
from mempipe.engines.generator import EngineDead, GenerationTimeout, Generator, WeightTransferFailed
from mempipe.engines.weights import WeightHandle
from mempipe.rl.rewards import information_gain
from mempipe.rollout import make_gold_logprobs
from mempipe.types import Completion, FinishReason, Question

GREEDY = SamplingConfig(temperature=0)
SAMPLED = SamplingConfig()
TOLERANCE = 1e-4


async def complete(
    generator: Generator, prompt: list[int], max_tokens: int = 6, sampling: SamplingConfig = SAMPLED
) -> Completion:
    return await generator.generate(prompt, max_tokens=max_tokens, sampling=sampling, stop_token_ids=[])


@torch.no_grad()
def next_logprobs(model: Qwen2ForCausalLM, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_logprobs_are_of_the_sampled_distribution(generator, serve, temperature):
    model = build_model(seed=0)
    await serve(model)
    for prompt in prompts(4):
        completion = await complete(generator, prompt, sampling=SamplingConfig(temperature=temperature))
        expected = model_scores(model, prompt + completion.token_ids, temperature=temperature)[-6:]
        assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_logprobs_are_renormalised_over_what_top_k_leaves(generator, serve):
    model = build_model(seed=0)
    await serve(model)
    for prompt in prompts(8):
        completion = await complete(generator, prompt, 1, SamplingConfig(top_k=3))
        top = next_logprobs(model, prompt).topk(3)
        assert completion.token_ids[0] in top.indices.tolist()
        expected = top.values.log_softmax(-1)[top.indices.tolist().index(completion.token_ids[0])]
        assert completion.logprobs == pytest.approx([float(expected)], abs=TOLERANCE)


async def test_temperature_0_takes_the_likeliest_id_with_its_logprob_at_temperature_1(generator, serve):
    model = build_model(seed=0)
    await serve(model)
    for prompt in prompts(4):
        completion = await complete(generator, prompt, 1, GREEDY)
        best = next_logprobs(model, prompt).max(-1)
        assert completion.token_ids == [int(best.indices)]
        assert completion.logprobs == pytest.approx([float(best.values)], abs=TOLERANCE)


async def test_the_engine_counts_its_steps_its_queue_and_its_cache(generator, serve):
    await serve(build_model(seed=0))
    generator.take_load()
    prompt = [7] * 64
    await complete(generator, prompt, 4)
    await complete(generator, prompt, 4)
    load = generator.take_load()
    assert 6 <= load.running <= load.steps <= 10 and load.most_waiting == 0 and 0 < load.most_cache_use < 1
    assert load.prompt_tokens == 128 and 0 < load.cached_tokens < 64
    with held(generator, after=0):  # all requests are there before the first step, more than the engine has room for
        tasks = [asyncio.create_task(complete(generator, prompt)) for prompt in prompts(100)]
        while await generator._engine.num_under_way() < 100:
            await asyncio.sleep(0.001)
    await asyncio.gather(*tasks)
    load = generator.take_load()
    assert load.running / load.steps > 2 and load.most_waiting > 0
    assert generator.take_load().steps == 0


async def test_a_completion_ends_with_its_stop_token_or_at_its_limit(generator):
    prompt = prompts(1)[0]
    free = await complete(generator, prompt, 8, GREEDY)
    assert (len(free.token_ids), free.finish_reason) == (8, FinishReason.LENGTH)
    stop = next(i for i, token in enumerate(free.token_ids) if i and token not in free.token_ids[:i])
    stopped = await generator.generate(prompt, max_tokens=8, sampling=GREEDY, stop_token_ids=[free.token_ids[stop], 0])
    assert stopped.token_ids == free.token_ids[: stop + 1]
    assert stopped.logprobs == pytest.approx(free.logprobs[: stop + 1], abs=1e-5)
    assert stopped.finish_reason is FinishReason.STOP
    last = await generator.generate(prompt, max_tokens=stop + 1, sampling=GREEDY, stop_token_ids=[free.token_ids[stop]])
    assert last.finish_reason is FinishReason.STOP, "a stop token at the limit is a stop"


async def test_the_checkpoints_own_eos_does_not_stop(generator, serve):
    """Id 0 is the checkpoint's eos; only the caller's stop ids stop."""
    model = build_model(seed=0)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.full((128,), 5.0))
        model.model.embed_tokens.weight[0] = 0.0
        model.model.embed_tokens.weight[1:] *= 0.0
    await serve(model)  # all logits equal: the likeliest id is the first, 0
    completion = await complete(generator, prompts(1)[0], 5, GREEDY)
    assert completion.token_ids == [0, 0, 0, 0, 0]
    await serve(build_model(seed=0))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (
            [1] * (MAX_MODEL_LEN - 3),
            4,
            f"{MAX_MODEL_LEN - 3} ids and max_tokens 4 exceed the model length {MAX_MODEL_LEN}",
        ),
        ([], 4, "at least 1"),
        ([1], 0, "at least 1"),
        ([1, VOCAB_SIZE], 4, f"{VOCAB_SIZE}, outside of the model's 0..{VOCAB_SIZE - 1}"),
        ([1, -1], 4, "outside"),
    ],
)
async def test_impossible_requests_are_refused(generator, prompt, max_tokens, message):
    with pytest.raises(ValueError, match=message):
        await complete(generator, prompt, max_tokens)


async def test_the_longest_request_that_fits_is_served(generator):
    completion = await complete(generator, [1] * (MAX_MODEL_LEN - 4), 4)
    assert len(completion.token_ids) == 4


async def test_score_leaves_the_first_id_out_and_needs_two(generator):
    assert len(await generator.score([5, 6, 7])) == 2
    with pytest.raises(ValueError, match="at least 2"):
        await generator.score([5])


async def test_the_information_gain_of_a_memory_is_what_transformers_finds(generator, serve, monkeypatch):
    model = build_model(seed=0)
    await serve(model)
    gold, (without, with_memory) = [7, 8, 9], prompts(2)

    class Probes:
        def answer_probe(self, question: Question, memory: str) -> AnswerProbe:
            return AnswerProbe(prompt=with_memory if memory else without, answer=gold)

    monkeypatch.setattr("mempipe.rollout.make_renderer", lambda *_, **__: Probes())
    ask = make_gold_logprobs(RunConfig(), tokenizer=None, score=generator.score)
    question = Question(id="q", text="?", golden_answers=["x"])
    found = information_gain(*[await ask(question, memory, group_id="g") for memory in ("a memory", "")])
    expected = [sum(model_scores(model, prompt + gold)[-3:]) for prompt in (with_memory, without)]
    assert found == pytest.approx(expected[0] - expected[1], abs=TOLERANCE) and abs(found) > 0.01


async def test_a_seeded_completion_does_not_depend_on_its_neighbours(generator):
    prompt, *others = prompts(60)

    async def seeded() -> Completion:
        return await generator.generate(prompt, max_tokens=12, sampling=SAMPLED, stop_token_ids=[], seed=5)

    alone = await seeded()
    among, *_ = await asyncio.gather(seeded(), *(complete(generator, other, 12) for other in others))
    assert among.token_ids == alone.token_ids
    unseeded = [(await complete(generator, prompt, 12)).token_ids for _ in range(2)]
    assert unseeded[0] != unseeded[1]


async def test_every_completion_is_of_one_version_while_weights_change_under_load(generator, serve):
    """Each completion's log-probs are those of the model of the version that it names, and of no other."""
    models = {await serve(build_model(seed=0)): build_model(seed=0)}
    completions: list[tuple[list[int], Completion]] = []
    running = True

    async def trajectory(prompt: list[int]) -> None:
        while running:
            completions.append((prompt, await complete(generator, prompt, 10)))

    async def until_one_is_of(version: int) -> None:
        while not any(completion.policy_version == version for _, completion in completions):
            await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(trajectory(prompt)) for prompt in prompts(100)]
    await until_one_is_of(next(iter(models)))
    for seed in (1, 2, 3):
        model = build_model(seed=seed)
        version = await serve(model)
        models[version] = model
        await until_one_is_of(version)
    running = False
    await asyncio.gather(*tasks)
    counts = {version: sum(c.policy_version == version for _, c in completions) for version in models}
    assert all(counts.values()) and sum(counts.values()) == len(completions)
    for prompt, completion in completions[:: max(1, len(completions) // 60)]:
        expected = model_scores(models[completion.policy_version], prompt + completion.token_ids)[-10:]
        assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE)


@pytest.fixture
def in_flight(generator, monkeypatch) -> None:
    monkeypatch.setattr(generator, "_config", generator._config.model_copy(update={"updates_in_flight": True}))


@asynccontextmanager
async def under_way(generator: Generator, count: int) -> AsyncIterator[list[tuple[list[int], Task[Completion]]]]:
    """Starts completions of 200 ids; the engine has sampled some of them, and samples no more until the block ends."""
    with held(generator, after=20) as steps_are_taken:
        tasks = [(prompt, asyncio.create_task(complete(generator, prompt, 200))) for prompt in prompts(count)]
        await steps_are_taken()
        yield tasks


async def test_new_weights_in_flight_sample_the_rest_from_a_cache_computed_anew(generator, serve, in_flight):
    """Log-probs are those of the version that a token carries, given everything before it: no cache of old weights."""
    models = {await serve(build_model(seed=0)): build_model(seed=0)}
    async with under_way(generator, 20) as tasks:
        models[await serve(build_model(seed=1))] = build_model(seed=1)
    completions = [(prompt, await task) for prompt, task in tasks]
    before, after = models
    crossed = [(prompt, c) for prompt, c in completions if set(c.policy_versions) == {before, after}]
    assert len(crossed) == 20 and all(c.policy_version == after and len(c.policy_versions) == 200 for _, c in crossed)
    for prompt, completion in crossed[:6]:
        scores = {v: model_scores(model, prompt + completion.token_ids)[-200:] for v, model in models.items()}
        expected = [scores[version][i] for i, version in enumerate(completion.policy_versions)]
        assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE)
    assert (await complete(generator, prompts(1)[0])).policy_versions == []


async def test_completions_that_stood_still_fail_with_a_transfer_that_fails(generator, serve, in_flight):
    async with under_way(generator, 4) as tasks:
        with pytest.raises(WeightTransferFailed):
            await generator.load_weights(WeightHandle(version=99), 99)
    for _, task in tasks:
        with pytest.raises(WeightTransferFailed, match="no whole set of weights: loading version 99 failed"):
            await task
    await serve(build_model(seed=0))
    assert len((await complete(generator, prompts(1)[0])).token_ids) == 6


async def test_a_late_completion_raises_and_leaves_the_engine_usable(generator, monkeypatch):
    monkeypatch.setattr(generator, "_config", GenerationConfig(timeout_s=0.01))
    with pytest.raises(GenerationTimeout, match=r"0\.01 s"):
        await asyncio.gather(*(complete(generator, prompt, 200) for prompt in prompts(40)))
    monkeypatch.undo()
    assert len((await complete(generator, prompts(1)[0])).token_ids) == 6
    assert await generator._engine.num_under_way() == 0


async def test_an_engine_that_does_not_run_is_dead():
    idle = Generator(ModelConfig(path="nowhere"), GenerationConfig(), max_model_len=64)
    with pytest.raises(EngineDead, match="not started"):
        await complete(idle, [0])
    with pytest.raises(EngineDead, match="not started"):
        await idle.load_weights(WeightHandle(version=1), 1)
    await idle.shutdown()


def test_the_head_sizes_that_are_accepted_on_cpus_are_vllms():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
