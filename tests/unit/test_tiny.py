from __future__ import annotations

import json
import unicodedata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from mempipe.agents.memsearcher import MemSearcher, MemSearcherBudget, MemSearcherPrompts, MemSearcherRenderer
from mempipe.agents.prompt_set import load_prompts
from mempipe.agents.tools import SearchTool, Toolbox
from mempipe.checks.models import _linear_layers
from mempipe.data import world as tiny_world
from mempipe.data.scripted_agents import NO_NOISE, TOOL_NAME, ScriptedMemSearcher, vocabulary
from mempipe.data.world import NAME_POOLS, PASSAGE_TOKENS, World
from mempipe.engines.architectures import TINY_POSITIONS, tiny_layers
from mempipe.engines.tiny import SPECIAL_TOKENS, build_model, build_tokenizer
from mempipe.engines.tokenizer import HFTokenizer, load_tokenizer
from mempipe.types import Completion, EndReason, FinishReason, SearchResult, Trajectory

BUDGET = MemSearcherBudget(
    question_tokens=32,
    memory_tokens=64,
    action_tokens=32,
    memory_message_tokens=68,
    observation_tokens=96,
    max_turns=6,
    context_tokens=512,
)
TOOLS = Toolbox(search=SearchTool(name=TOOL_NAME, num_passages=2, max_passages=2, max_query_chars=200))
WORLD = World(5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    build_tokenizer(folder)
    build_model(folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder) -> HFTokenizer:
    return load_tokenizer(str(folder))


def test_nine_layers_make_a_model_of_twice_the_parameters(folder, tmp_path):
    build_tokenizer(tmp_path)
    four = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    nine = build_model(tmp_path, seed=1, num_layers=9).num_parameters()
    assert 1.9 < nine / four < 2.1


def test_the_checks_know_the_positions_and_layers_of_the_model(folder):
    values = json.loads((folder / "config.json").read_text())
    assert values["max_position_embeddings"] == TINY_POSITIONS
    (file,) = folder.glob("*.safetensors")
    assert sorted(_linear_layers(file)) == sorted(tiny_layers(values["num_hidden_layers"]))


async def scripted_trajectory(tokenizer: HFTokenizer) -> Trajectory:
    """A faultless attempt at a three-hop question, through the agent's own loop."""
    (question,) = WORLD.questions(1, seed=1, hops=[3])
    script = ScriptedMemSearcher(question=question.text, max_turns=BUDGET.max_turns, noise=NO_NOISE)
    (stop_id,) = tokenizer.stop_token_ids

    async def generate(token_ids, *, max_tokens):
        reply = [*tokenizer.encode_template(script.reply(tokenizer.decode(token_ids))), stop_id]
        return Completion(
            token_ids=reply, logprobs=[0.0] * len(reply), finish_reason=FinishReason.STOP, policy_version=0
        )

    async def search(query, *, num_passages, partition):
        named = [passage for passage in WORLD.passages if passage.title in query.split()]
        return SearchResult(passages=named + WORLD.passages[:1], snapshot="")

    renderer = MemSearcherRenderer(
        tokenizer, prompts=load_prompts("tiny", MemSearcherPrompts), tools=TOOLS, budget=BUDGET
    )
    agent = MemSearcher(renderer, generate=generate, search=search)
    trajectory = await agent.rollout(question, trajectory_id="t", group_id="g", member=0)
    assert trajectory.end_reason is EndReason.ANSWERED
    assert (trajectory.answer or "").strip() == question.golden_answers[0]
    return trajectory


def test_every_name_is_one_token_with_and_without_a_space_before_it(tokenizer):
    names = [name for pool in NAME_POOLS.values() for name in pool]
    assert all(len(tokenizer.encode_text(text)) == 1 for name in names for text in (name, f" {name}"))
    assert len({tuple(tokenizer.encode_text(text)) for name in names for text in (name, f" {name}")}) == 2 * len(names)


def test_names_differ_in_more_than_case_and_from_all_other_words():
    names = [name.lower() for pool in NAME_POOLS.values() for name in pool]
    others = {word.lower() for word in vocabulary()} - set(names)
    assert len(set(names)) == len(names)
    assert len(others) == len(vocabulary()) - len(names)


@given(st.text(max_size=30))
def test_any_text_comes_back_and_makes_no_special_token(tokenizer, text):
    text = text.encode("utf-8", "ignore").decode()
    ids = tokenizer.encode_text(text)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)  # as Qwen2's own tokenizer has it
    assert tokenizer.special_token_ids.isdisjoint(ids)


