"""Rows and files as people bring them: every usual shape is read, what can be read in two ways is refused with both."""

from __future__ import annotations

import datetime
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mempipe.cli import main
from mempipe.data.config import Columns
from mempipe.data.qa import read_question_file, read_questions, skipped_text, understood
from mempipe.data.ruler import read_sources
from mempipe.data.shapes import ANSWERS, PROMPTS, QUESTION
from mempipe.evaluation.benchmarks import read_benchmark
from mempipe.evaluation.suite import Benchmark
from mempipe.settings import ConfigError
from mempipe.types import Question

ASKED, GOLD = "Who wrote Emma?", "Jane Austen"
USER = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED}]
TRIVIA = {"value": GOLD, "aliases": ["Austen", GOLD, ""], "normalized_value": "jane austen"}
MUSIQUE = {
    "id": "2hop__1_2",
    "paragraphs": [
        {"idx": 0, "title": "Emma", "paragraph_text": "Emma is by Jane Austen.", "is_supporting": True},
        {"idx": 1, "title": "Nile", "paragraph_text": "A river.", "is_supporting": False},
    ],
    "question": ASKED,
    "question_decomposition": [
        {"id": 1, "question": "Who wrote Emma?", "answer": GOLD, "paragraph_support_idx": 0},
        {"id": 2, "question": "#1 >> name", "answer": GOLD, "paragraph_support_idx": 0},
    ],
    "answer": GOLD,
    "answer_aliases": ["Austen"],
    "answerable": True,
}
LONG_MEM_EVAL = {
    "question_id": "e47b",
    "question_type": "single-session-user",
    "question": ASKED,
    "answer": 42,
    "question_date": "2023/05/30 (Tue) 23:40",
    "haystack_dates": ["2023/05/20 (Sat) 02:21"],
    "haystack_session_ids": ["a"],
    "haystack_sessions": [[{"role": "user", "content": "I am 42."}, {"role": "assistant", "content": "Noted."}]],
}

# The rows of other trainers and of published sets: name, row, golden answers.
ROWS = [
    ("question, answer", {"question": ASKED, "answer": GOLD}, [GOLD]),
    ("question, answers", {"question": ASKED, "answers": [GOLD, "Austen"]}, [GOLD, "Austen"]),
    (
        "SQuAD",
        {"id": "5", "title": "t", "context": "…", "question": ASKED, "answers": {"text": [GOLD], "answer_start": [3]}},
        [GOLD],
    ),
    ("TriviaQA", {"question": ASKED, "question_id": "tc_1", "answer": TRIVIA, "entity_pages": {}}, [GOLD, "Austen"]),
    ("NQ-open", {"question": ASKED, "answer": [GOLD, "Austen"]}, [GOLD, "Austen"]),
    ("MuSiQue", MUSIQUE, [GOLD, "Austen"]),
    ("TRL, text", {"prompt": ASKED, "answer": GOLD}, [GOLD]),
    ("TRL, messages", {"prompt": USER, "answer": GOLD}, [GOLD]),
    (
        "verl",
        {
            "data_source": "mine",
            "prompt": USER,
            "ability": "qa",
            "reward_model": {"style": "rule", "ground_truth": GOLD},
            "extra_info": {"split": "train", "index": 7},
        },
        [GOLD],
    ),
    ("slime", {"prompt": USER, "label": GOLD, "metadata": {"rm_type": "f1"}}, [GOLD]),
    ("NeMo Gym", {"responses_create_params": {"input": USER}, "expected_answer": GOLD}, [GOLD]),
    ("problem, answer", {"problem": ASKED, "answer": GOLD, "solution": "By \\boxed{Jane Austen}."}, [GOLD]),
    ("query, answer", {"query": ASKED, "answer": GOLD}, [GOLD]),
    ("inspect", {"input": ASKED, "target": GOLD, "id": 3}, [GOLD]),
    ("messages, ground_truth", {"messages": USER, "ground_truth": GOLD}, [GOLD]),
    ("LongMemEval", LONG_MEM_EVAL, ["42"]),
    ("FlashRAG", {"id": "t_0", "question": ASKED, "golden_answers": [GOLD]}, [GOLD]),
    (
        "Search-R1",
        {
            "id": "t_0",
            "question": ASKED,
            "golden_answers": [GOLD],
            "data_source": "nq",
            "prompt": [{"role": "user", "content": f"Answer the question. Question: {ASKED}"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": [GOLD]}},
            "extra_info": {"split": "test", "index": 0},
        },
        [GOLD],
    ),
    # their kin
    ("question, golden_answers", {"question": ASKED, "golden_answers": [GOLD]}, [GOLD]),
    ("inspect, messages and list", {"input": USER, "target": [GOLD, "Austen"]}, [GOLD, "Austen"]),
    ("problem, solution", {"problem": ASKED, "solution": GOLD}, [GOLD]),
    ("GSM8K", {"question": ASKED, "answer": "She wrote 6.\nSo it is her.\n#### Jane Austen"}, [GOLD]),
    ("PopQA", {"id": 4222, "question": ASKED, "possible_answers": '["Jane Austen", "Austen"]'}, [GOLD, "Austen"]),
    ("Bamboogle", {"Question": ASKED, "Answer": GOLD}, [GOLD]),
    (
        "ComplexWebQuestions",
        {"ID": "W", "question": ASKED, "answers": [{"answer_id": "m.0", "answer": GOLD, "aliases": ["Austen"]}]},
        [GOLD, "Austen"],
    ),
    (
        "WebQuestions",
        {"url": "u", "targetValue": '(list (description "Jane Austen") (description Austen))', "utterance": ASKED},
        [GOLD, "Austen"],
    ),
    (
        "TriviaQA, official",
        {"Question": ASKED, "QuestionId": "tc_1", "Answer": {"Value": GOLD, "Aliases": ["Austen"]}},
        [GOLD, "Austen"],
    ),
    ("BABILong", {"input": "Emma is by her.", "question": ASKED, "target": GOLD}, [GOLD]),
    (
        "RULER's own",
        {
            "index": 0,
            "input": "Answer the question based on the given documents. Only give me the answer and do not output any "
            "other words.\n\nThe following are given documents.\n\nDocument 1:\nEmma\nBy Jane Austen. Question: "
            "who else?\n\nDocument 2:\nNile\nA river.\n\nAnswer the question based on the given documents. Only give "
            f"me the answer and do not output any other words.\n\nQuestion: {ASKED} Answer:",
            "outputs": [GOLD, "Austen"],
            "length": 99,
        },
        [GOLD, "Austen"],
    ),
    ("GAIA", {"task_id": "c6", "Question": ASKED, "Level": 1, "Final answer": GOLD, "file_name": ""}, [GOLD]),
    (
        "KILT",
        {
            "id": "k",
            "input": ASKED,
            "output": [{"answer": GOLD}, {"provenance": [{"wikipedia_id": "1"}]}, {"answer": "Austen"}],
        },
        [GOLD, "Austen"],
    ),
    (
        "NarrativeQA",
        {
            "document": {"id": "d", "text": "Emma is by Jane Austen."},
            "question": {"text": ASKED, "tokens": ["Who"]},
            "answers": [{"text": GOLD, "tokens": []}, {"text": "Austen", "tokens": []}],
        },
        [GOLD, "Austen"],
    ),
    (
        "verl with a question",
        {"prompt": USER, "reward_model": {"ground_truth": [GOLD]}, "extra_info": {"question": ASKED}},
        [GOLD],
    ),
    (
        "content in parts",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ASKED}]}], "answer": GOLD},
        [GOLD],
    ),
    (
        "ShareGPT",
        {"conversations": [{"from": "system", "value": "Answer."}, {"from": "human", "value": ASKED}], "answer": GOLD},
        [GOLD],
    ),
]


