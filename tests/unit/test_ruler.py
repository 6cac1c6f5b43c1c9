"""RULER-HQA files: what a context holds and where, from one process or many, small and by number."""

import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mempipe.cli import main
from mempipe.data import ruler
from mempipe.data.qa import read_questions
from mempipe.data.ruler import DocumentPool, peer_order, read_depths, read_sources, write_ruler
from mempipe.settings import ConfigError

REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "hotpotqa_100.jsonl"


def hotpot(number: int, *, num_documents: int = 4) -> dict:
    """A question in the published format; its second and fourth document support it."""
    titles = [f"T{number}.{i}" for i in range(num_documents)]
    return {
        "_id": f"h{number}",
        "question": f"What is {number}?",
        "answer": f"answer {number}",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [[titles[1], 0], [titles[3], 1], [titles[1], 1]],
        "context": [[title, [f"About {title}.", " More."]] for title in titles],
    }


def source_file(folder: Path, rows: list[dict] | None = None) -> Path:
    path = folder / "hotpot.json"
    path.write_text(json.dumps(rows if rows is not None else [hotpot(i) for i in range(12)]))
    return path


def documents(context: str) -> list[str]:
    """The documents of a context, headers checked."""
    parts = context.split("\n\n")
    assert [part.partition("\n")[0] for part in parts] == [f"Document {i}:" for i in range(1, len(parts) + 1)]
    return [part.partition("\n")[2] for part in parts]


@pytest.fixture
def sources(tmp_path):
    return read_sources(source_file(tmp_path))


@pytest.mark.parametrize("file_format", ["parquet", "json"])
def test_a_file_reads_back_as_questions_with_their_documents_among_others(tmp_path, sources, file_format):
    write_ruler(sources, tmp_path, num_docs=[20], splits={"test": 5}, seed=1, file_format=file_format)
    questions, depths = (
        read_questions(tmp_path / f"test_20.{file_format}"),
        read_depths(tmp_path / f"test_20.{file_format}"),
    )
    assert len(questions) == 5
    for question in questions:
        number = question.text.removeprefix("What is ").removesuffix("?")
        found = documents(question.context)
        assert len(found) == len(set(found)) == 20 and question.golden_answers == [f"answer {number}"]
        assert {f"T{number}.{i}\nAbout T{number}.{i}. More." for i in range(4)} <= set(found)
        needed = [found.index(f"T{number}.{i}\nAbout T{number}.{i}. More.") / 19 for i in (1, 3)]
        assert depths[question.id] == pytest.approx(needed)


def test_every_length_asks_the_same_questions_and_positions_differ_between_questions(tmp_path, sources):
    manifest = write_ruler(sources, tmp_path, num_docs=[10, 30], splits={"test": 6}, seed=1)
    short, long = (read_questions(tmp_path / f"test_{n}.parquet") for n in (10, 30))
    assert [q.text for q in short] == [q.text for q in long]
    depths = read_depths(tmp_path / "test_30.parquet")
    assert len({tuple(values) for values in depths.values()}) == 6
    assert [file["num_questions"] for file in manifest["files"]] == [6, 6]
    assert sum(manifest["files"][1]["evidence_by_fifth"]) == 12


def test_the_same_seed_gives_the_same_bytes_whatever_the_order_of_the_questions(tmp_path, sources):
    shuffled = random.Random(0).sample(sources, len(sources))
    for folder, given in (("a", sources), ("b", sources), ("c", shuffled)):
        write_ruler(given, tmp_path / folder, num_docs=[20], splits={"test": 12}, seed=3)
    assert (tmp_path / "a/test_20.parquet").read_bytes() == (tmp_path / "b/test_20.parquet").read_bytes()
    contexts = [{q.text: q.context for q in read_questions(tmp_path / name / "test_20.parquet")} for name in ("a", "c")]
    assert contexts[0] == contexts[1]
    write_ruler(sources, tmp_path / "d", num_docs=[20], splits={"test": 12}, seed=4)
    assert {q.text: q.context for q in read_questions(tmp_path / "d/test_20.parquet")} != contexts[0]


def test_peer_positions_are_those_of_the_published_files(sources):
    assert [peer_order(50).index(i) + 1 for i in range(10)] == [27, 41, 18, 37, 42, 43, 48, 11, 29, 44]
    places = []
    pool = DocumentPool(sources)
    for question in sources[:3]:
        numbers, depths = pool.arrange(question, num_docs=20, seed=1, peer_positions=True)
        texts = [pool.texts[number] for number in numbers]
        places.append([texts.index(text) for _, text in question.documents])
        assert depths == [places[-1][1] / 19, places[-1][3] / 19]
    assert places[0] == places[1] == places[2] == [peer_order(20).index(i) for i in range(4)]


def test_other_versions_of_an_own_paragraph_are_not_among_the_others(tmp_path):
    rows = [hotpot(i) for i in range(8)]
    rows[1]["context"][0] = ["T0.1", ["Another text about it."]]
    pool = DocumentPool(read := read_sources(source_file(tmp_path, rows)))
    for seed in range(20):
        numbers, _ = pool.arrange(read[0], num_docs=20, seed=seed)
        assert sum(pool.texts[number].startswith("T0.1\n") for number in numbers) == 1


def test_splits_share_no_question_and_excluded_ones_are_left_out_by_their_words(tmp_path, sources):
    manifest = write_ruler(
        sources,
        tmp_path,
        num_docs=[8],
        splits={"train": 6, "test": 3},
        seed=1,
        exclude=["what is  THE 3", "What is 5?"],
    )
    train, test = ({q.text for q in read_questions(tmp_path / f"{split}_8.parquet")} for split in ("train", "test"))
    assert len(train) == 6 and len(test) == 3 and not train & test
    assert not {"What is 3?", "What is 5?"} & (train | test)
    assert manifest["left_out"] == {"excluded": 2, "known": 0}


