"""A model's own tokenizer, as the agents need it (`mempipe.agents.protocol.Tokenizer`).

Trusted text goes through the tokenizer as it is. Untrusted text goes through a copy that knows neither special nor
added tokens, so none of them can arise from it, whether it is flagged as special or not (`<tool_call>` of Qwen2.5 is
not).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from mempipe.agents.protocol import ChatTemplateError, ParseCalls
from mempipe.settings import ConfigError
from mempipe.storage.checksums import check_folder
from mempipe.storage.files import is_local_path, recover_folder
from mempipe.storage.json_files import read_object
from mempipe.text import replace_surrogates

MEND = "copy the model again, or export it again"
"""Advice for a model folder with a damaged file."""
_TODAY = datetime(2024, 7, 26)
"""The day that chat templates take for today. Some write it into the system message (Llama 3.2, SmolLM3, Granite 3.3),
and a run has the same prompts on every day. Llama's own falls back to this one.
"""
CACHED_TEXTS = 16384
CACHED_CHARS = 4096  # longer texts hardly ever come twice


def load_tokenizer(path: str) -> HFTokenizer:
    """Loads the tokenizer of the model at `path`, a Hugging Face folder or name. Code that comes with the model is
    never run.

    Raises ConfigError when there is none, when it is not a fast one, or when it lacks a chat template or a stop token.
    """
    recover_folder(Path(path))
    check_folder(Path(path), advice=MEND)
    if not path or (is_local_path(path) and not Path(path).is_dir()):
        raise ConfigError(f"model.path is {path!r}, expected a folder with a model or the name of one")
    try:
        # Not AutoTokenizer: that rebuilds the tokenizer of some model types from parts of its file, and imports torch
        # to do so.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    except Exception as error:  # a damaged file makes the libraries raise errors of any kind, plain Exception too
        reason = str(error).partition("\n")[0][:300] or type(error).__name__
        raise ConfigError(
            f"model.path is {path!r}, from which no fast tokenizer (tokenizer.json) can be loaded: {reason}"
        ) from error
    file = cached_file(path, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    return HFTokenizer(tokenizer, stop_token_ids=_stop_token_ids(Path(file)) if file else [])


def _stop_token_ids(file: Path) -> list[int]:
    """Returns the ids that end an answer by the model's generation_config.json. Raises ConfigError."""
    eos = read_object(file, advice=MEND).get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token_id) is int for token_id in ids):
        raise ConfigError(f"{file} is damaged: eos_token_id is {eos!r}, expected ids of tokens; {MEND}")
    return ids


class HFTokenizer:
    """A fast Hugging Face tokenizer. `stop_token_ids` are the model's own, in addition to the tokenizer's
    end-of-sequence token.

    Raises ConfigError when there is no chat template or no stop token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, stop_token_ids: Sequence[int] = ()) -> None:
        eos = tokenizer.eos_token_id
        self.stop_token_ids = frozenset(stop_token_ids) | ({eos} if isinstance(eos, int) else set())
        if not tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; agents need a chat model's"
            )
        if not self.stop_token_ids:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no eos_token and the model no generation_config.json"
            )
        added = {
            i: token for i, token in tokenizer.added_tokens_decoder.items() if token.special or _is_word(token.content)
        }
        self.special_token_ids = frozenset(added)
        self.special_tokens = tuple(token.content for token in added.values())
        self._tokenizer = tokenizer
        self._trusted = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._trusted.no_truncation()
        self._trusted.no_padding()
        self._untrusted = _without_tokens(self._trusted, self.special_tokens)
        self._encode_cached = functools.lru_cache(maxsize=CACHED_TEXTS)(self._encode_untrusted)

    def encode_template(self, text: str) -> list[int]:
        return self._trusted.encode(replace_surrogates(text), add_special_tokens=False).ids

    def encode_text(self, text: str) -> list[int]:
        return list(self._encode_cached(text) if len(text) <= CACHED_CHARS else self._encode_untrusted(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._trusted.decode(list(token_ids), skip_special_tokens=False)

    def render_chat(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool, tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                strftime_now=_TODAY.strftime,
            )
        except Exception as error:  # a template is code: it may refuse the messages, or fail at them
            raise ChatTemplateError(str(error)) from error
        assert isinstance(text, str), "one conversation renders to one text"
        return text

    def tool_parser(self, name: str) -> ParseCalls:
        from mempipe.engines.vllm_tools import parser_of

        return parser_of(name, self._tokenizer)

    def _encode_untrusted(self, text: str) -> tuple[int, ...]:
        token_ids = self._untrusted.encode(replace_surrogates(text), add_special_tokens=False).ids
        # Where a special token is also a word of the vocabulary (an unknown-token, say), it is skipped.
        return tuple(i for i in token_ids if i not in self.special_token_ids)


def _is_word(token: str) -> bool:
    """Returns False for added tokens that are only white space (Gemma has some): they are ordinary text."""
    return bool(token.strip(" \t\r\n\u2581"))


def _without_tokens(tokenizer: tokenizers.Tokenizer, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Returns a copy that encodes the text of these tokens as any other text."""
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in tokens
    copy = tokenizers.Tokenizer.from_str(json.dumps(state))
    copy.encode_special_tokens = True
    return copy
