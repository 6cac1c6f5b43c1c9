"""Evidence of the published multi-hop sets: which passages a question needs, and what each contributes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mempipe.cli import main
from mempipe.data.qa import iter_rows, read_questions
from mempipe.evaluation.causes import first_causes
from mempipe.evaluation.evidence import Fact, add_evidence, facts_of, match
from mempipe.evaluation.memory_quality import memory_quality
from mempipe.facts import contains_value
from mempipe.retrieval.build import build_index
from mempipe.settings import ConfigError
from mempipe.types import Context, EndReason, Evidence, Group, Passage, Search, Trajectory

SHARED = Path(__file__).parents[3] / "shared" / "data"
HOTPOT, WIKI = SHARED / "hotpotqa_100.jsonl", SHARED / "wiki_mini.jsonl"
EMMA, AUSTEN = "Emma is a novel by Jane Austen.", "Jane Austen was born in Steventon, a village."
NILE = "The Nile is a river."
CHAIN = [
    Fact(title="Emma (novel)", value="Jane Austen", text=EMMA),
    Fact(title="Jane Austen", value="Steventon", text=AUSTEN),
]
STEPS = [
    {"id": 1, "question": "Emma >> author", "answer": "Jane Austen", "paragraph_support_idx": 4},
    {"id": 2, "question": "#1 >> born", "answer": "Steventon", "paragraph_support_idx": 2},
]
PARAGRAPHS = [
    {"idx": 2, "title": "Jane Austen", "paragraph_text": AUSTEN, "is_supporting": True},
    {"idx": 4, "title": "Emma (novel)", "paragraph_text": EMMA, "is_supporting": True},
    {"idx": 7, "title": "Nile", "paragraph_text": NILE, "is_supporting": False},
]
ASKED = {"question": "Where was the author of Emma born?", "answer": "Steventon"}
DOCUMENTS = [
    ["Nile", [NILE]],
    ["Jane Austen", ["Jane Austen was born in Steventon,", " a village."]],
    ["Emma (novel)", [EMMA]],
]
SUPPORT = [["Jane Austen", 0], ["Emma (novel)", 0]]
TRIPLES = [["Emma (novel)", "author", "Jane Austen"], ["Jane Austen", "born in", "Steventon"]]
TITLES = [document[0] for document in DOCUMENTS]
TEXTS = [document[1] for document in DOCUMENTS]
COLUMNS = {"title": ["Jane Austen", "Emma (novel)"], "sent_id": [0, 0]}
FLASHRAG = {"id": "q", "question": ASKED["question"], "golden_answers": ["Steventon"]}
ROWS = {
    "MuSiQue": ASKED | {"id": "q", "paragraphs": PARAGRAPHS, "question_decomposition": STEPS, "answer_aliases": []},
    "2Wiki": ASKED | {"_id": "q", "context": DOCUMENTS, "supporting_facts": SUPPORT, "evidences": TRIPLES},
    "HotpotQA": ASKED | {"_id": "q", "context": DOCUMENTS, "supporting_facts": SUPPORT},
    "MuSiQue of FlashRAG": FLASHRAG
    | {
        "metadata": {
            "question_decomposition": [
                step | {"support_paragraph": next(p for p in PARAGRAPHS if p["idx"] == step["paragraph_support_idx"])}
                for step in STEPS
            ]
        }
    },
    "2Wiki of FlashRAG": FLASHRAG
    | {
        "metadata": {
            "context": {"title": TITLES, "content": TEXTS},
            "supporting_facts": COLUMNS,
            "evidences": {
                name: [triple[i] for triple in TRIPLES] for i, name in enumerate(("fact", "relation", "entity"))
            },
        }
    },
    "2Wiki of a table": ASKED
    | {
        "_id": "q",
        **{
            name: json.dumps(value)
            for name, value in (("context", DOCUMENTS), ("supporting_facts", SUPPORT), ("evidences", TRIPLES))
        },
    },
    "2Wiki with named parts": ASKED
    | {
        "_id": "q",
        "context": [{"title": title, "content": text} for title, text in DOCUMENTS],
        "supporting_facts": [{"title": title, "sent_id": place} for title, place in SUPPORT],
        "evidences": [dict(zip(("fact", "relation", "entity"), triple, strict=True)) for triple in TRIPLES],
    },
    "HotpotQA of FlashRAG": FLASHRAG
    | {"metadata": {"context": {"title": TITLES, "sentences": TEXTS}, "supporting_facts": COLUMNS}},
}
CORPUS = [
    {"id": "a", "contents": f'"Emma (novel)"\n{EMMA}'},
    {"id": "b", "contents": '"Jane Austen"\nShe lived in Bath and Steventon.'},
    {"id": "c", "contents": f'" jane AUSTEN "\n{AUSTEN}'},
    {"id": "d", "contents": '"Steventon"\nSteventon is where Jane Austen was born.'},
]


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ROWS)
def test_the_facts_of_every_set_are_found_in_the_order_of_reading_and_matched_by_title_and_text(tmp_path, name):
    file = jsonl(tmp_path / "q.jsonl", ROWS[name])
    ((row, reading),) = iter_rows(file)
    assert facts_of(row, reading.question) == CHAIN
    matched = add_evidence(file, jsonl(tmp_path / "c.jsonl", *CORPUS), tmp_path / "out.parquet")
    (question,) = read_questions(tmp_path / "out.parquet")
    expected = [Evidence(passage_id="a", value="Jane Austen"), Evidence(passage_id="c", value="Steventon")]
    assert question.evidence == expected and question.num_hops == 2 and question.id == "q"
    assert (matched.with_facts, matched.num_facts, matched.found_facts, matched.with_evidence) == (1, 2, 2, 1)


def test_of_several_passages_the_one_with_most_words_of_the_text_is_matched_and_the_first_of_equal_ones():
    short, long = "Jane Austen of Steventon, a village.", f"{AUSTEN} Steventon lies in Hampshire and has no railway."
    fact = CHAIN[1]
    for passages, chosen in (({"a": short, "b": long}, "b"), ({"b": long, "a": short, "c": long}, "b")):
        rows = [{"id": key, "title": fact.title, "text": text} for key, text in passages.items()]
        batches = [pa.RecordBatch.from_pylist([row]) for row in rows]
        assert match([fact], batches)[fact].passage_id == chosen
    bare = replace(fact, text="")
    assert match([bare], batches)[bare].passage_id == "b"


def test_a_question_of_which_one_passage_is_missing_has_no_evidence_and_the_share_is_said(tmp_path, capsys):
    file = jsonl(tmp_path / "q.jsonl", ROWS["MuSiQue"], ROWS["MuSiQue"] | {"id": "r", "question": "And?"})
    corpus = jsonl(tmp_path / "c.jsonl", CORPUS[0], {"id": "c", "title": "Jane Austen", "text": "She was born."})
    assert main(["data", "evidence", str(file), str(corpus), str(tmp_path / "out.parquet")]) == 0
    out = capsys.readouterr().out
    assert "of their 4 facts 2 (50.0%) were matched to a passage" in out and "0 questions (0.0%) have evidence" in out
    assert "not matched: 'Steventon' in 'Jane Austen'" in out
    assert [question.evidence for question in read_questions(tmp_path / "out.parquet")] == [[], []]
    assert main(["data", "evidence", str(file), str(corpus), str(tmp_path / "out.parquet")]) == 2
    assert "is not a new .parquet file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"answer": "yes"},
        {"type": "comparison"},
        {"supporting_facts": [["Jane Austen", 0]]},
        {"supporting_facts": [["Nile", 0], ["Emma (novel)", 0]]},
        {"context": []},
        {"question_decomposition": [*STEPS, {"answer": "x", "paragraph_support_idx": 9}]},
        {"evidences": [*TRIPLES, ["Nile", "length"]]},
        {"evidences": "x"},
    ],
)
def test_a_row_that_does_not_record_every_fact_records_none(tmp_path, change):
    file = jsonl(tmp_path / "q.jsonl", ROWS["HotpotQA"] | {"id": "q"} | change)
    ((row, reading),) = iter_rows(file)
    assert facts_of(row, reading.question) == []
    with pytest.raises(ConfigError, match="records no facts; expected rows of MuSiQue"):
        add_evidence(file, jsonl(tmp_path / "c.jsonl", *CORPUS), tmp_path / "out.parquet")


def test_where_two_texts_name_each_other_the_one_that_the_question_names_is_read_first(tmp_path):
    documents = [["Emma", ["Emma is by Jane Austen of Steventon."]], ["Jane Austen", ["She of Steventon wrote Emma."]]]
    row = ROWS["HotpotQA"] | {"context": documents, "supporting_facts": [["Jane Austen", 0], ["Emma", 0]]}
    ((row, reading),) = iter_rows(jsonl(tmp_path / "q.jsonl", row))
    assert [fact.title for fact in facts_of(row, reading.question)] == ["Emma", "Jane Austen"]
    ((row, reading),) = iter_rows(jsonl(tmp_path / "q.jsonl", row | {"question": "Where?"}))
    assert facts_of(row, reading.question) == []


def test_marks_of_html_in_titles_do_not_part_them(tmp_path):
    steps = [STEPS[0] | {"support_paragraph": {"title": "Simon &amp; Simon", "paragraph_text": "By Jane Austen."}}]
    file = jsonl(tmp_path / "q.jsonl", FLASHRAG | {"metadata": {"question_decomposition": steps}})
    for title in ("Simon & Simon", "Simon &amp; simon "):
        corpus = jsonl(tmp_path / "c.jsonl", {"id": "a", "title": title, "text": "By Jane Austen."})
        assert add_evidence(file, corpus, tmp_path / f"{len(title)}.parquet").with_evidence == 1


def turn(index: int, before: str, after: str, *ids: str) -> Context:
    passages = [Passage(id=key, title="", text="") for key in ids]
    return Context(
        index=index,
        token_ids=[1, 2],
        loss_mask=[0, 1],
        logprobs=[0.0, 0.0],
        policy_versions=[-1, 0],
        num_prompt_tokens=1,
        num_question_tokens=1,
        num_memory_tokens=0,
        searches=[Search(query="x", num_passages=1, passages=passages, snapshot="s")] if ids else [],
        memory_before=before,
        memory_after=after,
    )


@pytest.mark.skipif(not HOTPOT.exists(), reason="the shared real questions are not here")
def test_hotpotqa_is_matched_to_an_index_and_its_memories_can_be_measured(tmp_path):
    rows = [json.loads(line) for line in WIKI.read_text().splitlines()]
    needed = {
        title for line in HOTPOT.read_text().splitlines() for title in json.loads(line)["metadata"]["context"]["title"]
    }
    passages = [
        Passage(id=row["id"], title=title[1:-1], text=text)
        for row in rows
        for title, _, text in [row["contents"].partition("\n")]
    ]
    passages = [passage for passage in passages if passage.title in needed]
    build_index(passages, tmp_path / "index")
    matched = add_evidence(HOTPOT, tmp_path / "index", tmp_path / "out.parquet")
    assert (matched.num_questions, matched.with_facts) == (100, 56)
    assert matched.with_evidence == 56 and matched.found_facts / matched.num_facts > 0.97
    by_id = {passage.id: passage for passage in passages}
    known = [question for question in read_questions(tmp_path / "out.parquet") if question.evidence]
    for question in known:
        first, last = (by_id[fact.passage_id] for fact in question.evidence)
        assert contains_value(f"{first.title}. {first.text}", question.evidence[0].value)
        assert contains_value(last.title, question.evidence[0].value.partition(" (")[0])
        assert contains_value(f"{last.title}. {last.text}", question.golden_answers[0])
    # One attempt that keeps the first fact and loses it, measured as on the synthetic world.
    question = known[0]
    first, last = question.evidence
    contexts = [
        turn(0, "", first.value, first.passage_id),
        turn(1, first.value, "nothing", last.passage_id),
        turn(2, "nothing", ""),
    ]
    trajectory = Trajectory(
        id="t", group_id="g", member=0, contexts=contexts, end_reason=EndReason.ANSWERED, answer="x", em=0.0
    )
    rates = memory_quality([Group(id="g", question=question, trajectories=[trajectory])])
    assert (rates["kept_rate"], rates["lost_rate"], rates["found_rate"]) == (0.5, 1.0, 1.0)
    assert first_causes(trajectory, question, growing=False) == ["lost"]


def test_a_fact_belongs_to_the_text_about_its_subject_whatever_parts_the_title_from_others(tmp_path):
    documents = [
        ["Casino (film)", ["Casino was shot in France by Robert Smith."]],
        ["Robert Smith (director)", ["Robert Smith was born in France."]],
    ]
    row = {
        "_id": "q",
        "question": "Where was the director of Casino born?",
        "answer": "France",
        "context": documents,
        "supporting_facts": [[title, 0] for title, _ in documents],
        "evidences": [["Casino", "director", "Robert Smith"], ["Robert Smith", "place of birth", "France"]],
    }
    ((row, reading),) = iter_rows(jsonl(tmp_path / "2wiki.jsonl", row))
    found = facts_of(row, reading.question)
    assert [(fact.title, fact.value) for fact in found] == [
        ("Casino (film)", "Robert Smith"),
        ("Robert Smith (director)", "France"),
    ]


def test_a_title_is_the_same_however_its_accents_are_written():
    fact = Fact(title="Beyonc\u00e9", value="Houston", text="She was born in Houston.")
    passages = pa.RecordBatch.from_pylist([{"id": "b", "title": "Beyonce\u0301", "text": "She was born in Houston."}])
    assert match([fact], [passages]) == {fact: Evidence(passage_id="b", value="Houston")}