def jsonl(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refusal(path: Path | str, **columns: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_questions(path, columns=Columns(**columns))
    return str(caught.value)


@pytest.mark.parametrize(("row", "golden"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_a_row_of_every_usual_shape_is_a_question_with_its_golden_answers(tmp_path, kind, row, golden):
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([{name: value for name, value in row.items() if value != {}}]), path)
    else:
        path.write_text(json.dumps([row] if kind == "json" else row))
    (question,) = read_questions(path)
    assert question.text.removeprefix("Today is 2023/05/30 (Tue) 23:40. ") == ASKED
    assert question.golden_answers == golden and question.id


def test_a_needle_in_a_haystack_of_ruler_is_taken_out_of_its_prompt(tmp_path):
    asked = "What is the special magic number for vivid-owl mentioned in the provided text?"
    text = "The grass is green.\nOne of the special magic numbers for vivid-owl is: 7152.\nThe sky is blue."
    prompt = (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        f"the number afterwards.\n{text}\n{asked} The special magic number for vivid-owl mentioned in the provided "
        "text is"
    )
    (needle,) = read_questions(jsonl(tmp_path / "niah.jsonl", {"index": 0, "input": prompt, "outputs": ["7152"]}))
    assert (needle.text, needle.context, needle.golden_answers) == (asked, text, ["7152"])
    assert needle.source == "ruler_niah"
    several = prompt.replace("A special magic number is", "Some special magic numbers are").replace(
        "number after", "numbers after"
    )
    several = several.replace("What is the special magic number", "What are all the special magic numbers")
    said = refusal(jsonl(tmp_path / "many.jsonl", {"index": 0, "input": several, "outputs": ["7152", "9"]}))
    assert "fields ['index', 'input', 'outputs'] are of no known format" in said
    row = {"index": 0, "input": several, "outputs": ["7152", "9"], "length": 90}
    said = refusal(jsonl(tmp_path / "own.jsonl", row))
    assert "input is none of the tasks of RULER that are read" in said and "niah_single_*" in said


def test_sets_that_bring_documents_give_them_as_context(tmp_path):
    (musique,) = read_questions(jsonl(tmp_path / "m.jsonl", MUSIQUE))
    assert musique.context == "Document 1:\nEmma\nEmma is by Jane Austen.\n\nDocument 2:\nNile\nA river."
    assert (musique.id, musique.source, musique.num_hops) == ("2hop__1_2", "musique", 2)
    (remembered,) = read_questions(jsonl(tmp_path / "l.jsonl", LONG_MEM_EVAL))
    assert remembered.context == "Session of 2023/05/20 (Sat) 02:21:\nuser: I am 42.\nassistant: Noted."
    assert (remembered.id, remembered.source) == ("e47b", "longmemeval")
    by_name = {name: row for name, row, _ in ROWS}
    (placed,) = read_questions(jsonl(tmp_path / "qa1.jsonl", by_name["BABILong"]))
    assert (placed.context, placed.source) == ("Emma is by her.", "qa1")
    ruler = by_name["RULER's own"]
    shorter = ruler | {"input": ruler["input"].replace("Document 2:\nNile\nA river.\n\n", "").removesuffix(" Answer:")}
    many, one = read_questions(jsonl(tmp_path / "r.jsonl", ruler, shorter))
    assert many.context == "Document 1:\nEmma\nBy Jane Austen. Question: who else?\n\nDocument 2:\nNile\nA river."
    assert (one.context, one.text) == ("Document 1:\nEmma\nBy Jane Austen. Question: who else?", ASKED)
    assert one.id != many.id and one.source == "ruler_qa"
    (told,) = read_questions(jsonl(tmp_path / "n.jsonl", by_name["NarrativeQA"]))
    assert (told.context, told.source) == ("Emma is by Jane Austen.", "narrativeqa")
    (squad,) = read_questions(jsonl(tmp_path / "s.jsonl", ROWS[2][1] | {"context": "Emma, by Jane Austen"}))
    assert squad.context == "Emma, by Jane Austen" and squad.id == "5"
    (texts,) = read_questions(jsonl(tmp_path / "t.jsonl", {"question": "a?", "answer": "b", "context": ["x", "y"]}))
    assert texts.context == "Document 1:\nx\n\nDocument 2:\ny"


@pytest.mark.parametrize(
    "row",
    [
        {"text": ASKED, "golden_answers": [GOLD], "question": ASKED.upper(), "label": GOLD},
        {"question": ASKED, "golden_answers": [GOLD], "query": f"Say: {ASKED}", "answers": [GOLD, "Austen"]},
        {"question": ASKED, "golden_answers": [GOLD], "label": True, "problem": {"id": 3}},
        MUSIQUE | {"answers": [GOLD, "Austen"]},
    ],
)
def test_fields_that_say_the_same_twice_are_read_in_a_named_shape(tmp_path, row):
    (question,) = read_questions(jsonl(tmp_path / "rows.jsonl", row))
    assert question.text == ASKED and question.golden_answers[0] == GOLD


@pytest.mark.parametrize(
    "context",
    [
        ["x", "", None, " ", "y"],
        [{"text": "x"}, {"title": "A", "text": ""}, {"title": "B", "text": None}, {"text": "y"}],
        [["", ["x"]], ["U", []], ["", ["y"]]],
        {"title": ["", "U", ""], "sentences": [["x"], [], ["y"]]},
    ],
)
def test_a_blank_document_does_not_take_the_others_away(tmp_path, context):
    (question,) = read_questions(jsonl(tmp_path / "t.jsonl", {"question": "a?", "answer": "b", "context": context}))
    assert question.context == "Document 1:\nx\n\nDocument 2:\ny"


@pytest.mark.parametrize(
    "context",
    [
        [{"title": "A", "snippet": "x"}],
        ["x", {"title": "A", "snippet": "y"}],
        {"title": ["A", "B"], "sentences": [["x."]]},
        [" "],
        {"url": "u"},
        5,
    ],
)
def test_a_context_that_cannot_be_read_is_refused(tmp_path, context):
    path = jsonl(tmp_path / "t.jsonl", {"question": "a?", "answer": "b", "context": context})
    assert "context is " in refusal(path) and "expected a text" in refusal(path)


def test_sentences_of_2wikimultihopqa_have_a_space_between_them(tmp_path):
    context = [["Move", ["Move is a film.", "It is by Ann."]]]
    row = {"_id": "a", "question": ASKED, "answer": GOLD, "supporting_facts": [["Move", 0]], "context": context}
    path = jsonl(tmp_path / "dev.jsonl", row | {"evidences": [["Move", "by", "Ann"]]})
    assert [question.context for question in read_questions(path)] == [
        "Document 1:\nMove\nMove is a film. It is by Ann."
    ]
    assert [source.documents for source in read_sources(path)] == [[("Move", "Move\nMove is a film. It is by Ann.")]]


def test_an_input_that_holds_the_question_is_a_prompt_and_no_text_to_read(tmp_path):
    row = {"input": f"Answer briefly: {ASKED}", "question": ASKED, "target": GOLD}
    (question,) = read_questions(jsonl(tmp_path / "rows.jsonl", row))
    assert (question.text, question.context) == (ASKED, "")


@pytest.mark.parametrize(
    ("field", "cell", "golden"),
    [
        ("answers", '["Ann", ""]', ["Ann"]),
        ("answers", '["Ann", null, " Anne "]', ["Ann", "Anne"]),
        ("answer", '["Ann", 5]', ["Ann", "5"]),
        ("answers", "[1945, 1946]", ["1945", "1946"]),
        ("answer", "[0, 1]", ["[0, 1]"]),
        ("answer", "[[0, 1], [2, 3.5]]", ["[[0, 1], [2, 3.5]]"]),
        ("answer", "[.5, 1]", ["[.5, 1]"]),
        ("answer", "[Ann]", ["[Ann]"]),
        ("answers", '{"text": ["Paris"], "answer_start": [3]}', ["Paris"]),
        ("answer", '{"name": "Paris"}', ['{"name": "Paris"}']),
        ("answer", "\\boxed{4}", ["4"]),
        ("answer", "\\boxed{\\frac{1}{2}}", ["\\frac{1}{2}"]),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_cell_may_hold_several_answers(tmp_path, kind, field, cell, golden):
    path = tmp_path / f"rows.{kind}"
    row = {"question": ASKED, field: cell}
    pl.DataFrame([row]).write_csv(path) if kind == "csv" else jsonl(path, row)
    assert [question.golden_answers for question in read_questions(path)] == [golden]


@pytest.mark.parametrize("cell", ["[]", '{"text": [], "answer_start": []}'])
def test_a_cell_with_an_empty_list_of_answers_is_skipped(tmp_path, cell):
    file = read_question_file(jsonl(tmp_path / "q.jsonl", {"question": "Who?", "answers": cell}, ROWS[0][1]))
    assert len(file.questions) == 1 and file.left_out == {EMPTY: 1}


def test_sources_without_an_answer_are_no_golden_answer(tmp_path):
    row = {"id": "k", "input": ASKED, "output": [{"provenance": [{"wikipedia_id": "1"}]}]}
    assert "output is" in refusal(jsonl(tmp_path / "rows.jsonl", row))


def test_an_answer_in_objects_that_are_nested_deeply_is_one_bad_row(tmp_path):
    levels = 800 if sys.version_info < (3, 12) else 1500  # JSON that Python reads, and that no function of ours walks
    answer = levels * '{"text": ' + json.dumps(GOLD) + levels * "}"
    row = f'{{"question": {json.dumps(ASKED)}, "answer": {answer}}}'
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'question': ASKED, 'answer': GOLD})}\n{row}\n")
    assert "line 2: lists or objects are nested too deeply" in refusal(tmp_path / "rows.jsonl")
    assert len(read_questions(tmp_path / "rows.jsonl", max_bad_rows=1)) == 1


def test_one_conversation_of_locomo_holds_many_questions(tmp_path):
    item = {
        "sample_id": "conv-26",
        "conversation": {
            "speaker_a": "Ann",
            "session_10_date_time": "noon",
            "session_10": [{"speaker": "Ann", "dia_id": "D10:1", "text": "Bye", "blip_caption": "a dog"}],
            "session_2": [{"speaker": "Bo", "dia_id": "D2:1", "text": "Hi"}],
        },
        "qa": [
            {"question": "Who said bye?", "answer": "Ann", "evidence": ["D10:1"], "category": 1},
            {"question": "How many?", "answer": 2, "evidence": [], "category": 2},
            {"question": "What did Bo deny?", "adversarial_answer": "it", "category": 5},
        ],
    }
    (tmp_path / "locomo10.json").write_text(json.dumps([item, item | {"sample_id": "conv-30"}]))
    file = read_question_file(tmp_path / "locomo10.json")
    assert [q.id for q in file.questions] == ["conv-26-0", "conv-26-1", "conv-30-0", "conv-30-1"]
    assert file.questions[0].context == "Session:\nBo: Hi\n\nSession of noon:\nAnn: Bye [picture: a dog]"
    assert file.questions[1].golden_answers == ["2"] and file.formats == {"LoCoMo": 4}
    assert file.left_out == {"without an answer, as their data set says": 2}


def test_one_row_alone_in_a_json_file_is_a_row_whatever_lists_it_has(tmp_path):
    """A conversation of LoCoMo would be questions without their text, and MuSiQue's row two lists of objects."""
    talk = {"session_1": [{"speaker": "Bo", "text": "Hi"}], "speaker_a": "Ann"}
    locomo = {"sample_id": "c", "conversation": talk, "qa": [{"question": "Who said hi?", "answer": "Bo"}]}
    messages = {"messages": USER, "answer": GOLD}
    for row, context in ((locomo, "Session:\nBo: Hi"), (MUSIQUE, None), (CWQ, ""), (messages, "")):
        (tmp_path / "one.json").write_text(json.dumps(row))
        (question,) = read_questions(tmp_path / "one.json")
        (alone,) = read_questions(jsonl(tmp_path / "one.jsonl", row))
        assert question == alone and context in (None, question.context)


def test_questions_of_triviaqas_test_set_have_no_answer(tmp_path):
    unknown = {"value": "<unk>", "aliases": [], "normalized_value": "<unk>", "normalized_aliases": []}
    rows = [{"question_id": "t", "question": ASKED, "answer": answer} for answer in (unknown, TRIVIA)]
    file = read_question_file(jsonl(tmp_path / "test.jsonl", *rows))
    assert [question.golden_answers for question in file.questions] == [[GOLD, "Austen"]]
    assert file.left_out == {"without an answer, as their data set says": 1}


@pytest.mark.parametrize("fault", [{"answers": [], "is_impossible": True}, {"answers": []}, {"answers": [True]}])
def test_questions_behind_one_that_is_not_read_are_read(tmp_path, fault):
    asked = [{"question": "Who not?", "id": "b"} | fault, {"question": ASKED, "id": "a", "answers": [{"text": GOLD}]}]
    path = jsonl(tmp_path / "dev.jsonl", {"paragraphs": [{"context": "x", "qas": asked}]})
    assert [question.id for question in read_question_file(path, max_bad_rows=1).questions] == ["a"]


def test_squad_articles_are_unfolded_and_questions_without_answer_left_out(tmp_path):
    asked = [
        {"question": ASKED, "id": "a", "answers": [{"text": GOLD, "answer_start": 0}, {"text": GOLD}]},
        {"question": "Who not?", "id": "b", "answers": [], "is_impossible": True},
    ]
    article = {"title": "Emma", "paragraphs": [{"context": "Jane Austen wrote Emma.", "qas": asked}]}
    (tmp_path / "dev-v2.0.json").write_text(json.dumps({"version": "v2.0", "data": [article]}))
    file = read_question_file(tmp_path / "dev-v2.0.json")
    assert file.questions == [
        Question(id="a", text=ASKED, golden_answers=[GOLD], source="dev-v2", context="Jane Austen wrote Emma.")
    ]
    assert file.left_out == {"without an answer, as their data set says": 1}
    none = {"id": "c", "context": "x", "question": "Who?", "answers": {"text": [], "answer_start": []}}
    assert read_question_file(jsonl(tmp_path / "hf.jsonl", ROWS[2][1], none)).left_out == {
        "without an answer, as their data set says": 1
    }
    full = jsonl(tmp_path / "full.jsonl", MUSIQUE, MUSIQUE | {"answerable": False})
    assert len(read_questions(full)) == 1


CWQ = {"ID": "W", "question": ASKED, "answers": [{"answer_id": "m.0", "answer": GOLD, "aliases": ["Austen"]}]}
EMPTY = "whose list of answers is empty"


def test_rows_whose_list_of_answers_is_empty_are_skipped_and_counted(tmp_path, capsys):
    """As ComplexWebQuestions has them: `answers: []`, and answers without a name."""
    none = [
        CWQ | {"ID": "a", "answers": []},
        CWQ | {"ID": "b", "answers": [{"answer_id": "m.1", "answer": None, "aliases": []}]},
        CWQ | {"ID": "c", "answers": None, "answer": []},
        {"url": "u", "utterance": "Who?", "targetValue": '(list (description ""))'},
        {"url": "u", "utterance": "Who?", "targetValue": "(list)"},
    ]
    file = read_question_file(jsonl(tmp_path / "cwq.jsonl", *none[:3], CWQ, *none[3:]))
    assert [question.golden_answers for question in file.questions] == [[GOLD, "Austen"]]
    assert file.left_out == {EMPTY: 5}
    left_out = Counter[str]()
    assert len([*read_benchmark(Benchmark(name="cwq"), str(tmp_path / "cwq.jsonl"), left_out=left_out)]) == 1
    assert skipped_text(left_out) == f"; 5 rows are skipped: 5 {EMPTY}"
    assert main(["data", "qa", str(tmp_path / "cwq.jsonl")]) == 0
    assert f"skipped:  5 {EMPTY}" in capsys.readouterr().out


def test_a_file_without_any_answer_is_refused_and_the_reason_is_said(tmp_path):
    empty = jsonl(tmp_path / "empty.jsonl", CWQ | {"answers": []}, CWQ | {"ID": "b", "answers": []})
    assert refusal(empty) == f"{empty} holds no question; 2 rows are skipped: 2 {EMPTY}"
    test_file = jsonl(tmp_path / "test.jsonl", {"ID": "W", "question": ASKED})  # as the official one is
    assert "line 1: fields ['ID', 'question'] are of no known format: none of them holds a golden" in refusal(test_file)


def test_answers_without_a_value_are_passed_over(tmp_path):
    """The official file of ComplexWebQuestions has answers that are null, with and without aliases."""
    nameless = [{"answer_id": "m.1", "answer": None, "aliases": ["Jane"]}, {"answer": None, "aliases": []}]
    (question,) = read_questions(jsonl(tmp_path / "cwq.jsonl", CWQ | {"answers": [*nameless, *CWQ["answers"]]}))
    assert question.golden_answers == ["Jane", GOLD, "Austen"]


@pytest.mark.parametrize(
    ("value", "golden"),
    [
        (r'(list (description "B \"x\" C") (description D))', ['B "x" C', "D"]),
        (r'(list (description "B \"x\" C"))', ['B "x" C']),
        (r'(list (description "a \\ b") (description "(c) d"))', ["a \\ b", "(c) d"]),
        ('(list (description "") (description D))', ["D"]),
    ],
)
def test_the_answers_of_web_questions_may_hold_quotation_marks(tmp_path, value, golden):
    row = {"url": "u", "utterance": ASKED, "targetValue": value}
    assert read_questions(jsonl(tmp_path / "wq.jsonl", row))[0].golden_answers == golden


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"question": "Who?", "query": "What?", "answer": "a"},
            "question and query hold different questions, 'Who?' and 'What?'; set data.columns.question to question or "
            "to query",
        ),
        (
            {"question": "Who?", "answer": "Ann", "label": 0},
            "answer and label hold different answers, 'Ann' and '0'; set data.columns.answer to answer or to label",
        ),
        (
            {
                "messages": [USER[1], {"role": "assistant", "content": "x"}, {"role": "user", "content": "And?"}],
                "answer": "a",
            },
            "messages has 2 messages of the user; the question may be the first, 'Who wrote Emma?', or the last, "
            "'And?'; set data.columns.question, e.g. to messages.-1.content",
        ),
        (
            {"conversations": [{"from": "human", "value": "Who?"}, {"from": "human", "value": "And?"}], "answer": "a"},
            "'Who?', or the last, 'And?'; set data.columns.question, e.g. to conversations.-1.value",
        ),
        (
            {"question": "Who?", "choices": ["Ann", "Bo"], "answer": 1},
            "answer is '1', which may be the golden answer or the place of one of the choices ['Ann', 'Bo']; write",
        ),
        (
            {"question": "Is it?", "answer": "B", "options": {"A": "x"}},
            "'B', which may be the golden answer or the place",
        ),
        (
            {"question": "Who?", "choice_A": "Ann", "choice_B": "Bo", "answer": "B"},
            "'B', which may be the golden answer or the place of one of the choices {'choice_a': 'Ann', 'choice_b'",
        ),
        (
            {"question": "Who?", "A": "Ann", "B": "Bo", "answer": "A"},
            "'A', which may be the golden answer or the place of one of the choices {'a': 'Ann', 'b': 'Bo'}",
        ),
        (
            {"input": "A number is hidden in the text. 1\nWhat is the number?", "outputs": ["1", "2"]},
            "fields ['input', 'outputs'] are of no known format",
        ),
        ({"question": "Is it?", "answer": True}, "answer is True, which may mean 'yes' or 'true'; write it as a text"),
        ({"question": "Who?", "answers": [["a"], ["b"]]}, "may mean several golden answers or several objectives"),
        ({"question": "Who?", "answer": "['a', 'b']"}, "may be one golden answer or a list that Python printed"),
        ({"question": "Who?", "answer": "[\"Hawai'i\", 'Hawaii']"}, "a list that Python printed"),
        ({"question": "Who?", "answers": "['a' 'b']"}, "a list that Python printed"),
        ({"question": "Who?", "answers": "array(['a', 'b'], dtype=object)"}, "a list that Python printed"),
        ({"question": "Who?", "answers": "{'text': array(['a'], dtype=object)}"}, "a list that Python printed"),
        ({"question": "Who?", "answers": "{'text': array([], dtype=object)}"}, "a list that Python printed"),
        ({"question": "Who?", "answer": "{'text': ['Paris']}"}, "a list that Python printed"),
        ({"question": "Who?", "answers": "[.5, 1]"}, "a list that Python printed"),
        ({"question": "Who?", "answer": "[null]"}, "answer is []"),
        ({"question": "Who?", "answer": "\\boxed{4} or \\boxed{5}"}, "what its \\boxed holds"),
        (
            {"question": "Who?", "solution": "So \\boxed{4}."},
            "the golden answer may be all of it or what its \\boxed holds",
        ),
        (
            {"text": "Paris is big.", "question": "What is big?", "golden_answers": ["Paris"]},
            "text and question hold different questions, 'Paris is big.' and 'What is big?'; set data.columns.question",
        ),
        (
            {"question": "What?", "golden_answers": ["Paris"], "answer": "London"},
            "golden_answers and answer hold different answers, 'Paris' and 'London'; set data.columns.answer",
        ),
        (
            {"context": "Long", "question": "Who wrote it?", "input": "Be brief.", "answers": ["x"]},
            "input and question hold different questions",
        ),
        ({"input": "text", "question": "Q?", "target": "b", "answer": "c"}, "target and answer hold different answers"),
        (MUSIQUE | {"answers": ["Bo"]}, "answer and answers hold different answers"),
        ({"question": None, "answer": "a"}, "question has no value; the row needs a question (question, problem, "),
        ({"question": "Who?", "answer": None}, "answer has no value; the row needs a golden answer (golden_answers, "),
        ({"question": "Who?", "answers": [{"name": "Ann"}]}, "answers[0] is {'name': 'Ann'}; expected a golden answer"),
        (
            {"utterance": "Who?", "targetValue": "(list (number 3))"},
            "targetvalue is (list (number 3)), a list as WebQuestions writes it, with an entry that cannot be read",
        ),
        (
            {"question": "Who?", "gold": "a"},
            "fields ['gold', 'question'] are of no known format: none of them holds a golden",
        ),
        ({"question": ["Who?"], "answer": "a"}, "question is ['Who?']; expected messages"),
        ({"question": {"text": "Who?"}, "answer": "a"}, "question is \"{'text': 'Who?'}\"; expected a text"),
        ({"question": 3, "answer": "a"}, "question is '3'; expected a text"),
    ],
)
def test_what_is_missing_or_can_be_read_in_two_ways_is_refused(tmp_path, row, reason):
    path = jsonl(tmp_path / "q.jsonl", row)
    assert reason in (said := refusal(path)) and said.startswith(f"{path}, line 1: ") and "\n" not in said


