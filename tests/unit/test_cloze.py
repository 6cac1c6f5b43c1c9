"""Questions without labels: what is asked, what is rejected and counted, and that nothing tells the answer."""

from __future__ import annotations

import random
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mempipe.data.corpus import corpus_files, read_segments
from mempipe.data.qa import read_questions, write_questions
from mempipe.masking.cloze import (
    GAP,
    LINK,
    RULES,
    ClozeQuestions,
    choose_questions,
    find_candidates,
    split_of,
)
from mempipe.masking.config import ClozeConfig
from mempipe.masking.entities import KINDS, RuleFinder, can_be_read
from mempipe.settings import ConfigError
from mempipe.types import Passage, Question

WIKI = Path(__file__).parents[3] / "shared" / "data" / "wiki_mini.jsonl"
ALL_TRAIN = {"validation_share": 0.0, "test_share": 0.0}


def passage(title: str, text: str, **changes: str) -> Passage:
    return Passage(**{"id": f"p-{title}", "title": title, "text": text, **changes})


def make(*passages: Passage, **changes: object) -> ClozeQuestions:
    config = ClozeConfig(**{"entities": "rules", "two_passages": 0.0, **ALL_TRAIN, **changes})
    return choose_questions(find_candidates(passages, RuleFinder(), config).lazy(), len(passages), config)


BRIDGE = passage(
    "Old Bridge", "The stone bridge over the quiet river was designed by Anna Miller after the great flood."
)


def test_a_question_is_a_sentence_with_its_entity_taken_out():
    (question,) = make(BRIDGE).questions["train"]
    assert question.text == f"The stone bridge over the quiet river was designed by {GAP} after the great flood."
    assert question.golden_answers == ["Anna Miller"] and question.num_hops == 1
    assert [(fact.passage_id, fact.value) for fact in question.evidence] == [("p-Old Bridge", "Anna Miller")]


def test_the_title_is_named_when_it_is_wanted():
    (question,) = make(BRIDGE, with_title=True).questions["train"]
    assert question.text.startswith("Old Bridge: The stone bridge")


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("short", "He met Anna Miller there."),
        ("long", "It " + "was big and " * 15 + "met by Anna Miller in the long and very wet winter of that year."),
        ("in_title", "The stone bridge over the quiet river was called Old Bridge by people living nearby."),
        ("not_alone", "The stone bridge over the river was designed by Anna Miller, and Miller paid for all of it."),
        ("not_alone", "The bridge over the quiet river was designed by Anna Miller, and _Miller_ paid for all of it."),
        (
            "not_alone",
            "The bridge over the quiet river was designed by Anna Miller; ÁNNA-MÍLLER> is what people wrote.",
        ),
        ("unsearchable", "He was the one who was there before Anna Miller and all of us."),
    ],
)
def test_a_rule_rejects_and_is_counted(rule, text):
    made = make(BRIDGE, passage("Old Bridge (2)", text), passage("Old Bridge", text, id="again"))
    assert made.counts[rule] >= 1
    assert all(
        "Anna" not in question.text or question.golden_answers != ["Anna Miller"]
        for question in made.questions["train"]
    )


def test_an_answer_that_is_everywhere_could_be_guessed():
    many = [
        passage(
            f"Place {chr(65 + i % 26)}{i}",
            f"The small village with number {i}00 lies near lakes and green hills of Ruritania today.",
        )
        for i in range(40)
    ]
    made = make(*many, per_passage=3)
    assert made.counts["everywhere"] == 40
    assert all(question.golden_answers != ["Ruritania"] for question in made.questions["train"])


