"""Text encoders for dense retrieval: hashed bags of words, Hugging Face models such as E5, and sentence-transformers
models.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, ParamSpec, Protocol

import mmh3
import numpy as np
import numpy.typing as npt
from pydantic import NonNegativeFloat, PositiveInt, ValidationError, validate_call

from mempipe.settings import ConfigError
from mempipe.text import INVISIBLE, UNSPACED, accents, as_class, replace_surrogates, visible, with_marks
from mempipe.types import Passage

P = ParamSpec("P")
Vectors = npt.NDArray[np.float32]
WORD_RULES: Literal[2] = 2
"""The rules of `words`, which an index names; 1 if it names none. By 1 a vowel sign of Hindi, or a soft hyphen, ended a
word."""


class Encoder(Protocol):
    """Makes vectors of texts, float32 [n, dimension], of length 1 (0 for a text without a known word). Any string is a
    text.

    The same list gives the same vectors to the last bit, whatever was encoded before; equal texts of one list have
    equal vectors. Between lists a model's vector of a text may differ by rounding, since it depends on the texts that
    share its batch; HashingEncoder's does not.
    """

    name: str
    dimension: int

    def spec(self) -> dict[str, Any]:
        """Returns the description in an index's manifest, from which `make_encoder` makes the same encoder."""
        ...

    def encode_queries(self, queries: Sequence[str]) -> Vectors: ...

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors: ...


def _checked(init: Callable[P, None]) -> Callable[P, None]:
    """Returns the constructor of an encoder that checks its arguments against their types.

    It raises ConfigError with one line per wrong setting.
    """
    validated = validate_call(init)
    parameters = list(inspect.signature(init).parameters)
    allowed = ", ".join(parameters[1:])

    def sentence(kind: str, error: Mapping[str, Any]) -> str:
        place = error["loc"][0]
        name = parameters[place] if isinstance(place, int) else place
        if error["type"] == "unexpected_keyword_argument":
            return f"{kind} encoder has no setting {name!r}; it has {allowed}"
        if error["type"].startswith("missing"):
            return f"{kind} encoder: {name} is missing; it has the settings {allowed}"
        return f"{kind} encoder: {name} is {error['input']!r}: {error['msg'].replace('Input should be', 'should be')}"

    @functools.wraps(init)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            validated(*args, **kwargs)
        except ValidationError as error:
            raise ConfigError("\n".join(sentence(getattr(args[0], "name", ""), e) for e in error.errors())) from error

    return call


class HashingEncoder:
    """Hashed bags of words: deterministic, nothing to download; finds the passages that share words with the query.

    A word weighs 1 + ln(its occurrences) in the text, plus `title_weight` when the title has it, so that the passage
    about an entity comes before those that mention it. Case, accents and `STOP_WORDS` do not count. `word_rules` are
    those of `words`; an index names the ones that it was built with.

    MurmurHash3 (32 bits, signed, seed 0) decides a word's place and sign, as in scikit-learn's `FeatureHasher`, whose
    import takes longer than everything else that a retriever does before its first search.
    """

    name = "hashing"

    @_checked
    def __init__(
        self,
        *,
        dimension: PositiveInt = 1024,
        title_weight: NonNegativeFloat = 2.0,
        word_rules: Literal[1, 2] = WORD_RULES,
    ) -> None:
        self.dimension = dimension
        self.title_weight = title_weight
        self.word_rules = word_rules

    def spec(self) -> dict[str, Any]:
        return {
            "kind": self.name,
            "dimension": self.dimension,
            "title_weight": self.title_weight,
            "word_rules": self.word_rules,
        }

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        return self._encode([self._word_weights(query) for query in queries])

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        return self._encode([self._passage_weights(passage) for passage in passages])

    def _passage_weights(self, passage: Passage) -> Mapping[str, float]:
        weights = self._word_weights(passage.text)
        for word in set(words(passage.title, self.word_rules)):
            weights[word] = weights.get(word, 0.0) + self.title_weight
        return weights

    def _word_weights(self, text: str) -> dict[str, float]:
        counts = Counter(words(text, self.word_rules))
        return {word: 1.0 + math.log(count) for word, count in counts.items()}

    def _encode(self, weights: Sequence[Mapping[str, float]]) -> Vectors:
        hashes = np.array([mmh3.hash(word) for of_words in weights for word in of_words], dtype=np.int64)
        values = np.array([weight for of_words in weights for weight in of_words.values()])
        rows = np.repeat(np.arange(len(weights)), np.fromiter(map(len, weights), int))
        vectors = np.zeros((len(weights), self.dimension))
        np.add.at(vectors, (rows, np.abs(hashes) % self.dimension), np.where(hashes < 0, -values, values))
        return _normalized(vectors)