def test_columns_decide_what_can_be_read_in_two_ways_and_name_what_no_name_tells(tmp_path):
    path = jsonl(tmp_path / "q.jsonl", {"ask": [{"text": "Who?"}], "answer": "Ann", "label": 0, "no": 7, "doc": "d"})
    columns = Columns(question="ask.0.text", answer="label", id="no", context="doc")
    assert read_questions(path, columns=columns) == [
        Question(id="7", text="Who?", golden_answers=["0"], source="q", context="d")
    ]
    assert read_questions(path, columns=Columns(question="ask.-1.text", answer="answer"))[0].golden_answers == ["Ann"]
    said = refusal(path, question="asked", answer="answer")
    assert "data.columns.question is 'asked', where the row has no value; it has ['answer', 'ask', " in said
    flash = jsonl(tmp_path / "f.jsonl", {"id": "1", "question": "Who?", "golden_answers": ["a"], "short": "b"})
    assert read_questions(flash, columns=Columns(answer="short"))[0].golden_answers == ["b"]


def test_a_prompt_around_the_question_of_another_field_is_no_second_question(tmp_path):
    row = {
        "question": "Who?",
        "prompt": "Answer shortly. who? Think first.",
        "answer": "Ann",
        "golden_answers": ["ann", "A"],
    }
    (question,) = read_questions(jsonl(tmp_path / "q.jsonl", row | {"golden_answers": None, "target": ["Ann", "A"]}))
    assert (question.text, question.golden_answers) == ("Who?", ["Ann", "A"])


