"""Passages of plain text files, of markdown, and of Python's own reference."""

from __future__ import annotations

import pytest

from mempipe.data.plain_text import PASSAGE_WORDS, PYTHON_REFERENCE, is_plain_text, read_plain_text
from mempipe.settings import ConfigError


def test_paragraphs_are_joined_up_to_a_passage_and_headings_are_titles(tmp_path):
    words = " ".join(["word"] * 60)
    (tmp_path / "guide.md").write_text(
        f"# Guide\n\nfirst part\nof a line\n\n{words}\n\n{words}\n\n## Use\n\nlast part\n"
    )
    passages = list(read_plain_text(tmp_path / "guide.md"))
    assert [passage.title for passage in passages] == ["guide", "guide", "guide: Use"]
    assert passages[0].text == f"first part of a line {words}" and passages[2].text == "last part"
    assert [passage.id for passage in passages] == ["guide-0", "guide-1", "guide-2"]
    assert all(len(passage.text.split()) <= PASSAGE_WORDS for passage in passages)


def test_an_underlined_line_is_a_heading(tmp_path):
    (tmp_path / "a.txt").write_text("Scope\n=====\n\nwhat it is\n")
    (passage,) = read_plain_text(tmp_path / "a.txt")
    assert (passage.title, passage.text) == ("a: Scope", "what it is")


def test_a_folder_is_read_by_names(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("of b")
    (tmp_path / "sub" / "a.md").write_text("of a")
    (tmp_path / "c.pdf").write_text("nothing")
    assert [(p.id, p.text) for p in read_plain_text(tmp_path)] == [("b-0", "of b"), ("sub/a-0", "of a")]
    assert is_plain_text(tmp_path) and not is_plain_text(tmp_path / "c.pdf")


def test_python_carries_its_reference_everywhere():
    passages = list(read_plain_text(PYTHON_REFERENCE))
    assert len(passages) > 500 and len({passage.id for passage in passages}) == len(passages)
    assert all(passage.text.strip() and passage.title for passage in passages)


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
    (tmp_path / "empty.txt").write_text(" \n")
    for name, words in (
        ("latin.txt", "not UTF-8: byte 1"),
        ("empty.txt", "holds no text"),
        ("no.txt", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=words):
            list(read_plain_text(tmp_path / name))