def test_fixed_parts_of_the_protocol_are_single_tokens_that_untrusted_text_cannot_produce(tokenizer):
    for token in SPECIAL_TOKENS:
        assert len(tokenizer.encode_template(token)) == 1
        assert tokenizer.special_token_ids.isdisjoint(tokenizer.encode_text(token))


async def test_the_world_is_written_in_whole_words(tokenizer):
    """A byte among the tokens would be a word that the tokenizer does not know."""
    trajectory = await scripted_trajectory(tokenizer)
    alphabet = {
        tokenizer.encode_text(character)[0] for character in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    }
    assert all(alphabet.isdisjoint(context.token_ids) for context in trajectory.contexts)


async def test_a_turn_reads_as_the_protocol_says(tokenizer):
    trajectory = await scripted_trajectory(tokenizer)
    assert len(trajectory.contexts) == 4
    first = tokenizer.decode(trajectory.contexts[0].token_ids)
    (question,) = WORLD.questions(1, seed=1, hops=[3])
    entity, relations = tiny_world.parse_question(question.text)
    prompt = (
        f"<|im_start|>user\n{question.text}\n<memory>known nothing</memory><|im_end|>\n<|im_start|>assistant\n<think>"
    )
    query = f"{relations[0]} of {entity}"
    arguments = f'{{"name": "wikipedia_search", "arguments": {{"query": "{query}"}}}}'
    call = f"need {relations[0]}</think><tool_call>{arguments}</tool_call><|im_end|>"
    passages = "\n".join(passage.text for passage in trajectory.contexts[0].searches[0].passages)
    observation = f"\n<|im_start|>user\n<tool_response>{passages}</tool_response><|im_end|>\n<|im_start|>assistant\n"
    memory = f"<memory>known {entity} {relations[0]} {question.evidence[0].value};</memory><|im_end|>"
    assert first == prompt + call + observation + memory


async def test_a_name_is_the_same_token_in_question_passage_query_memory_and_answer(tokenizer):
    trajectory = await scripted_trajectory(tokenizer)
    (question,) = WORLD.questions(1, seed=1, hops=[3])
    start = tokenizer.encode_text(" " + tiny_world.parse_question(question.text)[0])[0]
    assert trajectory.contexts[0].token_ids.count(start) >= 4  # question, query, passage, memory
    (answer,) = tokenizer.encode_text(" " + question.golden_answers[0])
    last = trajectory.contexts[-1]
    sampled = [token for token, in_loss in zip(last.token_ids, last.loss_mask, strict=True) if in_loss]
    assert answer in sampled
    assert answer in last.token_ids[: last.num_prompt_tokens]


def test_a_chunk_is_a_passage_of_the_document(tokenizer):
    for question in WORLD.questions(30, seed=1):
        token_ids = tokenizer.encode_text(question.context)
        chunks = [token_ids[start : start + PASSAGE_TOKENS] for start in range(0, len(token_ids), PASSAGE_TOKENS)]
        assert [tokenizer.decode(chunk).strip("\n") for chunk in chunks] == question.context.splitlines()


def test_the_model_is_a_qwen2_that_both_engines_can_load(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, Qwen2ForCausalLM)
    config = model.config
    assert config.hidden_size // config.num_attention_heads in (32, 64), "the head sizes of vLLM's attention on CPUs"
    assert config.tie_word_embeddings
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert config.vocab_size == len(load_tokenizer(str(folder))._tokenizer)
    assert frozenset({config.eos_token_id}) == tokenizer.stop_token_ids


def test_the_seed_decides_the_weights_and_leaves_the_global_generator_alone(folder, tmp_path):
    build_tokenizer(tmp_path)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    same, other = build_model(tmp_path, seed=1), build_model(tmp_path, seed=2)
    assert torch.equal(torch.rand(3), expected)
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(weight, loaded[name]) for name, weight in same.state_dict().items())
    assert not torch.equal(other.model.embed_tokens.weight, same.model.embed_tokens.weight)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_untrained_model_prefers_what_followed_the_same_token_before(seed, tmp_path):
    """A sequence of different tokens comes twice.
    In the second half the right next token ranks far better than by chance (the middle).
    """
    vocab_size = len(build_tokenizer(tmp_path))
    model = build_model(tmp_path, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    once = torch.stack([torch.randperm(vocab_size, generator=generator)[:40] for _ in range(16)])
    twice = torch.cat([once, once], dim=1)
    with torch.inference_mode():
        logits = model(twice).logits[:, 40:-1]
    targets = twice[:, 41:, None]
    ranks = (logits > logits.gather(2, targets)).sum(-1).float() / vocab_size
    assert ranks.median() < 0.35