def test_an_id_comes_from_the_content_and_repeated_rows_are_left_out(tmp_path):
    rows = [{"question": "Who?", "answer": "Ann"}, {"question": "What?", "answer": "x"}]
    file = read_question_file(jsonl(tmp_path / "q.jsonl", *rows, rows[0], {"question": "Who?", "answer": "Bo"}))
    assert file.left_out == {"repeated": 1} and len({q.id for q in file.questions}) == 3
    again = read_questions(jsonl(tmp_path / "other.jsonl", *reversed(rows)))
    assert [q.id for q in again] == [file.questions[1].id, file.questions[0].id]
    assert all(q.id.startswith("q-") and len(q.id) == 14 for q in again)


def test_numbers_are_answers_as_they_are_written(tmp_path):
    rows = [{"question": f"{i}?", "answer": value} for i, value in enumerate([42, 42.0, 3.5, [1, "one"], 0])]
    found = [q.golden_answers for q in read_questions(jsonl(tmp_path / "q.jsonl", *rows))]
    assert found == [["42"], ["42"], ["3.5"], ["1", "one"], ["0"]]


def test_numbers_of_32_bits_are_answers_as_they_were_written(tmp_path):
    numbers = [0.1, 1234.567, -2.5e-10, 3.0, 123456792.0]
    singles = pa.array(numbers, pa.float32())
    columns = {
        "question": [f"{i}?" for i in range(len(numbers))],
        "answer": pa.StructArray.from_arrays([singles], ["value"]),
    }
    pq.write_table(pa.table(columns), tmp_path / "q.parquet")
    found = [q.golden_answers for q in read_questions(tmp_path / "q.parquet")]
    assert found == [["0.1"], ["1234.567"], ["-2.5e-10"], ["3"], ["123456792"]]
    longer = ["1.23456789012345", "9.5367431640625e-07", "1.23456789012345e+300", str(10**400)]
    text = "".join(f'{{"question": "{i}?", "answer": {number}}}\n' for i, number in enumerate(longer))
    (tmp_path / "q.jsonl").write_text(text)
    assert [q.golden_answers for q in read_questions(tmp_path / "q.jsonl")] == [[number] for number in longer]


