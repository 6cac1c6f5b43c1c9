"""The Hugging Face encoder, on a tiny random BERT: pooling, prefixes, cuts, and the fingerprint that ties an index to its weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from mempipe.config import ConfigError
from mempipe.engines.encoders import HFEncoder, make_encoder
from mempipe.engines.retrieval import Query, Retriever, build_index
from mempipe.types import Passage

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "query", "passage", ":", '"', "nile", "rhine", "river", "flows", "in", "egypt"]
PASSAGES = [
    Passage(id="1", title="Nile", text="river in Egypt"),
    Passage(id="2", title="", text="Rhine river"),
    Passage(id="3", title="Rhine", text="flows " * 20),
]


def save_bert(folder: Path, *, seed: int) -> str:
    """A BERT of one layer and 32 positions with random weights."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=32
    )
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> str:
    return save_bert(tmp_path_factory.mktemp("bert"), seed=0)


@pytest.fixture(scope="module")
def encoder(bert) -> HFEncoder:
    return HFEncoder(bert, max_tokens=12, batch_size=2)


def by_hand(bert: str, words: list[str]) -> np.ndarray:
    """The normalised mean of the last hidden states of `[CLS] words [SEP]`."""
    token_ids = torch.tensor([[WORDS.index(word) for word in ["[CLS]", *words, "[SEP]"]]])
    with torch.inference_mode():
        mean = BertModel.from_pretrained(bert).eval()(token_ids).last_hidden_state[0].double().mean(0).numpy()
    return mean / np.linalg.norm(mean)


def test_queries_and_passages_are_prefixed_and_pooled_over_their_own_tokens(bert, encoder):
    (query,) = encoder.encode_queries(["Nile river"])
    np.testing.assert_allclose(query, by_hand(bert, ["query", ":", "nile", "river"]), atol=1e-6)
    titled, untitled, _ = encoder.encode_passages(PASSAGES)  # of different lengths: padding must not count
    np.testing.assert_allclose(titled, by_hand(bert, ["passage", ":", '"', "nile", '"', "river", "in", "egypt"]), atol=1e-6)
    np.testing.assert_allclose(untitled, by_hand(bert, ["passage", ":", "rhine", "river"]), atol=1e-6)


def test_texts_are_cut_after_max_tokens_special_tokens_included(bert, encoder):
    long = encoder.encode_passages(PASSAGES)[2]
    np.testing.assert_allclose(long, by_hand(bert, ["passage", ":", '"', "rhine", '"', *["flows"] * 5]), atol=1e-6)


def test_vectors_come_back_in_the_order_of_the_texts(encoder):
    texts = ["nile", "nile river in egypt", "rhine", "", "flows " * 9]
    together = encoder.encode_queries(texts)
    assert together.dtype == np.float32 and together.shape == (5, 16)
    for text, vector in zip(texts, together, strict=True):
        np.testing.assert_allclose(encoder.encode_queries([text])[0], vector, atol=1e-6)


@pytest.mark.parametrize("text", ["", "\ud800", "東京", "x" * 100_000])
def test_any_string_can_be_encoded(encoder, text):
    assert np.isclose(np.linalg.norm(encoder.encode_queries([text])), 1, atol=1e-6)


def test_a_manifest_makes_the_same_encoder_and_the_index_finds_what_it_holds(bert, encoder, tmp_path):
    build_index(PASSAGES, tmp_path / "i", encoder=encoder)
    retriever = Retriever(tmp_path / "i")  # the encoder comes from the manifest
    assert make_encoder(encoder.spec()).spec() == encoder.spec()
    (result,) = retriever.search([Query(text="Nile", num_passages=3)])
    scores = encoder.encode_passages(PASSAGES) @ encoder.encode_queries(["Nile"])[0]
    assert [passage.id for passage in result.passages] == [PASSAGES[i].id for i in np.argsort(-scores)]


def test_other_weights_in_the_same_folder_are_refused_and_a_moved_model_is_not(tmp_path):
    folder = tmp_path / "model"
    built = HFEncoder(save_bert(folder, seed=0), max_tokens=12)
    build_index(PASSAGES, tmp_path / "i", encoder=built)
    moved = folder.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="is no Hugging Face encoder"):
        Retriever(tmp_path / "i")
    assert Retriever(tmp_path / "i", encoder=HFEncoder(str(moved), max_tokens=12)).num_passages == 3
    save_bert(folder, seed=1)
    with pytest.raises(ConfigError, match=r"fingerprint is '[0-9a-f]{16}', the index was built with"):
        Retriever(tmp_path / "i")


def test_impossible_encoders_are_refused(bert, tmp_path):
    with pytest.raises(ConfigError, match="max_tokens is 64; the model has 32 positions"):
        HFEncoder(bert, max_tokens=64)
    with pytest.raises(ConfigError, match="is no Hugging Face encoder"):
        HFEncoder(str(tmp_path))


def test_a_model_that_makes_no_numbers_is_an_error(tmp_path):
    folder = Path(save_bert(tmp_path / "broken", seed=0))
    model = BertModel.from_pretrained(folder)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[WORDS.index("nile")] = torch.nan
    model.save_pretrained(folder)
    encoder = HFEncoder(str(folder), max_tokens=12)
    assert np.isfinite(encoder.encode_queries(["rhine"])).all()
    with pytest.raises(RuntimeError, match="made vectors that are not finite"):
        encoder.encode_queries(["nile"])
    with pytest.raises(RuntimeError, match="made vectors that are not finite"):
        build_index(PASSAGES, tmp_path / "i", encoder=encoder)
    assert not (tmp_path / "i").exists()
