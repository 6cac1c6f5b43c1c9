"""The commands that start no cluster, as a user types them."""

import json
from pathlib import Path

import pytest

from mempipe.cli import main
from mempipe.data.trajectories import write_trajectories
from mempipe.retrieval.build import build_index
from mempipe.types import Context, EndReason, Group, Passage, Question, Search, Trajectory

CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"


def test_config_lists_every_setting_with_default_and_meaning(capsys):
    assert main(["config"]) == 0
    out = capsys.readouterr().out
    assert "algorithm.group_size = 5" in out
    assert "optimizer.lr = 1e-06    # Learning rate after the warm-up." in out
    assert main(["config", "index"]) == 0
    assert 'faiss.factory = "Flat"    # faiss factory string' in capsys.readouterr().out


def test_data_world_prints_passages_and_answerable_questions(capsys):
    assert main(["data", "world", "--seed", "3", "--questions", "3"]) == 0
    out = capsys.readouterr().out
    assert "(3 hops)" in out and "->" in out


def test_data_qa_says_what_it_understood_and_refuses_with_the_line(tmp_path, capsys):
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"id": "a", "question": "Who?", "golden_answers": ["me"]}) + "\n")
    assert main(["data", "qa", str(file)]) == 0
    assert "1 questions" in capsys.readouterr().out
    file.write_text(file.read_text() + json.dumps({"id": "b", "question": "", "golden_answers": ["me"]}) + "\n")
    assert main(["data", "qa", str(file)]) == 2
    assert "line 2" in capsys.readouterr().err


def test_an_index_is_searched_and_other_peoples_files_become_one(tmp_path, capsys):
    facts = {"Lima": "Peru", "Oslo": "Norway"}
    passages = [
        Passage(id=str(i), title=city, text=f"{city} is the capital of {facts[city]}.") for i, city in enumerate(facts)
    ]
    build_index(passages, tmp_path / "index")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": p.id, "contents": f'"{p.title}"\n{p.text}'}) + "\n" for p in passages))
    theirs = str(tmp_path / "index" / "vectors" / "00000.faiss")
    assert main(["index", "adopt", theirs, str(corpus), str(tmp_path / "adopted"), "kind=hashing"]) == 0
    assert "2 passages" in capsys.readouterr().out
    for index in ("index", "adopted"):
        assert (
            main(["index", "search", str(tmp_path / index), "capital of Norway", "--num-passages", "1", "--json"]) == 0
        )
        (found,) = json.loads(capsys.readouterr().out)
        assert (found["title"], found["id"]) == ("Oslo", "1")
    assert main(["index", "search", str(tmp_path / "index"), "capital of Norway"]) == 0
    assert "Oslo" in capsys.readouterr().out
    assert main(["index", "search", str(tmp_path), "x"]) == 2
    assert main(["index", "adopt", theirs, str(corpus), str(tmp_path / "again"), "kind=hashing", "dimension=7"]) == 2
    assert main(["index", "build", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err.count("error:") == 3


@pytest.fixture
def run(tmp_path) -> Path:
    search = Search(query="q", num_passages=1, passages=[Passage(id="p", title="T", text="body")], snapshot="s")
    context = Context(
        index=0,
        token_ids=[1, 2, 3],
        loss_mask=[0, 1, 1],
        logprobs=[0.0, -0.1, -0.2],
        policy_versions=[-1, 0, 0],
        num_prompt_tokens=1,
        num_question_tokens=1,
        num_memory_tokens=0,
        action="look it up",
        searches=[search],
        memory_after="known",
    )
    trajectory = Trajectory(
        id="g/0", group_id="g", member=0, contexts=[context], end_reason=EndReason.MAX_TURNS, answer=None
    )
    question = Question(id="q1", text="Who is it?", golden_answers=["me"])
    write_trajectories(tmp_path / "trajectories.parquet", [Group(id="g", question=question, trajectories=[trajectory])])
    return tmp_path


def test_trace_shows_a_trajectory_turn_by_turn(run, capsys):
    assert main(["trace", str(run), "--question", "Who"]) == 0
    out = capsys.readouterr().out
    assert [line in out for line in ("Who is it?", "look it up", "[T] body", "wrote    known", "max_turns")] == [
        True
    ] * 5


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--question", "absent"], "matches --question"), ([], "does not exist")]
)
def test_trace_says_what_is_missing(run, tmp_path, capsys, arguments, words):
    target = run if arguments else tmp_path / "nothing.parquet"
    assert main(["trace", str(target), *arguments]) == 2
    assert words in capsys.readouterr().err
