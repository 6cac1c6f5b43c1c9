"""The tiny model of the synthetic world: a tokenizer of whole words and a freshly initialised Qwen2, both saved as
Hugging Face folders.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from mempipe.data import scripted_agents as scripts
from mempipe.engines.architectures import TINY_POSITIONS

END_OF_TEXT = "<|endoftext|>"
MESSAGE_END = "<|im_end|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    "<|im_start|>",
    MESSAGE_END,
    "<think>",
    "</think>",
    scripts.CALL_OPEN,
    scripts.CALL_CLOSE,
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<memory>",
    "</memory>",
    "<search>",
    "</search>",
    "<information>",
    "</information>",
    "<answer>",
    "</answer>",
    scripts.ANSWER_OPEN,
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROPE_THETA = 10_000.0
WEIGHT_STD = 0.05
EMBEDDING_STD = 0.1
RESIDUAL_SCALE = 0.2  # of what attention and feed-forward layers write at first, so that tokens stay readable below
PREVIOUS_BIAS = 8.0
MATCH_SCALE = 2.0
WRITE_SCALE = 0.3
SLOW_ANGLE = 0.02  # radians per position
"""Strengths of the induction circuit in the first weights (`PREVIOUS_BIAS`: attention to the token before;
`MATCH_SCALE`: to an earlier equal token; `WRITE_SCALE`: of the copied token; `SLOW_ANGLE`: rotary frequencies that are
compared). Chosen by hand, not derived."""


def build_tokenizer(folder: str | Path) -> Qwen2Tokenizer:
    """Saves the tokenizer to `folder`, and returns it.

    Byte-level, so it encodes any text and gives it back (in NFC, as Qwen2 does). Every word of the world is one token
    with a space before it and one without. The words are reached through merges: whoever loads the folder by its model
    type gets a tokenizer that knows nothing else.
    """
    words = ["system", "user", "assistant", *scripts.vocabulary()]
    bpe = Qwen2Tokenizer().backend_tokenizer  # Qwen2's way of cutting text into words
    trainer = trainers.BpeTrainer(
        vocab_size=1_000_000, min_frequency=1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator([space + word for word in words for space in ("", " ")], trainer)
    learned = json.loads(bpe.to_str())["model"]
    make_tokenizer: Any = Qwen2Tokenizer  # its annotations are narrower than what it takes
    tokenizer = make_tokenizer(
        vocab={token: index for index, token in enumerate(learned["vocab"]) if token not in SPECIAL_TOKENS},
        merges=[tuple(pair) for pair in learned["merges"]],
        unk_token=None,
        eos_token=MESSAGE_END,
        pad_token=END_OF_TEXT,
        model_max_length=TINY_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS], special_tokens=True
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def build_model(folder: str | Path, *, seed: int, num_layers: int = 4) -> Qwen2ForCausalLM:
    """Saves the untrained model to `folder`, where `build_tokenizer` has saved the tokenizer, and returns it. All
    weights but those of `_plant_copying` are random, which needs two layers.
    """
    tokenizer = Qwen2Tokenizer.from_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        max_position_embeddings=TINY_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        initializer_range=WEIGHT_STD,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        _plant_copying(model)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def _plant_copying(model: Qwen2ForCausalLM) -> None:
    """Starts the first head group of the first two layers as an induction circuit (arXiv 2209.11895): "what followed
    this token earlier?".

    A model this small finds copying by itself only after hundreds of steps, or never, depending on the seed; from here
    it takes tens. Layer 0 attends to the previous token and notes it in the residual stream, turned by `frame` so that
    it is not taken for the token itself. Layer 1 looks for notes of the current token and copies the token at their
    position. Both are ordinary weights, trained on.
    """
    config = model.config
    size, dim = config.hidden_size, config.hidden_size // config.num_attention_heads
    assert config.num_key_value_heads, "build_model sets it"
    group = config.num_attention_heads // config.num_key_value_heads
    angles = ROPE_THETA ** (-torch.arange(0, dim, 2) / dim)  # a position turns each pair of dimensions by this
    frame, shared, copied = (torch.linalg.qr(torch.randn(size, size))[0] for _ in range(3))
    shared, copied = shared[:dim], copied[:dim]
    # Tokens are compared where the rotary embedding hardly turns over the length of a context.
    compared = MATCH_SCALE * shared * (angles < SLOW_ANGLE).float().repeat(2).unsqueeze(1)

    model.model.embed_tokens.weight *= EMBEDDING_STD / WEIGHT_STD
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= RESIDUAL_SCALE
        layer.mlp.down_proj.weight *= RESIDUAL_SCALE

    previous, match = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    queries, keys = slice(0, group * dim), slice(0, dim)
    # All keys are the same constant, and queries are turned back by one position: a query fits the key one position
    # before it.
    previous.k_proj.weight[keys] = 0.0
    previous.q_proj.weight[queries] = 0.0
    previous.k_proj.bias[keys] = PREVIOUS_BIAS * torch.cat([torch.ones_like(angles), torch.zeros_like(angles)])
    previous.q_proj.bias[queries] = PREVIOUS_BIAS * torch.cat([angles.cos(), -angles.sin()]).repeat(group)
    previous.v_proj.weight[keys] = shared
    previous.o_proj.weight[:, queries] = WRITE_SCALE / group * (frame @ shared.T).repeat(1, group)
    match.q_proj.weight[queries] = compared.repeat(group, 1)
    match.k_proj.weight[keys] = compared @ frame.T
    match.v_proj.weight[keys] = copied
    match.o_proj.weight[:, queries] = WRITE_SCALE / group * copied.T.repeat(1, group)
