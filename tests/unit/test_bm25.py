"""The BM25 index: scores by hand and against bm25s, order, row ranges, bytes, and what is refused."""

from __future__ import annotations

import json
import math
import random
import re
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mempipe.retrieval import bm25_build
from mempipe.retrieval.bm25 import LexicalIndex
from mempipe.retrieval.bm25_build import build_lexical
from mempipe.retrieval.encoders import words
from mempipe.settings import ConfigError

WIKI = Path(__file__).parents[3] / "shared" / "data" / "wiki_mini.jsonl"
PASSAGES = [
    ("Nile", "A river in Egypt"),
    ("Rhine", "river, river"),
    ("", "Alû and the Élan"),
    ("The", "of it"),
    ("Nile", "delta"),
]
VOCABULARY = ["nile", "rhine", "river", "delta", "egypt", "basel", "alu", "elan", "source", "mouth"]


def batches(passages: list[tuple[str, str]], *, size: int = 2) -> list[pa.RecordBatch]:
    rows = [{"id": str(i), "title": title, "text": text, "partition": ""} for i, (title, text) in enumerate(passages)]
    return [pa.RecordBatch.from_pylist(rows[i : i + size]) for i in range(0, len(rows), size)]


def some_passages(count: int) -> list[tuple[str, str]]:
    draw = random.Random(0)
    return [(draw.choice(VOCABULARY), " ".join(draw.choices(VOCABULARY, k=draw.randint(0, 12)))) for _ in range(count)]


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> LexicalIndex:
    return build_lexical(batches(PASSAGES), tmp_path_factory.mktemp("index"), k1=1.2, b=0.75)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> LexicalIndex:
    return build_lexical(batches(some_passages(100), size=64), tmp_path_factory.mktemp("large"))


def found(
    index: LexicalIndex, query: str, depth: int = 10, rows: tuple[int, int] | None = None
) -> list[tuple[int, float]]:
    ((best, scores),) = index.search([query], depth, rows)
    assert best.dtype == np.int64 and scores.dtype == np.float32
    return list(zip(best.tolist(), scores.tolist(), strict=True))


def weight(*, occurrences: int, length: int, passages_with_it: int) -> float:
    """BM25 by hand, for the five `PASSAGES`, whose lengths in words that count are 3, 3, 2, 0 and 2."""
    inverse_frequency = math.log(1 + (5 - passages_with_it + 0.5) / (passages_with_it + 0.5))
    return inverse_frequency * occurrences / (occurrences + 1.2 * (0.25 + 0.75 * length / 2))


def test_scores_are_bm25_over_title_and_text(index):
    assert dict(found(index, "river")) == {
        0: pytest.approx(weight(occurrences=1, length=3, passages_with_it=2), rel=1e-6),
        1: pytest.approx(weight(occurrences=2, length=3, passages_with_it=2), rel=1e-6),
    }
    (row, score), *_ = found(index, "Nile river")
    both = weight(occurrences=1, length=3, passages_with_it=2) * 2
    assert row == 0 and score == pytest.approx(both, rel=1e-6)


def test_a_word_that_the_query_holds_twice_counts_twice(index):
    assert found(index, "delta delta") == [(4, 2 * found(index, "delta")[0][1])]


def test_case_and_accents_do_not_count_and_stop_words_find_nothing(index):
    assert [row for row, _ in found(index, "ALU")] == [row for row, _ in found(index, "alû elan")] == [2]
    for nothing in ("", "of the it", "unknown", "\ud800", "?!"):
        assert found(index, nothing) == []


@pytest.mark.parametrize(
    ("query", "row"),
    [
        ("中国的首都", 0),
        ("鲁迅的原名是什么？", 1),
        ("村上春樹の出身地", 2),
        ("서울 인구", 3),  # the text has particles: 서울은, 인구는
        ("เมืองหลวงของประเทศไทย", 4),
        ("vitamin B12缺乏", 5),
    ],
)
def test_scripts_without_spaces_are_searched_by_pairs_of_characters(tmp_path, query, row):
    texts = [
        "北京是中华人民共和国的首都。",
        "鲁迅原名周树人，浙江绍兴人。",
        "村上春樹は京都市に生まれた小説家である。",
        "서울은 대한민국의 수도이다. 서울의 인구는 약 940만 명이다.",
        "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย",
        "维生素B12缺乏会导致贫血。",
    ]
    index = build_lexical(batches([("", text) for text in texts]), tmp_path / "index")
    assert found(index, query)[0][0] == row