@pytest.mark.parametrize("separator", [",", "\t", ";"])
def test_tables_are_read_whatever_separates_their_cells(tmp_path, separator):
    path = tmp_path / ("q.tsv" if separator == "\t" else "q.csv")
    rows = [["id", "Question", "answer"], ["1", "Who, then?", '["Ann", "Anne"]'], ["", "What\u2028is\n“it”?", "7"]]
    lines = [separator.join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows]
    path.write_bytes(("\ufeff" + "\r\n".join([*lines[:2], "", lines[2]])).encode())
    first, second = read_questions(path)
    assert (first.id, first.text, first.golden_answers) == ("1", "Who, then?", ["Ann", "Anne"])
    assert (second.text, second.golden_answers) == ("What\u2028is\n“it”?", ["7"]) and second.id.startswith("q-")


def test_a_table_that_excel_wrote_is_read_without_its_empty_columns_and_rows(tmp_path):
    path = tmp_path / "QUESTIONS.CSV"
    path.write_bytes("\ufeffquestion;answer;;\r\nWho?;Ann;;\r\n;;;\r\nWhen?;1900;;\r\n".encode())
    assert [(q.text, q.golden_answers) for q in read_questions(path)] == [("Who?", ["Ann"]), ("When?", ["1900"])]
    path.write_bytes(b"question;answer;;\r\n;;;\r\nWho?;;;\r\n")
    assert refusal(path).startswith(f"{path}, row 2: answer has no value")  # as Excel counts below the header


