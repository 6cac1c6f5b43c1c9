"""Forms of a name are found whatever the spelling, as whole words, and where the text writes them."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mempipe.spelling import is_written, letters, replaced, written


@pytest.mark.parametrize(
    ("text", "forms", "masked"),
    [
        ("LESTAT's _Lestat_, *Lestat* and lestats", ["Lestat"], "#'s _#_, *#* and lestats"),
        ("Léstat, Le\u0301stat, Les\u00adtat, Ｌｅｓｔａｔ", ["Lestat"], "#, #, #, #"),
        ("Lestat\u0301 came", ["Lestat"], "# came"),
        ("Les\u034ftat and Lestat\ufe0f", ["Lestat"], "# and #"),
        ("Lestat² and Lestat2", ["Lestat"], "#² and Lestat2"),
        ("bus, US, u.s., U.S", ["U.S."], "bus, #, #, #"),
        ("new-york New_York NewYork New\nYork Newyorker", ["New York"], "# # # # Newyorker"),
        ("The New York Times", ["York", "New York"], "The # Times"),
        ("1250, 1,250 and 11,250, 1 250", ["1250"], "#, # and 11,250, 1 250"),
        ("O’Brien, OBrien, O Brien", ["O'Brien"], "#, #, #"),
        ("Straße STRASSE ﬁne", ["strasse", "fine"], "# # #"),
        ("C++ (1979), C", ["C++"], "# (1979), #"),
        ("12 of 12,000 and 1,012 in 3,12", ["12"], "# of 12,000 and 1,012 in 3,#"),
        ("It sold 500 of 1,500, not 500,000", ["500"], "It sold # of 1,500, not 500,000"),
        ("12,000 or 12000", ["12,000"], "# or #"),
        ("a + b", ["+"], "a # b"),
        ("東京で生まれ、東京都", ["東京"], "#で生まれ、#都"),
        ("彼はLestatです", ["Lestat"], "彼は#です"),
        ("서울에서", ["서울"], "#에서"),
        ("text", ["", " "], "text"),
        ("", ["Lestat"], ""),
    ],
)
def test_a_form_is_found_however_it_is_spelled(text, forms, masked):
    assert replaced(text, forms, "#")[0] == masked
    assert is_written(text, forms) == (masked != text) == bool(written(text, forms))


def test_places_that_overlap_are_one_and_places_are_counted():
    assert written("New York York", ["York", "New York"]) == [(0, 8), (9, 13)]
    assert replaced("New York York", ["York", "New York"], "_") == ("_ _", 2)


def test_letters_are_what_counts():
    assert letters("_L'État_, 3.5 %") == "letat35" and letters("?!") == ""


WORD = st.text(st.sampled_from("aZéß1İ漢"), min_size=1, max_size=4)
GAP = st.sampled_from(["", " ", ", ", "_", "-", "'", "\u200b", "\u0301", "\n", "> "])


@given(name=st.lists(WORD, min_size=1, max_size=2), text=st.lists(st.tuples(GAP, WORD), max_size=8))
@example(name=["a", "Z"], text=[("", "aZ")])
def test_what_is_left_can_be_read_in_no_way(name, text):
    whole, form = "".join(gap + word for gap, word in text), " ".join(name)
    masked, count = replaced(whole, [form], "#")
    assert masked.count("#") == count
    for gap in ("", " "):
        assert f" {plain(form, gap)} " not in f" {plain(masked.replace('#', ' xxx '), gap)} "
    assert replaced(masked, [form], "#") == (masked, 0)


def plain(text: str, gap: str) -> str:
    """Returns the words of a text by another road: punctuation is dropped, or taken for spaces."""
    decomposed = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    shown = "".join(c for c in decomposed if not unicodedata.combining(c) and unicodedata.category(c) != "Cf")
    return " ".join(re.sub(r"[^\w\s]|_", gap, shown).split())