def test_a_character_without_neighbours_is_a_word_and_others_are_pairs():
    assert words("北京 是2020年的 Über-Stadt") == ["北京", "是", "2020", "年的", "uber", "stadt"]
    assert words("ハリー・ポッター、서울은") == ["ハリ", "リー", "ポッ", "ッタ", "ター", "서울", "울은"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("राम और रोम", ["राम", "और", "रोम"]),
        ("दिल्ली क्\u200dषेत्र", ["दिल्ली", "क्षेत्र"]),
        ("மலை মালা", ["மலை", "মালা"]),
        ("co\u00adoperate foo\u200bbar ﬁn\u2060e ❤\ufe0f 1\ufe0f\u20e3", ["cooperate", "foo", "bar", "fine", "1"]),
        ("فَتَحَ שָׁלוֹם Ёлка ά é_x", ["فتح", "שלום", "елка", "α", "e_x"]),
        ("می\u200cخواهم", ["می", "خواهم"]),
    ],
)
def test_a_word_holds_its_vowel_signs_and_no_accents(text, expected):
    assert words(text) == expected


def reads_the_same_by_all_rules(text: str) -> bool:
    """Whether the text has no sign that ended a word by the first rules and is part of one now, or the reverse."""
    marks = [each for each in unicodedata.normalize("NFKD", text) if unicodedata.category(each) in ("Mn", "Mc", "Cf")]
    return all(unicodedata.name(each, "").startswith(("COMBINING ACUTE", "COMBINING DIA", "HEBREW")) for each in marks)


@given(st.text(st.characters(max_codepoint=0x2FFFF) | st.sampled_from("aZ é́ü_שָ中ㅏß–İ"), max_size=40))
def test_text_without_such_signs_has_the_same_words_by_all_rules(text):
    assume(reads_the_same_by_all_rules(text))
    assert words(text) == words(text, 1)


def test_latin_text_of_wikipedia_has_the_same_words_by_all_rules():
    if not WIKI.exists():
        pytest.skip("the shared texts are not beside this checkout")
    texts = [text for line in WIKI.open() for text in json.loads(line).values() if isinstance(text, str)]
    differ = [text for text in texts if words(text) != words(text, 1)]
    indic = re.compile("[\u0900-\u0dff]")
    assert len(texts) > 10_000 and len(differ) < 50 and all(map(indic.search, differ))


def test_an_index_is_searched_by_the_rules_that_it_was_built_with(tmp_path, monkeypatch):
    texts = batches([("", "राम अयोध्या के राजा थे"), ("", "रोम इटली में है")])
    new = build_lexical(texts, tmp_path / "new")
    assert [row for row, _ in found(new, "रोम")] == [1]
    with monkeypatch.context() as patch:
        patch.setattr(bm25_build, "words", lambda text: words(text, 1))
        build_lexical(texts, tmp_path / "old")
    file = tmp_path / "old" / "lexical.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in settings.items() if name != "word_rules"}))
    assert len(found(LexicalIndex.open(tmp_path / "old"), "रोम")) == 2
    file.write_text(json.dumps(settings | {"word_rules": 3}))
    with pytest.raises(ConfigError, match="word_rules 3, this version knows 2; build the index again"):
        LexicalIndex.open(tmp_path / "old")


def test_equal_scores_are_ordered_by_row_also_at_the_last_place(tmp_path):
    index = build_lexical(batches([("x", "y")] * 50 + [("x", "x")]), tmp_path)
    assert [row for row, _ in found(index, "x", depth=4)] == [50, 0, 1, 2]


@given(
    st.lists(st.sampled_from([*VOCABULARY, "the", "unknown"]), max_size=6),
    st.integers(1, 40),
    st.integers(0, 100),
    st.integers(0, 100),
)
def test_search_equals_brute_force(large, query, depth, one, other):
    """Every passage scored on its own, in a range of one row; then sorted."""
    first, last = min(one, other), max(one, other)
    everything = [hit for row in range(first, last) for hit in found(large, " ".join(query), rows=(row, row + 1))]
    best = sorted(everything, key=lambda hit: (-hit[1], hit[0]))[:depth]
    assert found(large, " ".join(query), depth, (first, last)) == best


def test_scores_are_those_of_bm25s_itself(large):
    from bm25s import BM25

    texts = [words(title) + words(text) for title, text in some_passages(100)]
    theirs = BM25(k1=1.2, b=0.75, method="lucene")
    theirs.index(texts, show_progress=False)
    for query in ("nile river", "delta of the rhine rhine", "basel"):
        scores = np.zeros(100, dtype=np.float32)
        for row, score in found(large, query, depth=100):
            scores[row] = score
        np.testing.assert_allclose(scores, theirs.get_scores(words(query)), rtol=1e-5)


