"""Passages of plain text files, of markdown, and of Python's own reference."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import fsspec
import pytest

from mempipe.data.corpus import read_corpus
from mempipe.data.plain_text import (
    PASSAGE_WORDS,
    PYTHON_REFERENCE,
    check_source,
    is_plain_text,
    read_plain_text,
    skipped_files,
    write_corpus,
)
from mempipe.masking.cloze import choose_questions, find_candidates
from mempipe.masking.config import ClozeConfig
from mempipe.masking.entities import RuleFinder
from mempipe.settings import ConfigError
from mempipe.types import Passage


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


@pytest.mark.parametrize(
    ("name", "text", "titles"),
    [
        ("a.html", "<h1>Marie</h1><h2>Birth</h2><p>x<h2>Death</h2><p>y", ["a: Marie: Birth", "a: Marie: Death"]),
        ("a.md", "# Marie\n## Birth\nx\n# Pierre\n## Birth\ny\n", ["a: Marie: Birth", "a: Pierre: Birth"]),
        (
            "a.md",
            "# One\nx\n# Two\n#\ny\n### Three\nz\n## Four\nz\n",
            ["a: One", "a: Two", "a: Two: Three", "a: Two: Four"],
        ),
        ("a.txt", "Parts\n***\n\nOne\n===\n\nx\n\nUse\n---\n\ny\n", ["a: Parts: One", "a: Parts: One: Use"]),
        ("marie.md", "# Marie\n## Birth\nx\n", ["marie: Birth"]),
    ],
)
def test_a_title_holds_the_headings_above(tmp_path, name, text, titles):
    assert [passage.title for passage in read(tmp_path, text, name)] == titles


def test_an_underlined_line_is_a_heading(tmp_path):
    (tmp_path / "a.txt").write_text("Scope\n=====\n\nwhat it is\n")
    (passage,) = read_plain_text(tmp_path / "a.txt")
    assert (passage.title, passage.text) == ("a: Scope", "what it is")


def test_a_folder_is_read_by_names(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("of b")
    (tmp_path / "sub" / "a.md").write_text("of a")
    (tmp_path / "c.doc").write_text("nothing")
    assert [(p.id, p.text) for p in read_plain_text(tmp_path)] == [("b-0", "of b"), ("sub/a-0", "of a")]
    assert is_plain_text(tmp_path) and not is_plain_text(tmp_path / "c.doc")


def read(tmp_path: Path, text: str | bytes, name: str = "book.txt") -> list[Passage]:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(read_plain_text(tmp_path / name))


def squeezed(text: str) -> str:
    return "".join(text.split())


LINE = "Paragraph {} tells of Alice and the harbour of Bergen in many words that go on and on{}"


@pytest.mark.parametrize(
    ("text", "num_passages", "unit"),
    [
        ("\n".join(LINE.format(i, ".") for i in range(500)), 100, r"Paragraph \d+ .* on\."),
        (" ".join(LINE.format(i, ".") for i in range(500)), 100, r"Paragraph \d+ .* on\."),
        ("\n".join(LINE.format(i, "") for i in range(500)), 90, r"\w+ .* \w+"),
        ("\r\n".join(LINE.format(i, ".") for i in range(500)), 100, r"Paragraph \d+ .* on\."),
        ("Он шёл домой. Было поздно и темно. " * 500, 36, r"(Он|Было) .*\."),
        ("彼は東京で生まれた。" * 3000, 137, r"彼.*。"),
        ("彼は東京で生まれ" * 3000, 120, r"彼\w+"),
        ("word " * 60_000, 600, r"word( word)*"),
        ("see https://example.org/" + "abc/" * 60 + " here " * 100, 2, r"(see https://example.org/(abc/)+)?.*here"),
    ],
    ids=["lines", "one line", "no stops", "windows", "cyrillic", "chinese", "no spaces", "300 kB", "a long word"],
)
def test_text_without_blank_lines_is_cut_at_sentences_and_never_inside_a_word(tmp_path, text, num_passages, unit):
    passages = read(tmp_path, text)
    assert len(passages) == num_passages
    assert all(re.fullmatch(unit, passage.text) for passage in passages)
    assert all(len(passage.text.split()) <= PASSAGE_WORDS and len(passage.text) < 1200 for passage in passages)
    assert squeezed("".join(passage.text for passage in passages)) == squeezed(text)


def test_lines_of_chinese_and_japanese_are_joined_without_a_space_and_others_with_one(tmp_path):
    text = "鲁迅是浙江绍\n兴人。\n  他写了《呐\r\n喊》 1923\n年。\n\n서울은\n수도이다. It is\nlong.\n"
    first, *_ = passages = read(tmp_path, text)
    assert " ".join(passage.text for passage in passages).startswith("鲁迅是浙江绍兴人。他写了《呐喊》 1923 年。")
    assert "서울은 수도이다. It is long." in passages[-1].text and first.title == "book"


def test_a_paragraph_that_fits_is_kept_whole_and_a_sentence_that_fits_too(tmp_path):
    words = " ".join(["word"] * 59)
    passages = read(tmp_path, f"One {words}. Two {words}.\n\nThree {words}.\n\nFour e.g. {words}.")
    assert [passage.text.split()[0] for passage in passages] == ["One", "Two", "Three", "Four"]


def test_a_long_section_has_titles_by_which_its_questions_can_be_split(tmp_path):
    passages = read(
        tmp_path, "\n\n".join([" ".join(["word"] * PASSAGE_WORDS)] * 25) + "\n\nEnd\n===\n\nlast", "notes.txt"
    )
    parts = ["notes"] * 10 + ["notes (2)"] * 10 + ["notes (3)"] * 5 + ["notes: End"]
    assert [passage.title for passage in passages] == parts


def test_a_text_of_many_sentences_gives_many_questions_of_every_split(tmp_path):
    names = ["Alice", "Bergen", "Oslo", "Marlowe", "Tannen", "Edwina", "Corso", "Fabian", "Oduya", "Velmora", "Helgate"]
    rng = random.Random(0)
    text = "\n".join(
        f"On {rng.randrange(1, 28)} May {1500 + i % 400} the {rng.choice(names)} people walked {i} miles from "
        f"{rng.choice(names)}{i} to the old harbour with friends."
        for i in range(800)
    )
    passages, config = read(tmp_path, text, "notes.txt"), ClozeConfig(entities="rules", two_passages=0)
    made = choose_questions(find_candidates(passages, RuleFinder(), config).lazy(), len(passages), config)
    counts = {split: len(questions) for split, questions in made.questions.items()}
    assert sum(counts.values()) == len(passages) > 150 and all(counts.values())
    assert counts["train"] > len(passages) / 2


def test_byte_order_marks_page_breaks_and_windows_line_ends_are_no_text(tmp_path):
    (passage,) = read(tmp_path, "\ufeff# Guide\r\n\r\nfirst\r\npage\f\r\nsecond page".encode(), "guide.md")
    assert (passage.title, passage.text) == ("guide", "first page second page")


def test_a_long_line_is_no_heading(tmp_path):
    sentence = "It goes on and on and on and on and on and on and on and on and on and on and on."
    assert [p.title for p in read(tmp_path, f"{sentence}\n---\n# {sentence}\n\nend")] == ["book"]


def test_files_of_one_name_have_ids_of_their_own(tmp_path):
    for name in ("notes.md", "notes.txt", "notes.md.txt", "b.TXT"):
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "folder.txt").mkdir()
    passages = list(read_plain_text(tmp_path))
    assert sorted(passage.id for passage in passages) == ["b-0", "notes.md-0", "notes.md.txt-0", "notes.txt-0"]
    assert sorted(p.id for p in read_corpus(write_corpus(tmp_path, tmp_path / "made.parquet"))) == sorted(
        passage.id for passage in passages
    )


def test_a_readme_beside_a_corpus_does_not_make_it_plain_text(tmp_path):
    (tmp_path / "README.md").write_text("about the corpus")
    assert is_plain_text(tmp_path)
    (tmp_path / "wiki.jsonl").write_text('{"id": "1", "contents": "a\\nb"}\n')
    assert not is_plain_text(tmp_path)


def test_a_readme_above_a_corpus_is_not_taken_for_the_corpus(tmp_path):
    (tmp_path / "README.md").write_text("These passages are from Wikipedia.")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-00000-of-00001.parquet").touch()
    for read in (check_source, lambda source: list(read_plain_text(source))):
        with pytest.raises(
            ConfigError, match=f"{tmp_path} holds text files, and {tmp_path / 'data'} files of passages"
        ):
            read(tmp_path)


def test_hidden_files_and_folders_are_passed_over(tmp_path):
    (tmp_path / ".git").mkdir()
    for name in (".git/notes.txt", ".git/rows.jsonl", "._a.txt"):
        (tmp_path / name).write_bytes(b"\0\5\x16\7")
    (tmp_path / "a.txt").write_text("The river Elbe flows into the sea.")
    assert [passage.id for passage in read_plain_text(tmp_path)] == ["a-0"]


def test_a_link_to_a_folder_is_read_and_every_folder_once(tmp_path):
    docs, other = tmp_path / "docs", tmp_path / "other"
    docs.mkdir()
    other.mkdir()
    (docs / "a.txt").write_text("The river Elbe flows into the sea.")
    (other / "b.txt").write_text("The river Oder flows into the sea.")
    for link, target in (("one", other), ("two", other), ("itself", docs)):
        (docs / link).symlink_to(target)
    assert [passage.id for passage in read_plain_text(docs)] == ["a-0", "one/b-0"]
    assert is_plain_text(docs) and skipped_files(docs) == {}


def test_a_table_is_read_from_a_url_and_a_text_is_not():
    fsspec.filesystem("memory").pipe("/rivers.csv", b"title,text\nElbe,The Elbe flows into the sea.\n")
    check_source("memory://rivers.csv")
    assert [passage.id for passage in read_plain_text("memory://rivers.csv")] == ["rivers-1"]
    for refused in (check_source, lambda source: list(read_plain_text(source))):
        with pytest.raises(ConfigError, match=r"memory://rivers.txt is a text at a URL"):
            refused("memory://rivers.txt")


def test_files_of_a_kind_that_is_not_read_are_counted(tmp_path):
    for name in ("a.txt", "b.docx", "in/c.DOCX", "in/d.epub", "in/LICENSE", ".h.doc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("The river Elbe flows into the sea.")
    assert skipped_files(tmp_path) == {".docx": 2, ".epub": 1, "LICENSE": 1}
    assert skipped_files(tmp_path / "a.txt") == skipped_files(PYTHON_REFERENCE) == {}


def test_python_carries_its_reference_everywhere():
    passages = list(read_plain_text(PYTHON_REFERENCE))
    assert len(passages) > 500 and len({passage.id for passage in passages}) == len(passages)
    assert all(passage.text.strip() and passage.title for passage in passages)


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "sixteen.txt").write_text("hello", encoding="utf-16")
    (tmp_path / "zeros.txt").write_bytes(b"ab\0c")
    for name, words in (
        ("latin.txt", "not UTF-8: byte 1"),
        ("sixteen.txt", "not UTF-8: byte 0 is 0xff; save it as UTF-8"),
        ("zeros.txt", "is binary: character 2 is NUL"),
        ("empty.txt", "holds no text"),
        ("no.txt", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=words):
            list(read_plain_text(tmp_path / name))


PAGE = """<!doctype html><html><head><title>Not shown</title><style>p {color: red}</style></head>
<body><nav>Home | About</nav><h1>The <em>Nile</em></h1><p>It is a river &amp; it is <b>long</b>.<br>Very.
<p>It ends in Egypt.<script>alert("no")</script></p><h2>Cities</h2><ul><li>Cairo<li>Luxor</ul>
<table><tr><td>Khartoum</td><td>Sudan</td></tr></table></body></html>"""


def test_a_page_is_what_a_browser_shows(tmp_path):
    passages = read(tmp_path, PAGE, "nile.html")
    assert [(passage.title, passage.text) for passage in passages] == [
        ("nile: The Nile", "It is a river & it is long. Very. It ends in Egypt."),
        ("nile: The Nile: Cities", "Cairo Luxor Khartoum Sudan"),
    ]
    assert read(tmp_path, "<p>no end <b>of it <i>&unknown; 1 < 2", "b.htm")[0].text == "no end of it &unknown; 1 < 2"
    with pytest.raises(ConfigError, match="holds no text"):
        read(tmp_path, "<html><head><title>x</title></head><body><script>y</script>", "empty.html")


@pytest.mark.parametrize(
    ("page", "title"),
    [
        ("<head><title>\n The Nile &amp; its\n sources</title></head><body><p>Long.", "a: The Nile & its sources"),
        ("<title>The Nile</title><p>Long.", "a: The Nile"),
        ("<head><title>The Nile - A site</title></head><h1>Nile</h1><p>Long.", "a: Nile"),
        ("<head><title>Nile</title></head><nav><h1>A site</h1></nav><p>Long.", "a: Nile"),
        ("<head><title>A</title></head><body><p>Long.", "a"),
        ("<body><svg><title>icon</title></svg><p>Long.", "a"),
        (f"<title>{'word ' * 21}</title><p>Long.", "a"),
        ("<head><meta charset=utf-8><title>Nile</title><p>Long.", "a: Nile"),
        ("<head><noscript><img src=x></noscript><script>no</script><title>Nile</title></head><p>Long.", "a: Nile"),
    ],
)
def test_the_title_of_a_page_without_a_main_heading_is_its_heading(tmp_path, page, title):
    (passage,) = read(tmp_path, page, "a.html")
    assert (passage.title, passage.text) == (title, "Long.")


def pdf(*lines: str) -> bytes:
    """The smallest PDF with one page of these lines."""
    drawn = "BT /F1 12 Tf 72 720 Td 14 TL " + " ".join(f"({line}) Tj T*" for line in lines) + " ET"
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        "/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
    ]
    body, places = "%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        places.append(len(body))
        body += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    trailer = f"trailer << /Size 5 /Root 1 0 R >>\nstartxref\n{len(body)}\n%%EOF\n"
    return f"{body}xref\n0 5\n0000000000 65535 f \n{table}{trailer}".encode()


def test_a_pdf_is_read_and_what_is_none_is_refused(tmp_path):
    pytest.importorskip("pypdf")
    (passage,) = read(tmp_path, pdf("The Nile is a river.", "It ends in Egypt."), "nile.pdf")
    assert (passage.id, passage.text) == ("nile-0", "The Nile is a river. It ends in Egypt.")
    for content, words in (
        (b"no PDF", "cannot be read as a PDF: "),
        (pdf("x")[:300], "cannot be read as a PDF: "),
        (pdf(), "holds pictures of pages and no text"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            read(tmp_path, content, "b.pdf")
        assert "\n" not in str(caught.value)


def test_a_pdf_without_its_reader_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "notes.md").write_text("text")
    check_source(tmp_path)
    (tmp_path / "nile.pdf").write_bytes(pdf("x"))
    said = f"{tmp_path / 'nile.pdf'} is a PDF, which pypdf reads; it is not installed: pip install 'mempipe[pdf]'"
    for read_it in (check_source, lambda source: list(read_plain_text(source))):
        with pytest.raises(ConfigError) as caught:
            read_it(tmp_path)
        assert str(caught.value) == said


def test_the_words_of_a_passage_are_a_setting(tmp_path):
    (tmp_path / "a.txt").write_text("One two three four five six. Seven eight nine ten. " * 20)
    for words in (10, 40, 1000):
        passages = list(read_plain_text(tmp_path / "a.txt", words=words))
        assert max(len(passage.text.split()) for passage in passages) <= words
        assert len(passages) == -(-200 // words)


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.json"])
def test_a_table_of_passages_is_a_corpus(tmp_path, name):
    separator = "\t" if name.endswith("tsv") else ","
    content = separator.join(["docid", "title", "body"]) + "\n" + separator.join(["7", "Nile", "A river."]) + "\n"
    content += separator.join(["", "Rhine", "Another."]) + "\n"
    if name.endswith("json"):
        content = (
            '{"data": [{"docid": 7, "title": "Nile", "body": "A river."}, {"title": "Rhine", "body": "Another."}]}'
        )
    (tmp_path / name).write_text(content)
    expected = [
        Passage(id="7", title="Nile", text="A river."),
        Passage(id="t-2", title="Rhine", text="Another."),
    ]
    assert list(read_plain_text(tmp_path / name)) == expected
    assert list(read_corpus(write_corpus(tmp_path / name, tmp_path / "c.parquet"))) == expected


def test_passages_of_a_corpus_are_written_as_they_are(tmp_path):
    rows = [{"id": str(i), "contents": f'"Title {i}"\nText {i}.'} for i in range(3)]
    (tmp_path / "wiki.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = write_corpus(tmp_path / "wiki.jsonl", tmp_path / "corpus.parquet")
    assert list(read_corpus(made)) == list(read_corpus(tmp_path / "wiki.jsonl"))
    (tmp_path / "wiki.jsonl").write_text('{"id": "1"}\n')
    with pytest.raises(ConfigError, match=r"wiki.jsonl.*line 1"):
        write_corpus(tmp_path / "wiki.jsonl", tmp_path / "corpus.parquet")


def test_what_is_not_there_is_refused_by_every_kind_of_source(tmp_path):
    for name in ("nope.txt", "nope.html", "nope.csv", "nope.jsonl", "nope"):
        with pytest.raises(ConfigError, match="does not exist"):
            check_source(tmp_path / name)
    check_source(PYTHON_REFERENCE)
