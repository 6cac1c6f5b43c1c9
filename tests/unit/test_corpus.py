"""Corpora: what is read, and the place that every refusal names."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import itertools
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mempipe.data import corpus, rows
from mempipe.data.corpus import (
    PASSAGE_COLUMNS,
    CorpusPosition,
    SeenIds,
    corpus_files,
    join_contents,
    read_corpus,
    read_segments,
    split_contents,
)
from mempipe.data.plain_text import read_plain_text
from mempipe.settings import ConfigError
from mempipe.types import Passage

WIKI = Path(__file__).parents[3] / "shared" / "data" / "wiki_mini.jsonl"
ROWS = [
    {"id": "0", "contents": '"Nile"\nA river.\nIn Africa.'},
    {"id": 7, "title": "Rhine", "text": " A river. ", "partition": "de"},
]
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


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": ["A river.", " In Africa."]}, "A river. In Africa."),
        ({"text": ["Nile\n", "A river.\n"], "wikipedia_title": "Nile"}, "Nile\nA river."),
        ({"text": [["A river.", " In Africa."], ["It is long."]]}, "A river. In Africa.\nIt is long."),
        ({"page_content": "A river.", "metadata": {"source": "x"}}, "A river."),
    ],
    ids=["HotpotQA", "KILT", "paragraphs", "LangChain"],
)
def test_a_text_may_be_a_list_of_sentences(tmp_path, row, text):
    (passage,) = read_corpus(write(tmp_path / "c.jsonl", {"id": "0"} | row))
    assert passage.text == text


DEEP: Any = functools.reduce(lambda inner, _: [inner], range(300), "a")


@pytest.mark.parametrize("value", [[1, 2], ["a", None], [["a"], {}], [["a"], "b"], [], [[]], DEEP])
def test_a_list_of_anything_else_is_refused(tmp_path, value):
    assert re.search("text is|has no text", refusal(write(tmp_path / "c.jsonl", {"id": "0", "text": value})))


def test_a_refusal_says_how_to_mend_the_file(tmp_path):
    (tmp_path / "collection.tsv").write_text("0\tThe presence of communication amid minds\n1\tA river.\n")
    with pytest.raises(ConfigError, match=r"the first line of a csv file should name its columns"):
        list(read_plain_text(tmp_path / "collection.tsv"))
    (tmp_path / "psgs_w100.tsv.gz").touch()
    assert refusal(tmp_path / "psgs_w100.tsv.gz").endswith("; unpack it first")


def test_jsonl_gzip_and_parquet_give_the_same_passages(tmp_path):
    plain = write(tmp_path / "c.jsonl", *ROWS)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    pq.write_table(
        pa.Table.from_pylist(
            [{"id": p.id, "title": p.title, "text": p.text, "partition": p.partition} for p in PASSAGES]
        ),
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
        (b'{"id": NaN, "text": "x"}', "id is NaN, which is not a finite number"),
        (b"[" * 100_000, "not JSON"),
        (b'"text"', "expected an object"),
        (b'{"id": "a", "text": "\xff"}', "not UTF-8, byte 21 is 0xff"),
        (
            {"id": "a", "body": "x", "passage": "y"},
            "passage and body hold different texts; rename the one that is meant",
        ),
        ({"id": True, "text": "x"}, "id is True"),
        ({"id": "a"}, "text is missing"),
        ({"id": "a", "contents": 3}, "contents is 3"),
        ({"id": "a", "title": ["T"], "text": "x"}, "title is ['T']"),
        ({"id": "a", "contents": '"T"\n  '}, "passage 'a' has no text"),
        ({"id": 1.5, "text": "x"}, "id is 1.5"),
        ({"id": "", "text": "x"}, "id is ''"),
        ({"id": "a", "text": "x", "partition": 3}, "partition is 3"),
        (b'{"id": "a", "text": "x", "other": NaN}', "other is NaN, which is not a finite number"),
        (b'{"id": "a", "text": "x", "other": -Infinity }', "other is -Infinity, which is not a finite number"),
        (b'{"id": "a", "text": "x", "other": "\xff"}', "not UTF-8, byte 35 is 0xff"),
        (
            b'{"id": "a", "text": "x", "other": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "not JSON: lists or objects are nested too deeply",
        ),
        (b'{"id": "a", "text": "x"} {"id": "b", "text": "x"}', "not JSON"),
        ({"id": "a", "text": "x" * 2**20}, "longer than 1048576 bytes"),
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
    whole_lines = gzip.compress(lines.encode(), compresslevel=0)[10:-5000].count(b"\n")
    assert f"{cut} is truncated or not gzip, after line {whole_lines}:" in refusal(cut)
    fake = write(tmp_path / "fake.jsonl.gz", ROWS[0])
    assert "truncated or not gzip, after line 0" in refusal(fake)
    whole = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist([{"id": "1", "text": "x"}]), whole)
    whole.write_bytes(whole.read_bytes()[:-20])
    assert "truncated or not parquet" in refusal(whole)
    assert refusal(tmp_path / "none.jsonl") == f"{tmp_path / 'none.jsonl'} does not exist"
    suffixes = ".jsonl, .jsonl.gz, .ndjson, .ndjson.gz"
    assert f"ends in neither {suffixes} nor .parquet" in refusal(write(tmp_path / "c.txt", ROWS[0]))
    (tmp_path / "empty").mkdir()
    assert f"is a folder without a file that ends in {suffixes} or .parquet" in refusal(tmp_path / "empty")


def test_parquet_refusals_name_the_row(tmp_path):
    path = tmp_path / "c.parquet"
    pq.write_table(pa.Table.from_pylist([{"id": "1", "text": "x"}, {"id": "2", "text": None}]), path)
    assert refusal(path).startswith(f"{path}, row 2: text is missing")


def test_lone_surrogates_become_replacement_characters(tmp_path):
    path = write(tmp_path / "c.jsonl", b'{"id": "a", "title": "\\ud800T", "text": "x\\udc00"}')
    assert list(read_corpus(path)) == [Passage(id="a", title="\ufffdT", text="x\ufffd")]


# Lines of every kind that a corpus file may hold; `None` ids are numbered, so that most of them differ.
TEXTS = st.sampled_from(
    [
        "A river.",
        " x ",
        "",
        "\u3000",
        '"T"\nx',
        '"\nx',
        "T\n",
        "\u2028a\x1cb\x85",
        "é🙂",
        "\ud800",
        "a\x00b",
        "NaN}",
        "x\r\ny",
    ]
)
IDS = st.one_of(
    st.integers(-3, 30), st.integers(0, 30).map(str), st.sampled_from(["", None, 1.5, True, 2**70, [1], "\udc00"])
)
OBJECTS = st.fixed_dictionaries(
    {},
    optional={
        "id": IDS,
        "contents": st.one_of(TEXTS, st.none(), st.just(3)),
        "title": st.one_of(TEXTS, st.none(), st.just(["T"])),
        "text": st.one_of(TEXTS, TEXTS, st.none(), st.just(7)),
        "partition": st.sampled_from(["", "de", None, 1]),
        "Title": st.one_of(TEXTS, st.none(), st.just(["T"])),
        "wikipedia_title": st.one_of(TEXTS, st.none()),
        "other": st.sampled_from([None, 1, "\ud800", {"id": "9"}, [[1]], float("nan"), float("inf"), 1e300]),
    },
)
PLAIN = st.builds(
    lambda i, text: {"id": i, "contents": f'"T"\n{text}'}, st.integers(0, 60).map(str), st.text(max_size=5)
)
ODD = st.sampled_from(
    [
        *(b"", b"  \t", b"\x0c", b"{", b"{}", b"[1]", b"3", b"x" * 400),
        *(b'{"id": "1", "text": "\xff"}', b'{"id": "1", "text": "x", "o": "\xff"}', b'{"id":"1","id":"2","text":"x"}'),
        *(b'{"id":"4","text":"x"}{"id":"5","text":"y"}', b' {"id":"6","text":"x"} \r', b'{"id":"7","text":"x"}\r'),
        *(
            b'{"id":-0,"text":"x"}',
            b'{"\\u0069d":"8","text":"\\ud83d\\ude00"}',
            b'{"id":"9","text":"x",}',
            b'{"id":"10","text":"x","o":1e999}',
        ),
        *(b'\xef\xbb\xbf{"id":"11","text":"x"}', b'{"id":"12","text":"x","o":' + b"[" * 101 + b"]" * 101 + b"}"),
        *(
            b'{"id":"13","text":"x","o":Inf}',
            b'{"id":"14","text":"x","o":[NaN]}',
            b'{"id":"15","text":"x","o":{"id":1}}',
        ),
    ]
)
LINES = st.lists(st.one_of(PLAIN, PLAIN, PLAIN, OBJECTS, ODD), max_size=40)


def read_all(files, **options) -> tuple[list[dict[str, str]], CorpusPosition]:
    """Every passage, and the last position."""
    found = list(read_segments(files, max_bad_rows=10_000, max_line_bytes=350, **options))
    for batch, _ in found:
        assert batch.schema == PASSAGE_COLUMNS
        batch.validate(full=True)
    return [row for batch, _ in found for row in batch.to_pylist()], found[-1][1] if found else CorpusPosition()


@given(LINES, st.sampled_from([16, 64, 2**20]))
@pytest.mark.slow
def test_many_rows_at_once_and_one_by_one_give_the_same_passages_and_faults(tmp_path_factory, lines, block):
    files = corpus_files(write(tmp_path_factory.mktemp("c") / "c.jsonl", *lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "BLOCK_BYTES", block)
        fast = read_all(files, size=1000)
        patch.setattr(corpus, "_parse_lines", lambda lines: None)
        assert fast == read_all(files, size=1000)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            [b'{"id":"1","text":"x","o":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"id":"2","text":"x"}'],
            "line 1: not JSON: lists or objects are nested too deeply",
        ),
        (
            [b'{"id":"1","text":"x"}{"id":"2","text":"x"}', b"", b'{"id":"3","text":"x"}'],
            "line 1: not JSON: Extra data",
        ),
    ],
)
def test_what_arrow_would_read_and_python_would_not_is_refused(tmp_path, lines, reason):
    assert reason in refusal(write(tmp_path / "c.jsonl", *lines))


@settings(max_examples=100)
@given(st.lists(OBJECTS, max_size=20))
def test_parquet_columns_and_rows_give_the_same_passages_and_faults(tmp_path_factory, found):
    texts = [
        {name: row.get(name) if isinstance(row.get(name), str) else None for name in PASSAGE_COLUMNS.names}
        for row in found
    ]
    texts = [{name: value and re.sub("[\ud800-\udfff]", "?", value) for name, value in row.items()} for row in texts]
    path = tmp_path_factory.mktemp("c") / "c.parquet"
    pq.write_table(pa.Table.from_pylist(texts, schema=PASSAGE_COLUMNS), path)
    fast = read_all(corpus_files(path), size=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_read_columns", lambda batch, numbers: None)
        assert fast == read_all(corpus_files(path), size=1000)


def test_the_plain_format_is_read_many_rows_at_once(tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("row by row")

    monkeypatch.setattr(corpus, "parse_passage", never)
    numbers = [{"id": i, "contents": f'"T"\n{i} [1]'} for i in range(500)]
    named = [{"id": f"p{i}", "title": "T", "text": f"{i}", "url": "https://x", "tags": ["a"]} for i in range(500)]
    paths = [write(tmp_path / "a.jsonl", *numbers), write(tmp_path / "b.jsonl", *named)]
    assert [p.id for p in read_corpus(paths)] == [*map(str, range(500)), *(f"p{i}" for i in range(500))]


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(LINES, min_size=1, max_size=3), st.integers(1, 7), st.sampled_from([".jsonl", ".jsonl.gz", ".parquet"]))
def test_segments_have_the_size_asked_for_and_go_on_from_any_position(tmp_path_factory, files, size, suffix):
    folder = tmp_path_factory.mktemp("c")
    for number, lines in enumerate(files):
        path = write(folder / f"{number}.jsonl", *lines)
        if suffix == ".jsonl.gz":
            path.with_suffix(suffix).write_bytes(gzip.compress(path.read_bytes()))
        if suffix == ".parquet":
            found = [{"id": str(i % 9), "text": "x" if i % 5 else None} for i in range(len(lines))]
            pq.write_table(pa.Table.from_pylist(found, PASSAGE_COLUMNS), path.with_suffix(suffix), row_group_size=4)
        path.unlink() if suffix != ".jsonl" else None
    corpus_of = corpus_files(folder)
    assert len(corpus_of) == len(files)

    def segments(start: CorpusPosition, seen: SeenIds):
        found = read_segments(corpus_of, size=size, start=start, seen=seen, max_bad_rows=10_000, max_line_bytes=350)
        return [(batch.to_pylist(), position) for batch, position in found]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "BLOCK_BYTES", 128)
        whole = segments(CorpusPosition(), SeenIds())
        assert all(len(batch) == size for batch, _ in whole[:-1]) and all(0 < len(batch) <= size for batch, _ in whole)
        ids = [row["id"] for batch, _ in whole for row in batch]
        assert len(ids) == len(set(ids))
        for number, (_, position) in enumerate(whole, start=1):
            seen = SeenIds()
            seen.add(ids[: number * size])
            assert segments(position, seen) == whole[number:]


def test_seen_holds_the_ids_of_the_batches_handed_out_and_no_other(tmp_path):
    files = corpus_files(write(tmp_path / "c.jsonl", *({"id": i % 70, "text": "x"} for i in range(100))))
    seen = SeenIds()
    for number, (batch, _) in enumerate(read_segments(files, size=10, seen=seen, max_bad_rows=30), start=1):
        assert batch.num_rows == 10 and len(seen) == 10 * number
    assert seen.known([str(i) for i in range(71)]).tolist() == [True] * 70 + [False]


def test_bad_rows_behind_the_last_full_segment_are_counted(tmp_path):
    lines = [{"id": i, "text": "x"} for i in range(4)]
    files = corpus_files(write(tmp_path / "c.jsonl", *lines, b"{", {"id": 0, "text": "x"}))
    batches = list(read_segments(files, size=2, max_bad_rows=2))
    assert [position for _, position in batches] == [
        CorpusPosition(0, 2, {}),
        CorpusPosition(1, 0, {"not_json": 1, "duplicate_id": 1}),
    ]


def test_the_limit_on_bad_rows_counts_all_files_and_what_came_before(tmp_path):
    first = write(tmp_path / "a.jsonl", b"{", {"id": 0, "text": "x"}, {"id": 1, "text": " "})
    second = write(tmp_path / "b.jsonl", {"id": 0, "text": "y"}, {"id": 2, "text": "x"})
    files = corpus_files(tmp_path)
    (batch, position), *more = read_segments(files, size=10, max_bad_rows=3)
    assert not more and batch.column("id").to_pylist() == ["0", "2"]
    assert position == CorpusPosition(2, 0, {"not_json": 1, "empty": 1, "duplicate_id": 1})
    with pytest.raises(ConfigError) as caught:
        list(read_segments(files, size=10, max_bad_rows=2))
    head, *places = str(caught.value).splitlines()
    assert head == "3 bad rows (1 not_json, 1 empty, 1 duplicate_id), more than max_bad_rows 2:"
    assert [place.strip().split(": ")[0] for place in places] == [
        f"{first}, line 1",
        f"{first}, line 3",
        f"{second}, line 1",
    ]
    with pytest.raises(ConfigError, match="3 bad rows"):
        list(
            read_segments(files, size=10, start=CorpusPosition(0, 3, {"not_json": 2}), seen=_seen("0"), max_bad_rows=2)
        )
    with pytest.raises(ConfigError, match="max_bad_rows is -1"):
        list(read_segments(files, size=10, max_bad_rows=-1))


def _seen(*ids: str) -> SeenIds:
    seen = SeenIds()
    seen.add(ids)
    return seen


def test_a_line_that_is_too_long_is_passed_over_and_never_held(tmp_path, monkeypatch):
    path = tmp_path / "c.jsonl"
    with path.open("wb") as file:
        file.write(b'{"id": 0, "text": "x"}\n{"id": 1, "text": "')
        for _ in range(64):
            file.write(b"x" * 2**20)
        file.write(b'"}\n{"id": 2, "text": "x"}')
    monkeypatch.setattr(rows, "BLOCK_BYTES", 2**18)
    tracemalloc.start()
    (batch, position), *_ = read_segments(corpus_files(path), size=10, max_bad_rows=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert batch.column("id").to_pylist() == ["0", "2"] and position.counts == {"too_long": 1}
    assert peak < 8 * 2**20


def test_parsing_starts_at_the_position(tmp_path, monkeypatch):
    files = corpus_files(write(tmp_path / "c.jsonl", *([b"{"] * 500), {"id": 0, "text": "x"}))
    monkeypatch.setattr(rows, "BLOCK_BYTES", 100)
    ((batch, _),) = read_segments(files, size=5, start=CorpusPosition(0, 500))
    assert batch.num_rows == 1


def test_byte_order_mark_blank_lines_and_carriage_returns_are_fine(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": 1, "text": "x"}\r\n\r\n\n{"id": 2, "text": "y"}')
    assert [(p.id, p.text) for p in read_corpus(path)] == [("1", "x"), ("2", "y")]


def test_folders_are_read_by_name_and_lists_in_their_order(tmp_path):
    names = ["b.jsonl", "a.jsonl.gz", "README.md", "c.parquet"]
    for number, name in enumerate(names):
        row = {"id": number, "text": "x"}
        content = json.dumps(row).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    pq.write_table(pa.Table.from_pylist([{"id": 3, "text": "x"}]), tmp_path / "c.parquet")
    (tmp_path / "inner").mkdir()
    write(tmp_path / "inner" / "d.jsonl", ROWS[0])
    files = corpus_files(tmp_path)
    assert [(file.name, file.size) for file in files] == [
        (n, (tmp_path / n).stat().st_size) for n in ("a.jsonl.gz", "b.jsonl", "c.parquet")
    ]
    assert [p.id for p in read_corpus(tmp_path)] == ["1", "0", "3"]
    assert [p.id for p in read_corpus([str(tmp_path / "c.parquet"), tmp_path / "b.jsonl"])] == ["3", "0"]


def test_urls_are_read_as_local_files_are(tmp_path):
    memory = fsspec.filesystem("memory")
    plain = write(tmp_path / "c.jsonl", *ROWS).read_bytes()
    memory.pipe(
        {
            "/corpus/a.jsonl": plain,
            "/corpus/b.jsonl.gz": gzip.compress(plain.replace(b'"0"', b'"9"').replace(b"7", b"8")),
        }
    )
    assert [p.id for p in read_corpus("memory://corpus")] == ["0", "7", "9", "8"]
    assert list(read_corpus("memory://corpus/a.jsonl")) == list(read_corpus(f"file://{tmp_path}/c.jsonl")) == PASSAGES
    assert [file.size for file in corpus_files("memory://corpus/a.jsonl")] == [len(plain)]
    memory.pipe({"/corpus/a.jsonl": b"{"})
    assert refusal("memory://corpus/a.jsonl").startswith("memory://corpus/a.jsonl, line 1: not JSON")
    assert refusal("memory://corpus/none.jsonl") == "memory://corpus/none.jsonl does not exist or cannot be reached"
    assert refusal("nosuch://x/y.jsonl").startswith("nosuch://x/y.jsonl cannot be read: ValueError")


def test_a_fault_of_the_disk_is_no_bad_row(tmp_path, monkeypatch):
    files = corpus_files(write(tmp_path / "c.jsonl", *ROWS))
    (tmp_path / "c.jsonl").unlink()
    with pytest.raises(OSError, match="No such file"):
        list(read_segments(files, size=1, max_bad_rows=100))


@given(st.text(), st.text())
def test_joined_contents_are_split_into_the_same_title_and_text(title, text):
    expected = (title.replace("\n", " "), text.strip())
    assert split_contents(join_contents(title, text)) == expected


@pytest.mark.slow
def test_columns_are_stripped_as_python_strips():
    characters = [chr(code) for code in itertools.chain(range(0xD800), range(0xE000, 0x110000))]
    contents = [f'{c}"T{c}"{c}\n{c}x{c}' for c in characters]
    titles, texts = corpus._split_contents(pa.array(contents))
    assert list(zip(titles.to_pylist(), texts.to_pylist(), strict=True)) == [split_contents(c) for c in contents]


@given(st.lists(st.lists(st.integers(0, 40).map(str), max_size=20), max_size=30))
def test_seen_ids_are_those_of_a_set(batches):
    seen, expected = SeenIds(), set()
    for ids in batches:
        repeated = [i in expected or i in ids[:place] for place, i in enumerate(ids)]
        assert seen.known(ids).tolist() == [i in expected for i in ids]
        assert seen.add(pa.array(ids, pa.string())).tolist() == repeated
        expected.update(ids)
        assert len(seen) == len(expected)


def test_seen_ids_are_few_runs_of_sixteen_bytes_each():
    seen = SeenIds()
    for first in range(0, 100_000, 1000):
        assert not seen.add([str(i) for i in range(first, first + 1000)]).any()
    assert seen.add([str(i) for i in range(100_000)]).all()
    assert len(seen) == 100_000 and len(seen._runs) <= 8
    assert sum(run.nbytes for run in seen._runs) == 16 * 100_000


def test_ids_that_share_their_first_hash_are_told_apart(monkeypatch):
    monkeypatch.setattr(
        corpus, "_hashes", lambda ids: np.array([[7] * len(ids), [int(i) for i in ids]], dtype=np.uint64)
    )
    seen = SeenIds()
    assert seen.add(["3", "1", "3"]).tolist() == [False, False, True]
    assert seen.add(["2", "1"]).tolist() == [False, True]
    assert seen.known(["1", "2", "3", "4"]).tolist() == [True, True, True, False]


@pytest.mark.skipif(not WIKI.exists(), reason="the shared real text is not here")
def test_the_real_wiki_passages_are_read_in_full():
    passages = list(read_corpus(WIKI))
    assert len(passages) == 9002
    assert [passage.id for passage in passages] == [str(i) for i in range(9002)]
    assert passages[0].title == "Demon Dice" and passages[0].text.startswith("Demon Dice, originally published as")
    assert all(passage.title and "\n" not in passage.title for passage in passages)


NAMED = [
    {"_id": "7", "title": "Nile", "text": "A river."},
    {"docid": 8, "contents": '"Rhine"\nAnother.'},
    {"passage_id": "x", "passage": "A third."},
    {"title": "Oder", "body": "A fourth."},
    {"content": "A fifth.", "url": "u"},
    {"id": "y", "text": "A sixth.", "body": "a seventh"},
]
NAMED_PASSAGES = [
    Passage(id="7", title="Nile", text="A river."),
    Passage(id="8", title="Rhine", text="Another."),
    Passage(id="x", title="", text="A third."),
    Passage(id="c-4", title="Oder", text="A fourth."),
    Passage(id="c-5", title="", text="A fifth."),
    Passage(id="y", title="", text="A sixth."),
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (["A film.", "By Ann.", ""], "A film. By Ann."),
        (["A film.", " By Ann.", "And Bo."], "A film. By Ann.And Bo."),  # as HotpotQA has it
        (["Oslo\n", "A town."], "Oslo\nA town."),
        (['She said "', 'Yes" to it.'], 'She said "Yes" to it.'),
        (["你好。", "再见。"], "你好。再见。"),
        ([["A film.", "By Ann."], ["More."]], "A film. By Ann.\nMore."),
    ],
)
def test_sentences_have_a_space_between_them(tmp_path, text, expected):
    path = write(tmp_path / "c.jsonl", {"id": "1", "text": text})
    assert [passage.text for passage in read_corpus(path)] == [expected]


PARIS = Passage(id="1", title="Paris", text="It is big.")


@pytest.mark.parametrize(
    ("row", "passage"),
    [
        ({"title": "Paris", "contents": "It is big."}, PARIS),
        ({"title": "Paris", "contents": "Paris\nIt is big."}, PARIS),
        ({"title": "Paris", "contents": '"Paris"\nIt is big.'}, PARIS),
        (
            {"title": "Paris", "contents": "It is big.\nIt is old."},
            dataclasses.replace(PARIS, text="It is big.\nIt is old."),
        ),
        ({"title": " ", "contents": '"Paris"\nIt is big.'}, PARIS),
        ({"title": 3, "contents": '"Paris"\nIt is big.'}, PARIS),
        ({"Title": "Paris", "text": "It is big."}, PARIS),
        ({"TITLE": "Paris", "Contents": "It is big.", "other": "x"}, PARIS),
        ({"Title": "Lyon", "title": "Paris", "Text": "x", "passage": "It is big."}, PARIS),
        ({"wikipedia_title": "Paris", "text": ["It is big."]}, PARIS),
        ({"wikipedia_title": "Lyon", "title": "Paris", "text": "It is big."}, PARIS),
    ],
)
def test_a_title_beside_the_text_is_never_lost(tmp_path, row, passage):
    row = {"id": "1"} | row
    assert list(read_corpus(write(tmp_path / "c.jsonl", row))) == [passage]
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "c.parquet")
    assert list(read_corpus(tmp_path / "c.parquet")) == [passage]


@pytest.mark.parametrize("row", range(len(NAMED)))
def test_other_usual_names_of_id_and_text_are_read_from_lines_and_from_parquet(tmp_path, row):
    expected = dataclasses.replace(NAMED_PASSAGES[row], id=NAMED_PASSAGES[row].id.replace(f"c-{row + 1}", "c-1"))
    assert list(read_corpus(write(tmp_path / "c.jsonl", NAMED[row]))) == [expected]
    pq.write_table(pa.Table.from_pylist([NAMED[row]]), tmp_path / "c.parquet")
    assert list(read_corpus(tmp_path / "c.parquet")) == [expected]


def test_rows_of_several_names_share_a_file_and_ids_are_places_in_it(tmp_path):
    path = write(tmp_path / "c.jsonl", *NAMED)
    assert list(read_corpus(path)) == NAMED_PASSAGES
    many = write(tmp_path / "many.jsonl", *({"body": f"text {i}"} for i in range(9000)))
    assert [passage.id for passage in read_corpus(many)][::4000] == ["many-1", "many-4001", "many-8001"]


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        (["news.2023.jsonl"], ["news-1"]),
        (["news.2023.jsonl", "news.2024.jsonl", "other.x.jsonl"], ["news.2023-1", "news.2024-1", "other-1"]),
        (["a/wiki.jsonl", "b/wiki.jsonl", "c/wiki.en.JSONL"], ["wiki.1-1", "wiki.2-1", "wiki.en-1"]),
    ],
)
def test_rows_without_ids_of_files_that_share_a_name_have_different_ids(tmp_path, files, ids):
    for folder in "abc":
        (tmp_path / folder).mkdir()
    paths = [write(tmp_path / name, {"text": f"A text of {name}."}) for name in files]
    assert [passage.id for passage in read_corpus(paths)] == ids
