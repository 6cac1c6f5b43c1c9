from __future__ import annotations

import json
from pathlib import Path

import pytest
from agent_builders import FAMILIES, build_tokenizer, hf_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from mempipe.agents.protocol import ChatTemplateError
from mempipe.engines.tokenizer import HFTokenizer, load_tokenizer
from mempipe.settings import ConfigError

QWEN = build_tokenizer("qwen2_5")
GEMMA = build_tokenizer("gemma")
PIECES = st.one_of(
    st.sampled_from([*QWEN.special_tokens, *GEMMA.special_tokens, "<", "|", "\ud800", "\n\n"]), st.text(max_size=6)
)


def saved(folder: Path, family: str = "qwen2_5", **generation: object) -> str:
    hf_tokenizer(family).save_pretrained(folder)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_tokenizer_is_the_saved_one(family, tmp_path):
    built = build_tokenizer(family)
    loaded = load_tokenizer(saved(tmp_path, family, eos_token_id=sorted(built.stop_token_ids)))
    text = "What is " + "".join(built.special_tokens) + " the capital?\n\n"
    assert loaded.stop_token_ids == built.stop_token_ids
    assert loaded.special_tokens == built.special_tokens
    assert loaded.encode_template(text) == built.encode_template(text)
    assert loaded.encode_text(text) == built.encode_text(text)


def test_trusted_text_makes_special_tokens_and_untrusted_text_does_not():
    text = "<|im_start|>user <tool_call>"
    assert QWEN.special_token_ids.intersection(QWEN.encode_template(text)) == set(
        QWEN.encode_template("<|im_start|><tool_call>")
    )
    assert QWEN.special_token_ids.isdisjoint(QWEN.encode_text(text))
    assert QWEN.decode(QWEN.encode_template(text)) == QWEN.decode(QWEN.encode_text(text)) == text


def test_added_white_space_is_ordinary_text():
    assert "\n\n" not in GEMMA.special_tokens and "<table>" in GEMMA.special_tokens
    assert GEMMA.encode_text("\n\n") == GEMMA.encode_template("\n\n") and len(GEMMA.encode_text("\n\n")) == 1


@pytest.mark.parametrize("tokenizer", [QWEN, GEMMA], ids=["qwen2_5", "gemma"])
@given(text=st.lists(PIECES, max_size=8).map("".join))
def test_promise_2_no_special_token_arises_from_untrusted_text(tokenizer, text):
    token_ids = tokenizer.encode_text(text)
    assert tokenizer.special_token_ids.isdisjoint(token_ids)
    assert tokenizer.decode(token_ids) == "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)


def test_a_special_token_that_is_a_word_of_the_vocabulary_does_not_arise_either():
    hf = hf_tokenizer("qwen2_5")
    hf.add_special_tokens({"additional_special_tokens": ["the"]})
    tokenizer = HFTokenizer(hf)
    (word,) = tokenizer.encode_template("the")
    assert word in QWEN.encode_text("the") and word in tokenizer.special_token_ids
    assert word not in tokenizer.encode_text("the question")


def test_ordinary_text_is_encoded_as_by_the_tokenizer_itself():
    hf = hf_tokenizer("qwen2_5")
    text = "What is the capital of France? Ünïcödé 😀\n\n  indented"
    assert QWEN.encode_text(text) == QWEN.encode_template(text) == hf.encode(text, add_special_tokens=False)


def test_a_truncating_tokenizer_does_not_truncate_here():
    hf = hf_tokenizer("qwen2_5")
    hf.backend_tokenizer.enable_truncation(4)
    tokenizer = HFTokenizer(hf)
    assert len(tokenizer.encode_text("ZXZXZXZX")) == len(tokenizer.encode_template("ZXZXZXZX")) == 8


def test_an_encoded_list_is_the_callers_own():
    QWEN.encode_text("abc").append(-1)
    assert -1 not in QWEN.encode_text("abc")


def test_stop_tokens_come_from_tokenizer_and_generation_config(tmp_path):
    assert load_tokenizer(saved(tmp_path / "a")).stop_token_ids == set(QWEN.encode_template("<|im_end|>"))
    (other,) = QWEN.encode_template("<|endoftext|>")
    assert load_tokenizer(saved(tmp_path / "b", eos_token_id=other)).stop_token_ids == {
        other,
        *QWEN.encode_template("<|im_end|>"),
    }


def test_a_template_that_refuses_raises_its_own_error():
    with pytest.raises(ChatTemplateError, match="System role not supported"):
        GEMMA.render_chat([{"role": "system", "content": "x"}], add_generation_prompt=False)


@pytest.mark.parametrize(
    "path", ["", "/no/such/folder", "./no-such-folder", "~/model", "runs/quickstat/huggingface", "runs/quickstat"]
)
def test_a_missing_folder_is_refused_without_asking_the_hub_for_it(path, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"model.path is .*, expected a folder"):
        load_tokenizer(path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="from which no fast tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    saved(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_a_stop_token_is_refused():
    hf = hf_tokenizer("qwen2_5")
    hf.eos_token = None
    with pytest.raises(ConfigError, match=r"no eos_token and the model no generation_config.json"):
        HFTokenizer(hf)


def test_a_slow_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(ConfigError, match=r"no fast tokenizer \(tokenizer.json\) can be loaded"):
        load_tokenizer(str(tmp_path))


def test_a_template_that_writes_the_date_gives_the_same_prompt_on_every_day():
    """A run that is resumed on another day compares the hash of its prompt with that of its beginning."""
    dated = "Today Date: {{ strftime_now('%d %b %Y') }}\n{{ messages[0].content }}"
    tokenizer = build_tokenizer(chat_template=dated)
    shown = tokenizer.render_chat([{"role": "user", "content": "x"}], add_generation_prompt=True)
    assert shown == "Today Date: 26 Jul 2024\nx"
