"""Question files: every format gives the same record, and every refusal names place and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mempipe.config import ConfigError
from mempipe.data.qa import check_lengths, long_questions, read_questions, write_questions
from mempipe.data.world import World
from mempipe.types import Question

HOTPOT = Path(__file__).parents[3] / "shared" / "data" / "hotpotqa_100.jsonl"
FLASHRAG = {"id": "q1", "question": " Who? ", "golden_answers": ["Ann", "Anne"]}


def jsonl(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, *rows: dict[str, Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_questions(path)
    return str(caught.value)


def memsearcher_row(index: int) -> dict[str, Any]:
    return {
        "data_source": "musique_re_call",
        "question": f"Who is {index}?",
        "ability": "re_call",
        "reward_model": {"ground_truth": ["Ann"], "style": "rule"},
        "extra_info": {"env": "", "func_schemas": "", "index": index, "split": "train"},
    }


def search_r1_row(source: str, index: int) -> dict[str, Any]:
    return {
        "id": f"test_{index}",
        "question": "Who?",
        "golden_answers": ["Ann"],
        "data_source": source,
        "prompt": [{"role": "user", "content": "Answer the question: Who?"}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": {"target": ["Ann", "Anne"]}, "style": "rule"},
        "extra_info": {"index": index, "split": "test"},
    }


def test_flashrag_rows_become_questions_named_after_their_data_set(tmp_path):
    named = read_questions(jsonl(tmp_path / "popqa.jsonl", FLASHRAG))
    assert named == [Question(id="q1", text="Who?", golden_answers=["Ann", "Anne"], source="popqa")]
    assert read_questions(jsonl(tmp_path / "nq" / "test.jsonl", FLASHRAG))[0].source == "nq"


def test_hops_are_the_different_supporting_titles_and_evidence_stays_empty(tmp_path):
    metadata = {"supporting_facts": {"title": ["Nile", "Rhine", "Nile"], "sent_id": [0, 1, 2]}}
    (question,) = read_questions(jsonl(tmp_path / "h.jsonl", FLASHRAG | {"metadata": metadata}))
    assert (question.num_hops, question.evidence) == (2, [])


def test_own_parquet_gives_every_field_back(tmp_path):
    questions = World(3).questions(12, seed=0)
    write_questions(tmp_path / "q.parquet", questions)
    assert read_questions(tmp_path / "q.parquet") == questions
    assert len(questions[1].evidence) == questions[1].num_hops == 2


def test_write_questions_replaces_a_file_whole_or_not_at_all(tmp_path):
    path = tmp_path / "made" / "q.parquet"
    first, second = World(3).questions(2, seed=0)
    write_questions(path, [first])

    def failing():
        yield second
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        write_questions(path, failing())
    assert read_questions(path) == [first]
    assert [file.name for file in path.parent.iterdir()] == ["q.parquet"]


def test_memsearcher_rows_are_numbered_because_their_data_source_is_always_the_same(tmp_path):
    questions = read_questions(parquet(tmp_path / "t.parquet", memsearcher_row(5), memsearcher_row(5)))
    assert [q.id for q in questions] == ["musique_re_call-train-0", "musique_re_call-train-1"]
    assert (questions[0].text, questions[0].golden_answers, questions[0].source) == ("Who is 5?", ["Ann"], "musique_re_call")


def test_search_r1_ids_tell_data_sets_apart_and_targets_are_the_golden_answers(tmp_path):
    questions = read_questions(parquet(tmp_path / "t.parquet", search_r1_row("nq", 0), search_r1_row("popqa", 0)))
    assert [q.id for q in questions] == ["nq-test-0", "popqa-test-0"]
    assert questions[0].golden_answers == ["Ann", "Anne"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"question": 3}, "question is '3'"),
        ({"question": "  "}, "question is '  '"),
        ({"id": None}, "id is 'None'"),
        ({"golden_answers": []}, "golden_answers is []"),
        ({"golden_answers": "Ann"}, "golden_answers is Ann"),
        ({"golden_answers": ["Ann", 3]}, "golden_answers is ['Ann', 3]"),
        ({"golden_answers": [""]}, "golden_answers is ['']"),
        ({"id": "q0"}, "question id 'q0' occurs twice"),
    ],
)
def test_a_wrong_row_is_refused_by_line_and_field(tmp_path, change, reason):
    path = jsonl(tmp_path / "q.jsonl", FLASHRAG | {"id": "q0"}, FLASHRAG | change)
    message = refusal(path)
    assert message.startswith(f"{path}, line 2: ") and reason in message


def test_wrong_parquet_rows_are_refused_by_row_and_field(tmp_path):
    no_answers = parquet(tmp_path / "m.parquet", memsearcher_row(0) | {"reward_model": {"ground_truth": [], "style": "rule"}})
    assert refusal(no_answers).startswith(f"{no_answers}, row 1: reward_model.ground_truth is []")
    no_target = parquet(tmp_path / "s.parquet", search_r1_row("nq", 0) | {"reward_model": {"ground_truth": {"other": ["Ann"]}}})
    assert f"{no_target}, row 1: reward_model.ground_truth.target is None" in refusal(no_target)
    no_source = parquet(tmp_path / "d.parquet", memsearcher_row(0) | {"data_source": None})
    assert "data_source is 'None'" in refusal(no_source)
    own = parquet(tmp_path / "o.parquet", {"id": "a", "text": "Who?", "golden_answers": ["Ann"], "num_hops": "two"})
    assert f"{own}, row 1: not a row that write_questions wrote" in refusal(own)


def test_unknown_formats_and_empty_files_are_refused(tmp_path):
    assert "fields ['answer', 'question'] are of no known format" in refusal(
        jsonl(tmp_path / "q.jsonl", {"question": "Who?", "answer": "Ann"})
    )
    assert refusal(jsonl(tmp_path / "empty.jsonl")) == f"{tmp_path / 'empty.jsonl'} holds no question"


def test_lone_surrogates_become_replacement_characters_and_can_be_written(tmp_path):
    path = jsonl(tmp_path / "q.jsonl", FLASHRAG | {"question": "Who \ud800?", "golden_answers": ["\udfff"]})
    questions = read_questions(path)
    assert (questions[0].text, questions[0].golden_answers) == ("Who \ufffd?", ["\ufffd"])
    write_questions(tmp_path / "q.parquet", questions)
    assert read_questions(tmp_path / "q.parquet") == questions


def test_long_questions_are_reported_with_their_length_and_refused_by_name():
    questions = [Question(id=f"q{n}", text="x " * n, golden_answers=["a"]) for n in (3, 9, 4, 7, 8)]

    def count(text: str) -> int:
        return len(text.split())

    assert [(q.id, n) for q, n in long_questions(questions, count_tokens=count, limit=7)] == [("q9", 9), ("q8", 8)]
    check_lengths(questions, count_tokens=count, limit=9)
    with pytest.raises(ConfigError, match=r"budget.question_tokens is 3, but 4 of .* longest being q9 \(9\), q8 \(8\), q7 \(7\);"):
        check_lengths(questions, count_tokens=count, limit=3)


@pytest.mark.skipif(not HOTPOT.exists(), reason="the shared real questions are not here")
def test_the_real_hotpotqa_questions_are_read_in_full():
    questions = read_questions(HOTPOT)
    assert len(questions) == 100
    assert questions[0].text == "If Gallu is a demon Lilu is what?" and questions[0].golden_answers == ["a spirit"]
    assert {question.num_hops for question in questions} == {2}