_STOP_WORDS = (
    "a an and are as at be been but by did do does for from had has have he her his how i in into is it its of on "
    "or s she that the their "
    "them then there these they this to was were what when where which who whom whose why will with would you"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())
_WORD = re.compile(r"\w+")
_UNSPACED = re.compile(f"[{UNSPACED}]")


def words(text: str, rules: int = WORD_RULES) -> list[str]:
    """Returns the words that count, in order: case-folded, without accents, without `STOP_WORDS`. In scripts without
    spaces every pair of neighbouring characters is a word, and so is a character without neighbours. Vowel signs are
    part of a word, and characters that nobody sees are not (`mempipe.text`).

    `rules` are those of the index that is built or searched; text without such signs has the same words by all.
    """
    if text.isascii():
        return [word for word in _WORD.findall(text.casefold()) if word not in STOP_WORDS]
    decomposed = unicodedata.normalize("NFKD", replace_surrogates(text))
    without, word_or_run = _patterns(rules)
    bare = without.sub("", decomposed) if rules == 1 else visible(decomposed, without=without)
    if bare.isascii():
        return [word for word in _WORD.findall(bare.casefold()) if word not in STOP_WORDS]
    found = word_or_run.finditer(unicodedata.normalize("NFC", bare).casefold())  # syllables and kana are whole again
    spelt = (_pairs(match["run"]) if match["run"] else [match[0]] for match in found)
    return [word for part in spelt for word in part if word not in STOP_WORDS]