def test_known_questions_are_left_out_and_counted(tmp_path, sources):
    def are_known(questions):
        return [int(question.id[1:]) % 2 == 0 for question in questions]

    manifest = write_ruler(sources, tmp_path, num_docs=[8], splits={"test": 6}, seed=1, are_known=are_known)
    assert {int(row["id"][1:]) % 2 for row in pq.read_table(tmp_path / "test_8.parquet").to_pylist()} == {1}
    assert manifest["left_out"]["known"] == 6
    with pytest.raises(ConfigError, match="7 questions are wanted, but only 6 of 12 are left"):
        write_ruler(sources, tmp_path, num_docs=[8], splits={"test": 7}, seed=1, are_known=are_known)


@pytest.mark.parametrize("file_format", ["parquet", "json"])
def test_many_documents_are_kept_by_number_and_expanded_while_reading(tmp_path, sources, file_format, monkeypatch):
    write_ruler(sources, tmp_path / "joined", num_docs=[30], splits={"test": 4}, seed=1, file_format=file_format)
    monkeypatch.setattr(ruler, "MAX_JOINED_DOCS", 25)
    write_ruler(sources, tmp_path / "listed", num_docs=[30], splits={"test": 4}, seed=1, file_format=file_format)
    joined, listed = (tmp_path / folder / f"test_30.{file_format}" for folder in ("joined", "listed"))
    assert listed.stat().st_size < joined.stat().st_size or file_format == "parquet"
    assert read_questions(listed) == read_questions(joined)
    assert read_depths(listed) == read_depths(joined)
    (tmp_path / "listed" / ruler.DOCUMENTS_FILE).unlink()
    with pytest.raises(ConfigError, match=r"documents\.arrow, which would hold the documents, does not exist"):
        read_questions(listed)


def test_a_document_number_that_does_not_exist_is_refused(tmp_path, sources, monkeypatch):
    monkeypatch.setattr(ruler, "MAX_JOINED_DOCS", 10)
    write_ruler(sources, tmp_path, num_docs=[12], splits={"test": 1}, seed=1, file_format="json")
    path = tmp_path / "test_12.json"
    row = json.loads(path.read_text())[0]
    for wrong in (-1, 48, "1", True):
        path.write_text(json.dumps([row | {"context": [0, wrong]}]))
        with pytest.raises(ConfigError, match="expected numbers from 0 to 47"):
            read_questions(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": None}, r"item 1: context is None; expected documents"),
        ({"context": [["T", "no list"]]}, r"item 1: context is .*expected documents"),
        ({"supporting_facts": [["Elsewhere", 0]]}, r"item 1: supporting_facts names 'Elsewhere'"),
        ({"supporting_facts": []}, r"item 1: supporting_facts is \[\]"),
        ({"answer": ""}, r"item 1: answer is \[''\]; expected a text"),
        ({"question": " "}, r"item 1: _id is 'h0' and question ' '"),
    ],
)
def test_a_row_without_its_documents_is_refused_by_place_and_field(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        read_sources(source_file(tmp_path, [hotpot(0) | change]))


def test_lengths_that_cannot_work_are_refused_before_a_file_is_written(tmp_path, sources):
    for num_docs, message in (([10, 3], "brings 4 documents"), ([10, 49], "the file has only 44 paragraphs")):
        with pytest.raises(ConfigError, match=message):
            write_ruler(sources, tmp_path / "out", num_docs=num_docs, splits={"test": 2}, seed=1)
        assert list((tmp_path / "out").iterdir()) == []


def test_the_command_writes_files_and_says_where_the_needed_documents_stand(tmp_path, capsys):
    source, output = str(source_file(tmp_path)), str(tmp_path / "out")
    assert (
        main(["data", "ruler", source, output, "--num-docs", "8,16", "--split", "train=6,test=4", "--seed", "2"]) == 0
    )
    out = capsys.readouterr().out
    assert (
        "48 paragraphs; positions drawn per question" in out and "test_16.parquet: 4 questions of 16 documents" in out
    )
    more = ["data", "ruler", source, str(tmp_path / "more"), "--num-docs", "8"]
    assert (
        main([*more, "--num-questions", "2", "--exclude", f"{output}/train_8.parquet", f"{output}/test_8.parquet"]) == 0
    )
    assert "10 excluded" in capsys.readouterr().out
    for wrong, message in (
        (["--num-docs", "8,x"], "--num-docs is '8,x'"),
        (["--num-docs", "²"], "--num-docs is '²'"),
        (["--num-questions", "-1"], "the questions are {'test': -1}; expected numbers from 1"),
        (["--split", "train=²"], "--split is 'train=²'; expected names with numbers"),
        (["--split", "train=many"], "--split is 'train=many'; expected names with numbers"),
        (["--unknown-only", "m"], "give both or neither"),
        (["--exclude", str(tmp_path / "none.jsonl")], "none.jsonl does not exist"),
    ):
        assert main([*more, *wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.skipif(not REAL.exists(), reason="the real questions are not beside this checkout")
def test_real_questions_stand_among_real_paragraphs(tmp_path):
    sources = read_sources(REAL)
    write_ruler(sources, tmp_path, num_docs=[50, 200], splits={"test": 20}, seed=1)
    questions = read_questions(tmp_path / "test_200.parquet")
    assert len(questions) == 20 and all(
        len(depths) >= 2 for depths in read_depths(tmp_path / "test_200.parquet").values()
    )
    assert all(question.context.count("\n\nDocument ") == 199 for question in questions)