@pytest.mark.parametrize("cell", ["None", "nan", "NaN", "NaT", "<NA>"])
def test_what_pandas_writes_for_no_value_is_no_answer(tmp_path, cell):
    path = tmp_path / "q.csv"
    path.write_text(f"question,answer,context\nWho?,Ann,{cell}\nWhich bread?,{cell},\n")
    assert refusal(path).startswith(f"{path}, row 2: answer has no value")
    (question,) = read_questions(path, max_bad_rows=1)
    assert (question.golden_answers, question.context) == (["Ann"], "")
    path.write_text(f'question,answer\nWhich word is it?,"[""{cell}""]"\n')
    assert read_questions(path)[0].golden_answers == [cell]


def test_a_refused_row_is_described_by_the_names_of_its_file(tmp_path):
    path = jsonl(tmp_path / "q.jsonl", {"Frage": "Wer?", "Antwort": "Ann"})
    assert "fields ['Antwort', 'Frage'] are of no known format" in refusal(path)


def test_tables_that_are_none_are_refused_in_one_sentence(tmp_path):
    path = tmp_path / "q.csv"
    for content, reason in (
        (b"question,answer\nWho?,Ann,Bo\n", f"{path}, row 1: 3 cells, but the header has 2"),
        (b"question,answer\nf\xfcr,a\n", f"{path} is not UTF-8 (byte 0xfc); save it as UTF-8"),
        ("question,answer\n".encode("utf-16"), f"{path} is not UTF-8 (byte 0xff)"),
        (b'question,answer\n"Who?,Ann\n', f"{path}, line 2: not a table: "),
        (b"answer,answer\na,b\n", f"{path} has two columns of one name: answer, answer"),
        (b"", f"{path} holds no question; the first line of a csv file names its columns"),
        (b"question,answer\n", f"{path} holds no question; the first line of a csv file names its columns"),
        (b"Who?,Ann\n", f"{path} holds no question; the first line of a csv file names its columns"),
    ):
        path.write_bytes(content)
        assert refusal(path).startswith(reason)