def test_an_answer_depends_neither_on_the_other_queries_nor_on_the_order_of_words(large):
    queries = ["nile river egypt basel", "delta", "", "rhine source"]
    together = large.search(queries, 7)
    for query, (rows, scores) in zip(queries, together, strict=True):
        assert found(large, query, depth=7) == list(zip(rows.tolist(), scores.tolist(), strict=True))
    assert found(large, "basel egypt river nile") == found(large, "nile river egypt basel")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_passages_give_the_same_bytes_however_they_are_cut(tmp_path):
    for name, size in (("a", 7), ("b", 100), ("c", 7)):
        build_lexical(batches(some_passages(100), size=size), tmp_path / name)
    assert files(tmp_path / "a") == files(tmp_path / "b") == files(tmp_path / "c")
    assert sorted(files(tmp_path / "a")) == ["lexical.json", "rows.npy", "starts.npy", "weights.npy", "words.arrow"]


@pytest.mark.parametrize("block_words", [1, 17, 100])
@pytest.mark.parametrize("range_postings", [1, 13])
def test_the_bytes_do_not_depend_on_the_blocks(tmp_path, monkeypatch, block_words, range_postings):
    passages = [("", ""), *some_passages(60), ("The", "of it"), *some_passages(40)]
    build_lexical(batches(passages), tmp_path / "one block")
    monkeypatch.setattr(bm25_build, "BLOCK_WORDS", block_words)
    monkeypatch.setattr(bm25_build, "RANGE_POSTINGS", range_postings)
    build_lexical(batches(passages), tmp_path / "blocks")
    assert files(tmp_path / "one block") == files(tmp_path / "blocks")


def test_settings_and_counts_are_kept_and_an_opened_index_answers_alike(tmp_path):
    built = build_lexical(batches(PASSAGES), tmp_path, k1=1.5, b=0.3)
    counts = {"num_passages": 5, "num_words": 7, "num_postings": 9}
    assert built.spec() == {"format": 1, "word_rules": 2, "k1": 1.5, "b": 0.3, **counts}
    for mmap in (True, False):
        opened = LexicalIndex.open(tmp_path, mmap=mmap)
        assert opened.spec() == built.spec() and found(opened, "nile river") == found(built, "nile river")


def test_nothing_is_printed(tmp_path, capfd):
    build_lexical(batches(PASSAGES), tmp_path).search(["nile"], 2)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("impossible", "sentence"),
    [({"k1": -1.0}, "k1 is -1.0"), ({"b": 1.5}, "b is 1.5"), ({"k1": math.nan}, "k1 is nan")],
)
def test_impossible_settings_are_refused(tmp_path, impossible, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build_lexical(batches(PASSAGES), tmp_path, **impossible)


def test_a_corpus_without_a_word_that_counts_is_refused(tmp_path):
    for passages in ([], [("The", "of it")]):
        with pytest.raises(ConfigError, match=f"none of the corpus's {len(passages)} passages has a word that counts"):
            build_lexical(batches(passages), tmp_path / "i")
    assert not list((tmp_path / "i").iterdir())


@pytest.mark.parametrize("name", ["lexical.json", "words.arrow", "starts.npy", "rows.npy", "weights.npy"])
@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "other"])
@pytest.mark.parametrize("mmap", [True, False])
def test_a_missing_or_damaged_file_is_named(tmp_path, name, damage, mmap):
    build_lexical(batches(PASSAGES), tmp_path)
    path = tmp_path / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"cut": content[: len(content) - 9], "empty": b"", "other": b"[1, 2]"}[damage])
    with pytest.raises(ConfigError, match=name):
        LexicalIndex.open(tmp_path, mmap=mmap)


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    build_lexical(batches(PASSAGES), tmp_path / "a")
    build_lexical(batches(PASSAGES[:2]), tmp_path / "b")
    for name in ("words.arrow", "starts.npy", "rows.npy", "weights.npy"):
        own = (tmp_path / "a" / name).read_bytes()
        (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
        with pytest.raises(ConfigError, match=rf"{name} (is|holds) .*lexical.json says"):
            LexicalIndex.open(tmp_path / "a")
        (tmp_path / "a" / name).write_bytes(own)
    np.save(tmp_path / "a" / "starts.npy", np.zeros(8, dtype=np.int64))
    with pytest.raises(ConfigError, match=r"starts.npy does not rise from 0 to 9"):
        LexicalIndex.open(tmp_path / "a")
    for name, value in (("num_words", 0), ("num_postings", "9"), ("num_passages", None)):
        kept = json.loads((tmp_path / "b" / "lexical.json").read_text())
        (tmp_path / "a" / "lexical.json").write_text(json.dumps(kept | {name: value}))
        with pytest.raises(ConfigError, match=f"lexical.json: {name} is {value!r}"):
            LexicalIndex.open(tmp_path / "a")


def test_a_pickle_among_the_files_is_never_loaded(tmp_path):
    build_lexical(batches(PASSAGES), tmp_path)
    np.save(tmp_path / "rows.npy", np.array([print] * 9, dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match=r"rows.npy is missing or damaged"):
        LexicalIndex.open(tmp_path, mmap=False)