def test_several_questions_about_one_passage_have_ids_of_their_own(tmp_path):
    names = ("Marlowe Tannen", "Edwina Corso", "Fabian Oduya")
    sentences = [f"In the spring {name} walked across eleven frozen fields toward home." for name in names]
    passages = [
        Passage(id=f"p{i}", title=f"Zebra {i}", text=" ".join(sentences).replace("eleven", f"{20 + i}"))
        for i in range(3)
    ]
    settings = {"max_passage_share": 1.0, "two_passages": 0}
    (one,) = make(*passages[:1], per_passage=1, **settings).questions["train"]
    several = make(*passages, per_passage=3, **settings).questions["train"]
    ids = [question.id for question in several]
    assert len(ids) == len(set(ids)) == 9 and one.id in ids
    write_questions(tmp_path / "q.parquet", several)
    assert read_questions(tmp_path / "q.parquet") == several


def test_words_that_betray_the_answer_reject_it():
    many = [
        passage(
            f"Club {i}",
            f"Members of group {1000 + i} often sing hymns composed by United Kingdoms of Borduria choirs nearby.",
        )
        for i in range(6)
    ]
    assert make(*many).counts["guessable"] == 6


def test_two_passages_are_joined_by_the_entity_that_leads_from_one_to_the_other():
    made = make(
        BRIDGE,
        passage(
            "Anna Miller", "She learned the craft of building long stone arches as a young woman in Steinbach village."
        ),
        two_passages=1.0,
    )
    (question,) = made.questions["train"]
    assert question.text == (
        f"The stone bridge over the quiet river was designed by {LINK} after the great flood. / {LINK}: "
        f"She learned the craft of building long stone arches as a young woman in {GAP} village."
    )
    assert [fact.value for fact in question.evidence] == ["Anna Miller", "Steinbach"] and question.num_hops == 2


def test_a_pair_whose_first_sentence_names_the_answer_is_left_out():
    river = "The stone bridge over the quiet Steinbach river was designed by Anna Miller after the great flood."
    life = "She learned the craft of building long stone arches as a young woman in Steinbach village."
    made = make(passage("Old Bridge", river), passage("Anna Miller", life), two_passages=1.0)
    assert not made.questions["train"]


def test_the_last_word_of_an_organisation_is_not_its_name():
    text = "The press at home wrote that Oxford University Press printed the book about bridges in early spring."
    (question,) = make(passage("Old Bridge", text)).questions["train"]
    assert question.text == text.replace("Oxford University Press", GAP)
    assert question.golden_answers == ["Oxford University Press"]


def test_a_name_that_two_titles_share_leads_nowhere():
    about = "She learned the craft of building long stone arches as a young woman in Steinbach village."
    twins = [passage("Anna Miller (architect)", about, id="a"), passage("Anna Miller (singer)", about, id="b")]
    assert not make(BRIDGE, *twins, two_passages=1.0).questions["train"]


def test_a_text_without_capitals_is_refused_with_what_would_help():
    with pytest.raises(ConfigError, match=r"no question could be made of 1 passages: 0 candidates.*spaCy"):
        make(passage("brücke", "die alte steinerne brücke über den stillen fluss wurde nach der großen flut gebaut."))


WORDS = [
    "river",
    "stone",
    "Anna",
    "Miller",
    "Old Bridge",
    "1921",
    "the",
    "and",
    "Rome",
    "of",
    "quiet.",
    "flood,",
    "Borduria",
    "house",
]


@settings(max_examples=60)
@given(st.lists(st.lists(st.sampled_from(WORDS), min_size=8, max_size=40), min_size=1, max_size=12), st.integers(0, 3))
def test_whatever_the_corpus_no_question_tells_its_answer(texts, seed):
    passages = [passage(f"T {' '.join(words[:2])}", " ".join(words), id=str(i)) for i, words in enumerate(texts)]
    try:
        made = make(*passages, seed=seed, two_passages=0.5, per_passage=2)
    except ConfigError:
        return
    assert made.counts["candidates"] == sum(made.counts[rule] for rule in (*RULES, "kept"))
    assert_untold(made.questions["train"])


def assert_untold(questions: list[Question]) -> None:
    for question in questions:
        answer = question.golden_answers[0]
        kinds = [kind for kind in KINDS if kind in ("title", "date", "number")] if " " not in answer else KINDS
        readable = [kind for kind in kinds if can_be_read(question.text, answer, kind)]
        assert answer.lower() not in f" {question.text.lower()} ".replace(GAP, "").split() and "title" not in readable
        assert question.text.count(GAP) == 1


