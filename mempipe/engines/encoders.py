"""Text encoders for dense retrieval: hashed bags of words, and Hugging Face models such as E5."""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mempipe.agents.protocol import replace_surrogates
from mempipe.config import ConfigError
from mempipe.types import Passage

Vectors = npt.NDArray[np.float32]


class Encoder(Protocol):
    """Texts to vectors, float32 [n, dimension], of length 1 (0 for a text without a known word). Any string is a text."""

    name: str
    dimension: int

    def spec(self) -> dict[str, Any]:
        """What an index's manifest keeps: `make_encoder` makes the same encoder of it."""
        ...

    def encode_queries(self, queries: Sequence[str]) -> Vectors: ...

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors: ...


class HashingEncoder:
    """Hashed bags of words: deterministic, nothing to download; finds the passages that share words with the query.

    A word weighs 1 + ln(its occurrences) in the text, plus `title_weight` when the title has it, so that the passage about an entity comes
    before those that mention it. Case, accents and `STOP_WORDS` do not count.
    """

    name = "hashing"

    def __init__(self, *, dimension: int = 1024, title_weight: float = 2.0) -> None:
        from sklearn.feature_extraction import FeatureHasher

        if dimension < 1 or title_weight < 0:
            raise ConfigError(f"hashing encoder: dimension is {dimension} and title_weight {title_weight}; they must be >= 1 and >= 0")
        self.dimension = dimension
        self.title_weight = title_weight
        self._hasher = FeatureHasher(dimension, alternate_sign=True)

    def spec(self) -> dict[str, Any]:
        return {"kind": self.name, "dimension": self.dimension, "title_weight": self.title_weight}

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        return self._encode(_word_weights(query) for query in queries)

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        return self._encode(self._passage_weights(passage) for passage in passages)

    def _passage_weights(self, passage: Passage) -> Mapping[str, float]:
        weights = _word_weights(passage.text)
        for word in set(_words(passage.title)):
            weights[word] = weights.get(word, 0.0) + self.title_weight
        return weights

    def _encode(self, weights: Iterator[Mapping[str, float]]) -> Vectors:
        counts: Any = self._hasher.transform(weights)
        return _normalized(counts.toarray())


_STOP_WORDS = (
    "a an and are as at be been but by did do does for from had has have he her his how i in into is it its of on or s she that the their "
    "them then there these they this to was were what when where which who whom whose why will with would you"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())


def _words(text: str) -> list[str]:
    if not text.isascii():
        decomposed = unicodedata.normalize("NFKD", replace_surrogates(text))
        text = "".join(character for character in decomposed if not unicodedata.combining(character))
    return [word for word in re.findall(r"\w+", text.casefold()) if word not in STOP_WORDS]


def _word_weights(text: str) -> dict[str, float]:
    return {word: 1.0 + math.log(count) for word, count in Counter(_words(text)).items()}


class HFEncoder:
    """A Hugging Face encoder with prefixes, mean pooling and L2 norm, the way E5 was trained (arXiv 2212.03533).

    A passage is encoded as wiki-18 writes it: title in quotes, newline, text. On a GPU the model runs in float16. `batch_size` is in texts;
    texts are cut after `max_tokens` tokens.
    """

    name = "huggingface"

    def __init__(
        self, path: str, *, query_prefix: str = "query: ", passage_prefix: str = "passage: ", max_tokens: int = 256, batch_size: int = 64
    ) -> None:
        """Raises ConfigError when `path` is no encoder, or one of fewer positions than `max_tokens`."""
        import torch
        from transformers import AutoModel, AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
            model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
        except (OSError, ValueError) as error:
            raise ConfigError(f"encoder {path!r} is no Hugging Face encoder: {' '.join(str(error).split())}") from error
        positions = getattr(model.config, "max_position_embeddings", max_tokens)
        if not 1 <= max_tokens <= positions:
            raise ConfigError(f"encoder {path!r}: max_tokens is {max_tokens}; the model has {positions} positions")
        self._settings = {"path": path, "query_prefix": query_prefix, "passage_prefix": passage_prefix, "max_tokens": max_tokens}
        self._fingerprint = _fingerprint(model, self._tokenizer)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model.to(self._device, dtype=torch.float16 if self._device.type == "cuda" else torch.float32)
        self._batch_size = batch_size
        self.dimension: int = model.config.hidden_size

    def spec(self) -> dict[str, Any]:
        return {"kind": self.name, "dimension": self.dimension, **self._settings, "fingerprint": self._fingerprint}

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        return self._encode([self._settings["query_prefix"] + query for query in queries])

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        prefix = self._settings["passage_prefix"]
        return self._encode([f'{prefix}"{p.title}"\n{p.text}' if p.title else prefix + p.text for p in passages])

    def _encode(self, texts: Sequence[str]) -> Vectors:
        import torch

        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # texts of one length need no padding
        for start in range(0, len(texts), self._batch_size):
            rows = by_length[start : start + self._batch_size]
            inputs = self._tokenizer(
                [replace_surrogates(texts[i]) for i in rows],
                padding=True,
                truncation=True,
                max_length=self._settings["max_tokens"],
                return_tensors="pt",
            ).to(self._device)
            with torch.inference_mode():
                states = self._model(**inputs).last_hidden_state.float()  # [rows, tokens, dimension]; float16 sums would overflow
                mask = inputs["attention_mask"].unsqueeze(-1).float()
                vectors[rows] = ((states * mask).sum(1) / mask.sum(1)).cpu().numpy()
        if not np.isfinite(vectors).all():
            raise RuntimeError(f"encoder {self._settings['path']!r} made vectors that are not finite")
        return _normalized(vectors)


def make_encoder(spec: Mapping[str, Any]) -> Encoder:
    """The encoder that an index's manifest describes. Raises ConfigError when there is no such encoder, or its weights are others now."""
    kind = spec.get("kind")
    if kind not in (HashingEncoder.name, HFEncoder.name):
        raise ConfigError(f"encoder kind is {kind!r}; it must be {HashingEncoder.name!r} or {HFEncoder.name!r}")
    made = HashingEncoder if kind == HashingEncoder.name else HFEncoder
    settings = {name: value for name, value in spec.items() if name not in ("kind", "fingerprint")}
    if made is HFEncoder:
        settings.pop("dimension", None)
    try:
        encoder: Encoder = made(**settings)
    except TypeError as error:
        raise ConfigError(f"{kind} encoder with settings {settings}: {error}") from error
    check_same_encoder(encoder.spec(), spec)
    return encoder


def check_same_encoder(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises ConfigError unless both specs encode alike; where a model lies does not matter."""
    for name in sorted((found.keys() | expected.keys()) - {"path"}):
        if found.get(name) != expected.get(name):
            raise ConfigError(f"the encoder's {name} is {found.get(name)!r}, the index was built with {expected.get(name)!r}")


def _fingerprint(model: Any, tokenizer: Any) -> str:
    """A hash of all weights (as float32) and of the vocabulary."""
    digest = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy())
    return digest.hexdigest()[:16]


def _normalized(vectors: npt.NDArray) -> Vectors:
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, np.where(lengths == 0, 1, lengths), dtype=np.float32)
