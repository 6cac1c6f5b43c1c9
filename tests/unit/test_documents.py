"""Masked documents: what they hold, what is rejected, and that nothing in them tells the hidden entity."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempipe.agents.memtrain import hide
from mempipe.data.corpus import split_contents
from mempipe.masking.documents import (
    REJECTIONS,
    CommonEntities,
    DocumentsConfig,
    MaskedDocument,
    Material,
    common_entities,
    entities_of,
    make_document,
)
from mempipe.masking.entities import RuleFinder, can_be_read, forms
from mempipe.settings import ConfigError
from mempipe.text import check_mask, chunks_of
from mempipe.types import Passage, Question, from_row

WIKI = Path(__file__).parents[3] / "shared" / "data" / "wiki_mini.jsonl"
MASK = "[MASK]"
NOTHING_COMMON = CommonEntities()
GUESSABLE = CommonEntities(guessable=frozenset({("designed by _ in spring", "anna miller")}))


def words(text: str) -> int:
    return len(text.split())


def passage(number: int, title: str, text: str) -> Passage:
    return Passage(id=f"p{number}", title=title, text=text, score=1.0 / number)


BRIDGE = passage(1, "Old Bridge", "The stone bridge over the river was designed by Anna Miller in spring.")
RELATED = [
    passage(2, "Anna Miller", "Anna Miller was an engineer. MILLER built many bridges."),
    passage(3, "Mill", "A mill in Vernon grinds grain."),
]
OTHERS = [passage(i, f"Hill {i}", "A hill is a landform that rises above the land around it.") for i in range(4, 60)]


def config(**changes: object) -> DocumentsConfig:
    values = {"index": "i", "tokenizer": "t", "entities": "rules", "num_random": 5}
    values |= {"chunk_tokens": 64, "min_tokens": 64, "max_tokens": 400}
    return DocumentsConfig(**values | changes)


def make(
    pivot: Passage = BRIDGE,
    *,
    related: list[Passage] = RELATED,
    others: list[Passage] = OTHERS,
    common: CommonEntities = NOTHING_COMMON,
    number: int = 0,
    **changes: object,
) -> tuple[MaskedDocument | None, list[str]]:
    material = Material(pivot=pivot, related=related, random=iter(others), seed=(1, number))
    return make_document(material, RuleFinder(), common, words, config(**changes)), material.rejected


def test_every_form_of_the_entity_is_masked_in_all_passages():
    document, _ = make()
    assert document is not None and (document.golden_answers[0], document.kind) == ("Anna Miller", "person")
    text = document.context
    assert "designed by [MASK] in spring" in text and "[MASK]\n[MASK] was an engineer. [MASK] built" in text
    assert document.num_masks == text.count(MASK) == 4 and "A mill in Vernon grinds" in text
    assert document.pivot_id == "p1" and document.related_scores == [1 / 2, 1 / 3]


def test_a_document_is_a_question_with_entities_to_recall():
    document, _ = make(related=[*RELATED, passage(60, "Lake", "The lake was mapped by John Smith in 1920.")])
    assert document is not None
    question = from_row(Question, asdict(document))
    assert (question.text, question.golden_answers[0]) == ("What does [MASK] stand for?", "Anna Miller")
    assert "Miller" in question.golden_answers and question.context == document.context
    assert [target for target in question.recall_targets if target[0] in ("1920", "John Smith")]
    assert not any("Miller" in form for target in question.recall_targets for form in target)
    assert make(num_recall_targets=0)[0].recall_targets == []


def test_the_same_seed_and_number_give_the_same_document_and_others_another_order():
    lengths = {"min_tokens": 200, "max_tokens": 200}
    first, again, other = (make(number=number, **lengths)[0] for number in (0, 0, 1))
    assert first == again
    assert first is not None and other is not None
    assert first.passage_ids != other.passage_ids and sorted(first.passage_ids) == sorted(other.passage_ids)


@pytest.mark.parametrize(("min_tokens", "max_tokens", "num_random"), [(64, 110, 5), (300, 310, 19), (64, 84, 3)])
def test_random_passages_fill_a_document_up_and_are_left_out_of_a_long_one(min_tokens, max_tokens, num_random):
    document, _ = make(min_tokens=min_tokens, max_tokens=max_tokens)
    assert document is not None and len(document.passage_ids) == 3 + num_random
    assert sum(document.chunk_tokens) <= max_tokens


def test_lengths_are_spread_from_the_least_to_the_most():
    made = [make(number=number, min_tokens=100, max_tokens=400, num_random=1)[0] for number in range(200)]
    lengths = sorted(len(document.context.split()) for document in made if document is not None)
    assert len(lengths) == 200 and lengths[0] >= 95 and lengths[-1] <= 400
    for quarter in range(4):
        inside = sum(100 + 75 * quarter <= length < 175 + 75 * quarter for length in lengths)
        assert 30 <= inside <= 75, (quarter, inside)


@pytest.mark.parametrize(
    ("rule", "pivot", "changes"),
    [
        ("no_entity", passage(1, "Hill", "a hill is a landform."), {}),
        ("short", passage(1, "Hill", "a hill has 7 sides."), {}),
        ("in_title", passage(1, "Anna Miller", "a woman called Anna Miller was there."), {}),
        ("everywhere", BRIDGE, {"common": CommonEntities(frozenset({"anna miller"}))}),
        (
            "guessable",
            BRIDGE,
            {"common": GUESSABLE},
        ),
        ("readable", passage(1, "Old Bridge", "The stone bridge was designed by Mask in spring."), {}),
        ("readable", passage(1, "Old Bridge", "The stone bridge was designed by Miles Stand in spring."), {}),
        ("too_long", passage(1, "Old Bridge", "The stone bridge was designed by Anna Miller. " * 60), {}),
        ("too_short", BRIDGE, {"others": [], "related": []}),
        ("no_recall", BRIDGE, {"related": []}),
    ],
)
def test_a_rule_rejects_and_is_counted(rule, pivot, changes):
    document, rejected = make(pivot, **changes)
    assert document is None and rejected == [rule] and rule in REJECTIONS


def test_another_entity_is_taken_where_one_is_rejected():
    pivot = passage(1, "Anna Miller", "In 1920 the bridge of Anna Miller was opened.")
    made = [make(pivot, number=number) for number in range(8)]
    assert all(document is not None and document.golden_answers[0] == "1920" for document, _ in made)
    assert {tuple(rejected) for _, rejected in made} == {(), ("in_title",)}


def test_other_spellings_of_the_entity_are_masked_and_words_of_other_names_are_not():
    others = [passage(2, "Ánna Míller", "We met _Anna_Miller_ in Vernon. Anna-Miller's mill, MILLER> said.")]
    document, _ = make(related=others)
    assert document is not None
    assert "[MASK]\nWe met _[MASK]_ in Vernon. [MASK]'s mill, [MASK]> said." in document.context
    press = passage(1, "Old Bridge", "The book about it was printed by Oxford University Press in spring.")
    document, _ = make(press, related=[passage(2, "Paper", "The press in Vernon wrote of it.")])
    assert document is not None and document.golden_answers[0] == "Oxford University Press"
    assert "Press" not in document.golden_answers and "The press in Vernon" in document.context


def test_masks_of_the_corpus_itself_do_not_stand_in_a_document():
    document, _ = make(related=[passage(2, "Mask", "The word [MASK] stands here in Vernon.")])
    assert document is not None and document.context.count(MASK) == document.num_masks == 1


def test_common_and_guessable_entities_are_counted_over_the_corpus():
    texts = [f"the tall house number {i} was seen by Anna Miller in spring." for i in range(30)]
    texts += [f"the bus to Basel left at noon number {i}." for i in range(6)]
    passages = [passage(i + 1, f"T{i}", text) for i, text in enumerate(texts)]
    common = common_entities(entities_of(passages, RuleFinder()).lazy(), len(passages), config())
    assert common.everywhere == {"anna miller"}
    assert ("bus to _ left at", "basel") in common.guessable


@given(
    st.lists(st.sampled_from(["a", "word", MASK, f"({MASK},", "x" * 80, "\n\n", " ", "été", "漢字" * 40]), max_size=60),
    st.integers(1, 20),
)
def test_chunks_join_to_the_text_and_never_split_a_mask(parts, max_tokens):
    def count(text: str) -> int:
        return 3 * text.count(MASK) + len(text.replace(MASK, "").split())

    text = "".join(parts)
    chunks = list(chunks_of(text, max_tokens, count, MASK))
    assert "".join(chunks) == text
    assert sum(chunk.count(MASK) for chunk in chunks) == text.count(MASK)
    assert all(count(chunk) <= max(max_tokens, 3) for chunk in chunks)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"chunk_tokens": 500}, "must rise in this order"),
        ({"min_tokens": 500}, "must rise in this order"),
        ({"mask": "two words"}, "it must be one word"),
        ({"mask": " "}, "it must be one word"),
        ({"question": "What is hidden?"}, "it must contain {mask}"),
    ],
)
def test_impossible_settings_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        config(**changes)


def test_a_mask_that_the_tokenizer_does_not_give_back_is_refused():
    check_mask(MASK, lambda text: list(map(ord, text)), lambda ids: "".join(map(chr, ids)))
    with pytest.raises(ConfigError, match=r"mask is '\[MASK\]', which the tokenizer reads as 'word \[mask\]"):
        check_mask(MASK, lambda text: list(map(ord, text)), lambda ids: "".join(map(chr, ids)).lower())


@pytest.mark.skipif(not WIKI.exists(), reason="the real passages are not on this machine")
@pytest.mark.jobs
@pytest.mark.slow
def test_no_form_of_the_entity_is_anywhere_in_thousands_of_documents_of_real_text():
    contents = [split_contents(json.loads(line)["contents"]) for line in WIKI.open()]
    corpus = sorted((passage(i + 1, *parts) for i, parts in enumerate(contents)), key=lambda each: each.title)
    finder = RuleFinder()
    common = common_entities(entities_of(corpus[::8], finder).lazy(), len(corpus[::8]), config())
    chosen = config(num_random=2, chunk_tokens=64, min_tokens=250, max_tokens=1500, num_recall_targets=3)
    rejected: Counter[str] = Counter()
    num_documents = 0
    for number in range(1, len(corpus) - 1, 3):
        others = np.random.default_rng(number).permutation(len(corpus))[:20].tolist()
        material = Material(
            pivot=corpus[number],
            related=[corpus[number - 1], corpus[number + 1]],
            random=(corpus[i] for i in others),
            seed=(1, number),
        )
        document = make_document(material, finder, common, words, chosen)
        rejected.update(material.rejected)
        if document is None:
            continue
        num_documents += 1
        text = document.context
        for form in forms(document.golden_answers[0], document.kind):
            assert not re.search(rf"(?<!\w){re.escape(form)}(?!\w)", text, re.IGNORECASE), (form, document.id)
        assert not can_be_read(text, document.golden_answers[0], document.kind)
        assert text.count(MASK) == document.num_masks >= 1
        assert all(count <= 64 for count in document.chunk_tokens) and len(document.chunk_tokens) >= 4
        for target in document.recall_targets:
            assert {form.casefold() for form in target}.isdisjoint(map(str.casefold, document.golden_answers))
            assert hide(text, target) != text
    assert num_documents > 2000, rejected


@pytest.mark.parametrize(
    "text",
    [
        "नई दिल्ली हिन्दी में लिखी है " * 3,
        "ประเทศไทยที่นี่เป็นเมือง" * 6,
        "e\u0301te\u0301 " * 20,
        "Les\u00adtat " * 9,
        "👍\ufe0f" * 20,
    ],
    ids=["Hindi", "Thai", "accents", "soft hyphens", "selectors"],
)
@pytest.mark.parametrize("max_tokens", [1, 3, 7])
def test_a_chunk_begins_with_no_mark_of_the_character_before_it(text, max_tokens):
    chunks = list(chunks_of(text, max_tokens, lambda text: len(text.strip()), MASK))
    assert "".join(chunks) == text and len(chunks) > 1
    firsts = [chunk.strip()[0] for chunk in chunks if chunk.strip()]
    assert not [first for first in firsts if unicodedata.category(first) in ("Mn", "Mc", "Me", "Cf")]
