"""Question files: every format gives the same record, and every refusal names place and field."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import math
import pickle
import threading
import time
from collections import Counter
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mempipe.cli import main
from mempipe.data.qa import (
    QuestionTable,
    describe_questions,
    draw_questions,
    read_question_file,
    read_questions,
    write_questions,
)
from mempipe.data.world import World
from mempipe.settings import ConfigError
from mempipe.types import Evidence, Question

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


def memagent_row(index: int) -> dict[str, Any]:
    return {
        "data_source": "hotpotqa",
        "prompt": [{"role": "user", "content": "Who?"}],
        "context": "Document 1:\nNile\nA river.\n\nDocument 2:\nRhine\nAnother.",
        "ability": "memory",
        "reward_model": {"style": "rule", "ground_truth": ["Ann", "Anne"]},
        "extra_info": {"index": index, "question": "Who?", "num_docs": 2},
    }


def ruler_item(index: int) -> dict[str, Any]:
    return {"context": "Document 1:\nA river.", "input": "Who?", "answers": ["Ann"], "num_docs": 50, "index": index}


def mem1_row(*indices: int) -> dict[str, Any]:
    asked = "; ".join(f"who is {index}?" for index in indices)
    return {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": f"Answer several questions: use the tools.\nQuestion: {asked}\n"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": [[f"Ann {index}", "x"] for index in indices]}},
        "extra_info": {"split": "train", "indices": list(indices)},
    }


def hotpotqa_item(identity: str) -> dict[str, Any]:
    return {
        "_id": identity,
        "question": "Who?",
        "answer": "Ann",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [["Nile", 0], ["Rhine", 1], ["Nile", 2]],
        "context": [["Nile", ["A river.", " In Africa."]], ["Rhine", ["Another."]]],
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
    assert (questions[0].text, questions[0].golden_answers, questions[0].source) == (
        "Who is 5?",
        ["Ann"],
        "musique_re_call",
    )


def test_search_r1_ids_tell_data_sets_apart_and_targets_are_the_golden_answers(tmp_path):
    questions = read_questions(parquet(tmp_path / "t.parquet", search_r1_row("nq", 0), search_r1_row("popqa", 0)))
    assert [q.id for q in questions] == ["nq-test-0", "popqa-test-0"]
    assert questions[0].golden_answers == ["Ann", "Anne"]


def test_memagent_rows_bring_their_text_and_the_plain_question(tmp_path):
    first, second = read_questions(parquet(tmp_path / "train.parquet", memagent_row(7), memagent_row(9)))
    assert (first.id, second.id, first.text, first.source) == ("hotpotqa-7", "hotpotqa-9", "Who?", "hotpotqa")
    assert (first.context, first.golden_answers) == (memagent_row(7)["context"], ["Ann", "Anne"])
    without = memagent_row(7) | {"extra_info": {"index": 7, "num_docs": 2}}
    assert read_questions(parquet(tmp_path / "t.parquet", without)) == [first]


def test_ruler_items_bring_their_text_and_are_named_after_the_file(tmp_path):
    path = tmp_path / "eval_50.json"
    path.write_text(json.dumps([ruler_item(0), ruler_item(1)]))
    first, second = read_questions(path)
    assert first == Question(
        id="eval_50-0", text="Who?", golden_answers=["Ann"], source="eval_50", context="Document 1:\nA river."
    )
    assert second.id == "eval_50-1"


def test_a_ruler_file_of_document_numbers_without_the_documents_is_refused_whatever_the_limit(tmp_path):
    path = tmp_path / "eval_12800.json"
    path.write_text(json.dumps([ruler_item(0), ruler_item(1) | {"context": [3, 1, 2]}]))
    with pytest.raises(ConfigError) as caught:
        read_questions(path, max_bad_rows=100)
    assert str(caught.value).startswith(f"{path}, item 2: context is a list of document numbers, but ")


@pytest.mark.parametrize("num_objectives", [1, 2, 3])
def test_mem1_rows_keep_the_answers_of_every_objective(tmp_path, num_objectives):
    indices = range(num_objectives)
    (question,) = read_questions(parquet(tmp_path / "t.parquet", mem1_row(*indices)))
    assert question.text == "; ".join(f"who is {i}?" for i in indices)
    assert question.objectives == [[f"Ann {i}", "x"] for i in indices]
    assert question.golden_answers == ["; ".join(f"Ann {i}" for i in indices)]
    assert (question.id, question.source) == (f"nq-train-{'+'.join(map(str, indices))}", "nq")
    (named,) = read_questions(parquet(tmp_path / "q.parquet", mem1_row(*indices) | {"question": "a?; b?"}))
    assert named == dataclasses.replace(question, text="a?; b?")


def test_hotpotqa_items_have_hops_and_their_documents(tmp_path):
    path = tmp_path / "hotpot_dev_distractor_v1.json"
    path.write_text(json.dumps([hotpotqa_item("a"), hotpotqa_item("b")]))
    expected = Question(
        id="a",
        text="Who?",
        golden_answers=["Ann"],
        source="hotpotqa",
        num_hops=2,
        context="Document 1:\nNile\nA river. In Africa.\n\nDocument 2:\nRhine\nAnother.",
    )
    assert read_questions(path) == [expected, dataclasses.replace(expected, id="b")]


def test_a_question_of_hotpotqa_for_which_no_document_was_found_has_no_context(tmp_path):
    none: list[Any] = [[], {"title": [], "sentences": []}]  # official and Hugging Face's fullwiki
    rows = [hotpotqa_item("a"), *(hotpotqa_item(str(i)) | {"context": empty} for i, empty in enumerate(none))]
    (tmp_path / "fullwiki.json").write_text(json.dumps(rows))
    assert [bool(question.context) for question in read_questions(tmp_path / "fullwiki.json")] == [True, False, False]


def test_context_and_objectives_survive_our_own_parquet(tmp_path):
    questions = read_questions(parquet(tmp_path / "m.parquet", mem1_row(0, 1))) + read_questions(
        parquet(tmp_path / "a.parquet", memagent_row(0))
    )
    write_questions(tmp_path / "q.parquet", questions)
    assert read_questions(tmp_path / "q.parquet") == questions
    old = parquet(
        tmp_path / "old.parquet", {"id": "a", "text": "Who?", "golden_answers": ["Ann"], "source": "s", "context": None}
    )
    assert read_questions(old) == [Question(id="a", text="Who?", golden_answers=["Ann"], source="s")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (memagent_row(0) | {"context": ""}, "context is ''"),
        (memagent_row(0) | {"context": None}, "context is 'None'"),
        (memagent_row(0) | {"reward_model": {"ground_truth": []}}, "reward_model.ground_truth is []"),
        (
            memagent_row(0) | {"extra_info": {"index": 0}, "prompt": [{"role": "system", "content": "Who?"}]},
            "expected messages with role",
        ),
        (
            mem1_row(0, 1) | {"reward_model": {"ground_truth": {"target": [["Ann"], []]}}},
            "reward_model.ground_truth.target[1] is []",
        ),
        (
            mem1_row(0, 1) | {"reward_model": {"ground_truth": {"target": [["a"], ["b"], ["c"]]}}},
            "with 3 questions joined by '; '",
        ),
        (mem1_row(0) | {"prompt": [{"role": "user", "content": "Who is it?"}]}, "has no line 'Question: …'"),
        (ruler_item(0) | {"answers": {"Ann": 1}}, "answers is {'Ann': 1}"),
        (ruler_item(0) | {"input": None}, "input is 'None'"),
        (hotpotqa_item("a") | {"answer": ""}, "answer is ''"),
        (hotpotqa_item("a") | {"_id": ["a"]}, "_id is \"['a']\"; expected a text or a whole number"),
        (
            {"ask": "Who?", "answer": "Ann"},
            "fields ['answer', 'ask'] are of no known format: none of them holds a question (question, problem, ",
        ),
    ],
)
def test_wrong_rows_of_every_format_are_refused_by_item_and_field(tmp_path, row, reason):
    path = tmp_path / "q.json"
    path.write_text(json.dumps([FLASHRAG, row]))
    message = refusal(path)
    assert message.startswith(f"{path}, item 2: ") and reason in message
    assert [question.id for question in read_questions(path, max_bad_rows=1)] == ["q1"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"id": math.nan}, "id is NaN"),
        ({"level": -math.inf}, "level is -Infinity"),
        ({"golden_answers": [1.5, math.nan]}, "golden_answers.1 is NaN"),
    ],
)
@pytest.mark.parametrize(("kind", "unit"), [("jsonl", "line"), ("json", "item"), ("parquet", "row")])
def test_a_number_that_is_none_is_refused_in_every_file_with_its_row_and_column(tmp_path, kind, unit, wrong, said):
    good = {"id": None, "question": "Who?", "golden_answers": [0.5], "level": 1.0}
    rows, path = [good, good | wrong], tmp_path / f"q.{kind}"
    if kind == "json":
        path.write_text(json.dumps(rows))
    else:
        {"jsonl": jsonl, "parquet": parquet}[kind](path, *rows)
    assert (
        refusal(path) == f"{path}, {unit} 2: {said}, which is not a finite number; write null where there is no value"
    )


def test_a_text_may_say_nan(tmp_path):
    row = {"question": "Which word stands for no number, 1e999 aside?", "answer": "NaN", "more": {"a": ["Infinity"]}}
    (tmp_path / "q.jsonl").write_text(json.dumps(row)[:-1] + ', "size": 1e999}')
    assert read_questions(tmp_path / "q.jsonl")[0].golden_answers == ["NaN"]


def test_json_files_that_are_no_list_or_cut_are_refused(tmp_path):
    path = tmp_path / "q.json"
    path.write_text(json.dumps([FLASHRAG])[:-5])
    assert refusal(path).startswith(f"{path} is truncated or not JSON: ")
    path.write_text("3")
    assert refusal(path) == f"{path} holds int, expected a list of objects"
    path.write_text("[3]")
    assert refusal(path) == f"{path}, item 1: expected an object, got '3'"
    path.write_bytes(b'["\xff"]')
    assert "is truncated or not JSON: 'utf-8' codec can't decode byte 0xff" in refusal(path)
    path.write_text("[" * 100_000)
    assert refusal(path) == f"{path} is not JSON: lists or objects are nested too deeply"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (json.dumps([FLASHRAG], indent=1), "not JSON: a value of several lines; a list of objects belongs in a .json"),
        ("[" * 100_000, "not JSON: lists or objects are nested too deeply"),
        ('{"answer": ' + "9" * 5000 + "}", "not JSON: Exceeds the limit (4300 digits) for integer string conversion"),
        ('{"question": "Who?", "answer": 1e999}', "answer is inf; expected a golden answer"),
    ],
)
def test_lines_that_are_no_json_are_refused_in_words_for_people(tmp_path, content, reason):
    path = tmp_path / "q.jsonl"
    path.write_text(content)
    said = refusal(path)
    assert said.startswith(f"{path}, line 1: {reason}") and "sys." not in said and "recursion" not in said


def test_bad_rows_are_counted_by_kind_and_passed_over_up_to_the_limit(tmp_path):
    path = jsonl(
        tmp_path / "q.jsonl",
        FLASHRAG,
        FLASHRAG | {"id": "q2", "question": ""},
        FLASHRAG,
        {"a": 1},
        FLASHRAG | {"id": "q3"},
    )
    with path.open("ab") as file:
        file.write(b'{\n{"id": "\xff"}\n')
    file = read_question_file(path, max_bad_rows=5)
    assert [question.id for question in file.questions] == ["q1", "q3"] and file.formats == {"FlashRAG": 2}
    assert file.bad.counts == {"empty": 1, "duplicate_id": 1, "unknown_format": 1, "not_json": 1, "not_utf8": 1}
    assert [example.split(": ")[0] for example in file.bad.examples] == [
        f"{path}, line {number}" for number in (2, 3, 4, 6, 7)
    ]
    with pytest.raises(ConfigError) as caught:
        read_questions(path, max_bad_rows=4)
    assert str(caught.value).startswith(
        "5 bad rows (1 empty, 1 duplicate_id, 1 unknown_format, 1 not_json, 1 not_utf8), more than"
    )
    assert f"{path}, line 6: not JSON" in str(caught.value)


def test_a_folder_that_datasets_saved_is_refused_with_the_call_that_writes_parquet(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    (tmp_path / "saved" / "data-00000-of-00001.arrow").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds .arrow files, .*load_from_disk\('.*saved'\).to_parquet\("):
        read_questions(tmp_path / "saved")


def test_a_folder_of_question_files_is_one(tmp_path):
    jsonl(tmp_path / "data" / "a.jsonl", FLASHRAG)
    (tmp_path / "data" / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(FLASHRAG | {"id": "q2"}).encode()))
    jsonl(tmp_path / "data" / "c.ndjson", FLASHRAG | {"id": "q3"})
    assert [(q.id, q.source) for q in read_questions(tmp_path / "data")] == [("q1", "a"), ("q2", "b"), ("q3", "c")]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("name", ["._a.jsonl", ".hidden.csv", "~$b.csv"])
def test_hidden_files_of_a_folder_are_passed_over(tmp_path, name):
    jsonl(tmp_path / "a.jsonl", {"question": "Who?", "answer": "Ann"})
    (tmp_path / name).write_bytes(b"\0\5\x16\7")
    assert [question.text for question in read_questions(tmp_path)] == ["Who?"]


def test_questions_are_read_from_a_web_server_and_from_memory(tmp_path):
    jsonl(tmp_path / "nq" / "test.jsonl", FLASHRAG)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/nq"
    try:
        assert read_questions(f"{url}/test.jsonl") == read_questions(tmp_path / "nq" / "test.jsonl")
        with pytest.raises(ConfigError, match=r"none.jsonl does not exist or cannot be reached"):
            read_questions(f"{url}/none.jsonl")
    finally:
        server.shutdown()
        server.server_close()
    fsspec.filesystem("memory").pipe("/nq/test.jsonl", (tmp_path / "nq" / "test.jsonl").read_bytes())
    assert read_questions("memory://nq/test.jsonl")[0].source == "nq"


@pytest.mark.parametrize("name", ["OWNER/NAME:nq/train.jsonl", "hf://datasets/OWNER/NAME/nq/train.jsonl"])
def test_a_hub_data_set_without_a_network_is_refused_at_once(monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    fsspec.filesystem("hf").clear_instance_cache()
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"^hf://datasets/OWNER/NAME/nq/train.jsonl cannot be read: .*offline"):
        read_questions(name)
    assert time.monotonic() - started < 10


def test_a_file_is_described_for_people(tmp_path, capsys):
    path = jsonl(
        tmp_path / "q.jsonl", FLASHRAG, FLASHRAG | {"id": "q2", "question": "Who [red]is[/red] it, and why?"}, {"a": 1}
    )
    assert main(["data", "qa", str(path), "--max-bad-rows", "1", "--limit", "2"]) == 0
    out = capsys.readouterr().out
    for line in (
        "2 questions",
        "format: 2 FlashRAG",
        "sources: 2 q",
        "with evidence 0%, hops 0%, objectives 0%, context 0%",
        "characters of a question: 4 to 30, half of them at most 4",
        "bad rows: 1 unknown_format; the first:",
        f"  {path}, line 3: fields ['a'] are of no known format",
    ):
        assert line in out
    assert "[red]is[/red]" in out and "Ann | Anne" in out
    assert main(["data", "qa", str(path)]) == 2
    assert f"error: {path}, line 3: " in capsys.readouterr().err


def test_the_description_counts_what_questions_come_with(tmp_path):
    path = parquet(tmp_path / "t.parquet", memagent_row(0), memagent_row(1))
    lines = describe_questions(read_question_file(path))
    assert "format: 2 MemAgent" in lines and "with evidence 0%, hops 0%, objectives 0%, context 100%" in lines
    length = len(memagent_row(0)["context"])
    assert f"characters of a context: {length} to {length}, half of them at most {length}" in lines
    for row, name in (
        (mem1_row(0, 1), "MEM1"),
        (search_r1_row("nq", 0), "Search-R1"),
        (memsearcher_row(0), "MemSearcher"),
    ):
        assert read_question_file(parquet(path, row)).formats == {name: 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"question": 3}, "question is '3'"),
        ({"question": "  "}, "question is '  '"),
        ({"id": ["a"]}, "id is \"['a']\""),
        ({"golden_answers": []}, "golden_answers is []"),
        ({"golden_answers": {"Ann": 1}}, "golden_answers is {'Ann': 1}"),
        ({"golden_answers": ["Ann", None]}, "golden_answers[1] is None"),
        ({"golden_answers": [""]}, "golden_answers[0] is ''"),
        ({"id": "q0"}, "question id 'q0' occurs twice"),
    ],
)
def test_a_wrong_row_is_refused_by_line_and_field(tmp_path, change, reason):
    path = jsonl(tmp_path / "q.jsonl", FLASHRAG | {"id": "q0"}, FLASHRAG | change)
    message = refusal(path)
    assert message.startswith(f"{path}, line 2: ") and reason in message


OWN = {"id": "1", "text": "Who?", "golden_answers": ["Ann"]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"objectives": ["Paris", "Rome"]},
            'objectives is ["Paris", "Rome"]; expected a list of lists: [["Paris"], ["Rome"]] for 2 objectives with '
            'one golden answer each, or [["Paris", "Rome"]] for one objective with 2 golden answers',
        ),
        (
            {"recall_targets": ["Obama", "Ann"]},
            'recall_targets is ["Obama", "Ann"]; expected a list of lists: [["Obama"], ["Ann"]] for 2 entities with '
            'one surface form each, or [["Obama", "Ann"]] for one entity with 2 surface forms',
        ),
        ({"objectives": ["Paris"]}, 'objectives is ["Paris"]; expected a list of lists: [["Paris"]]'),
        ({"objectives": "Paris"}, "objectives is Paris; expected a list of lists of texts"),
        ({"objectives": [["Paris"], []]}, "objectives[1] is []; expected a list of at least one text"),
        ({"objectives": [["Paris"], "Rome"]}, "objectives[1] is Rome; expected a list of at least one text"),
        ({"objectives": [["Paris", None]]}, "objectives[0] is ['Paris', None]; expected a list of at least one text"),
        ({"context": ["a", "b"]}, "context is ['a', 'b']; expected a text"),
        ({"source": {"a": 1}}, "source is {'a': 1}; expected a text"),
        ({"partition": 3}, "partition is 3; expected a text"),
        ({"num_hops": True}, "num_hops is True; expected a whole number"),
        ({"num_hops": 2.5}, "num_hops is 2.5; expected a whole number"),
        ({"num_hops": 10**30}, f"num_hops is {10**30}; expected 0 to 10000"),
        ({"evidence": "xy"}, "evidence is 'xy'; expected a list"),
        ({"evidence": ["xy"]}, "evidence[0] is 'xy'; expected an object with fields"),
        ({"evidence": [{"value": "x"}]}, "evidence[0].passage_id is missing"),
        ({"evidence": [{"passage_id": "p", "value": ["x"]}]}, "evidence[0].value is ['x']; expected a text"),
    ],
)
def test_a_value_of_another_type_in_our_own_format_is_refused_by_field(tmp_path, change, reason):
    path = jsonl(tmp_path / "q.jsonl", OWN | change)
    assert refusal(path) == f"{path}, line 1: {reason}"


def test_numbers_that_name_a_passage_are_texts_and_whole_floats_are_numbers(tmp_path):
    row = OWN | {"evidence": [{"passage_id": 7, "value": 1984}], "num_hops": 2.0}
    (question,) = read_questions(jsonl(tmp_path / "q.jsonl", row))
    assert question.evidence == [Evidence(passage_id="7", value="1984")] and question.num_hops == 2


def test_no_text_of_our_own_format_keeps_a_lone_surrogate(tmp_path):
    text = "a \ud800 b"
    facts = {"objectives": [[text]], "recall_targets": [[text]], "evidence": [{"passage_id": text, "value": text}]}
    row = {"id": text, "text": text, "golden_answers": [text], "context": text, "source": text, "partition": text}
    (question,) = read_questions(jsonl(tmp_path / "q.jsonl", row | facts))
    assert "\ud800" not in str(dataclasses.asdict(question)) and question.context == "a \ufffd b"
    assert QuestionTable([question])[0] == question
    write_questions(tmp_path / "q.parquet", [question])
    assert read_questions(tmp_path / "q.parquet") == [question]
    (split,) = read_questions(jsonl(tmp_path / "q.jsonl", memsearcher_row(0) | {"extra_info": {"split": text}}))
    assert split.id == "musique_re_call-a \ufffd b-0"


TEXTS = st.text(st.characters(codec=None, categories=None), max_size=4)  # lone surrogates too
NAMES = ["passage_id", "value", "target", "ground_truth", "title", "index", "indices", "split", "role", "content"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)
GOOD_ROWS = [
    OWN | {"objectives": [["a"]], "evidence": [{"passage_id": "p", "value": "v"}], "recall_targets": [["a"]]},
    FLASHRAG | {"metadata": {"supporting_facts": {"title": ["A"]}}},
    memsearcher_row(0),
    search_r1_row("nq", 0),
    memagent_row(0),
    mem1_row(0, 1),
    ruler_item(0),
    hotpotqa_item("a"),
]


@st.composite
def odd_rows(draw) -> dict[str, Any]:
    """A row of a known format of which some fields, or fields of fields, hold anything."""
    row = json.loads(json.dumps(draw(st.sampled_from(GOOD_ROWS))))
    row |= draw(st.dictionaries(st.sampled_from(["context", "num_hops", "source", "objectives", "question"]), VALUES))
    for _ in range(draw(st.integers(1, 2))):
        part: Any = row
        while True:
            places = sorted(part) if isinstance(part, dict) else range(len(part))
            place = draw(st.sampled_from(places))
            if isinstance(part[place], dict | list) and part[place] and draw(st.booleans()):
                part = part[place]
            else:
                part[place] = draw(VALUES)
                break
    return row


@settings(max_examples=100)
@given(row=odd_rows())
def test_a_row_of_any_shape_is_a_question_that_can_be_kept_or_a_sentence(tmp_path_factory, row):
    path = jsonl(tmp_path_factory.getbasetemp() / "odd.jsonl", row)
    try:
        (question,) = read_questions(path)
    except ConfigError as error:
        assert "\n" not in str(error) and str(error).startswith(f"{path}")
    else:
        assert QuestionTable([question])[0] == question


def test_ids_that_repeat_across_data_sets_get_their_sources_name(tmp_path):
    for source in ("nq", "hotpotqa"):
        rows = [FLASHRAG | {"id": f"train_{i}", "question": f"{source} {i}?"} for i in range(2)]
        jsonl(tmp_path / f"{source}.jsonl", *rows)
    questions = read_questions(tmp_path)
    assert [question.id for question in questions] == ["train_0", "train_1", "nq-train_0", "nq-train_1"]
    assert [question.source for question in questions] == ["hotpotqa", "hotpotqa", "nq", "nq"]


def test_ids_that_repeat_in_one_file_of_several_data_sets_get_their_row(tmp_path):
    rows = [FLASHRAG | {"id": "train_0", "question": f"{i}?"} for i in range(4)]
    questions = read_questions(jsonl(tmp_path / "nq_hotpotqa_train.jsonl", *rows))
    prefix = "nq_hotpotqa_train-train_0"
    assert [question.id for question in questions] == ["train_0", prefix, f"{prefix}-2", f"{prefix}-3"]
    with pytest.raises(ConfigError, match="question id 'train_0' occurs twice"):
        read_questions(jsonl(tmp_path / "nq_hotpotqa_train.jsonl", *rows, rows[1]))


def test_a_set_may_have_many_files_whose_rows_count_from_0_each(tmp_path):
    for file in range(5):
        row = memsearcher_row(0) | {"question": f"Who is {file}?"}
        jsonl(tmp_path / "nq" / f"train-{file:05d}-of-00005.jsonl", row)
    ids = [question.id for question in read_questions(tmp_path / "nq")]
    prefix = "musique_re_call-musique_re_call-train-0"
    assert ids[:3] == ["musique_re_call-train-0", prefix, f"{prefix}-0"]
    assert ids[3:] == [f"{prefix}-train-{file:05d}-of-00005.jsonl-0" for file in (3, 4)]


def some_questions(**counts: int) -> list[Question]:
    return [
        Question(id=f"{source}{i}", text="t", golden_answers=["a"], source=source)
        for source, count in counts.items()
        for i in range(count)
    ]


def test_questions_are_drawn_in_equal_shares_of_their_sources_by_the_seed():
    questions = some_questions(nq=100, hotpotqa=50, bamboogle=4)
    drawn = draw_questions(questions, 30, seed=1)
    assert Counter(question.source for question in drawn) == {"nq": 13, "hotpotqa": 13, "bamboogle": 4}
    assert drawn == draw_questions(questions, 30, seed=1) != draw_questions(questions, 30, seed=2)
    assert drawn == sorted(drawn, key=questions.index) and drawn[4:] != questions[4:30]


@pytest.mark.parametrize("count", [0, 154, 1000])
def test_all_questions_are_taken_where_that_many_are_asked_for(count):
    questions = some_questions(nq=100, hotpotqa=50, bamboogle=4)
    assert draw_questions(questions, count, seed=1) == questions


@pytest.mark.parametrize("count", range(1, 20))
def test_as_many_questions_are_drawn_as_were_asked_for(count):
    assert len(draw_questions(some_questions(a=1, b=9, c=3, d=7), count, seed=0)) == count


def test_a_table_gives_its_questions_back_and_its_texts_travel_without_a_copy():
    drawn = World(1).questions(50, seed=0)
    questions = [
        dataclasses.replace(question, id=f"{question.id}-{i}", context=f"Zoë {i} " * 500)
        for i in range(3)
        for question in drawn
    ]
    table, buffers = QuestionTable(questions), []
    assert [table[i] for i in range(len(table))] == questions
    carried = pickle.dumps(table, protocol=5, buffer_callback=buffers.append)  # as Ray does it
    assert len(carried) < 0.05 * sum(len(question.context) for question in questions)
    assert pickle.loads(carried, buffers=buffers)[140] == questions[140]


def test_wrong_parquet_rows_are_refused_by_row_and_field(tmp_path):
    no_answers = parquet(
        tmp_path / "m.parquet", memsearcher_row(0) | {"reward_model": {"ground_truth": [], "style": "rule"}}
    )
    assert refusal(no_answers).startswith(f"{no_answers}, row 1: reward_model.ground_truth is []")
    no_target = parquet(
        tmp_path / "s.parquet", search_r1_row("nq", 0) | {"reward_model": {"ground_truth": {"other": ["Ann"]}}}
    )
    assert f"{no_target}, row 1: reward_model.ground_truth is {{'other': ['Ann']}}" in refusal(no_target)
    no_source = parquet(tmp_path / "d.parquet", memsearcher_row(0) | {"data_source": None})
    assert "data_source is 'None'" in refusal(no_source)
    own = parquet(tmp_path / "o.parquet", {"id": "a", "text": "Who?", "golden_answers": ["Ann"], "num_hops": "two"})
    assert refusal(own) == f"{own}, row 1: num_hops is 'two'; expected a whole number"


def test_unknown_formats_and_empty_files_are_refused(tmp_path):
    assert "fields ['answer', 'ask'] are of no known format" in refusal(
        jsonl(tmp_path / "q.jsonl", {"ask": "Who?", "answer": "Ann"})
    )
    assert refusal(jsonl(tmp_path / "empty.jsonl")) == f"{tmp_path / 'empty.jsonl'} holds no question"


def test_lone_surrogates_become_replacement_characters_and_can_be_written(tmp_path):
    path = jsonl(tmp_path / "q.jsonl", FLASHRAG | {"question": "Who \ud800?", "golden_answers": ["\udfff"]})
    questions = read_questions(path)
    assert (questions[0].text, questions[0].golden_answers) == ("Who \ufffd?", ["\ufffd"])
    write_questions(tmp_path / "q.parquet", questions)
    assert read_questions(tmp_path / "q.parquet") == questions


@pytest.mark.skipif(not HOTPOT.exists(), reason="the shared real questions are not here")
def test_the_real_hotpotqa_questions_are_read_in_full():
    questions = read_questions(HOTPOT)
    assert len(questions) == 100
    assert questions[0].text == "If Gallu is a demon Lilu is what?" and questions[0].golden_answers == ["a spirit"]
    assert {question.num_hops for question in questions} == {2}


def test_a_table_of_long_contexts_is_cut_so_that_no_column_holds_too_much(monkeypatch):
    monkeypatch.setattr("mempipe.data.qa._BATCH_CHARS", 100)  # for 2 GiB, which Arrow's columns of texts do not reach
    questions = [
        Question(id=str(i), text="Who?", golden_answers=["Ann"], context="x" * (i % 7 * 25)) for i in range(150)
    ]
    table = QuestionTable(questions)
    assert [table[i] for i in range(len(table))] == questions and list(table) == questions
    assert max(len("".join(batch.column("context").to_pylist())) for batch in table._batches) <= 150
    with pytest.raises(IndexError):
        table[150]
    assert len(QuestionTable([])) == 0
