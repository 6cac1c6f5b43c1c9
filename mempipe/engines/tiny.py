"""The tiny model of the synthetic world: a tokenizer of whole words and a freshly initialised Qwen2, saved as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from mempipe.data import world

END_OF_TEXT = "<|endoftext|>"
MESSAGE_END = "<|im_end|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    "<|im_start|>",
    MESSAGE_END,
    "<think>",
    "</think>",
    world.CALL_OPEN,
    world.CALL_CLOSE,
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<memory>",
    "</memory>",
    world.ANSWER_OPEN,
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT_TOKENS = 1024


def build_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer, saved to `folder`.

    Byte-level, so it encodes any text and gives it back unchanged. Every word of the world is one token with a space before it and one without; every other word falls into bytes.
    """
    words = ["system", "user", "assistant", *world.vocabulary()]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(_byte_level(space + word) for word in words for space in ("", " "))]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=MESSAGE_END,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    return wrapped


def build_model(folder: str | Path, *, seed: int) -> Qwen2ForCausalLM:
    """The untrained model, saved to `folder` (in which `build_tokenizer` has been)."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return model


def _byte_level(text: str) -> str:
    """The text in the byte-level alphabet, in which vocabularies are written."""
    return "".join(piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text))