def wiki(limit: int | None = None) -> list[Passage]:
    if not WIKI.exists():
        pytest.skip("the shared texts are not beside this checkout")
    batches = (batch for batch, _ in read_segments(corpus_files(WIKI), size=4096))
    return [Passage(**row) for batch in batches for row in batch.to_pylist()][:limit]


@pytest.fixture(scope="module")
def of_wikipedia() -> tuple[list[Passage], pl.DataFrame, ClozeQuestions]:
    passages, config = wiki(), ClozeConfig(entities="rules")
    candidates = find_candidates(passages, RuleFinder(), config)
    return passages, candidates, choose_questions(candidates.lazy(), len(passages), config)


@pytest.mark.jobs
@pytest.mark.slow
def test_of_9002_passages_no_question_tells_its_answer(of_wikipedia):
    _, _, made = of_wikipedia
    assert made.counts["questions"] > 5000 and made.counts["two_passages"] > 500
    assert_untold([question for listed in made.questions.values() for question in listed])


@pytest.mark.jobs
@pytest.mark.slow
def test_no_passage_of_a_test_question_is_in_a_training_question(of_wikipedia):
    passages, _, made = of_wikipedia
    titles = {passage.id: passage.title for passage in passages}
    used = {
        split: {titles[fact.passage_id] for question in listed for fact in question.evidence}
        for split, listed in made.questions.items()
    }
    assert (
        not used["train"] & used["test"]
        and not used["train"] & used["validation"]
        and not used["validation"] & used["test"]
    )
    config = ClozeConfig()
    assert all(split_of(title, "", config) == split for split, listed in used.items() for title in listed)


@pytest.mark.jobs
@pytest.mark.slow
def test_every_kept_answer_stands_in_the_passage_that_is_its_evidence(of_wikipedia):
    passages, _, made = of_wikipedia
    texts = {passage.id: passage.text for passage in passages}
    for listed in made.questions.values():
        assert all(fact.value in texts[fact.passage_id] for question in listed for fact in question.evidence)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_questions_in_whatever_order_passages_come():
    passages, config = wiki(1000), ClozeConfig(entities="rules")
    candidates = find_candidates(passages, RuleFinder(), config)
    made = choose_questions(candidates.lazy(), len(passages), config)
    shuffled = random.Random(1).sample(passages, len(passages))
    parts = [
        find_candidates(shuffled[start : start + 100], RuleFinder(), config) for start in range(0, len(shuffled), 100)
    ]
    again = choose_questions(pl.concat(parts).lazy(), len(passages), config)
    assert again.counts["questions"] > 500
    assert again.questions == made.questions and again.counts == made.counts
    other = choose_questions(candidates.with_columns(pl.col("draw").hash(seed=3)).lazy(), len(passages), config)
    assert other.questions != made.questions


def test_passages_without_titles_are_in_every_split():
    sentence = "In the cold spring Ada{} Loman walked across {} frozen fields toward the old mill."
    passages = [Passage(id=str(i), title="", text=sentence.format(i, 30 + i)) for i in range(200)]
    config = ClozeConfig(validation_share=0.2, test_share=0.2, two_passages=0)
    made = choose_questions(find_candidates(passages, RuleFinder(), config).lazy(), len(passages), config)
    assert all(len(questions) > 20 for questions in made.questions.values())


@pytest.mark.parametrize("mark", [GAP, LINK])
def test_a_sentence_with_a_gap_of_its_own_is_no_question(mark):
    sentence = "In the cold spring Ada Loman walked across {} frozen fields toward the old mill."
    passages = [Passage(id="a", title="A", text=sentence.format(mark)), Passage(id="b", title="B", text="It is.")]
    assert not len(find_candidates(passages, RuleFinder(), ClozeConfig()))
    passages[0] = Passage(id="a", title="A", text=sentence.format("the"))
    assert len(find_candidates(passages, RuleFinder(), ClozeConfig()))