def test_json_is_a_list_or_one_list_in_an_object_or_columns_or_lines(tmp_path):
    path, rows = tmp_path / "q.json", [{"question": "Who?", "answer": "Ann"}, {"question": "What?", "answer": "x"}]
    frame = pl.DataFrame(rows)
    for content in (
        json.dumps(rows),
        json.dumps({"version": 1, "data": rows}),
        json.dumps({"questions": rows}),
        json.dumps(frame.to_dict(as_series=False)),
        json.dumps({name: dict(enumerate(frame[name])) for name in frame.columns}),
        "\ufeff" + "".join(json.dumps(row) + "\r\n" for row in rows),
    ):
        path.write_text(content)
        assert [(q.text, q.golden_answers) for q in read_questions(path)] == [("Who?", ["Ann"]), ("What?", ["x"])]
    path.write_text(json.dumps({"a": rows[0], "b": rows[1]}))
    assert [(q.id, q.text) for q in read_questions(path)] == [("a", "Who?"), ("b", "What?")]
    path.write_text(json.dumps({"train": rows, "test": rows[:1]}))
    said = f"{path} holds several lists of objects: train (2 objects) and test (1 objects); keep the one that is meant"
    assert refusal(path) == said


def test_a_page_of_the_dataset_viewer_is_its_rows_unless_cells_were_cut(tmp_path):
    path = tmp_path / "rows.json"
    rows = [{"row_idx": i, "row": {"question": f"Q{i}?", "answer": "x"}, "truncated_cells": []} for i in range(2)]
    path.write_text(json.dumps({"features": [{"name": "question"}], "rows": rows, "num_rows_total": 2}))
    assert [question.text for question in read_questions(path)] == ["Q0?", "Q1?"]
    rows[1]["truncated_cells"] = ["answer"]
    path.write_text(json.dumps({"features": [{"name": "question"}], "rows": rows}))
    assert refusal(path) == f"{path} holds rows whose answer the dataset viewer has cut; take its files"


def test_the_answers_of_dprs_question_files_hold_commas_and_are_still_one_cell(tmp_path):
    path = tmp_path / "nq-test.tsv"
    path.write_text('Who wrote Emma?\t["Jane Austen", "Austen"]\nWho is by Emma?\t["Bo"]\n')
    assert refusal(path).endswith("(if these are values: the first line of a csv file should name its columns)")
    path.write_text('question\tanswers, all\nWho wrote Emma?\t["Jane Austen", "Austen"]\n')
    assert read_questions(path, columns=Columns(answer="answers, all"))[0].golden_answers == ["Jane Austen", "Austen"]


def test_a_csv_file_without_a_header_is_told_that_it_needs_one(tmp_path):
    path = tmp_path / "q.csv"
    path.write_text("What is the capital of France?,Paris\nWho wrote Faust in two parts?,Goethe\n")
    assert refusal(path).endswith("(if these are values: the first line of a csv file should name its columns)")
    path.write_text("left,right\nWhat is the capital of France?,Paris\n")
    assert refusal(path).endswith("set data.columns.question to the one that does")


def test_a_folder_of_several_splits_is_refused_and_descriptions_beside_rows_are_passed_over(tmp_path):
    folder = jsonl(tmp_path / "set" / "train.jsonl", {"question": "Who?", "answer": "Ann"}).parent
    (folder / "dataset_info.json").write_text("{}")
    (folder / "ruler.json").write_text('{"files": [{"a": 1}]}')
    assert read_questions(folder)[0].source == "set"
    jsonl(folder / "test.jsonl", {"question": "Who?", "answer": "Ann"})
    assert refusal(folder) == f"{folder} holds several splits (test.jsonl, train.jsonl); name one of the files"


