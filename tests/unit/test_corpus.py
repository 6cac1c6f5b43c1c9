"""Corpora: what is read, and the place that every refusal names."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mempipe.config import ConfigError
from mempipe.data.corpus import read_corpus, split_contents
from mempipe.types import Passage

WIKI = Path(__file__).parents[3] / "shared" / "data" / "wiki_mini.jsonl"
ROWS = [{"id": "0", "contents": '"Nile"\nA river.\nIn Africa.'}, {"id": 7, "title": "Rhine", "text": " A river. ", "partition": "de"}]
PASSAGES = [
    Passage(id="0", title="Nile", text="A river.\nIn Africa."),
    Passage(id="7", title="Rhine", text="A river.", partition="de"),
]


def write(path: Path, *lines: object) -> Path:
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        list(read_corpus(path))
    return str(caught.value)


def test_jsonl_gzip_and_parquet_give_the_same_passages(tmp_path):
    plain = write(tmp_path / "c.jsonl", *ROWS)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    pq.write_table(
        pa.Table.from_pylist([{"id": p.id, "title": p.title, "text": p.text, "partition": p.partition} for p in PASSAGES]),
        tmp_path / "c.parquet",
    )
    for name in ("c.jsonl", "c.jsonl.gz", "c.parquet"):
        assert list(read_corpus(tmp_path / name)) == PASSAGES


@pytest.mark.parametrize(
    ("contents", "title", "text"),
    [
        ('"Nile"\nA river.', "Nile", "A river."),
        ('""Heroes" (album)"\nBy Bowie.', '"Heroes" (album)', "By Bowie."),  # quotes of its own
        ('""Heroes""\nBy Bowie.', '"Heroes"', "By Bowie."),
        ('"\nOdd', '"', "Odd"),
        ("No quotes\nText", "No quotes", "Text"),
        ("Only text", "", "Only text"),
    ],
)
def test_contents_are_split_as_wiki_18_writes_them(contents, title, text):
    assert split_contents(contents) == (title, text)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b'{"id": NaN, "text": "x"}', "NaN is not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'"text"', "expected an object"),
        (b'{"id": "a", "text": "\xff"}', "not UTF-8, byte 21 is 0xff"),
        ({"contents": '"T"\nx'}, "id is None"),
        ({"id": True, "text": "x"}, "id is True"),
        ({"id": "a"}, "text is missing"),
        ({"id": "a", "contents": 3}, "contents is 3"),
        ({"id": "a", "title": ["T"], "text": "x"}, "title is ['T']"),
        ({"id": "a", "contents": '"T"\n  '}, "passage 'a' has no text"),
        ({"id": 0, "text": "x"}, "passage id '0' occurs twice"),
    ],
)
def test_a_refusal_names_file_line_and_reason(tmp_path, line, reason):
    path = write(tmp_path / "c.jsonl", ROWS[0], b"", line, ROWS[1])
    message = refusal(path)
    assert message.startswith(f"{path}, line 3: ") and reason in message
    assert "\n" not in message


def test_invalid_utf8_is_found_at_its_own_line_far_into_the_file(tmp_path):
    rows = [{"id": i, "text": "x" * 50} for i in range(5000)]
    path = write(tmp_path / "c.jsonl", *rows, b'{"id": "a", "text": "\xff"}')
    assert refusal(path).startswith(f"{path}, line 5001: not UTF-8")


def test_files_that_are_cut_or_of_another_kind_are_refused(tmp_path):
    cut = tmp_path / "cut.jsonl.gz"
    lines = "".join(json.dumps({"id": i, "text": "x"}) + "\n" for i in range(1000))
    cut.write_bytes(gzip.compress(lines.encode(), compresslevel=0)[:-5000])
    assert "truncated or not gzip, after line" in refusal(cut)
    fake = write(tmp_path / "fake.jsonl.gz", ROWS[0])
    assert "truncated or not gzip, after line 0" in refusal(fake)
    whole = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist([{"id": "1", "text": "x"}]), whole)
    whole.write_bytes(whole.read_bytes()[:-20])
    assert "truncated or not parquet" in refusal(whole)
    assert refusal(tmp_path / "none.jsonl") == f"{tmp_path / 'none.jsonl'} does not exist"
    assert "is not a file" in refusal(tmp_path)
    assert "neither .jsonl, .jsonl.gz nor .parquet" in refusal(write(tmp_path / "c.txt", ROWS[0]))


def test_parquet_refusals_name_the_row(tmp_path):
    path = tmp_path / "c.parquet"
    pq.write_table(pa.Table.from_pylist([{"id": "1", "text": "x"}, {"id": "2", "text": None}]), path)
    assert refusal(path).startswith(f"{path}, row 2: text is missing")


def test_lone_surrogates_become_replacement_characters(tmp_path):
    path = write(tmp_path / "c.jsonl", b'{"id": "a", "title": "\\ud800T", "text": "x\\udc00"}')
    assert list(read_corpus(path)) == [Passage(id="a", title="\ufffdT", text="x\ufffd")]


@pytest.mark.skipif(not WIKI.exists(), reason="the shared real text is not here")
def test_the_real_wiki_passages_are_read_in_full():
    passages = list(read_corpus(WIKI))
    assert len(passages) == 9002
    assert [passage.id for passage in passages] == [str(i) for i in range(9002)]
    assert passages[0].title == "Demon Dice" and passages[0].text.startswith("Demon Dice, originally published as")
    assert all(passage.title and "\n" not in passage.title for passage in passages)