@functools.cache
def _patterns(rules: int) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Returns the marks that words are written without, and a word or a run of a script without spaces."""
    letter, run = rf"[^\W{UNSPACED}]", f"(?P<run>[{UNSPACED}]+)"
    if rules == 1:
        marks = as_class(each for each in map(chr, range(0x20000)) if unicodedata.combining(each))
        return re.compile(f"(?![{UNSPACED}])[{marks}]"), re.compile(f"{letter}+|{run}")
    return re.compile(f"[{INVISIBLE}{accents()}]"), re.compile(f"{with_marks(letter)}|{run}")


def _pairs(run: str) -> list[str]:
    return [run[place : place + 2] for place in range(max(len(run) - 1, 1))]


class HFEncoder:
    """A Hugging Face encoder: prefix, last hidden states, pooling, L2 norm. The defaults are E5's (arXiv 2212.03533).

    `pooling` is "mean" (over the text's own tokens), "cls" (the first token) or "last" (the last token of the text).
    Texts are cut after `max_tokens` tokens; `batch_size` is in texts. On a GPU the model runs in float16.
    """

    name = "huggingface"

    @_checked
    def __init__(
        self,
        path: str,
        *,
        query_prefix: str = "query: ",
        passage_prefix: str = "passage: ",
        pooling: Literal["mean", "cls", "last"] = "mean",
        normalize: bool = True,
        max_tokens: PositiveInt = 256,
        batch_size: PositiveInt = 64,
    ) -> None:
        """Raises ConfigError when `path` is not an encoder, or one of fewer positions than `max_tokens`."""
        import torch
        from transformers import AutoModel, AutoTokenizer

        folder = _model_folder(path)
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            model = AutoModel.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"encoder {path!r} is not a Hugging Face encoder: {' '.join(str(error).split())}"
            ) from error
        if getattr(model.config, "is_encoder_decoder", False):  # the decoder of T5 encodes nothing
            model = model.get_encoder()
        _check_positions(path, max_tokens, model)
        self._settings = {
            "path": path,
            "query_prefix": query_prefix,
            "passage_prefix": passage_prefix,
            "pooling": pooling,
            "normalize": normalize,
            "max_tokens": max_tokens,
        }
        self._fingerprint = _fingerprint(model.state_dict(), tokenizer.get_vocab())
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model.to(self._device, dtype=torch.float16 if self._device.type == "cuda" else torch.float32)
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        self.dimension: int = model.config.hidden_size

    def spec(self) -> dict[str, Any]:
        return {"kind": self.name, "dimension": self.dimension, **self._settings, "fingerprint": self._fingerprint}

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        return self._encode([self._settings["query_prefix"] + query for query in queries])

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        return self._encode([self._settings["passage_prefix"] + _passage_text(passage) for passage in passages])

    def _encode(self, texts: Sequence[str]) -> Vectors:
        return _encode_distinct(
            texts, self._vectors, self._settings["path"], self.dimension, normalize=self._settings["normalize"]
        )

    def _vectors(self, texts: Sequence[str]) -> Vectors:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        token_ids = self._tokenizer(texts, truncation=True, max_length=self._settings["max_tokens"])["input_ids"]
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        # Texts of one length need no padding; a text without any token (a tokenizer that adds none) stays 0.
        by_length = sorted((i for i, ids in enumerate(token_ids) if ids), key=lambda i: len(token_ids[i]))
        for start in range(0, len(by_length), self._batch_size):
            rows = by_length[start : start + self._batch_size]
            tokens = [torch.tensor(token_ids[i]) for i in rows]
            # Padded here, on the right: where a tokenizer pads (and whether it can) must not change the pooled tokens,
            # nor any position.
            inputs = pad_sequence(tokens, batch_first=True, padding_value=self._tokenizer.pad_token_id or 0).to(
                self._device
            )
            mask = pad_sequence([torch.ones_like(ids) for ids in tokens], batch_first=True).to(self._device)
            with torch.inference_mode():
                states = self._model(
                    input_ids=inputs, attention_mask=mask
                ).last_hidden_state.float()  # float16 sums would overflow
                vectors[rows] = _pooled(states, mask, self._settings["pooling"]).cpu().numpy()
        return vectors


class SentenceTransformerEncoder:
    """A sentence-transformers model (a folder or name with `modules.json`), as that library runs it; vectors are
    normalised.

    `query_prompt` and `passage_prompt` come before the texts; None takes the model's own. `max_tokens` None is the
    model's own limit. The library is an extra: `pip install 'mempipe[sentence]'`. On a GPU the model runs in float16.
    """

    name = "sentence_transformers"

    @_checked
    def __init__(
        self,
        path: str,
        *,
        query_prompt: str | None = None,
        passage_prompt: str | None = None,
        max_tokens: PositiveInt | None = None,
        batch_size: PositiveInt = 64,
    ) -> None:
        """Raises ConfigError when the library is missing, `path` is not such a model, or one of fewer positions than
        `max_tokens`.
        """
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ConfigError(
                f"encoder kind is {self.name!r}; it needs sentence-transformers: pip install 'mempipe[sentence]'"
            ) from error

        folder = Path(_model_folder(path))
        if folder.is_dir() and not (folder / "modules.json").is_file():
            raise ConfigError(
                f"encoder {path!r} holds no modules.json; a plain model is read by kind {HFEncoder.name!r}"
            )
        try:
            # A folder needs no network; without `local_files_only` the library may look up the model's card.
            model: Any = SentenceTransformer(str(folder), trust_remote_code=False, local_files_only=folder.is_dir())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"encoder {path!r} is not a sentence-transformers model: {' '.join(str(error).split())}"
            ) from error
        model.float().eval()
        if max_tokens is not None:
            _check_positions(path, max_tokens, model.transformers_model)
            model.max_seq_length = max_tokens
        own = model.prompts
        self._settings = {
            "path": path,
            "query_prompt": query_prompt if query_prompt is not None else own.get("query") or "",
            "passage_prompt": passage_prompt
            if passage_prompt is not None
            else own.get("document") or own.get("passage") or "",
            "max_tokens": model.max_seq_length,
        }
        # Pooling has no weights, and changes every vector.
        pooling = [str(module.pooling_mode) for module in model if hasattr(module, "pooling_mode")]
        self._fingerprint = _fingerprint(model.state_dict(), model.tokenizer.get_vocab(), *pooling)
        if model.device.type == "cuda":
            model.half()
        self._model = model
        self._batch_size = batch_size
        self.dimension: int = model.get_embedding_dimension()

    def spec(self) -> dict[str, Any]:
        return {"kind": self.name, "dimension": self.dimension, **self._settings, "fingerprint": self._fingerprint}

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        return self._encode(queries, self._model.encode_query, self._settings["query_prompt"])

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        texts = [_passage_text(passage) for passage in passages]
        return self._encode(texts, self._model.encode_document, self._settings["passage_prompt"])

    def _encode(self, texts: Sequence[str], encode: Callable[..., Vectors], prompt: str) -> Vectors:
        def vectors(distinct: Sequence[str]) -> Vectors:
            return encode(distinct, prompt=prompt, batch_size=self._batch_size, show_progress_bar=False)

        return _encode_distinct(texts, vectors, self._settings["path"], self.dimension)


ENCODERS: dict[str, Callable[..., Encoder]] = {
    made.name: made for made in (HashingEncoder, HFEncoder, SentenceTransformerEncoder)
}


def make_encoder(spec: Mapping[str, Any], path: str = "") -> Encoder:
    """Makes the encoder that a config or an index's manifest describes by its kind and settings; missing settings have
    their defaults.

    `path` is where the model lies now, if not where the spec says. Raises ConfigError when there is no such encoder or
    setting, and when the model has another dimension or fingerprint than the spec.
    """
    kind = spec.get("kind")
    if not isinstance(kind, str) or kind not in ENCODERS:
        raise ConfigError(f"encoder kind is {kind!r}; it must be {', '.join(map(repr, ENCODERS))}")
    made = ENCODERS[kind]
    found_only = {"dimension", "fingerprint"} - inspect.signature(
        made
    ).parameters.keys()  # properties of a model, not settings
    settings = {name: value for name, value in spec.items() if name not in {"kind", *found_only}}
    encoder: Encoder = made(**settings | ({"path": path} if path else {}))
    expected = {name: spec[name] for name in found_only & spec.keys()}
    check_same_encoder({name: encoder.spec().get(name) for name in expected}, expected)
    return encoder


def check_same_encoder(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises ConfigError unless both specs encode alike; where a model lies does not matter."""
    for name in sorted((found.keys() | expected.keys()) - {"path"}):
        if found.get(name) != expected.get(name):
            raise ConfigError(
                f"the encoder's {name} is {found.get(name)!r}, the index was built with {expected.get(name)!r}"
            )


def _model_folder(path: str) -> str:
    """Returns the folder of the model that an installed package of this name carries, or `path` itself."""
    try:
        files = [] if Path(path).is_dir() else importlib.metadata.files(path) or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        files = []
    configs = [file for file in files if file.name == "config.json"]
    return str(Path(str(min(configs, key=lambda file: len(file.parts)).locate())).parent) if configs else path


def _check_positions(path: str, max_tokens: int, model: Any) -> None:
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None) or max_tokens
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    if (padding := getattr(table, "padding_idx", None)) is not None:  # RoBERTa and MPNet count from the one after it
        positions -= padding + 1
    if max_tokens > positions:
        raise ConfigError(f"encoder {path!r}: max_tokens is {max_tokens}; the model has {positions} positions")