def test_a_name_on_the_hub_may_leave_out_that_it_is_a_data_set(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("hf://OWNER/NAME/train.jsonl", "hf://datasets/OWNER/NAME/train.jsonl"):
        assert refusal(name).startswith("hf://datasets/OWNER/NAME/train.jsonl cannot be read")


def test_huge_fields_are_read(tmp_path):
    text = "word " * 400_000
    path = tmp_path / "q.csv"
    path.write_text(f'question,answer,context\nWho?,Ann,"{text}"\n')
    assert read_questions(path)[0].context == text.strip()


def test_what_was_understood_is_said_with_the_first_row(tmp_path, capsys):
    path = jsonl(tmp_path / "q.jsonl", {"prompt": USER, "label": GOLD, "answer": 3, "context": "x" * 2000})
    line = understood(path, columns=Columns(answer="label"))
    assert line.startswith(
        "prompt + label: question 'Who wrote Emma?' from `prompt`, golden answers 'Jane Austen' from `label`, "
        "a context of 2,000 characters from `context`, id 'q-"
    ) and line.endswith("from its content")
    assert main(["data", "qa", str(path), "data.columns.answer=label"]) == 0
    out = capsys.readouterr().out
    assert "the first row: question 'Who wrote Emma?' from `prompt`" in out and "format: 1 prompt + label" in out
    assert main(["data", "qa", str(path)]) == 2
    assert "set data.columns.answer to answer or to label" in capsys.readouterr().err
    assert main(["data", "qa", str(path), "data.column.answer=label"]) == 2
    assert "data.column.answer=label is not a setting of this command" in capsys.readouterr().err
    assert main(["data", "qa", str(path), "data.columns.answers=label"]) == 2
    assert "answers is not a setting; did you mean answer?" in capsys.readouterr().err


NAMES = st.sampled_from([*QUESTION[:3], *PROMPTS[:3], *ANSWERS[:6], "solution", "context", "id", "metadata", "x"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None, categories=None), max_size=6)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["text", "value", "target", "role", "content", "title"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(row=st.dictionaries(NAMES, VALUES, max_size=5))
def test_any_row_is_a_question_that_stays_itself_or_one_sentence(tmp_path_factory, row):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text(json.dumps(row).replace("NaN", "null").replace("-Infinity", "0").replace("Infinity", "0") + "\n")
    try:
        (question,) = read_questions(path)
    except ConfigError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
    else:
        assert question.text.strip() and question.id and all(map(str.strip, question.golden_answers))
        assert question.golden_answers and read_questions(path) == [question]


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), min_size=1, max_size=20).filter(
    lambda text: text.strip() == text and not text.startswith(("[", "\ufeff", "(list")) and "\n####" not in text
)


@settings(max_examples=60)
@given(rows=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4, unique_by=lambda row: row[0]))
def test_every_kind_of_file_gives_the_same_questions(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("kinds")
    frame = pl.DataFrame(rows, schema=["question", "answer"], orient="row")
    frame.write_csv(folder / "q.csv", quote_style="always")
    frame.write_csv(folder / "q.tsv", separator="\t", quote_style="always")
    frame.write_ndjson(folder / "q.jsonl")
    frame.write_parquet(folder / "q.parquet")
    (folder / "q.json").write_text(json.dumps(frame.to_dicts()))
    found = [read_questions(folder / f"q.{kind}") for kind in ("jsonl", "json", "csv", "tsv", "parquet")]
    assert all(questions == found[0] for questions in found)
    assert [(q.text, q.golden_answers) for q in found[0]] == [(asked, [gold]) for asked, gold in rows]


@pytest.mark.parametrize("field", ["gold_answers", "gold_answer", "golden_answer"])
def test_gold_answers_are_found_under_that_name(tmp_path, field):
    (question,) = read_questions(jsonl(tmp_path / "q.jsonl", {"question": "Who?", field: "Ann"}))
    assert question.golden_answers == ["Ann"]


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (("Train.jsonl", "Test.jsonl"), True),
        (("nq_train.jsonl", "nq_test.jsonl"), True),
        (("nq.dev.jsonl", "nq.validation.jsonl"), True),
        (("train-1.jsonl", "Validation-1.jsonl"), True),
        (("nq_test.jsonl", "hotpotqa_dev.jsonl"), False),
        (("nq_val.jsonl", "nq_validation.jsonl"), False),
        (("latest.jsonl", "trainers.jsonl"), False),
    ],
)
def test_a_folder_of_several_splits_of_one_set_is_refused(tmp_path, names, refused):
    for name in names:
        jsonl(tmp_path / "set" / name, {"question": name, "answer": "x"})
    if refused:
        assert f"holds several splits ({', '.join(sorted(names))})" in refusal(tmp_path / "set")
    else:
        assert len(read_questions(tmp_path / "set")) == 2


def test_a_date_that_python_lacks_is_read_as_a_text(tmp_path):
    far = pa.array([300 * 10**9, 0], pa.timestamp("s"))
    pq.write_table(pa.table({"question": ["a?", "c?"], "answer": ["b", "d"], "born": far}), tmp_path / "q.parquet")
    assert len(read_questions(tmp_path / "q.parquet")) == 2
    pq.write_table(pa.table({"question": ["a?", "c?"], "answer": far}), tmp_path / "far.parquet")
    assert read_questions(tmp_path / "far.parquet")[0].golden_answers[0].startswith("11476-08-15")
    nested = pa.table(
        {"question": ["a?", "c?"], "answer": ["b", "d"], "born": pa.array([[300 * 10**9], None], pa.list_(far.type))}
    )
    pq.write_table(nested, tmp_path / "deep.parquet")
    assert "row 1: a date or a time, deep in a column, is none that Python has" in refusal(tmp_path / "deep.parquet")


def test_a_world_with_too_few_questions_is_refused(capsys):
    assert main(["data", "world", "--questions", "100000"]) == 2
    assert "--questions: world-" in capsys.readouterr().err


def test_a_day_that_pandas_keeps_as_a_time_is_that_day(tmp_path):
    days = [datetime.datetime(2020, 1, 2), datetime.datetime(2020, 1, 2, 15, 30), datetime.datetime(1066, 10, 14)]
    table = pa.table({"question": ["a?", "b?", "c?"], "answer": pa.array(days, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "days.parquet")
    answers = [question.golden_answers for question in read_questions(tmp_path / "days.parquet")]
    assert answers == [["2020-01-02"], ["2020-01-02T15:30:00"], ["1066-10-14"]]