def _fingerprint(weights: Mapping[str, Any], vocabulary: Mapping[str, int], *others: str) -> str:
    """Hashes all weights (as float32), the vocabulary, and `others`."""
    digest = hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode())
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().numpy())
    for text in others:
        digest.update(text.encode())
    return digest.hexdigest()[:16]


def _passage_text(passage: Passage) -> str:
    """Returns the passage as wiki-18 writes it: title in quotes, newline, text."""
    return f'"{passage.title}"\n{passage.text}' if passage.title else passage.text


def _pooled(states: Any, mask: Any, pooling: str) -> Any:
    """Pools states [rows, tokens, dimension] to [rows, dimension]; `mask` [rows, tokens] is 1, then 0 for padding."""
    if pooling == "cls":
        return states[:, 0]
    lengths = mask.sum(1, keepdim=True)
    if pooling == "last":
        return states.take_along_dim((lengths - 1).unsqueeze(-1), dim=1).squeeze(1)
    return (states * mask.unsqueeze(-1)).sum(1) / lengths


def _encode_distinct(
    texts: Sequence[str],
    encode: Callable[[Sequence[str]], npt.NDArray],
    path: str,
    dimension: int,
    *,
    normalize: bool = True,
) -> Vectors:
    """Returns vectors in the order of `texts` and encodes equal texts once.

    Raises RuntimeError for a vector that is not finite.
    """
    texts = [replace_surrogates(text) for text in texts]
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    distinct = encode(list(places)) if places else np.empty((0, dimension), dtype=np.float32)
    if not np.isfinite(distinct).all():
        raise RuntimeError(f"encoder {path!r} made vectors that are not finite")
    vectors = distinct[[places[text] for text in texts]].astype(np.float32, copy=False)
    return _normalized(vectors) if normalize else vectors


def _normalized(vectors: npt.NDArray) -> Vectors:
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, np.where(lengths == 0, 1, lengths), dtype=np.float32)
